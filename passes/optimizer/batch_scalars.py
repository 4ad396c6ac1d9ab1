"""Stack numbers: what parameters know of their step is computed for all of them at once.

Before      %n = mul(sqrt(sub(1, pow(0.999, add(%step, 1)))), …)  for each;  update_parameters(…, [%n, %n', …], spec)
            copy_(%step, add(%step, 1))                           for each
After       %s = fp8.stack([%step, %step', …]);  %n = mul(sqrt(sub(1, pow(0.999, add(%s, 1)))), …)
            update_parameters(…, [cat([unsqueeze(%n, 1), …], 1)], spec);  fp8.add_in_place([%step, %step', …], 1, None)

An optimizer computes bias corrections and counts steps parameter by parameter, in a dozen operators on one number each:
as many kernels to launch at every step, and for Inductor to write.
Where parameters disagree (other operators, other constants), their numbers are stacked as they are.

A rate that may change is a number of the CPU, and so is what is computed of rates alone. It reaches parameters of a GPU
as a number that a kernel is launched with (`zeros + %rate`), a few of them; more are copied, all together. Copied one
by one, each would wait for all that the GPU still has to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import fx

from fp8compile.kernels.optimizer.update_spec import from_json
from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import aten, is_tensor, remove_dead, update_value, value
from fp8compile.passes.core.node_views import Copy, argument
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.optimizer.find_updates import FLOATS, is_elementwise
from fp8compile.passes.optimizer.state_views import UpdateParameters
from fp8compile.passes.optimizer.update_rules import FILLS, SHAPED, schema_name

prims = torch.ops.prims
LAUNCHED_WITH = 8  # for a column at most: runs of neighbours that have the same number of the CPU
NUMBERS = (*FLOATS, torch.float64)  # as a rate that may change is


def run(c: OptimizerGraph) -> None:
    """Stack the numbers of every update, and count all steps at once."""
    graph = c.graph
    for node in list(graph.find_nodes(op="call_function", target=state_ops.update_parameters)):
        update = UpdateParameters(node)
        numbers, each = update.scalars, len(from_json(update.spec).scalars)
        device = value(update.stored[0]).device
        away = any(value(n).device != device for n in numbers)
        if each and (len(numbers) > each or away):
            node.update_arg(2, [NumberStacker(graph, node, device).matrix(numbers, each)])
    remove_dead(graph)
    _count_at_once(graph)


@dataclass
class NumberStacker:
    """Writes before `place` what computes the same for many parameters, which are on `device`."""

    graph: fx.Graph
    place: fx.Node
    device: torch.device

    def __post_init__(self) -> None:
        self.known: dict[tuple[fx.Node, ...], fx.Node] = {}
        self.written: dict[fx.Node, str] = {}
        self.formulas: dict[Hashable, str] = {}

    def matrix(self, numbers: Sequence[fx.Node], each: int) -> fx.Node:
        """Return FP32 [parameters, each], of `each` numbers a parameter, one after the other."""
        vectors = [self.vector(numbers[i::each]) for i in range(each)]
        matrix = self.call(aten.cat.default, [self.call(aten.unsqueeze.default, v, 1) for v in vectors], 1)
        is_fp32 = value(matrix).dtype == torch.float32
        return matrix if is_fp32 else self.call(prims.convert_element_type.default, matrix, torch.float32)

    def vector(self, column: Sequence[fx.Node]) -> fx.Node:
        """Return [parameters], on the device of the parameters."""
        found = self.stacked(column)
        device, dim = value(found).device, value(found).dim()
        if device != self.device:
            same = [list(nodes) for _, nodes in groupby(column, self.formula)] if dim else [list(column)]
            if device.type == "cpu" and len(same) <= LAUNCHED_WITH:
                parts = [self.launched(nodes[0], [len(nodes)]) for nodes in same]
                return parts[0] if len(parts) == 1 else self.call(aten.cat.default, parts)
            found = self.call(prims.device_put.default, found, self.device, device.type == "cpu")
        return found if dim else self.call(aten.expand.default, found, [len(column)])

    def launched(self, number: fx.Node, shape: list[int]) -> fx.Node:
        """Return a number of the CPU in this shape on the device of the parameters: what a kernel is launched with."""
        dtype = value(number).dtype
        zeros = self.call(aten.full.default, shape, 0, dtype=dtype, device=self.device, pin_memory=False)
        return self.call(aten.add.Tensor, zeros, number)

    def here(self, number: fx.Node) -> fx.Node:
        """Return a number on the device of the parameters."""
        device = value(number).device
        if device == self.device:
            return number
        if device.type == "cpu":
            return self.launched(number, [])
        return self.call(prims.device_put.default, number, self.device)

    def formula(self, node: fx.Node) -> Hashable:
        """Return what computes a number: equal for nodes that compute the same."""
        if node.op != "call_function" or not is_elementwise(node, NUMBERS):
            return node
        if node not in self.written:
            args: Any = fx.map_arg((node.args, node.kwargs), cast("Callable[[fx.Node], Any]", self.formula))
            self.written[node] = self.formulas.setdefault((node.target, repr(args)), f"formula {len(self.formulas)}")
        return self.written[node]

    def stacked(self, column: Sequence[fx.Node]) -> fx.Node:
        """Return [parameters], or a number where all have the same."""
        key = tuple(column)
        if key not in self.known:
            same = all(n is column[0] or _is_same_constant(n, column[0]) for n in column)
            self.known[key] = column[0] if same else self._computed(column) or self._stacked(column)
        return self.known[key]

    def _stacked(self, column: Sequence[fx.Node]) -> fx.Node:
        """Return [parameters]: the numbers as they are, one behind the other."""
        together = len({value(n).device for n in column}) == 1
        return self.call(state_ops.stack, list(column) if together else [self.here(n) for n in column])

    def _computed(self, column: Sequence[fx.Node]) -> fx.Node | None:
        """Return what computes the column out of stacked arguments; None unless all of it is computed in the same
        way."""
        first = column[0]
        if not is_elementwise(first, NUMBERS) or schema_name(first) in SHAPED:
            return None
        calls = [self.call_of(n) for n in column]
        target, _, kwargs = calls[0]
        if any(call[0] is not target or call[2] != kwargs for call in calls):
            return None
        args: list[Any] = []
        columns = list(zip(*(call[1] for call in calls), strict=True))
        for given in columns:
            if all(x == given[0] for x in given):
                args.append(given[0])
            elif all(map(_is_a_tensor, given)):
                args.append(self.stacked(given))
            else:
                return None
        if len({value(a).device for a in args if _is_bound(a)}) > 1:
            away = [_is_bound(a) and value(a).device != self.device for a in args]
            args = [self.vector(c) if moves else a for a, c, moves in zip(args, columns, away, strict=True)]
        node = self.call(target, *args, **kwargs)
        if value(node).dtype != value(first).dtype:  # a number and a vector promote otherwise: a rate in FP64, say
            node = self.call(target, *[self._as(a, value(first).dtype) for a in args], **kwargs)
        return node if value(node).dtype == value(first).dtype else None

    def call_of(self, node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return operator and arguments of what computes a number."""
        return node.target, node.args, dict(node.kwargs)

    def _as(self, given: Any, dtype: torch.dtype) -> Any:
        """Return a vector of floating-point numbers in `dtype`; all else as it is."""
        if not _is_a_tensor(given) or value(given).dim() == 0 or not value(given).is_floating_point():
            return given
        return self.call(prims.convert_element_type.default, given, dtype)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Return a new call at the place of this object, with its value."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        update_value(node)
        return node


def _is_a_tensor(given: Any) -> bool:
    """Return True for a node that computes a tensor: for no constant, and no symbol of a number of Python."""
    return isinstance(given, fx.Node) and is_tensor(given)


def _is_bound(given: Any) -> bool:
    """Return True if it meets tensors of its own device alone: all but numbers of the CPU."""
    return _is_a_tensor(given) and (value(given).dim() > 0 or value(given).device.type != "cpu")


def _is_same_constant(a: fx.Node, b: fx.Node) -> bool:
    computed = a.op == "call_function" and not a.all_input_nodes
    return computed and schema_name(a) in FILLS and (a.target, a.args, a.kwargs) == (b.target, b.args, b.kwargs)


def _count_at_once(graph: fx.Graph) -> None:
    """Make one operator of all additions of the same number to what a step counts."""
    groups: dict[tuple[float, torch.dtype, torch.device], list[fx.Node]] = defaultdict(list)
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        count, new = Copy(copy).written, Copy(copy).source
        counts = count.op == "placeholder" and value(count).dim() == 0 and not copy.users
        adds = new.target is aten.add.Tensor and argument(new, "self") is count and not new.kwargs
        if counts and adds and isinstance(by := argument(new, "other"), int | float):
            groups[by, value(count).dtype, value(count).device].append(copy)
    for (by, _, _), copies in groups.items():
        if len(copies) > 1:
            with graph.inserting_after(copies[-1]):
                node = graph.call_function(state_ops.add_in_place, ([Copy(copy).written for copy in copies], by, None))
            node.meta["val"] = None
            for copy in copies:
                graph.erase_node(copy)
    remove_dead(graph)
