"""Update spec → Triton source of one kernel for many parameters.

    kernel(table, sizes, blocks, scalars)      table    int64 [parameters, tensors]  addresses
                                               sizes    int64 [parameters]           elements
                                               blocks   int32 [programs, 2]          (parameter, first group)
                                               scalars  FP32 [parameters, numbers]

A program owns some tiles of one parameter, each of some groups of 128 elements, and loads a tile while it computes the
one before: else it would wait most of the time, for addresses first and then for data. It adds the 64-bit start of a
tile to each address once; within the tile offsets are 32-bit and the same for all tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8compile.kernels import state_helpers
from fp8compile.kernels.emit_helpers import HELPERS
from fp8compile.kernels.expressions import EXPRESSIONS
from fp8compile.kernels.update_spec import SCALAR, SPLIT, STATE, Slot, Update, coded_values, never_negative
from fp8compile.state_formats import GROUP, StateFormat, parse_state_format

ALIGNMENT = 16  # of every address in the table, in bytes
POINTERS = {"float32": "tl.float32", "bfloat16": "tl.bfloat16", "float16": "tl.float16"}
# Of what is not stored as a code, one or two ULPs are nothing.
APPROXIMATE = {
    "sqrt": "tl.sqrt({0})",
    "div": "libdevice.fast_dividef({0}, {1})",
    "reciprocal": "libdevice.fast_dividef(1.0, {0})",
}


@dataclass(frozen=True)
class UpdateSchedule:
    """How many groups of 128 make a tile, how many tiles a program takes, and with how many warps."""

    groups: int = 16
    warps: int = 4
    tiles: int = 16


def columns(update: Update) -> dict[tuple[int, str], int]:
    """Which column of the table has the address of which tensor: (slot, name) → column."""
    found: dict[tuple[int, str], int] = {}
    for i in (*update.stored, *update.read):
        for name in update.slots[i].tensors:
            found[i, name] = len(found)
    return found


def update_source(update: Update, schedule: UpdateSchedule, name: str, target: str) -> str:
    """The functions of the kernel `name`, for "cuda" or "interpreter"."""
    emitter = _Emitter(update, schedule, target)
    functions = emitter.functions(name)
    formats = {parse_state_format(s.type) for s in update.slots if s.kind == STATE}
    parts = [state_helpers.NEAREST[target], state_helpers.COMMON]
    nearest = dict.fromkeys(f.nearest() for f in sorted(formats, key=str) if not f.is_exact)
    parts += [state_helpers.helpers_of(how) for how in nearest]
    parts += [state_helpers.STOCHASTIC] if any(f.stochastic for f in formats) else []
    stored = {parse_state_format(update.slots[i].type) for i in update.stored if update.slots[i].kind == STATE}
    parts += [state_helpers.encoder_of(how) for how in sorted(stored, key=str) if not how.is_exact]
    parts += [state_helpers.PARAMETER] if any(s.stochastic for s in update.slots) else []
    parts += [state_helpers.SPLIT] if any(s.kind == SPLIT for s in update.slots) else []
    parts += [HELPERS[helper].for_target(target) for helper in emitter.helpers]
    return "\n\n\n".join(part.strip("\n") for part in (*parts, *functions))


@dataclass
class _Emitter:
    """Writes the body of the kernel."""

    update: Update
    schedule: UpdateSchedule
    target: str
    helpers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = columns(self.update)
        self.positive = never_negative(self.update)
        self.pointers = [f"{name}{slot}" for slot, name in self.columns]
        self.raw: dict[str, str] = {}  # what is loaded of a tile: name → how
        self.lines: list[str] = []  # what is computed and stored

    def functions(self, name: str) -> list[str]:
        """`load` and `finish` a tile, and the kernel."""
        coded = coded_values(self.update)
        for i, value in enumerate(self.update.values):
            self.lines.append(f"v{i} = {self._text(value.op, value.args, value.params, i in coded)}")
        for i in self.update.stored:
            self._store(i, self.update.slots[i])
        loads = [*self._tile(), *(f"{raw} = {how}" for raw, how in self.raw.items()), f"return {', '.join(self.raw)}"]
        given = ", ".join((*self.pointers, "first_group", "left", "FULL: tl.constexpr"))
        finish = [*self._tile(), *self.lines]
        arguments = "table, sizes, blocks, scalars, TENSORS: tl.constexpr, NUMBERS: tl.constexpr"
        return [
            _function(f"load({given})", loads),
            _function(f"finish({', '.join(self.raw)}, numbers, {given})", finish),
            _function(f"{name}({arguments})", self._kernel()),
        ]

    def _kernel(self) -> list[str]:
        """The kernel's body: it finds its parameter, does full tiles without masks, and what is left with them."""
        groups, tiles = self.schedule.groups, self.schedule.tiles
        raw = ", ".join(self.raw)
        coming = ", ".join(f"next_{name}" for name in self.raw)
        pointers = ", ".join(self.pointers)
        return [
            "pid = tl.program_id(0)",
            "parameter = tl.load(blocks + 2 * pid)",
            "first_group = tl.load(blocks + 2 * pid + 1).to(tl.int64)",
            f"left = tl.load(sizes + parameter) - first_group * {GROUP}",
            "row = table + parameter.to(tl.int64) * TENSORS",
            "numbers = scalars + parameter * NUMBERS",
            *(self._address(slot, name) for slot, name in self.columns),
            f"full = tl.minimum(left // {groups * GROUP}, {tiles}).to(tl.int32)",
            "if full > 0:",
            f"    {raw} = load({pointers}, first_group, 0, True)",
            "    for i in range(full):",
            f"        following = first_group + tl.minimum(i + 1, full - 1) * {groups}",
            f"        {coming} = load({pointers}, following, 0, True)",
            f"        finish({raw}, numbers, {pointers}, first_group + i * {groups}, 0, True)",
            f"        {raw} = {coming}",
            f"rest = left - full.to(tl.int64) * {groups * GROUP}",
            f"if (full < {tiles}) & (rest > 0):",
            f"    last = first_group + full * {groups}",
            f"    {raw} = load({pointers}, last, rest.to(tl.int32), False)",
            f"    finish({raw}, numbers, {pointers}, last, rest.to(tl.int32), False)",
        ]

    def _address(self, slot: int, name: str) -> str:
        """Loads where a tensor begins; of a counter, what it counts."""
        kind = self.update.slots[slot]
        types = {"side": "tl.int64", "payload": "tl.uint8", "low": "tl.int16", "counter": "tl.int32"}
        exact = kind.kind == STATE and parse_state_format(kind.type).is_exact
        type = "tl.float32" if exact and name == "payload" else types.get(name) or POINTERS[kind.type]
        address = f"tl.load(row + {self.columns[slot, name]}).to(tl.pointer_type({type}))"
        return f"{name}{slot} = " + (
            f"tl.load({address})" if name == "counter" else f"tl.multiple_of({address}, {ALIGNMENT})"
        )

    def _tile(self) -> list[str]:
        """Where a tile lies, and what of it is inside the parameter."""
        groups = self.schedule.groups
        return [
            f"start = first_group * {GROUP}",
            f"groups = tl.arange(0, {groups})",
            f"offset = groups[:, None] * {GROUP} + tl.arange(0, {GROUP})[None, :]",
            "inside = offset < left",
            f"has_group = groups * {GROUP} < left",
            "if FULL:",
            "    inside = tl.full(offset.shape, True, tl.int1)",
            "    has_group = tl.full(groups.shape, True, tl.int1)",
            "position = start.to(tl.uint32) + offset.to(tl.uint32)",
        ]

    def _loaded(self, slot: int, name: str, other: str = "0.0") -> str:
        raw = f"{name}{slot}_tile"
        self.raw[raw] = f"tl.load({name}{slot} + start + offset, mask=inside, other={other})"
        return raw

    def _text(self, op: str, args: tuple[int, ...], params: tuple[object, ...], coded: bool) -> str:
        if op == "constant":
            x = params[0]
            kind = "tl.int1" if isinstance(x, bool) else "tl.float32"
            text = repr(x) if isinstance(x, bool) or abs(float(x)) < float("inf") else f'float("{x}")'  # type: ignore[arg-type]
            return f"tl.full((1, 1), {text}, {kind})"
        if op == "load":
            return self._load(int(params[0]))  # type: ignore[call-overload]
        expression = EXPRESSIONS[op]
        if expression.helper:
            self.helpers[expression.helper] = None
        text = expression.triton if coded else APPROXIMATE.get(op, expression.triton)
        if self.target == "interpreter":
            text = expression.interpreted or expression.triton
            self.helpers |= {name: None for name in HELPERS if f"{name}(" in text}
        return text.format(*(f"v{a}" for a in args), **{f"p{i}": p for i, p in enumerate(params)})

    def _load(self, i: int) -> str:
        slot = self.update.slots[i]
        if slot.kind == SCALAR:
            return f"tl.load(numbers + {self.update.scalars.index(i)})"
        if slot.kind == SPLIT:
            return f"joined({self._loaded(i, 'x')}, {self._loaded(i, 'low', '0')})"
        if slot.kind != STATE:
            return f"{self._loaded(i, 'x')}.to(tl.float32)"
        how = parse_state_format(slot.type)
        if how.is_exact:
            return self._loaded(i, "payload")
        payload, ends = self._loaded(i, "payload", "0"), f"side{i}_tile"
        self.raw[ends] = f"tl.load(side{i} + first_group + groups, mask=has_group, other=0)"
        return f"decode_{state_helpers.name_of(how)}({payload}, {ends}[:, None], {slot.stored in self.positive})"

    # ---- stores -------------------------------------------------------------------------------------------------

    def _store(self, i: int, slot: Slot) -> None:
        self.lines.append(f"s{i} = tl.broadcast_to(v{slot.stored}, ({self.schedule.groups}, {GROUP}))")
        if slot.kind == STATE and not (how := parse_state_format(slot.type)).is_exact:
            self._store_state(i, how, slot.stored in self.positive)
        elif slot.kind == SPLIT:
            self.lines += [f"high{i} = s{i}.to(tl.bfloat16)"]
            self._write(f"x{i}", f"high{i}")
            self._write(f"low{i}", f"missing_bits(s{i}, high{i})")
        elif slot.kind == STATE:
            self._write(f"payload{i}", f"s{i}")
        elif slot.stochastic:
            self._write(f"x{i}", f"round_parameter(s{i}, position, counter{i})")
        else:
            self._write(f"x{i}", f"s{i}.to({POINTERS[slot.type]})")

    def _store_state(self, i: int, how: StateFormat, positive: bool) -> None:
        name = state_helpers.name_of(how)
        x = f"tl.where(inside, s{i}, 0.0)"
        given = f"{x}, position, counter{i}" if how.stochastic else x
        call = f"encode_{name}{'_randomly' if how.stochastic else ''}({given}, {positive})"
        self.lines.append(f"code{i}, side_of{i} = {call}")
        self._write(f"payload{i}", f"code{i}")
        self.lines.append(f"tl.store(side{i} + first_group + groups, side_of{i}, mask=has_group)")

    def _write(self, pointer: str, text: str) -> None:
        self.lines.append(f"tl.store({pointer} + start + offset, {text}, mask=inside)")


def _function(signature: str, body: list[str]) -> str:
    lines = "\n".join(f"    {line}" for line in body)
    return f"@triton.jit\ndef {signature}:\n{lines}"
