"""Update spec → Triton source of one kernel for many parameters.

    kernel(table, sizes, blocks, scalars)      table    int64 [parameters, tensors]  addresses
                                               sizes    int64 [parameters]           elements
                                               blocks   int32 [programs, 2]          (parameter, first group)
                                               scalars  FP32 [parameters, numbers]

A program owns some groups of 128 elements of one parameter. It adds the 64-bit start of its tile to each address once;
within the tile offsets are 32-bit and the same for all tensors.
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
    """How many groups of 128 a program takes, and with how many warps."""

    groups: int = 16
    warps: int = 4


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
    body = emitter.body()
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
    lines = "\n".join(f"    {line}" for line in body)
    parts += [f"@triton.jit\ndef tile({', '.join(_TILE)}, FULL: tl.constexpr):\n{lines}", _entry(name, schedule)]
    return "\n\n\n".join(part.strip("\n") for part in parts)


_TILE = ("row", "numbers", "first_group", "left")


def _entry(name: str, schedule: UpdateSchedule) -> str:
    """The kernel: it finds its tile, and does it without masks where the tile is full."""
    elements = schedule.groups * GROUP
    return f"""
@triton.jit
def {name}(table, sizes, blocks, scalars, TENSORS: tl.constexpr, NUMBERS: tl.constexpr):
    pid = tl.program_id(0)
    parameter = tl.load(blocks + 2 * pid)
    first_group = tl.load(blocks + 2 * pid + 1).to(tl.int64)
    left = tl.load(sizes + parameter) - first_group * {GROUP}
    row = table + parameter.to(tl.int64) * TENSORS
    numbers = scalars + parameter * NUMBERS
    if left >= {elements}:
        tile(row, numbers, first_group, {elements}, True)
    else:
        tile(row, numbers, first_group, left.to(tl.int32), False)
"""


@dataclass
class _Emitter:
    """Writes the body of the kernel."""

    update: Update
    schedule: UpdateSchedule
    target: str
    lines: list[str] = field(default_factory=list)
    helpers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = columns(self.update)
        self.pointers: set[str] = set()
        self.positive = never_negative(self.update)

    def body(self) -> list[str]:
        """All lines: where the tile lies, what is loaded and computed, then all stores."""
        self._tile()
        coded = coded_values(self.update)
        for i, value in enumerate(self.update.values):
            self.lines.append(f"v{i} = {self._text(value.op, value.args, value.params, i in coded)}")
        for i in self.update.stored:
            self._store(i, self.update.slots[i])
        return self.lines

    def _tile(self) -> None:
        groups = self.schedule.groups
        self.lines += [
            f"start = first_group * {GROUP}",
            f"groups = tl.arange(0, {groups})",
            f"offset = groups[:, None] * {GROUP} + tl.arange(0, {GROUP})[None, :]",
            "inside = offset < left",
            f"has_group = groups * {GROUP} < left",
            "if FULL:",
            "    inside = tl.full(offset.shape, True, tl.int1)",
            "    has_group = tl.full(groups.shape, True, tl.int1)",
        ]
        if any(slot.counter for slot in self.update.slots):
            self.lines.append("position = start.to(tl.uint32) + offset.to(tl.uint32)")

    def _pointer(self, slot: int, name: str, type: str, start: str = "start") -> str:
        """The address of the tile in a tensor, computed once."""
        pointer = f"{name}{slot}"
        if pointer not in self.pointers:
            self.pointers.add(pointer)
            address = f"tl.load(row + {self.columns[slot, name]}).to(tl.pointer_type({type}))"
            text = f"tl.multiple_of({address} + {start}, {ALIGNMENT})" if start else address
            self.lines.append(f"{pointer} = {text}")
        return pointer

    def _loaded(self, slot: int, name: str, type: str, other: str = "0.0") -> str:
        return f"tl.load({self._pointer(slot, name, type)} + offset, mask=inside, other={other})"

    def _side(self, slot: int) -> str:
        return self._pointer(slot, "side", "tl.int64", "first_group")

    def _counter(self, slot: int) -> str:
        name = f"count{slot}"
        if name not in self.pointers:
            pointer = self._pointer(slot, "counter", "tl.int32", "")
            self.pointers.add(name)
            self.lines.append(f"{name} = tl.load({pointer})")
        return name

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
            return f"joined({self._loaded(i, 'x', 'tl.bfloat16')}, {self._loaded(i, 'low', 'tl.int16', '0')})"
        if slot.kind != STATE:
            return f"{self._loaded(i, 'x', POINTERS[slot.type])}.to(tl.float32)"
        how = parse_state_format(slot.type)
        if how.is_exact:
            return self._loaded(i, "payload", "tl.float32")
        side = self._side(i)
        payload = self._loaded(i, "payload", "tl.uint8", "0")
        ends = f"tl.load({side} + groups, mask=has_group, other=0)[:, None]"
        return f"decode_{state_helpers.name_of(how)}({payload}, {ends}, {slot.stored in self.positive})"

    # ---- stores -------------------------------------------------------------------------------------------------

    def _store(self, i: int, slot: Slot) -> None:
        self.lines.append(f"s{i} = tl.broadcast_to(v{slot.stored}, ({self.schedule.groups}, {GROUP}))")
        if slot.kind == STATE and not (how := parse_state_format(slot.type)).is_exact:
            self._store_state(i, how, slot.stored in self.positive)
        elif slot.kind == SPLIT:
            self.lines += [f"high{i} = s{i}.to(tl.bfloat16)"]
            self._write(i, "x", "tl.bfloat16", f"high{i}")
            self._write(i, "low", "tl.int16", f"missing_bits(s{i}, high{i})")
        elif slot.kind == STATE:
            self._write(i, "payload", "tl.float32", f"s{i}")
        elif slot.stochastic:
            self._write(i, "x", "tl.bfloat16", f"round_parameter(s{i}, position, {self._counter(i)})")
        else:
            type = POINTERS[slot.type]
            self._write(i, "x", type, f"s{i}.to({type})")

    def _store_state(self, i: int, how: StateFormat, positive: bool) -> None:
        name = state_helpers.name_of(how)
        x = f"tl.where(inside, s{i}, 0.0)"
        given = f"{x}, position, {self._counter(i)}" if how.stochastic else x
        call = f"encode_{name}{'_randomly' if how.stochastic else ''}({given}, {positive})"
        self.lines.append(f"code{i}, side_of{i} = {call}")
        self._write(i, "payload", "tl.uint8", f"code{i}")
        side = self._side(i)
        self.lines.append(f"tl.store({side} + groups, side_of{i}, mask=has_group)")

    def _write(self, i: int, name: str, type: str, text: str) -> None:
        pointer = self._pointer(i, name, type)
        self.lines.append(f"tl.store({pointer} + offset, {text}, mask=inside)")
