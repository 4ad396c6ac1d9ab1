"""Verify an optimizer's graph between its passes.

- the graph is well-formed, and every node that returns something carries its value
- it returns what it returned, and writes the inputs that it wrote: parameters, and both parts of each state
- nothing reads an input after it was overwritten
"""

from __future__ import annotations

from torch import fx

from fp8compile.errors import VerificationError
from fp8compile.passes.compilation import aten
from fp8compile.passes.verify import Signature, verify
from fp8compile.passes.verify_kernels import late_read
from fp8compile.state_ops import add_in_place, update_parameters

WRITERS = (update_parameters, add_in_place)  # they write what their first argument lists


def verify_optimizer(graph: fx.Graph, stage: str, outputs: Signature, written: set[str]) -> None:
    """Check all rules of this module after `stage`; raises `VerificationError`. `outputs` and `written`: of the graph
    as it came."""
    verify(graph, stage, outputs)
    now = written_inputs(graph)
    if now != written:
        lost, found = sorted(written - now), sorted(now - written)
        what = f"no longer writes {', '.join(lost)}" if lost else f"writes {', '.join(found)}, which it did not before"
        raise VerificationError(f"after {stage}: the graph {what}")
    why = late_read(graph)
    if why:
        raise VerificationError(f"after {stage}: {why}")


def written_inputs(graph: fx.Graph) -> set[str]:
    """Return the names of the inputs that `graph` overwrites."""
    found: set[str] = set()
    for node in graph.nodes:
        if node.target is aten.copy_.default:
            found.add(node.args[0].name)
        elif node.target in WRITERS:
            found |= {x.name for x in node.args[0]}
    return found
