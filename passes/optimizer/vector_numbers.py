"""Vector numbers: what two parameters know of their step, written for any number of them.

Before      %n = mul(sqrt(sub(1, pow(0.999, add(%step, 1)))), …)  for each of two;   copy_(%step, add(%step, 1))
            update_parameters(…, [%n, %n', …], spec)
After       %s: a vector, with an element a parameter;  %n = mul(sqrt(sub(1, pow(0.999, add(%s, 1)))), …)
            return cat([unsqueeze(%n, 1), …], 1), …

As `batch_scalars` does where all parameters are in the graph: element by element the same arithmetic. Two that compute
their numbers in different ways, or from anything but numbers, raise `NotVectorError`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from fp8compile.kernels.optimizer.update_spec import from_json
from fp8compile.passes.core.compilation import aten, is_tensor, remove_dead, value
from fp8compile.passes.core.node_views import Copy, Getitem, node_argument
from fp8compile.passes.optimizer.batch_scalars import NumberStacker
from fp8compile.passes.optimizer.state_views import UpdateParameters
from fp8compile.passes.optimizer.update_rules import call_of

prims = torch.ops.prims


class NotVectorError(Exception):
    """Numbers of two parameters are not the same function of theirs."""


@dataclass
class Numbers:
    """A module of numbers, and what its inputs are: keys of `leaves`, a vector for each that parameters have.

    It returns the matrix of the update (if that has numbers), then a vector for each of `copies`.
    """

    module: fx.GraphModule
    inputs: list[Hashable]
    has_matrix: bool


def vectorized(
    update: fx.Node, copies: Sequence[Sequence[fx.Node]], leaves: Mapping[fx.Node, tuple[Hashable, bool]], count: int
) -> Numbers:
    """Return the numbers of `count` parameters. Takes the graph of `update` apart.

    copies: for each state that is a number, the operators that write it, one a parameter. leaves: what each input is,
    and whether each parameter has its own.
    """
    graph, view = update.graph, UpdateParameters(update)
    device, each = value(view.stored[0]).device, len(from_json(view.spec).scalars)
    stacker = _VectorStacker(graph, update, device, count, leaves)
    results = [stacker.matrix(view.scalars, each)] if each else []
    results += [stacker.copied([Copy(node).source for node in nodes]) for nodes in copies]
    for node in (update, *(node for nodes in copies for node in nodes)):
        node.replace_all_uses_with(Copy(node).written) if Copy.of(node) else None
        graph.erase_node(node)
    graph.output_node().update_arg(0, tuple(results))
    remove_dead(graph)
    for node in graph.find_nodes(op="placeholder"):
        if not node.users:
            graph.erase_node(node)
    known = {node: key for node, (key, own) in leaves.items() if not own} | stacker.inputs
    inputs = list(graph.find_nodes(op="placeholder"))
    if strange := [n.name for n in inputs if n not in known or (n not in stacker.inputs and _is_no_number(n))]:
        raise NotVectorError(f"a number is computed from {', '.join(strange)}, which is none")
    graph.lint()
    return Numbers(fx.GraphModule(nn.Module(), _renamed(graph)), [known[n] for n in inputs], bool(each))


def _is_no_number(node: fx.Node) -> bool:
    return not is_tensor(node) or value(node).dim() > 0


def _renamed(graph: fx.Graph) -> fx.Graph:
    """Return the graph with names that say nothing of where its nodes come from: equal functions have equal code."""
    new, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(graph.nodes):
        if node.op == "placeholder":
            nodes[node] = new.placeholder(f"input_{i}")
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
        nodes[node] = new.create_node(node.op, node.target, args, kwargs)
    return new


@dataclass
class _VectorStacker(NumberStacker):
    """Writes before `place` what computes for `count` parameters what is there for two."""

    count: int
    leaves: Mapping[fx.Node, tuple[Hashable, bool]]
    inputs: dict[fx.Node, Hashable] = field(default_factory=dict)
    vectors: dict[Hashable, fx.Node] = field(default_factory=dict)

    def call_of(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return operator and arguments of what computes a number; of an output of a foreach operator, for this one."""
        found = call_of(node) if Getitem.of(node) else None
        return super().call_of(node) if found is None else (getattr(aten, found[0]), *found[1:])

    def vector(self, column: Sequence[fx.Node]) -> fx.Node:
        """Return [count], on the device of the parameters."""
        found = self.stacked(column)
        at, dim = value(found).device, value(found).dim()
        if at != self.device and at.type == "cpu" and not dim:
            return self.launched(found, [self.count])
        if at != self.device:
            found = self.call(prims.device_put.default, found, self.device, at.type == "cpu")
        return found if dim else self.call(aten.expand.default, found, [self.count])

    def copied(self, column: Sequence[fx.Node]) -> fx.Node:
        """Return [count], on the device of what it is written to, which decides about its dtype."""
        while all(node.target is aten.copy.default for node in column):
            column = [node_argument(node, "src") for node in column]
        found = self.stacked(column)
        return found if value(found).dim() else self.call(aten.expand.default, found, [self.count])

    def _stacked(self, column: Sequence[fx.Node]) -> fx.Node:
        """Return the vector that all parameters have of an input."""
        keys = {self.leaves.get(node, (None, False)) for node in column}
        key, own = next(iter(keys))
        if len(keys) > 1 or not own:
            raise NotVectorError("parameters compute their numbers in different ways")
        if key not in self.vectors:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                node = self.graph.placeholder(f"numbers_{len(self.vectors)}")
            like = value(column[0])
            if like.dim():
                raise NotVectorError("what a parameter reads as a number is none")
            node.meta["val"] = like.new_empty(self.count)
            self.vectors[key] = node
            self.inputs[node] = key
        return self.vectors[key]
