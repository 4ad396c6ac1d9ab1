"""Verify Dynamo's graph between its passes.

- the graph, and each graph that it calls, is well-formed, and everything that it takes from its module is there
- it has the inputs that it had, by name and in order, and as many outputs, of the same types as far as they are known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.errors import VerificationError
from fp8compile.passes.core.run_passes import Check
from fp8compile.passes.core.stages import DynamoGraph
from fp8compile.passes.core.verify import verify_form

Outputs = list[tuple[str, str] | None]  # dtype and shape of each; None: unknown, or no tensor


def dynamo_verifier(c: DynamoGraph) -> Check:
    """Return the check of Dynamo's graph: all rules of this module, against the graph as it is now."""
    graphs = [m.graph for m in c.gm.modules() if isinstance(m, fx.GraphModule)]
    before = [(inputs_of(graph), outputs_of(graph)) for graph in graphs]

    def check(step: str) -> None:
        for graph, (inputs, outputs) in zip(graphs, before, strict=True):
            verify_form(graph, step)
            if inputs != inputs_of(graph):
                raise VerificationError(f"after {step}: inputs changed from {inputs} to {inputs_of(graph)}")
            if not _agree(outputs, outputs_of(graph)):
                raise VerificationError(f"after {step}: outputs changed from {outputs} to {outputs_of(graph)}")

    return check


def inputs_of(graph: fx.Graph) -> list[str]:
    """Return the names of the inputs of `graph`, in order."""
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]


def outputs_of(graph: fx.Graph) -> Outputs:
    """Return the types of the outputs of `graph`, in order."""
    returned: list[Any] = []
    fx.map_arg(graph.output_node().args, returned.append)
    return [_type(node.meta.get("example_value")) for node in returned]


def _type(x: Any) -> tuple[str, str] | None:
    return (str(x.dtype), str(tuple(x.shape))) if isinstance(x, torch.Tensor) else None


def _agree(before: Outputs, after: Outputs) -> bool:
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(None in (a, b) or a == b for a, b in pairs)
