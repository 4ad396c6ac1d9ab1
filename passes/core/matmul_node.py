"""Matmuls of a graph: one record each, from the pass that finds it to the row of the plan that tells of it.

    roles               finds them: node, role, sizes
    select_matmuls      decision, why, estimated times
    assign_scales       the casts of the operands
    convolutions,       `node` is what computes it now; of several that became one there is one record
    merge_matmuls
    quantize_matmuls    `node` is the FP8 matmul

Operands are read from the node, so that there is nothing to keep right when a pass replaces them. Rows are made of the
records when a plan is wanted, and never read by passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.matmul_views import Addmm, Convolution, ConvolutionBackward, GroupedMM, Product
from fp8compile.plan.overrides import Decision
from fp8compile.plan.reasons import Why
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand

CONVOLUTION = "convolution"
GRAD_INPUT, GRAD_WEIGHT = 0, 1  # which result of a convolution's backward


@dataclass(eq=False)
class MatmulNode:
    """A matmul of the graph, left [.., M, K] @ right [.., K, N], or a convolution in those terms; and its decision.

    node: computes it. name: of that node when a pass put it there, as rows call it. kind: as the user has it: "mm",
    "addmm", "bmm", "grouped", "convolution", or an operator that is none of these in words. result: which gradient of a
    convolution's backward it is. groups: of a grouped matmul. forward: the matmul whose gradient this is; grads: the
    gradients of this one.
    why_other: why it has no role. override: what a given plan says of it. milliseconds_by_casts: estimates with other
    granularities. is_placed: an FP8 operator that does more than this matmul stands in the graph already.
    """

    node: fx.Node
    kind: str
    m: Any = 0
    n: Any = 0
    k: Any = 0
    batch: Any = 1
    groups: Any = 1
    result: int = GRAD_INPUT
    name: str = ""
    path: str = ""
    source: str = ""
    dtype: torch.dtype | None = None
    role: str = "other"
    weight_on_left: bool = False
    why_other: Why | None = None
    forward: MatmulNode | None = None
    grads: list[MatmulNode] = field(default_factory=list)
    override: Decision | None = None
    decision: str = BF16
    why: Why | None = None
    left_cast: Operand | None = None
    right_cast: Operand | None = None
    fast_accumulation: bool = False
    is_placed: bool = False
    merged: tuple[str, ...] = ()
    padded: tuple[str, ...] = ()
    milliseconds_bf16: float | None = None
    milliseconds_fp8: float | None = None
    milliseconds_by_casts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Name it after its node."""
        self.name = self.name or self.node.name

    # ---- the graph ----------------------------------------------------------------------------------------------

    @property
    def operands(self) -> tuple[fx.Node | None, fx.Node | None, fx.Node | None]:
        """(left, right, bias), as the graph has them now; None for what there is not."""
        if (product := Product.of(self.node)) is not None:
            return product.left, product.right, None
        if (addmm := Addmm.of(self.node)) is not None:
            return addmm.left, addmm.right, addmm.bias
        if (convolution := Convolution.of(self.node)) is not None:
            return convolution.input, convolution.weight, convolution.bias
        if (backward := ConvolutionBackward.of(self.node)) is not None:
            return backward.gradient, backward.weight if self.result == GRAD_INPUT else backward.input, None
        return None, None, None

    @property
    def left(self) -> fx.Node | None:
        """The left operand."""
        return self.operands[0]

    @property
    def right(self) -> fx.Node | None:
        """The right operand."""
        return self.operands[1]

    @property
    def bias(self) -> fx.Node | None:
        """The bias of an output matmul."""
        return self.operands[2]

    @property
    def pair(self) -> tuple[fx.Node, fx.Node]:
        """(left, right) of a matmul that has both."""
        left, right, _ = self.operands
        assert left is not None, f"{self.name} has no operands"
        assert right is not None, f"{self.name} has no operands"
        return left, right

    @property
    def offs(self) -> fx.Node | None:
        """The rows at which the groups of a grouped matmul end."""
        grouped = GroupedMM.of(self.node)
        return None if grouped is None else grouped.offs

    @property
    def contracts_groups(self) -> bool:
        """True for a grouped matmul that contracts the rows of each group, as grad_weight of experts does."""
        grouped = GroupedMM.of(self.node)
        return grouped is not None and grouped.left.meta["val"].dim() == grouped.right.meta["val"].dim() == 2

    @property
    def weight(self) -> fx.Node | None:
        """The weight operand of an output matmul."""
        return self.left if self.weight_on_left else self.right

    @property
    def is_plain(self) -> bool:
        """True if it multiplies two matrices, and may add a bias: no batch, no groups, no patches."""
        return self.node.target is torch.ops.aten.mm.default or Addmm.of(self.node) is not None

    @property
    def layer(self) -> MatmulNode:
        """The output matmul of the layer that this one serves: itself, where no other is known."""
        return self.forward or self

    # ---- the decision -------------------------------------------------------------------------------------------

    @property
    def is_fp8(self) -> bool:
        """True if it runs in FP8."""
        return self.decision == FP8

    def decide(self, decision: str, why: Why) -> None:
        """Let it run in `decision`."""
        self.decision, self.why = decision, why

    @property
    def casts(self) -> tuple[Operand, Operand]:
        """The casts of both operands of an FP8 matmul."""
        assert self.left_cast is not None, f"{self.name} has no casts"
        assert self.right_cast is not None, f"{self.name} has no casts"
        return self.left_cast, self.right_cast

    def row(self) -> Matmul:
        """Return the row of the plan."""
        m, n, k, batch, groups = map(plain, (self.m, self.n, self.k, self.batch, self.groups))
        why = self.why
        return Matmul(
            self.name, self.path, self.source, self.kind, self.role, m, n, k, batch,
            str(self.dtype).removeprefix("torch."), self.decision, why.text if why else "", self.left_cast,
            self.right_cast, self.fast_accumulation, self.merged, self.padded, self.milliseconds_bf16,
            self.milliseconds_fp8, groups, why.code if why else "", why.remarks if why else (),
            self.milliseconds_by_casts,
        )  # fmt: skip


def plain(size: Any) -> int | str:
    """Return a size as rows have it: a number, or the text of a symbolic one."""
    return size if isinstance(size, int) else str(size)


class Matmuls:
    """The matmuls of a graph in its order, each found by its node as well."""

    def __init__(self, found: Iterable[MatmulNode] = ()):
        self._found = list(found)
        self._at: dict[fx.Node, list[MatmulNode]] = {}
        for matmul in self._found:
            self._at.setdefault(matmul.node, []).append(matmul)

    def __iter__(self) -> Iterator[MatmulNode]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def at(self, node: fx.Node) -> Sequence[MatmulNode]:
        """Return the matmuls that `node` computes: two for the backward of a convolution."""
        return tuple(self._at.get(node, ()))

    @property
    def converted(self) -> list[MatmulNode]:
        """Those that are to become FP8 matmuls of the graph."""
        return [matmul for matmul in self if matmul.is_fp8 and not matmul.is_placed]

    def move(self, matmul: MatmulNode, node: fx.Node) -> None:
        """Let `node` compute `matmul` from now on, and give it its name."""
        self._at[matmul.node].remove(matmul)
        self._at.setdefault(node, []).append(matmul)
        matmul.node, matmul.name = node, node.name

    def replaced(self, old: fx.Node, new: fx.Node) -> None:
        """Follow a pass that has put `new` in the place of `old`; names in rows stay."""
        for matmul in self._at.pop(old, ()):
            self._at.setdefault(new, []).append(matmul)
            matmul.node = new

    def merge(self, members: Sequence[MatmulNode], merged: MatmulNode) -> None:
        """Put `merged` in the place of the first of `members`; the others go."""
        gone = set(members[1:])
        self._found = [merged if m is members[0] else m for m in self._found if m not in gone]
        for member in members:
            self._at[member.node].remove(member)
        self._at.setdefault(merged.node, []).append(merged)

    def rows(self) -> list[Matmul]:
        """Return the rows of the plan, as all is decided now."""
        return [matmul.row() for matmul in self]
