"""Alternative costs: the milliseconds that each FP8 matmul would take with scales of other granularities.

Recipe "auto" weighs them (`Matmul.milliseconds_by_casts`) against the noise that it measures
(`fp8compile/adaptive/best_casts.py`). Where a CPU emulates FP8, the estimates are an H100's, so that it chooses there
as it would on a GPU.
"""

from __future__ import annotations

from fp8compile.devices import TABLE
from fp8compile.formats import GROUP128, ROW, TENSOR
from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.matmul.grouped_matmuls import GROUPED, casts_of
from fp8compile.passes.matmul.matmul_costs import Costs
from fp8compile.recipe import Cast, Role

COARSE = [Role(Cast(left), Cast(right)) for left in (TENSOR, ROW) for right in (TENSOR, ROW)]
GROUPS = Role(Cast(GROUP128), Cast(GROUP128))


def record(c: Compilation, matmuls: list[MatmulNode], costs: Costs) -> None:
    """Fill in the estimates, with recipe "auto"; costs: of this graph, beside the matmuls that are in FP8."""
    if not c.options.recipe.is_auto:
        return
    converted = [m for m in matmuls if m.is_fp8 and m.kind != GROUPED]
    if not c.device.has_fp8:
        costs = Costs(TABLE["H100"], converted, c.options.one_pass_casts, kept=costs.kept)
    for matmul in converted:
        roles = [*COARSE, *([GROUPS] if costs.device.blockwise else [])]
        if (own := casts_of(matmul, c.options.recipe)) is not None:
            roles.append(Role(own.right, own.left) if matmul.weight_on_left else own)
        for role in roles:
            name = f"{role.left.granularity} × {role.right.granularity}"
            matmul.milliseconds_by_casts[name] = costs.milliseconds(matmul, role)[1]
