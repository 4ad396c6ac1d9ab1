"""Explanations of what this process has compiled."""

from __future__ import annotations

from fp8compile.adaptive.adaptive_graph import adaptive_graphs
from fp8compile.insight.explanation import Explanation
from fp8compile.plan import store


def last_compile() -> Explanation:
    """Return what `explain` tells, of what was compiled last, without compiling again; also where a cache had it.

    All graphs that the last call of a compiled function made (graph breaks make several), one without matmuls left out;
    graphs which that call found compiled are not in it. If torch compiled nothing of it, `failure` says why.
    An optimizer that was compiled after a model does not hide it: where graphs with matmuls have been compiled, it is
    of those. `compiles()` has everything. Raises `LookupError` before the first, and after `torch.compiler.reset()`.
    """
    if found := store.last_call():
        return Explanation(found)
    raise LookupError("nothing has been compiled with backend='fp8' yet: call the compiled model once")


def adaptive_plan() -> Explanation:
    """Return what all training graphs in automatic mode have come to; options={"plan": …} takes it, or its `to_json()`.

    Raises `LookupError` where no graph trains in automatic mode.
    """
    found = [graph.plan for graph in adaptive_graphs() if graph.is_training]
    if not found:
        raise LookupError('no graph trains under options={"adaptive": "auto"}: call the compiled model once')
    return Explanation(found)
