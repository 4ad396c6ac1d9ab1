"""Update spec → Triton source of one kernel for many parameters.

    kernel(table, sizes, blocks, scalars)      table    int64 [parameters, tensors]  addresses
                                               sizes    int64 [parameters]           elements
                                               blocks   int32 [programs, 2]          (parameter, first group)
                                               scalars  FP32 [parameters, numbers]
                                               matrices int32 [parameters, 2]        of transposed parameters

A program owns some tiles of one parameter, each of some groups of 128 elements, and loads a tile while it computes the
one before: else it would wait most of the time, for addresses first and then for data. It adds the 64-bit start of a
tile to each address once; within the tile offsets are 32-bit and the same for all tensors.

Of parameters that are not contiguous (`memory_order.py`), and of their gradients and plain states, each element is
looked for where it lies; the parts of 8-bit states are contiguous.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from fp8compile.kernels.codegen.source.helpers import HELPERS, with_needed
from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.region import Value
from fp8compile.kernels.optimizer import state_helpers, word_helpers
from fp8compile.kernels.optimizer.update_spec import SCALAR, SPLIT, STATE, Slot, Update, coded_values, never_negative
from fp8compile.state_formats import GROUP, StateFormat, parse_state_format

ALIGNMENT = 16  # of every address in the table, in bytes
POINTERS = {"float32": "tl.float32", "bfloat16": "tl.bfloat16", "float16": "tl.float16"}
NAMES = {8: "bytes", 16: "shorts"}
TILE = "offset, word, inside, FULL"
TRANSPOSED = (
    "first = start.to(tl.int32)",
    "rows = tl.load(matrices + 2 * parameter)",
    "columns = tl.load(matrices + 2 * parameter + 1)",
)


@dataclass(frozen=True)
class UpdateSchedule:
    """The groups of 128 of a tile, the tiles of a program, and its warps.

    registers: how many a thread has at most. Left alone, the compiler takes 170: a quarter of the warps less would run.
    """

    groups: int = 16
    warps: int = 4
    tiles: int = 16
    registers: int = 128

    def options(self, target: str) -> dict[str, int | bool]:
        """Return the options of a launch. Codes agree only where no product and sum are contracted."""
        more = {"maxnreg": self.registers, "enable_fp_fusion": False} if target == "cuda" else {}
        return {"num_warps": self.warps} | more


def columns(update: Update) -> dict[tuple[int, str], int]:
    """Return the columns of the table in which the addresses of tensors are: (slot, name) → column."""
    found: dict[tuple[int, str], int] = {}
    for i in (*update.stored, *update.read):
        for name in update.slots[i].tensors:
            found[i, name] = len(found)
    return found


def update_source(update: Update, schedule: UpdateSchedule, name: str, target: str, transposed: bool = False) -> str:
    """Return the functions of the kernel `name`, for "cuda" or "interpreter"; of parameters that lie transposed."""
    emitter = _Emitter(update, schedule, target, transposed)
    functions = emitter.functions(name)
    formats = {parse_state_format(s.type) for s in update.slots if s.kind == STATE}
    parts = [state_helpers.APPROXIMATIONS] if target == "cuda" else []
    parts += [state_helpers.COMMON, state_helpers.ROUNDING[target]]
    parts += [word_helpers.PACKING[target], word_helpers.COMMON]
    parts += [word_helpers.TRANSPOSED] if transposed else []
    parts += [word_helpers.FP16] if any(s.type == "float16" for s in update.slots) else []
    nearest = dict.fromkeys(f.nearest() for f in sorted(formats, key=str) if not f.is_exact)
    parts += [state_helpers.helpers_of(how, target) for how in nearest]
    parts += [state_helpers.STOCHASTIC] if any(f.stochastic for f in formats) else []
    stored = {parse_state_format(update.slots[i].type) for i in update.stored if update.slots[i].kind == STATE}
    parts += [state_helpers.encoder_of(how) for how in sorted(stored, key=str) if not how.is_exact]
    parts += [state_helpers.PARAMETER] if any(s.stochastic for s in update.slots) else []
    parts += [state_helpers.SPLIT] if any(s.kind == SPLIT for s in update.slots) else []
    parts += [HELPERS[helper].for_target(target) for helper in with_needed(emitter.helpers)]
    return "\n\n\n".join(part.strip("\n") for part in (*parts, *functions))


@dataclass
class _Emitter:
    """Writes the body of the kernel."""

    update: Update
    schedule: UpdateSchedule
    target: str
    transposed: bool = False
    helpers: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = columns(self.update)
        self.positive = never_negative(self.update)
        self.pointers = [f"{name}{slot}" for slot, name in self.columns]
        self.numbers = [f"number{i}" for i in self.update.scalars]
        self.matrix = ["first", "rows", "columns"] if self.transposed else []
        self.coded = coded_values(self.update)
        self.fused = {} if self.target == "interpreter" else _fused_quotients(self.update, self.coded)
        self.raw: dict[str, str] = {}  # what is loaded of a tile: name → how
        self.lines: list[str] = []  # what is computed and stored

    def functions(self, name: str) -> list[str]:
        """Return the functions `load` and `finish` of a tile, and the kernel."""
        inside = set(self.fused.values())
        for i, value in enumerate(self.update.values):
            if i not in inside:
                self.lines.append(f"v{i} = {self._value(i, value)}")
        for i in self.update.stored:
            self._store(i, self.update.slots[i])
        loads = [*self._tile(), *(f"{raw} = {how}" for raw, how in self.raw.items()), f"return {', '.join(self.raw)}"]
        given = ", ".join((*self.pointers, *self.matrix, "half", "at", "left", "FULL: tl.constexpr"))
        finish = [*self._tile(), *self.lines]
        arguments = "table, sizes, blocks, scalars, " + "matrices, " * self.transposed
        arguments += "TENSORS: tl.constexpr, NUMBERS: tl.constexpr"
        return [
            _function(f"load({given})", loads),
            _function(f"finish({', '.join((*self.raw, *self.numbers))}, {given})", finish),
            _function(f"{name}({arguments})", self._kernel()),
        ]

    def _kernel(self) -> list[str]:
        """Return the kernel's body: it finds its parameter, does full tiles without masks, and the rest with them."""
        groups, tiles, skip = self.schedule.groups, self.schedule.tiles, self.update.skip
        raw = ", ".join(self.raw)
        coming = ", ".join(f"next_{name}" for name in self.raw)
        pointers = ", ".join((*self.pointers, *self.matrix, "half"))
        given = ", ".join((*self.raw, *self.numbers, pointers))
        return [
            "pid = tl.program_id(0)",
            "parameter = tl.load(blocks + 2 * pid)",
            "first_group = tl.load(blocks + 2 * pid + 1).to(tl.int64)",
            f"start = first_group * {GROUP}",
            "half = (start >> 1).to(tl.uint32)",
            "left = tl.load(sizes + parameter) - start",
            *(TRANSPOSED if self.transposed else []),
            "row = table + parameter.to(tl.int64) * TENSORS",
            *(f"{name} = tl.load(scalars + parameter * NUMBERS + {k})" for k, name in enumerate(self.numbers)),
            *([] if skip is None else [f"left = tl.where(number{skip} == 0, left, 0)"]),
            *(self._address(slot, name) for slot, name in self.columns),
            f"full = tl.minimum(left // {groups * GROUP}, {tiles}).to(tl.int32)",
            "if full > 0:",
            f"    {raw} = load({pointers}, 0, 0, True)",
            "    for i in range(full):",
            f"        {coming} = load({pointers}, tl.minimum(i + 1, full - 1) * {groups}, 0, True)",
            f"        finish({given}, i * {groups}, 0, True)",
            f"        {raw} = {coming}",
            f"rest = (left - full.to(tl.int64) * {groups * GROUP}).to(tl.int32)",
            f"if (full < {tiles}) & (rest > 0):",
            f"    {raw} = load({pointers}, full * {groups}, rest, False)",
            f"    finish({given}, full * {groups}, rest, False)",
        ]

    def _address(self, slot: int, name: str) -> str:
        """Return the line that loads where a tensor begins; of a counter, its count."""
        kind = self.update.slots[slot]
        types = {"side": "tl.int64", "payload": "tl.uint8", "low": "tl.int16", "counter": "tl.int32"}
        exact = kind.kind == STATE and parse_state_format(kind.type).is_exact
        type = "tl.float32" if exact and name == "payload" else types.get(name) or POINTERS[kind.type]
        address = f"tl.load(row + {self.columns[slot, name]}).to(tl.pointer_type({type}))"
        if name == "counter":
            return f"{name}{slot} = tl.load({address})"
        start = "first_group" if name == "side" else "0" if self._lies_transposed(name) else "start"
        return f"{name}{slot} = tl.multiple_of({address}, {ALIGNMENT}) + {start}"

    def _lies_transposed(self, name: str) -> bool:
        """Return True for a parameter, its gradient and plain states: all but the parts of other states."""
        return self.transposed and name == "x"

    def _tile(self) -> list[str]:
        """Return the lines that say where a tile lies, and which part of it is inside the parameter."""
        groups = self.schedule.groups
        return [
            f"groups = tl.arange(0, {groups})",
            f"offset = groups[:, None] * {GROUP} + tl.arange(0, {GROUP})[None, :]",
            "inside = offset < left",
            f"has_group = groups * {GROUP} < left",
            "if FULL:",
            "    inside = tl.full(offset.shape, True, tl.int1)",
            "    has_group = tl.full(groups.shape, True, tl.int1)",
            "groups = at + groups",
            f"offset = at * {GROUP} + offset",
            f"word = groups[:, None] * {GROUP // 4} + tl.arange(0, {GROUP // 4})[None, :]",
            "pair, odd = half + (offset >> 1).to(tl.uint32), (offset & 1) != 0",
            *(["place = transposed_place(first + offset, rows, columns)"] if self.transposed else []),
        ]

    def _loaded(self, slot: int, name: str) -> str:
        """Return the variable with a tile of a tensor, as it is loaded: in words, if its elements are smaller."""
        raw, pointer = f"{name}{slot}_tile", f"{name}{slot}"
        bits, is_transposed = self._bits(slot, name), self._lies_transposed(name)
        if bits == 32:
            self.raw[raw] = f"tl.load({pointer} + {'place' if is_transposed else 'offset'}, mask=inside, other=0.0)"
        elif is_transposed:
            self.raw[raw] = f"load_shorts_at({pointer}, place, inside, FULL)"
        else:
            self.raw[raw] = f"load_{NAMES[bits]}({pointer}, {TILE})"
        return raw

    def _bits(self, slot: int, name: str) -> int:
        kind = self.update.slots[slot]
        if kind.kind == STATE:
            return 32 if parse_state_format(kind.type).is_exact else 8
        return 32 if kind.type == "float32" and name == "x" else 16

    def _value(self, i: int, value: Value) -> str:
        op, args, params = value.op, value.args, value.params
        if op == "constant":
            x: float | bool = params[0]
            kind = "tl.int1" if isinstance(x, bool) else "tl.float32"
            text = repr(x) if isinstance(x, bool) or math.isfinite(x) else f'float("{x}")'
            return f"tl.full((1, 1), {text}, {kind})"
        if op == "load":
            return self._load(params[0])
        if i in self.fused:
            above, below = self.update.values[self.fused[i]].args
            (other,) = (a for a in args if a != self.fused[i])
            return f"tl.fma(v{above}, fast_reciprocal(v{below}), v{other})"
        operation = OPERATIONS[op]
        self.helpers |= dict.fromkeys(operation.helpers(self.target))
        # of what is not stored as a code, one or two ULPs are nothing, and neither are numbers below 2^-126
        text = operation.text(self.target, params, approximately=i not in self.coded)
        return text.format(*(f"v{a}" for a in args))

    def _load(self, i: int) -> str:
        slot = self.update.slots[i]
        if slot.kind == SCALAR:
            return f"tl.full((1, 1), number{i}, tl.float32)"
        if slot.kind == SPLIT:
            return f"joined(widened({self._loaded(i, 'x')}, FULL), shorts({self._loaded(i, 'low')}, FULL))"
        if slot.kind != STATE:
            x = self._loaded(i, "x")
            return {"float32": x, "bfloat16": f"widened({x}, FULL)", "float16": f"from_fp16({x}, FULL)"}[slot.type]
        how = parse_state_format(slot.type)
        if how.is_exact:
            return self._loaded(i, "payload")
        payload, ends = self._loaded(i, "payload"), f"side{i}_tile"
        self.raw[ends] = f"tl.load(side{i} + groups, mask=has_group, other=0)"
        positive = slot.stored in self.positive
        return f"decode_{state_helpers.name_of(how)}({payload}, {ends}[:, None], {positive}, FULL)"

    # ---- stores -------------------------------------------------------------------------------------------------

    def _store(self, i: int, slot: Slot) -> None:
        self.lines.append(f"s{i} = tl.broadcast_to(v{slot.stored}, ({self.schedule.groups}, {GROUP}))")
        if slot.kind == STATE and not (how := parse_state_format(slot.type)).is_exact:
            self._store_state(i, how, slot.stored in self.positive)
        elif slot.kind == SPLIT:
            self._write(i, "x", f"narrowed(s{i}, FULL)")
            self._write(i, "low", f"packed_shorts(missing_bits(s{i}), FULL)")
        elif slot.kind == STATE:
            self._write(i, "payload", f"s{i}")
        elif slot.stochastic:
            self._write(i, "x", f"narrowed(round_parameter(s{i}, pair, odd, counter{i}), FULL)")
        else:
            names = {"float32": f"s{i}", "bfloat16": f"narrowed(s{i}, FULL)", "float16": f"to_fp16(s{i}, FULL)"}
            self._write(i, "x", names[slot.type])

    def _store_state(self, i: int, how: StateFormat, positive: bool) -> None:
        name = state_helpers.name_of(how)
        x = f"tl.where(inside, s{i}, 0.0)"
        given = f"{x}, pair, odd, counter{i}" if how.stochastic else x
        call = f"encode_{name}{'_randomly' if how.stochastic else ''}({given}, {positive}, FULL)"
        self.lines.append(f"code{i}, side_of{i} = {call}")
        self._write(i, "payload", f"code{i}")
        self.lines.append(f"tl.store(side{i} + groups, side_of{i}, mask=has_group)")

    def _write(self, slot: int, name: str, text: str) -> None:
        bits, pointer, is_transposed = self._bits(slot, name), f"{name}{slot}", self._lies_transposed(name)
        if bits == 32:
            self.lines.append(f"tl.store({pointer} + {'place' if is_transposed else 'offset'}, {text}, mask=inside)")
        elif is_transposed:
            self.lines.append(f"store_shorts_at({pointer}, {text}, place, inside, FULL)")
        else:
            self.lines.append(f"store_{NAMES[bits]}({pointer}, {text}, {TILE})")


def _fused_quotients(update: Update, coded: set[int]) -> dict[int, int]:
    """Return sums to which a quotient is added that nothing else uses: sum → quotient."""
    used = Counter(a for value in update.values for a in value.args) + Counter(
        update.slots[i].stored for i in update.stored
    )
    found: dict[int, int] = {}
    for i, value in enumerate(update.values):
        quotients = [a for a in value.args if update.values[a].op == "div" and used[a] == 1]
        if value.op == "add" and i not in coded and quotients:
            found[i] = quotients[-1]
    return found


def _function(signature: str, body: list[str]) -> str:
    lines = "\n".join(f"    {line}" for line in body)
    return f"@triton.jit\ndef {signature}:\n{lines}"
