"""The plan: what the compiler decided, as plain data: one row a matmul, a saved tensor, a kernel, each with its reason.

The deciding passes write it, the rewriting passes only carry it out; reports and tests read it. `to_json` and
`from_json` are inverse to each other.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import sympy

from fp8compile.plan.reasons import Reason

FP8, BF16 = "fp8", "bf16"


@dataclass(frozen=True)
class Operand:
    """How an operand is cast: the names of format and granularity, scaling "current" or "delayed(history, margin)".

    gathered: it is not cast at all: it arrived as FP8 (`fp8compile.prepare_fsdp`).
    """

    format: str
    granularity: str
    power_of_two: bool = False
    history: int = 0
    margin: int = 0
    gathered: bool = False

    def __str__(self) -> str:
        marks = ("^2" if self.power_of_two else "") + (f" delayed({self.history})" if self.history else "")
        marks += " gathered" if self.gathered else ""
        return f"{self.format} {self.granularity}{marks}"


@dataclass(frozen=True)
class Matmul:
    """One matmul [batch ×] M×K · K×N of the graph; a grouped one multiplies each of `groups` groups of rows (of M; of K
    in grad_weight) by itself, and has M·N·K products like another.

    path: module path in the user's model; source: the user's line; kind: mm, bmm, grouped, convolution, …
    role: output, grad_input, grad_weight, or other (no weight on either side).
    decision: "fp8" or "bf16" (left in the precision that the user gave it); reason: why, for people; code: the same
    for programs, remarks: the codes of what the reason adds (`fp8compile.plan.reasons.Reason`; "" in older plans).
    left, right: the casts of an FP8 matmul; merged: paths of the matmuls that this one took in.
    padded: dimensions that were filled up with zeros, as "K 1000→1008".
    m, n, k may be strings where they are symbolic.
    """

    node: str
    path: str
    source: str
    kind: str
    role: str
    m: int | str
    n: int | str
    k: int | str
    batch: int | str = 1
    dtype: str = "bfloat16"
    decision: str = BF16
    reason: str = ""
    left: Operand | None = None
    right: Operand | None = None
    fast_accumulation: bool = False
    merged: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    milliseconds_bf16: float | None = None
    milliseconds_fp8: float | None = None
    groups: int | str = 1
    code: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """One tensor that the forward half keeps for the backward half.

    shape, dtype: of the value as the model computes it (sizes may be strings where they are symbolic).
    form: what is kept: the name of `dtype` for the value itself, or payload and granularity, as "e4m3 group(128)".
    bytes: what that form takes, scales included (of a symbolic size: at the sizes seen when it was compiled).
    reason: why it has this form; code: the same for programs, as of a matmul.
    before: bytes of what it stands for, where that is not the value itself: for an FP8 payload that a matmul of
    backward reads, the tensor that was cast, unless a parameter or another row is that already (then 0, as for amaxes
    and scales, which nothing but FP8 has).
    """

    node: str
    path: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    form: str
    bytes: int
    reason: str
    before: int | None = None
    code: str = ""


@dataclass(frozen=True)
class Loss:
    """The cross-entropy of an output head.

    rows, classes: of its logits (rows may be a string where they are symbolic); bytes: what all of them would take.
    chunk: how many rows of logits exist at a time; 0: all of them, for this reason.
    """

    node: str
    path: str
    source: str
    rows: int | str
    classes: int | str
    dtype: str
    bytes: int
    chunk: int
    reason: str


@dataclass(frozen=True)
class Mask:
    """An attention mask that is not made, as attention knows what it says (`kind`): "causal" or "everything"."""

    node: str
    path: str
    source: str
    shape: tuple[int, ...]
    kind: str


@dataclass(frozen=True)
class Transfer:
    """A collective that hands a tensor of activations or gradients to other ranks as it is: it reduces nothing.

    kind: "all-gather" or "all-to-all"; half: "forward" or "backward". shape: of what a rank has afterwards.
    form: what travels: the name of `dtype`, or payload and granularity, as "e4m3 row", and why.
    before, after: bytes that a rank has afterwards, its own part included, as the model computes them and as they are.
    """

    node: str
    path: str
    source: str
    kind: str
    half: str
    shape: tuple[int | str, ...]
    dtype: str
    form: str
    before: int
    after: int
    reason: str


@dataclass(frozen=True)
class Recomputed:
    """One value of the forward half that the backward half reads and computes again, instead of keeping it.

    bytes: what keeping it as it is would have taken. operators: how many run again for it, shared ones counted each
    time. sources: what it is computed from: nodes that are kept, with their form; "parameters"; inputs of the graph.
    """

    node: str
    path: str
    source: str
    shape: tuple[int | str, ...]
    dtype: str
    bytes: int
    operators: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """One generated kernel of a compiled graph.

    half: forward, backward, or inference. space: rows × cols of its parts. operations: what it computes, with counts.
    moved: bytes that it reads and writes at least, of symbolic sizes as they were seen when it was compiled; 0 where
    only the data knows a size. origins: the user's lines.
    """

    name: str
    half: str
    space: tuple[str, ...]
    operations: tuple[str, ...]
    moved: int
    origins: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """One state of an optimizer: `parameter` counts them through its groups; format "": a plain tensor; and why.

    dtype: as the optimizer computes with it. bytes: what is kept, side data included (if sharded: on all ranks).
    """

    parameter: int
    name: str
    shape: tuple[int, ...]
    format: str
    reason: str
    dtype: str = "float32"
    bytes: int = 0


@dataclass(frozen=True)
class Group:
    """One group of parameters of an optimizer, counted as `optimizer.param_groups` is.

    settings: its hyperparameters by name ("lr", "betas", …), as they were; several numbers as text.
    parameters, elements: how many, and how many numbers they have. in_8_bits: parameters with a state in 8 bits;
    others: why the others have none, with counts. before, after: bytes of its states, as plain tensors and as kept.
    """

    group: int
    parameters: int
    elements: int
    in_8_bits: int
    before: int
    after: int
    others: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MergedUpdate:
    """So many parameters that one launch updates, by an expression of so many values; reason: why it is not merged."""

    parameters: int
    elements: int
    formats: tuple[str, ...]
    values: int
    reason: str = ""


@dataclass
class Lowered:
    """What the passes after the cut made of one half: its kernels, which casts were left to Inductor and why; of an
    optimizer's graph the updates that were merged."""

    kernels: list[Kernel] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failure: str = ""
    updates: list[MergedUpdate] = field(default_factory=list)

    def __add__(self, other: Lowered) -> Lowered:
        """Return what became of a graph and the regions that it calls together."""
        failure, updates = self.failure or other.failure, self.updates + other.updates
        return Lowered(self.kernels + other.kernels, self.left + other.left, failure, updates)


@dataclass
class Plan:
    """Rows for every matmul of one graph; `graph` says which (training, inference or optimizer), `failure` why
    nothing of it was carried out.

    `saved`: what the forward half keeps for the backward half, parameters left out; `recomputed`: how many nodes of
    each operator the backward half computes again; `restored`: which values it gets in that way.
    `halves`: what became of the forward, backward or inference graph, as far as it has been compiled (torch compiles
    backward when it is first needed). `states`, `groups`: those of an optimizer, and of its parameters.
    `losses`: what became of cross-entropies with large logits. `masks`: those of attention that are not made.
    `transfers`: what ranks hand each other for matmuls, and in which form.
    `hints`: symbolic sizes of rows → what they were when this was compiled. `called`: the user's line that compiled it.
    """

    graph: str = "training"
    recipe: str = ""
    device: str = ""
    matmuls: list[Matmul] = field(default_factory=list)
    failure: str = ""
    saved: list[Saved] = field(default_factory=list)
    recomputed: dict[str, int] = field(default_factory=dict)
    restored: list[Recomputed] = field(default_factory=list)
    halves: dict[str, Lowered] = field(default_factory=dict)
    states: list[State] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    hints: dict[str, int] = field(default_factory=dict)
    called: str = field(default="", compare=False)

    def row(self, node: str) -> Matmul | None:
        """Return the row of the matmul at graph node `node`."""
        return next((m for m in self.matmuls if m.node == node), None)

    def update(self, which: str, /, **changes: Any) -> None:
        """Replace fields of the row at node `which`: a way to edit a plan that is to be handed back."""
        self.matmuls = [replace(m, **changes) if m.node == which else m for m in self.matmuls]

    def undone(self, failure: str) -> Plan:
        """Return this plan where a pass failed and none of it is carried out; reasons keep what had been decided."""
        why = "a pass failed; FP8 was decided: {}"
        rows = [
            replace(m, decision=BF16, reason=why.format(m.reason), code=Reason.FAILED) if m.decision == FP8 else m
            for m in self.matmuls
        ]
        losses = [
            replace(x, chunk=0, reason=f"a pass failed; chunks of {x.chunk} rows were decided") if x.chunk else x
            for x in self.losses
        ]
        return replace(self, matmuls=rows, losses=losses, masks=[], failure=failure)

    def size(self, size: int | str) -> int:
        """Return a size of a row as a number; 0 for a symbolic one of which nothing is known."""
        if isinstance(size, int) or size in self.hints:
            return size if isinstance(size, int) else self.hints[size]
        known = {name: sympy.Integer(hint) for name, hint in self.hints.items() if name.isidentifier()}
        number = sympy.parse_expr(size, local_dict=known)  # a padded size: "16*((s33 + 15)//16)"
        return int(number) if number.is_Integer else 0

    def line(self, row: Matmul | Saved | Recomputed | Transfer) -> str:
        """Return the user's line of a row; where it has none, the line that called the whole.

        The modules of an nn.Sequential that is compiled itself have none, as torch's own code calls them.
        """
        return row.source or (f"called at {self.called}" if row.path and self.called else "")

    @property
    def converted(self) -> list[Matmul]:
        """Rows that run in FP8."""
        return [m for m in self.matmuls if m.decision == FP8]

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward half keeps for the backward half, parameters left out."""
        return sum(row.bytes for row in self.saved)

    @property
    def kernels(self) -> list[Kernel]:
        """The generated kernels of all halves."""
        return [kernel for half in self.halves.values() for kernel in half.kernels]

    @property
    def updates(self) -> list[MergedUpdate]:
        """The updates of an optimizer, as they were merged."""
        return [update for half in self.halves.values() for update in half.updates]

    @property
    def kept(self) -> list[Matmul]:
        """Rows that were left as they are."""
        return [m for m in self.matmuls if m.decision != FP8]

    def reasons(self) -> Counter[str]:
        """Return how many matmuls were left, by reason."""
        return Counter(m.reason for m in self.kept)

    def __str__(self) -> str:
        from fp8compile.insight.tables.text import (
            plan_text,  # the tables know plans; plans need them to show themselves
        )

        return plan_text(self)

    def _repr_html_(self) -> str:
        from fp8compile.insight.tables.html import explanation_html

        return explanation_html([self])

    def rows(self, table: str = "matmuls") -> list[dict[str, Any]]:
        """Flat rows, as `Explanation.rows` gives them."""
        from fp8compile.insight.explanation import Explanation

        return Explanation([self]).rows(table)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """A plan from `to_json`'s text, or an explanation's of one graph. Raises `OptionError` for another."""
        from fp8compile.plan.from_json import plan_from_json  # reading knows plans, which need it for this

        return plan_from_json(text)
