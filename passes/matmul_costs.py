"""What a matmul takes in BF16 and in FP8, casts included: the model behind select="profitable".

    BF16   2·M·N·K / bf16 rate                                                          (grouped: as if all were one)
    FP8    2·M·N'·K' / fp8 rate + casts of both operands + kernels · launch                      (N', K' padded)

    a cast of [R, C]   (itemsize · reads / readers + 1 / readers of the role) · R · C bytes / cast rate

An operand with a scale of the whole tensor is read twice, for its amax and to be cast; one with scales of rows, groups
or blocks once. Where a generated kernel computes it (norms, activation functions and their gradients), one read falls
away. Matmuls of all roles that read a tensor share its reads, since both layouts are stored from one; those of one role
(q, k and v of x) share the payload. So each depends on what the others do: `select_matmuls` asks with all in FP8 that
can be, and asks again without those that do not pay.

`fp8compile.devices` has the constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from fp8compile.devices import Device
from fp8compile.formats import ALIGNMENT, Granularity, round_up
from fp8compile.passes import fusible
from fp8compile.passes.compilation import base, hint, value
from fp8compile.passes.grouped_matmuls import GROUPED
from fp8compile.passes.roles import Site
from fp8compile.recipe import Role


class Costs:
    """The costs of matmuls beside those that are in FP8 already (`sites`)."""

    def __init__(self, device: Device, sites: Iterable[Site]):
        self.device = device
        self.keys: set[str] = set()
        self.readers: Counter[fx.Node] = Counter()
        self.of_role: Counter[tuple[fx.Node, str]] = Counter()
        for site in sites:
            self.keys.add(site.key)
            for operand in _operands(site):
                self.readers[operand] += 1
                self.of_role[operand, site.role] += 1

    def milliseconds(self, site: Site, role: Role) -> tuple[float, float]:
        """Of this matmul in BF16, and in FP8 as `role` of the recipe says."""
        m, n, k, batch = (hint(s) for s in (site.m, site.n, site.k, site.batch))
        kp, np_ = round_up(k, ALIGNMENT), round_up(n, ALIGNMENT)
        d, work = self.device, 2 * batch * 1e-9  # FLOPs / TFLOP/s = 1e-12 s = 1e-9 ms
        coarser = "tensor" if {role.left.granularity.kind, role.right.granularity.kind} == {"tensor"} else "row"
        rate = d.rate("block" if role.left.granularity.size else coarser)
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
        casts = moved / (d.casts * 1e9) + kernels / self._siblings(site) * d.launch * 1e-3
        return work * m * n * k / d.bf16, work * m * np_ * kp / rate + casts

    def _siblings(self, site: Site) -> int:
        """How many layers read what this one's layer reads: their casts are launched together."""
        forward = site.forward or site
        return max(1, self.of_role[base(forward.left), forward.role]) if forward.left is not None else 1


def _operands(site: Site) -> list[fx.Node]:
    return [base(operand) for operand in (site.left, site.right) if operand is not None]


def _reads(node: fx.Node, granularity: Granularity) -> int:
    """How often a cast reads a tensor that it alone needs."""
    fused = node.op == "call_function" and fusible.is_fusible(node)
    return (2 if granularity.kind == "tensor" else 1) - fused
