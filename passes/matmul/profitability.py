"""Profitability: select the set of matmuls for which FP8 is faster, counting casts that several share once.

Each has a time in BF16 and in FP8 that depends on the others (`passes/matmul/matmul_costs.py`): a matmul that leaves
FP8 leaves the reads of its operands to those that share them. So all are in FP8 first. Where one is slower by itself,
the set around it is looked for without which the sum of all times is least: it leaves, or, if no set makes the sum
less, all stay. First come matmuls that are slower even with the unpacking that they spare
(`passes/matmul/unpack_costs.py`). Sets that may leave are the matmul alone, a layer's two gradients, its three matmuls,
and the same of all layers that read one activation (q, k and v).

What has left does not come back, and not all sets are tried: `tests/passes/matmul/test_profitability.py` compares with
all ways.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fp8compile.passes.core.compilation import base
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.matmul.matmul_costs import Costs, Timed, shared_by
from fp8compile.recipe import Role


def leave_out(matmuls: Sequence[Timed], costs: Costs, bound: Collection[MatmulNode] = ()) -> set[MatmulNode]:
    """Return the matmuls without which all is faster. `costs`: with all in FP8, and then beside what stays; `bound`:
    those that stay whatever they cost."""
    near = _neighbours(matmuls)
    staying = dict(matmuls)
    free = [(matmul, role) for matmul, role in matmuls if matmul not in bound]
    while True:
        before = len(staying)
        for is_fine in (costs.pays, costs.is_faster):  # those first that nothing spared makes up for
            for matmul, role in free:
                if matmul in staying and not is_fine(matmul, role):
                    around = [other for other in near[matmul] if other in staying and other not in bound]
                    for leaving in _least(_sets(matmul, around), near, staying, costs):
                        costs.remove([leaving])
                        del staying[leaving]
        if len(staying) == before:
            return {matmul for matmul, _ in matmuls} - staying.keys()


def _least(
    sets: Sequence[list[MatmulNode]],
    near: Mapping[MatmulNode, Sequence[MatmulNode]],
    staying: Mapping[MatmulNode, Role],
    costs: Costs,
) -> list[MatmulNode]:
    """Return the set without which all is fastest; [] if all is fastest as it is."""
    best: list[MatmulNode] = []
    least = 0.0
    for leaving in sets:
        others = dict.fromkeys(m for left in leaving for m in near[left] if m in staying and m not in leaving)
        added = costs.added([(m, staying[m]) for m in leaving], [(m, staying[m]) for m in others])
        if added < least:
            best, least = leaving, added
    return best


def _sets(matmul: MatmulNode, around: Sequence[MatmulNode]) -> list[list[MatmulNode]]:
    """Return the sets that may leave with `matmul`, of those around it, itself among them."""
    mine = matmul.layer
    layer = [m for m in around if m.layer is mine]
    layers = [m for m in around if _activation(m.layer) is not None and _activation(m.layer) is _activation(mine)]
    sets = [[matmul]]
    for group in (layer, layers):
        for roles in ({matmul.role}, {"grad_input", "grad_weight"}, {"output", "grad_input", "grad_weight"}):
            members = [m for m in group if m.role in roles]
            if matmul in members and members not in sets:
                sets.append(members)
    return sets


def _activation(layer: MatmulNode) -> object:
    """Return the activation that a layer reads, None if it is not known."""
    left = layer.left
    return None if left is None else base(left)


def _neighbours(matmuls: Sequence[Timed]) -> dict[MatmulNode, list[MatmulNode]]:
    """Return for each matmul those with which it shares casts or a kernel, itself among them."""
    shared = {matmul: shared_by(matmul) for matmul, _ in matmuls}
    sharing: dict[object, list[MatmulNode]] = {}
    for matmul, names in shared.items():
        for name in names:
            sharing.setdefault(name, []).append(matmul)
    return {
        matmul: list(dict.fromkeys(other for name in names for other in sharing[name]))
        for matmul, names in shared.items()
    }
