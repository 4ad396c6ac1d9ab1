"""Verify an optimizer's graph between its passes.

- the graph is well-formed, and every node that returns something carries its value
- it returns what it returned, and writes the inputs that it wrote: parameters, and both parts of each state; beside
  them, only what `fp8::store_state` names as belonging to a state (its counter, the missing bits of a parameter)
- nothing reads an input after it was overwritten
"""

from __future__ import annotations

from typing import cast

from torch import fx

from fp8compile.errors import VerificationError
from fp8compile.optimizer.state_ops import add_in_place, store_state, update_parameters
from fp8compile.passes.core.node_views import Copy
from fp8compile.passes.core.run_passes import Check
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.core.verify import Signature, signature, verify
from fp8compile.passes.lower.verify_kernels import late_read
from fp8compile.passes.optimizer.state_views import StoreState

WRITERS = (update_parameters, add_in_place)  # they write what their first argument lists


def optimizer_verifier(c: OptimizerGraph) -> Check:
    """Return the check of an optimizer's graph: all rules of this module, against the graph as it is now."""
    before = signature(c.graph), written_inputs(c.graph), beside_states(c.graph)
    return lambda step: verify_optimizer(c.graph, step, *before)


def verify_optimizer(graph: fx.Graph, stage: str, outputs: Signature, written: set[str], beside: set[str]) -> None:
    """Check all rules of this module after `stage`; raises `VerificationError`.

    outputs, written, beside: of the graph as it came: what it returns and writes, and what it may write beside that.
    """
    verify(graph, stage, outputs)
    now = written_inputs(graph)
    lost, found = sorted(written - now), sorted(now - written - beside)
    if lost or found:
        what = f"no longer writes {', '.join(lost)}" if lost else f"writes {', '.join(found)}, which it did not before"
        raise VerificationError(f"after {stage}: the graph {what}")
    why = late_read(graph)
    if why:
        raise VerificationError(f"after {stage}: {why}")


def beside_states(graph: fx.Graph) -> set[str]:
    """Return the names of the inputs that belong to a state beside its payload and side data."""
    stores = graph.find_nodes(op="call_function", target=store_state)
    beside = [x for node in stores for x in (StoreState(node).counter, StoreState(node).low)]
    return {x.name for x in beside if x is not None}


def written_inputs(graph: fx.Graph) -> set[str]:
    """Return the names of the inputs that `graph` overwrites."""
    found: set[str] = set()
    for node in graph.nodes:
        if copy := Copy.of(node):
            found.add(copy.written.name)
        elif node.target in WRITERS:
            found |= {x.name for x in cast("list[fx.Node]", node.args[0])}
    return found
