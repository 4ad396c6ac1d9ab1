"""Rows of a plan, as plain data: one a matmul, a saved tensor, a kernel, an optimizer's state, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FP8, BF16 = "fp8", "bf16"


@dataclass(frozen=True)
class Operand:
    """The cast of an operand: the names of format and granularity, scaling "current" or "delayed(history, margin)".

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
    milliseconds_by_casts: estimates with other granularities, as "row × tensor" (recipe "auto" alone chooses by them).
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
    milliseconds_by_casts: dict[str, float] = field(default_factory=dict)


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
    on_host: it waits in the host's memory for backward (option `offload`).
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
    on_host: bool = False

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the GPU's memory that it takes between forward and backward."""
        return 0 if self.on_host else self.bytes


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
    shape: tuple[int | str, ...]
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
    """One half after the passes that lower it: its kernels, which casts were left to Inductor and why; of an
    optimizer's graph the updates that were merged; of casts of weights how many bytes are kept."""

    kernels: list[Kernel] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failure: str = ""
    updates: list[MergedUpdate] = field(default_factory=list)
    kept: int = 0

    def __add__(self, other: Lowered) -> Lowered:
        """Return what became of a graph and the regions that it calls, together."""
        failure, updates = self.failure or other.failure, self.updates + other.updates
        kernels, left = self.kernels + other.kernels, self.left + other.left
        return Lowered(kernels, left, failure, updates, self.kept + other.kept)
