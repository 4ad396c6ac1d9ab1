"""What pays: which of several matmuls that share casts, or become one, are faster in FP8.

Each has a time in BF16 and in FP8 that depends on the others (`passes/matmul/matmul_costs.py`): left out, it leaves the
reads of its operands to those that share them. So all are in FP8 first, and where one does not pay by itself, what
makes the sum of all times least is done with it and its neighbours: all stay, or some leave. Sets that may leave are
the matmul alone, a layer's two gradients, its three matmuls, and the same of all layers that read one activation (q, k
and v).

What has left does not come back, and not all sets are tried: `tests/passes/matmul/test_profitability.py` compares with
all ways.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fp8compile.passes.core.compilation import base
from fp8compile.passes.matmul.matmul_costs import Costs, Timed, shared_by
from fp8compile.passes.matmul.roles import Site


def leave_out(matmuls: Sequence[Timed], costs: Costs, bound: Collection[str] = ()) -> set[str]:
    """Keys of the matmuls without which all is faster. `costs`: with all in FP8, and then beside what stays; `bound`:
    keys of those that stay whatever they cost."""
    near = _neighbours(matmuls)
    staying = {site.key: (site, role) for site, role in matmuls}
    free = [(site, role) for site, role in matmuls if site.key not in bound]
    while True:
        before = len(staying)
        for site, role in free:
            if site.key in staying and not costs.pays(site, role):
                around = [other for other in near[site.key] if other in staying]
                sets = _sets(site, [staying[key][0] for key in around if key not in bound])
                for key in _least(sets, near, staying, costs):
                    costs.remove([staying.pop(key)[0]])
        if len(staying) == before:
            return {site.key for site, _ in matmuls} - staying.keys()


def _least(
    sets: Sequence[list[str]], near: Mapping[str, Sequence[str]], staying: Mapping[str, Timed], costs: Costs
) -> list[str]:
    """The set without which all is fastest; [] if all is fastest as it is."""
    best: list[str] = []
    least = 0.0
    for leaving in sets:
        others = dict.fromkeys(key for left in leaving for key in near[left] if key in staying and key not in leaving)
        added = costs.added([staying[key] for key in leaving], [staying[key] for key in others])
        if added < least:
            best, least = leaving, added
    return best


def _sets(site: Site, around: Sequence[Site]) -> list[list[str]]:
    """Keys of the sets that may leave with `site`, of those around it, itself among them."""
    mine = site.forward or site
    layer = [s for s in around if (s.forward or s) is mine]
    layers = [s for s in around if _reads(s.forward or s) is not None and _reads(s.forward or s) is _reads(mine)]
    sets = [[site.key]]
    for group in (layer, layers):
        for roles in ({site.role}, {"grad_input", "grad_weight"}, {"output", "grad_input", "grad_weight"}):
            keys = [s.key for s in group if s.role in roles]
            if site.key in keys and keys not in sets:
                sets.append(keys)
    return sets


def _reads(layer: Site) -> object:
    """The activation that a layer reads."""
    return None if layer.left is None else base(layer.left)


def _neighbours(matmuls: Sequence[Timed]) -> dict[str, list[str]]:
    """Key → keys of those with which it shares casts or a kernel, its own among them."""
    shared = {site.key: shared_by(site) for site, _ in matmuls}
    sharing: dict[object, list[str]] = {}
    for key, names in shared.items():
        for name in names:
            sharing.setdefault(name, []).append(key)
    return {key: list(dict.fromkeys(k for name in names for k in sharing[name])) for key, names in shared.items()}
