"""Update specs with data to run them on: an Adam step in every kind of slot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fp8compile.kernels.codegen.spec.region import Value
from fp8compile.kernels.optimizer.update_spec import PLAIN, SCALAR, SPLIT, STATE, Slot, Update
from fp8compile.kernels.reference import state_reference
from fp8compile.state_formats import GROUP

SIZES = (1, 127, 128, 129, 5000, 0, 2048)


def adam(
    first: str,
    second: str,
    parameter: str = "float32",
    gradient: str = "float32",
    root: str = "sqrt",
    quotient: str = "div",
) -> Update:
    """m = 0.9 m + 0.1 g;  v = 0.999 v + 0.001 g²;  p = p - rate · m / (√v + ε).

    `root` and `quotient` may be other functions, which all devices round correctly.
    parameter: "float32", "bfloat16", "stochastic" (BF16) or "split" (BF16 and 16 bits).
    """
    values = [
        Value("load", (), (0,)),  # 0: p
        Value("load", (), (1,)),  # 1: m
        Value("load", (), (2,)),  # 2: v
        Value("load", (), (3,)),  # 3: g
        Value("load", (), (4,)),  # 4: rate
        Value("constant", (), (0.1,)),
        Value("sub", (3, 1)),
        Value("mul", (5, 6)),
        Value("add", (1, 7)),  # 8: new m
        Value("constant", (), (0.999,)),
        Value("mul", (2, 9)),
        Value("mul", (3, 3)),
        Value("constant", (), (0.001,)),
        Value("mul", (11, 12)),
        Value("add", (10, 13)),  # 14: new v
        Value(root, (14,)),
        Value("constant", (), (1e-8,)),
        Value("add", (15, 16)),
        Value(quotient, (8, 17)),
        Value("mul", (4, 18)),
        Value("sub", (0, 19)),  # 20: new p
    ]
    kind = SPLIT if parameter == "split" else PLAIN
    type = parameter if parameter == "float32" else "bfloat16"
    slots = (
        Slot(kind, type, 20, counter=parameter == "stochastic", stochastic=parameter == "stochastic"),
        Slot(STATE, first, 8, counter="stochastic" in first),
        Slot(STATE, second, 14, counter="stochastic" in second),
        Slot(PLAIN, gradient),
        Slot(SCALAR, "float32"),
    )
    return Update(slots, tuple(values))


def unscaled(update: Update) -> Update:
    """An Adam step that multiplies its gradient by a number, rounds it to BF16, and is skipped by another number."""
    numbers = len(update.slots), len(update.slots) + 1
    inverse, values = len(update.values), list(update.values)
    values += [
        Value("load", (), (numbers[0],)),
        Value("mul", (3, inverse)),
        Value("round", (inverse + 1,), ("bfloat16",)),
    ]
    order = [0, 1, 2, 3, *range(inverse, inverse + 3), *range(4, inverse)]  # the new ones behind the gradient's load
    at = {old: new for new, old in enumerate(order)}
    values = [
        Value(v.op, tuple(at[inverse + 2 if a == 3 and i != inverse + 1 else a] for a in v.args), v.params)
        for i, v in ((i, values[i]) for i in order)
    ]
    slots = [replace(s, stored=None if s.stored is None else at[s.stored]) for s in update.slots]
    return Update((*slots, Slot(SCALAR, "float32"), Slot(SCALAR, "float32")), tuple(values), numbers[1])


@dataclass
class Data:
    """The flat lists that the operator takes."""

    stored: list[Tensor] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    scalars: list[Tensor] = field(default_factory=list)

    def clone(self) -> Data:
        return Data(*([x.clone() for x in xs] for xs in (self.stored, self.read, self.scalars)))


def data_for(update: Update, sizes: tuple[int, ...] = SIZES, device: str = "cpu") -> Data:
    """Parameters of `sizes` elements, states as they are after some steps, one that is all zero."""
    g = torch.Generator().manual_seed(0)
    data = Data()

    def random(n: int) -> Tensor:
        return torch.randn(n, generator=g) * torch.exp(torch.randn(n, generator=g))

    for k, n in enumerate(sizes):
        for i in update.stored:
            data.stored += _slot(update, i, random(n) * (0 if k == 3 else 1), k)
        data.read += [random(n).to(getattr(torch, update.slots[i].type)) for i in update.read]
        data.scalars += [torch.tensor(1e-3 * (k + 1)) for _ in update.scalars]
    for xs in (data.stored, data.read, data.scalars):
        xs[:] = [x.to(device) for x in xs]
    return data


def _slot(update: Update, i: int, x: Tensor, salt: int) -> list[Tensor]:
    slot = update.slots[i]
    counter = [torch.tensor([1000 * i + salt], dtype=torch.int32)]
    if slot.kind == STATE:
        parts = state_reference.encode(x.square() if i == 2 else x, slot.type, counter[0])
    elif slot.kind == SPLIT:
        parts = state_reference.split(x)
    else:
        parts = (x.to(getattr(torch, slot.type)),)
    return [*parts, *(counter if slot.counter else [])]


def hard(format: str, positive: bool) -> tuple[Update, Data]:
    """A state of `format` that becomes x, or |x|, of `_hard_groups`, and a parameter that becomes the old state."""
    values = (Value("load", (), (1,)), Value("load", (), (2,)), Value("abs", (1,)))
    noise = "stochastic" in format
    state = Slot(STATE, format, 2 if positive else 1, counter=noise)
    x = _hard_groups()
    old = state_reference.encode(x.abs() if positive else x, format.removesuffix("/stochastic"))
    counter = [torch.tensor([9], dtype=torch.int32)] if noise else []
    update = Update((Slot(PLAIN, "float32", 0), state, Slot(PLAIN, "float32")), values)
    return update, Data([torch.zeros(len(x)), *old, *counter], [x])


def _hard_groups() -> Tensor:
    """Full tiles of groups: wide, narrow to a bit, tiny, huge, inf, of one sign, with zeros of both signs."""
    g = torch.Generator().manual_seed(0)
    groups = [torch.zeros(GROUP), torch.full((GROUP,), -1.5e-45), torch.full((GROUP,), 3.4e38)]
    for width in (1, 2, 3, 100, 126, 127, 128, 253, 254, 255, 300, 508, 2047, 2048, 5000, 1 << 20, 1 << 27):
        for least in (1, 0x00800000, 0x3F800000):
            bits = least + torch.randint(0, width + 1, (GROUP,), generator=g)
            bits[:2] = torch.tensor([least, least + width])
            groups.append(bits.int().view(torch.float32))
    groups.append(torch.tensor([1e-45, 3.4e38]).repeat(GROUP // 2))
    groups.append(torch.full((GROUP,), torch.inf))
    groups.append(torch.tensor([torch.inf, torch.finfo(torch.float32).max, 1e30, 1e-30]).repeat(GROUP // 4))
    x = torch.stack(groups)
    sparse = x.where(torch.rand(x.shape, generator=g) < 0.7, 0.0)
    signed = sparse * torch.where(torch.rand(x.shape, generator=g) < 0.5, 1.0, -1.0)
    return torch.cat([x, sparse, signed, -x]).reshape(-1)
