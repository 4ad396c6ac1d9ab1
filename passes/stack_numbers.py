"""Stack numbers: what parameters know of their step is computed for all of them at once.

Before      %n = mul(sqrt(sub(1, pow(0.999, add(%step, 1)))), …)  for each;  update_parameters(…, [%n, %n', …], spec)
            copy_(%step, add(%step, 1))                           for each
After       %s = fp8.stack([%step, %step', …]);  %n = mul(sqrt(sub(1, pow(0.999, add(%s, 1)))), …)
            update_parameters(…, [cat([unsqueeze(%n, 1), …], 1)], spec);  fp8.add_in_place([%step, %step', …], 1, None)

An optimizer computes bias corrections and counts steps parameter by parameter, in a dozen operators on one number each:
as many kernels to launch at every step, and for Inductor to write.
Where parameters disagree (other operators, other constants), their numbers are stacked as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fp8compile import state_ops
from fp8compile.kernels.update_spec import from_json
from fp8compile.passes.compilation import aten, update_value, value
from fp8compile.passes.find_updates import FLOATS, is_elementwise
from fp8compile.passes.update_rules import FILLS, IDENTITIES, schema_name

prims = torch.ops.prims
NUMBERS = (*FLOATS, torch.float64)  # as a rate that may change is
SHAPED = (IDENTITIES | set(FILLS)) - {"convert_element_type", "_to_copy", "clone"}  # they name a shape


def run(graph: fx.Graph) -> None:
    """Stack the numbers of every update, and count all steps at once."""
    for node in list(graph.find_nodes(op="call_function", target=state_ops.update_parameters)):
        stored, read, numbers, spec = node.args
        each = len(from_json(str(spec)).scalars)
        if each and len(numbers) > each and len({value(n).device for n in numbers}) == 1:  # type: ignore[arg-type]
            node.args = stored, read, [_Stacker(graph, node).matrix(numbers, each)], spec  # type: ignore[arg-type]
    graph.eliminate_dead_code()
    _count_at_once(graph)


class _Stacker:
    """Writes before `place` what computes the same for many parameters."""

    def __init__(self, graph: fx.Graph, place: fx.Node) -> None:
        self.graph, self.place = graph, place
        self.known: dict[tuple[fx.Node, ...], fx.Node] = {}

    def matrix(self, numbers: Sequence[fx.Node], each: int) -> fx.Node:
        """FP32 [parameters, each], of `each` numbers a parameter, one after the other."""
        count = len(numbers) // each
        columns = [self.stacked(numbers[i::each]) for i in range(each)]
        vectors = [self.call(aten.expand.default, c, [count]) if value(c).dim() == 0 else c for c in columns]
        matrix = self.call(aten.cat.default, [self.call(aten.unsqueeze.default, v, 1) for v in vectors], 1)
        is_fp32 = value(matrix).dtype == torch.float32
        return matrix if is_fp32 else self.call(prims.convert_element_type.default, matrix, torch.float32)

    def stacked(self, column: Sequence[fx.Node]) -> fx.Node:
        """[parameters], or a number where all have the same."""
        key = tuple(column)
        if key not in self.known:
            same = all(n is column[0] or _is_same_constant(n, column[0]) for n in column)
            self.known[key] = column[0] if same else self._computed(column) or self.call(state_ops.stack, list(column))
        return self.known[key]

    def _computed(self, column: Sequence[fx.Node]) -> fx.Node | None:
        """What computes the column out of stacked arguments; None unless all of it is computed in the same way."""
        first = column[0]
        if not is_elementwise(first, NUMBERS) or schema_name(first) in SHAPED:
            return None
        if any(n.target is not first.target or n.kwargs != first.kwargs for n in column):
            return None
        args = []
        for given in zip(*(n.args for n in column), strict=True):
            if all(isinstance(x, fx.Node) for x in given):
                args.append(self.stacked(given))
            elif all(x == given[0] for x in given):
                args.append(given[0])
            else:
                return None
        node = self.call(first.target, *args, **first.kwargs)
        if value(node).dtype != value(first).dtype:  # a number and a vector promote otherwise: a rate in FP64, say
            node = self.call(first.target, *[self._as(a, value(first).dtype) for a in args], **first.kwargs)
        return node if value(node).dtype == value(first).dtype else None

    def _as(self, given: Any, dtype: torch.dtype) -> Any:
        """A vector of floating-point numbers in `dtype`; all else as it is."""
        if not isinstance(given, fx.Node) or value(given).dim() == 0 or not value(given).is_floating_point():
            return given
        return self.call(prims.convert_element_type.default, given, dtype)

    def call(self, target: object, *args: object, **kwargs: object) -> fx.Node:
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        update_value(node)
        return node


def _is_same_constant(a: fx.Node, b: fx.Node) -> bool:
    computed = a.op == "call_function" and not a.all_input_nodes
    return computed and schema_name(a) in FILLS and (a.target, a.args, a.kwargs) == (b.target, b.args, b.kwargs)


def _count_at_once(graph: fx.Graph) -> None:
    """One operator for all numbers that a step adds the same to."""
    groups: dict[tuple[float, torch.dtype, torch.device], list[fx.Node]] = defaultdict(list)
    for copy in graph.find_nodes(op="call_function", target=aten.copy_.default):
        count, new = copy.args
        counts = count.op == "placeholder" and value(count).dim() == 0 and not copy.users
        adds = new.target is aten.add.Tensor and new.args[0] is count and not new.kwargs
        if counts and adds and isinstance(by := new.args[1], int | float):
            groups[by, value(count).dtype, value(count).device].append(copy)
    for (by, _, _), copies in groups.items():
        if len(copies) > 1:
            with graph.inserting_after(copies[-1]):
                node = graph.call_function(state_ops.add_in_place, ([copy.args[0] for copy in copies], by, None))
            node.meta["val"] = None
            for copy in copies:
                graph.erase_node(copy)
    graph.eliminate_dead_code()
