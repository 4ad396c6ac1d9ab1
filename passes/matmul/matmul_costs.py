"""Matmul costs: the milliseconds of a matmul in BF16 and in FP8, casts included: the model behind select="profitable".

    BF16   2·M·N·K / bf16 rate + start + sum                                         (grouped: as if all were one)
    FP8    2·M·N'·K' / (fp8 rate · filled) + start / merged + casts + kernels · launch    (both operands; N', K' padded)

    a cast of [R, C]   (itemsize · (reads - spared) / readers + 1 / readers of the role) · R · C bytes / cast rate
    the sum            (merged - 1) / merged · M·N bytes of output / cast rate                       (grad_input alone)

`merged`: how many matmuls become this one, of which FP8 starts one only. Their grad_inputs are summed within it, where
those in BF16 are each written, and read again to be added. `start` is no more than a matmul's own time: it was measured
on matmuls that fill a device.
`filled` is 1 with tensor scales, else the share of the device that has tiles of the output to work on
(`Device.filled`): a grad_weight of small layers fills little of it. Layers that read one activation count together.
Grouped matmuls have a share of the rate by their tiles (`passes/matmul/grouped_matmuls.py`).

An operand with a scale of the whole tensor is read twice, for its amax and to be cast; one with scales of rows, groups
or blocks once; one whose rows are columns of what lies in memory twice, by itself, as its amaxes are known at the end
alone. Where a generated kernel computes it (norms, activation functions and their gradients), one read falls
away. Matmuls of all roles that read a tensor share its reads, since both layouts are stored from one; those of one role
(q, k and v of x) share the payload. So each depends on what the others do: `passes/matmul/profitability.py`
begins with all in FP8 that can be, and leaves out what makes the sum of all times less.
grad_weight of experts casts groups of tokens, filled up, by a kernel of its own (`fp8::grouped_cast`), whoever else
reads them, and shares it only with others that contract the same groups. With a scale a column it reads them twice,
which takes as long as `READS_OF_GROUPS` reads; with one a group once, and once more where no other matmul in FP8 reads
them for their amaxes.

With kept weights (option `frozen`) a matmul casts its activation alone. It may have few rows: then it takes as long as
its operands take to be read, of which the weight has half the bytes in FP8.

What backward reads in BF16 is unpacked first, which a matmul in FP8 spares (`passes/matmul/unpack_costs.py`).

A gradient that FP8 matmuls alone read (and sums of its rows: a bias) is spared what BF16 does with it: one that a
generated kernel computes is never written, one that is concatenated of what lies in memory (dq, dk, dv) neither
written nor read. Of a large one with a scale of the whole tensor, a sample of rows is read in place of all for its amax
(`passes/regions/one_pass_casts.py`).

`fp8compile.devices` has the constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import ceil

from torch import fx

from fp8compile.devices import Device
from fp8compile.formats import ALIGNMENT, ROW, Granularity, round_up
from fp8compile.kernels.codegen.schedule import one_pass
from fp8compile.kernels.codegen.spec.region import MOST_BESIDE
from fp8compile.kernels.reference.grouped_reference import padded_tokens
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.aten_views import Concatenation
from fp8compile.passes.core.compilation import VIEWS, base, value
from fp8compile.passes.core.matmul_node import CONVOLUTION, MatmulNode
from fp8compile.passes.core.sizes import hint, same_sizes
from fp8compile.passes.core.walk import users_of, walk
from fp8compile.passes.matmul.grouped_matmuls import GROUPED, share_of_rate
from fp8compile.passes.matmul.unpack_costs import Unpacked
from fp8compile.recipe import Role

Timed = tuple[MatmulNode, Role]
READS_OF_GROUPS = 2.75  # two, for their amaxes and to be cast, at three quarters of the rate of other casts
TILE = 128  # rows and columns of an output that one multiprocessor computes at a time


class Costs:
    """The costs of a matmul beside those that are in FP8 already (`matmuls`); one_pass: large gradients are cast in one
    pass; unpacked: the activations that matmuls of backward in BF16 would have unpacked; kept: what is computed of
    frozen weights alone, whose casts cost nothing."""

    def __init__(
        self,
        device: Device,
        matmuls: Iterable[MatmulNode],
        one_pass: bool = True,
        unpacked: Sequence[Unpacked] = (),
        kept: Collection[fx.Node] = (),
    ):
        self.device, self.one_pass, self.unpacked, self.kept = device, one_pass, unpacked, kept
        self.unpacked_by: dict[MatmulNode, list[Unpacked]] = {}
        for each in unpacked:
            for matmul in each.readers | each.casters:
                self.unpacked_by.setdefault(matmul, []).append(each)
        self.alone: dict[fx.Node, int] = {}
        self.in_fp8: set[MatmulNode] = set()
        self.readers: Counter[fx.Node] = Counter()
        self.of_role: Counter[tuple[fx.Node, str]] = Counter()
        self.merged: Counter[tuple[fx.Node, str]] = Counter()
        self.tiles: Counter[tuple[fx.Node, str]] = Counter()
        for matmul in matmuls:
            self._count(matmul, 1)

    def _count(self, matmul: MatmulNode, by: int) -> None:
        (self.in_fp8.add if by > 0 else self.in_fp8.remove)(matmul)
        for operand in _operands(matmul):
            self.readers[operand] += 0 if matmul.contracts_groups else by
            self.of_role[operand, matmul.role] += by
        if merged := merged_as(matmul):
            self.merged[merged] += by
            self.tiles[merged] += by * _tiles(matmul)

    def remove(self, matmuls: Iterable[MatmulNode]) -> None:
        """Count these as BF16 from now on."""
        for matmul in matmuls:
            self._count(matmul, -1)

    def added(self, leaving: Sequence[Timed], others: Sequence[Timed]) -> float:
        """Return how many milliseconds longer everything takes when `leaving` run in BF16, and `others` have casts for
        themselves that they shared with them; less than 0 if it is faster."""
        times = [self.milliseconds(matmul, role) for matmul, role in leaving]
        unpacking = self._unpacking([matmul for matmul, _ in leaving])
        before = sum(self.milliseconds(matmul, role)[1] for matmul, role in others)
        self.remove(matmul for matmul, _ in leaving)
        after = sum(self.milliseconds(matmul, role)[1] for matmul, role in others)
        for matmul, _ in leaving:
            self._count(matmul, 1)
        return sum(bf16 - fp8 for bf16, fp8 in times) + after - before + unpacking

    def milliseconds(self, matmul: MatmulNode, role: Role) -> tuple[float, float]:
        """Return the times of this matmul in BF16, and in FP8 as `role` of the recipe says."""
        m, n, batch = (hint(s) for s in (matmul.m, matmul.n, matmul.batch))
        left, right = matmul.pair
        kp, np_ = _padded(matmul), round_up(n, ALIGNMENT)
        d, work = self.device, 2 * batch * 1e-9  # FLOPs / TFLOP/s = 1e-12 s = 1e-9 ms
        rate = d.rate(kind := "row" if matmul.kind == GROUPED else _kind(role))
        if kind != "tensor":
            rate *= d.filled(self._merged_tiles(matmul)) * share_of_rate(matmul, role)
        weights = hint(matmul.groups) if value(right).dim() == 3 and matmul.kind == GROUPED else 1
        moved = kernels = 0.0
        sides = (left, role.left.granularity, m, True), (right, role.right.granularity, np_ * weights, False)
        for operand, granularity, rows, contracted_last in sides:
            node = base(operand)
            if node in self.kept:
                continue
            itself = matmul not in self.in_fp8
            readers, of_role = self.readers[node] + itself, self.of_role[node, matmul.role] + itself
            if matmul.kind == GROUPED and not matmul.contracts_groups:
                granularity = ROW  # one scale an expert is made of the amaxes of rows
            reads, spared = float(_reads(node, granularity)), self._spared(matmul, node, granularity, readers)
            if matmul.contracts_groups:  # which a kernel of their own casts
                found = granularity.kind == "tensor" and readers > itself
                reads, spared, readers = READS_OF_GROUPS / 2 if found else READS_OF_GROUPS, 0.0, of_role
            elif granularity.kind == "row" and _is_turned(matmul, operand, contracted_last):
                reads, readers = reads + 1, of_role
            moved += batch * rows * kp * ((reads - spared) / readers * value(node).element_size() + 1 / of_role)
            kernels += reads / readers
        alone = alone_in_bf16(matmul, d, self.kept)
        merged, start = self._merged(matmul), min(d.start * 1e-3, alone)
        sums = matmul.role == "grad_input" and merged > 1  # alone it is added to nothing; a convolution's has no tensor
        summed = (1 - 1 / merged) * m * n * value(matmul.node).element_size() if sums else 0.0
        bf16 = alone + start + summed / (d.casts * 1e9)
        casts = moved / (d.casts * 1e9) + kernels / self._siblings(matmul) * d.launch * 1e-3
        in_fp8 = max(work * m * np_ * kp / rate, _moved(matmul, self.kept, 1) / (d.casts * 1e9))
        return bf16, in_fp8 + start / merged + casts

    def is_faster(self, matmul: MatmulNode, role: Role) -> bool:
        """Return True if a matmul and its casts take less time in FP8."""
        bf16, fp8 = self.milliseconds(matmul, role)
        return fp8 < bf16

    def pays(self, matmul: MatmulNode, role: Role) -> bool:
        """Return True if a matmul is faster in FP8 by itself, with what is not unpacked for it then."""
        bf16, fp8 = self.milliseconds(matmul, role)
        return fp8 < bf16 + self._unpacking([matmul])

    def _unpacking(self, leaving: Sequence[MatmulNode]) -> float:
        """Return how many milliseconds longer activations take to unpack when `leaving` run in BF16."""
        concerned = dict.fromkeys(each for matmul in leaving for each in self.unpacked_by.get(matmul, ()))
        if not concerned:
            return 0.0
        staying = {m for x in concerned for m in (*x.readers, *x.casters) if m in self.in_fp8 and m not in leaving}
        before = {*staying, *leaving}
        return sum(x.milliseconds(staying) - x.milliseconds(before) for x in concerned)

    def _spared(self, matmul: MatmulNode, node: fx.Node, granularity: Granularity, readers: int) -> float:
        """Return how often less an operand is read and written than `_reads` and BF16 would have it, where FP8 matmuls
        alone read it, so many of them; 0 of what is no gradient."""
        if not _is_gradient(matmul, node):
            return 0.0
        if node not in self.alone:
            self.alone[node] = _read_by_matmuls_alone(node)
        if readers < self.alone[node] or not self.alone[node]:
            return 0.0
        is_large = hint(value(node).numel()) * value(node).element_size() >= one_pass.LEAST
        sampled = self.one_pass and is_large and granularity.kind == "tensor"
        unwritten = 2.0 if _is_read_in_pieces(node, granularity) else float(fusible.is_fusible(node))
        return unwritten + (1 - 1 / one_pass.EVERY if sampled else 0.0)

    def _merged(self, matmul: MatmulNode) -> int:
        """Return how many matmuls become one with this (`passes/matmul/merge_matmuls.py`), itself among them."""
        merged = merged_as(matmul)
        return 1 if merged is None else self.merged[merged] + (matmul not in self.in_fp8)

    def _merged_tiles(self, matmul: MatmulNode) -> int:
        """Return how many tiles the output of the matmul has that this one becomes a part of
        (`passes/matmul/merge_matmuls.py`)."""
        merged, own = merged_as(matmul), _tiles(matmul)
        if merged is None or matmul.role == "grad_input":  # of which a sum is made: one output
            return own
        return self.tiles[merged] + (own if matmul not in self.in_fp8 else 0)

    def _siblings(self, matmul: MatmulNode) -> int:
        """Return how many layers read what this one's layer reads: their casts are launched together."""
        layer, left = matmul.layer, matmul.layer.left
        return max(1, self.of_role[base(left), layer.role]) if left is not None else 1


def alone_in_bf16(matmul: MatmulNode, device: Device, kept: Collection[fx.Node] = ()) -> float:
    """Return the milliseconds of a matmul in BF16, without its start: of its FLOPs, or to read a kept weight."""
    m, n, k, batch = (hint(s) for s in (matmul.m, matmul.n, matmul.k, matmul.batch))
    return max(2e-9 * batch * m * n * k / device.bf16, _moved(matmul, kept) / (device.casts * 1e9))


def _moved(matmul: MatmulNode, kept: Collection[fx.Node], itemsize: int = 0) -> int:
    """Return the bytes that a matmul with a kept weight reads and writes. itemsize: of what it reads, if not its own.

    0 for any other: training has so many rows that FLOPs take longer.
    """
    if not any(base(x) in kept for x in (matmul.left, matmul.right) if x is not None):
        return 0
    m, n, k, batch = (hint(s) for s in (matmul.m, matmul.n, matmul.k, matmul.batch))
    written = value(matmul.node).element_size()
    return batch * ((m + n) * k * (itemsize or written) + m * n * written)


def shared_by(matmul: MatmulNode) -> set[object]:
    """Return names for all that the costs of a matmul have in common with those of others: tensors, merged matmuls."""
    left = matmul.layer.left
    layer = [("layers", base(left))] if left is not None else []
    return {*_operands(matmul), *layer}


def merged_as(matmul: MatmulNode) -> tuple[fx.Node, str] | None:
    """Return what matmuls have in common that may become one (`passes/matmul/merge_matmuls.py`): the tensor that their
    layers read, and the role. None for a matmul that is never merged."""
    layer, left = matmul.layer, matmul.layer.left
    if not (matmul.is_plain and layer.is_plain) or left is None:
        return None
    aligned = isinstance(layer.n, int) and layer.n % ALIGNMENT == 0
    return (base(left), matmul.role) if aligned else None


def _padded(matmul: MatmulNode) -> int:
    """Return how long what is contracted becomes; where groups are, at most: only the data knows."""
    k = hint(matmul.k)
    return padded_tokens(k, hint(matmul.groups)) if matmul.contracts_groups else round_up(k, ALIGNMENT)


def _tiles(matmul: MatmulNode) -> int:
    """Return how many tiles its output has."""
    products = hint(matmul.groups if matmul.contracts_groups else matmul.batch)
    return products * ceil(hint(matmul.m) / TILE) * ceil(round_up(hint(matmul.n), ALIGNMENT) / TILE)


def _kind(role: Role) -> str:
    """Return the name of the device's rate that holds for this role."""
    kinds = {role.left.granularity.kind, role.right.granularity.kind}
    if role.left.granularity.size:
        return "block" if "block" in kinds else "group"
    return "row" if "row" in kinds else "tensor"


def _operands(matmul: MatmulNode) -> list[fx.Node]:
    return [base(operand) for operand in (matmul.left, matmul.right) if operand is not None]


def _is_gradient(matmul: MatmulNode, node: fx.Node) -> bool:
    """Return True if the matmul's operand `node` is the gradient of its layer's output."""
    others = [base(x) for x in (matmul.layer.left, matmul.layer.right) if x is not None]
    return matmul.role in ("grad_input", "grad_weight") and bool(others) and node not in others


def _is_read_in_pieces(node: fx.Node, granularity: Granularity) -> bool:
    """Return True for a concatenation that casts do without: of matrices, whose payloads are concatenated, or of a few
    tensors that lie side by side as columns (`passes/regions/side_by_side.py`)."""
    cat = Concatenation.of(fusible.laid_out(node))
    if cat is None or (cat.node is node and value(node).dim() == 2):
        return cat is not None
    first = value(cat.pieces[0]).shape
    computed = any(fusible.is_fusible(base(fusible.laid_out(piece))) for piece in cat.pieces)
    columns = cat.dim == value(cat.node).dim() - 1 or cat.node is not node  # or became columns with the copy
    alike = all(same_sizes(value(piece).shape, first) for piece in cat.pieces) and len(cat.pieces) <= MOST_BESIDE
    return alike and columns and not computed and granularity.kind == "tensor"


def _read_by_matmuls_alone(node: fx.Node) -> int:
    """Return how many matmuls read a tensor, if but for sums over its rows nothing else does; else 0."""
    found = 0
    for user in walk([node], users_of, through=lambda n: n is node or n.target in VIEWS):
        if user is node or user.target in VIEWS:
            continue
        if operators.name_of(user.target) in operators.MATMULS:
            found += 1
        elif not fusible.is_col_sum(user):
            return 0
    return found


def _is_turned(matmul: MatmulNode, operand: fx.Node, contracted_last: bool) -> bool:
    """Return True if what is contracted, the operand's last dimension or else its first, does not lie in memory as rows
    do; False where nobody knows: of groups and patches."""
    if matmul.kind in (GROUPED, CONVOLUTION):
        return False
    return hint(value(operand).stride(-1 if contracted_last else -2)) != 1


def _reads(node: fx.Node, granularity: Granularity) -> int:
    """Return how often a cast reads a tensor that it alone needs."""
    fused = node.op == "call_function" and fusible.is_fusible(node)
    return (2 if granularity.kind == "tensor" else 1) - fused
