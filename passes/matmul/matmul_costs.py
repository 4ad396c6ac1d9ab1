"""What a matmul takes in BF16 and in FP8, casts included: the model behind select="profitable".

    BF16   2·M·N·K / bf16 rate + start + sum                                         (grouped: as if all were one)
    FP8    2·M·N'·K' / (fp8 rate · filled) + start / merged + casts + kernels · launch    (both operands; N', K' padded)

    a cast of [R, C]   (itemsize · reads / readers + 1 / readers of the role) · R · C bytes / cast rate
    the sum            (merged - 1) / merged · M·N bytes of output / cast rate                       (grad_input alone)

`merged`: how many matmuls become this one, of which FP8 starts one only. Their grad_inputs are summed within it, where
those in BF16 are each written, and read again to be added. `start` is no more than a matmul's own time: it was measured
on matmuls that fill a device.
`filled` is 1 with tensor scales, else the share of the device that has tiles of the output to work on
(`Device.filled`): a grad_weight of small layers fills little of it. Layers that read one activation count together.

An operand with a scale of the whole tensor is read twice, for its amax and to be cast; one with scales of rows, groups
or blocks once. Where a generated kernel computes it (norms, activation functions and their gradients), one read falls
away. Matmuls of all roles that read a tensor share its reads, since both layouts are stored from one; those of one role
(q, k and v of x) share the payload. So each depends on what the others do: `passes/matmul/profitability.py`
begins with all in FP8 that can be, and leaves out what makes the sum of all times less.

`fp8compile.devices` has the constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

from torch import fx

from fp8compile.devices import Device
from fp8compile.formats import ALIGNMENT, Granularity, round_up
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import base, hint, value
from fp8compile.passes.matmul.grouped_matmuls import GROUPED
from fp8compile.passes.matmul.roles import Site
from fp8compile.recipe import Role

Timed = tuple[Site, Role]
TILE = 128  # rows and columns of an output that one multiprocessor computes at a time


class Costs:
    """The costs of matmuls beside those that are in FP8 already (`sites`)."""

    def __init__(self, device: Device, sites: Iterable[Site]):
        self.device = device
        self.keys: set[str] = set()
        self.readers: Counter[fx.Node] = Counter()
        self.of_role: Counter[tuple[fx.Node, str]] = Counter()
        self.merged: Counter[tuple[fx.Node, str]] = Counter()
        self.tiles: Counter[tuple[fx.Node, str]] = Counter()
        for site in sites:
            self._count(site, 1)

    def _count(self, site: Site, by: int) -> None:
        (self.keys.add if by > 0 else self.keys.remove)(site.key)
        for operand in _operands(site):
            self.readers[operand] += by
            self.of_role[operand, site.role] += by
        if merged := merged_as(site):
            self.merged[merged] += by
            self.tiles[merged] += by * _tiles(site)

    def remove(self, sites: Iterable[Site]) -> None:
        """These are in BF16 from now on."""
        for site in sites:
            self._count(site, -1)

    def added(self, leaving: Sequence[Timed], others: Sequence[Timed]) -> float:
        """Milliseconds that all takes longer when `leaving` run in BF16, and `others` have casts for themselves that
        they shared with them; less than 0 if it is faster."""
        times = [self.milliseconds(site, role) for site, role in leaving]
        before = sum(self.milliseconds(site, role)[1] for site, role in others)
        self.remove(site for site, _ in leaving)
        after = sum(self.milliseconds(site, role)[1] for site, role in others)
        for site, _ in leaving:
            self._count(site, 1)
        return sum(bf16 - fp8 for bf16, fp8 in times) + after - before

    def milliseconds(self, site: Site, role: Role) -> tuple[float, float]:
        """Of this matmul in BF16, and in FP8 as `role` of the recipe says."""
        m, n, k, batch = (hint(s) for s in (site.m, site.n, site.k, site.batch))
        kp, np_ = round_up(k, ALIGNMENT), round_up(n, ALIGNMENT)
        d, work = self.device, 2 * batch * 1e-9  # FLOPs / TFLOP/s = 1e-12 s = 1e-9 ms
        rate = d.rate(kind := _kind(role))
        if kind != "tensor":
            rate *= d.filled(self._merged_tiles(site))
        weights = hint(site.groups) if value(site.right).dim() == 3 and site.kind == GROUPED else 1  # type: ignore[arg-type]
        moved = kernels = 0.0
        sides = (site.left, role.left.granularity, m), (site.right, role.right.granularity, np_ * weights)
        for operand, granularity, rows in sides:
            node = base(operand)  # type: ignore[arg-type]
            itself = site.key not in self.keys
            readers, of_role = self.readers[node] + itself, self.of_role[node, site.role] + itself
            reads = _reads(node, granularity) / readers
            moved += batch * rows * kp * (reads * value(node).element_size() + 1 / of_role)
            kernels += reads
        alone = work * m * n * k / d.bf16
        merged, start = self._merged(site), min(d.start * 1e-3, alone)
        sums = site.role == "grad_input" and merged > 1  # alone it is added to nothing; a convolution's has no tensor
        summed = (1 - 1 / merged) * m * n * value(site.node).element_size() if sums else 0.0
        bf16 = alone + start + summed / (d.casts * 1e9)
        casts = moved / (d.casts * 1e9) + kernels / self._siblings(site) * d.launch * 1e-3
        return bf16, work * m * np_ * kp / rate + start / merged + casts

    def pays(self, site: Site, role: Role) -> bool:
        """Whether a matmul is faster in FP8 by itself."""
        bf16, fp8 = self.milliseconds(site, role)
        return fp8 < bf16

    def _merged(self, site: Site) -> int:
        """How many matmuls become one with this (`passes/matmul/merge_matmuls.py`), itself among them."""
        merged = merged_as(site)
        return 1 if merged is None else self.merged[merged] + (site.key not in self.keys)

    def _merged_tiles(self, site: Site) -> int:
        """How many tiles the output has of the matmul that this one becomes a part of
        (`passes/matmul/merge_matmuls.py`)."""
        merged, own = merged_as(site), _tiles(site)
        if merged is None or site.role == "grad_input":  # of which a sum is made: one output
            return own
        return self.tiles[merged] + (own if site.key not in self.keys else 0)

    def _siblings(self, site: Site) -> int:
        """How many layers read what this one's layer reads: their casts are launched together."""
        forward = site.forward or site
        return max(1, self.of_role[base(forward.left), forward.role]) if forward.left is not None else 1


def shared_by(site: Site) -> set[object]:
    """Names for all that the costs of a matmul have in common with those of others: tensors, and what is merged."""
    forward = site.forward or site
    layer = [("layers", base(forward.left))] if forward.left is not None else []
    return {*_operands(site), *layer}


def merged_as(site: Site) -> tuple[fx.Node, str] | None:
    """What matmuls have in common that may become one (`passes/matmul/merge_matmuls.py`): what their layers read, and
    the role. None for what is never merged."""
    forward = site.forward or site
    if site.kind not in ("mm", "addmm") or forward.kind not in ("mm", "addmm") or forward.left is None:
        return None
    aligned = isinstance(forward.n, int) and forward.n % ALIGNMENT == 0
    return (base(forward.left), site.role) if aligned else None


def _tiles(site: Site) -> int:
    """Of its output."""
    return hint(site.batch) * ceil(hint(site.m) / TILE) * ceil(round_up(hint(site.n), ALIGNMENT) / TILE)


def _kind(role: Role) -> str:
    """Which rate of the device is this role's."""
    kinds = {role.left.granularity.kind, role.right.granularity.kind}
    if role.left.granularity.size:
        return "block" if "block" in kinds else "group"
    return "row" if "row" in kinds else "tensor"


def _operands(site: Site) -> list[fx.Node]:
    return [base(operand) for operand in (site.left, site.right) if operand is not None]


def _reads(node: fx.Node, granularity: Granularity) -> int:
    """How often a cast reads a tensor that it alone needs."""
    fused = node.op == "call_function" and fusible.is_fusible(node)
    return (2 if granularity.kind == "tensor" else 1) - fused
