"""Regions as nodes of a graph: putting one in, and reading one back.

    %r = fp8.region([%x, %w], [sizes], spec, schedule)        %q = getitem(%r, 0), viewed in the shape it had

What a program of the kernel leaves behind is reduced once more: column sums by aten.sum, amaxes by fp8.amax, of which
`combine_regions` makes regions, or parts of the regions that need them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Region
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import (
    INHERITED,
    aten,
    depends_on,
    is_tensor,
    sort_topologically,
    update_value,
    value,
)  # fmt: skip
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.marker_views import RegionCall, is_amax_of_tensor
from fp8compile.passes.core.node_views import Copy, Getitem
from fp8compile.passes.regions.part_values import RefusedError

SIZE_CALLS: dict[str, Callable[..., Any]] = {  # of expressions of sizes, by the names of their types
    "Add": operator.add,
    "CleanDiv": operator.floordiv,
    "FloorDiv": operator.floordiv,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    "Mod": operator.mod,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "PythonMod": operator.mod,
}


class GraphEditor:
    """Puts regions into `graph`."""

    def __init__(self, graph: fx.Graph):
        self.graph = graph
        self._sizes: dict[str, fx.Node] | None = None
        self._late: dict[str, fx.Node] = {}  # that are read off what the graph computes
        self.order: dict[fx.Node, float] = {}
        self.replaced: dict[fx.Node, fx.Node] = {}  # nodes, by what regions store in their place
        self.number()

    def number(self) -> None:
        """Number the nodes in order, after they were moved. What is put in later counts with what it stands before."""
        self.order = {node: float(n) for n, node in enumerate(self.graph.nodes)}

    def waits_for_itself(self, reads: Sequence[fx.Node], makes: Iterable[fx.Node]) -> bool:
        """Return True if one of `reads` is computed from one of `makes`."""
        return depends_on(list(reads), set(makes), self.order)

    def emit(self, target: Callable[..., Any], *args: Any, before: fx.Node, like: fx.Node) -> fx.Node:
        """Return a new call of `target` before a node, with the origin of `like`."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args)
        node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
        update_value(node)
        self.order[node] = (self.order.get(node.prev, self.order[before] - 1) + self.order[before]) / 2
        return node

    def settle(self, node: fx.Node) -> None:
        """Put the graph in order again if `node` stands before what it reads: `waits_for_itself` goes by order."""
        if any(i > node for i in node.all_input_nodes):
            sort_topologically(self.graph)
            self.number()

    def place(self, users: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> fx.Node:
        """Return before which node to compute something: its first user; or, where it only leaves the graph, what
        follows its last input, so that this need not be kept until the end."""
        first = min(users)  # by their place in the graph: numbers may be equal
        if first.op != "output":
            return first
        place = max(inputs).next
        while place.op == "placeholder":
            place = place.next
        return place

    def refresh(self, node: fx.Node) -> None:
        """Compute the value of `node` again."""
        update_value(node)

    def insert(
        self,
        region: Region,
        tensors: Sequence[fx.Node],
        sizes: Sequence[Any],
        nodes: Sequence[fx.Node],
        users: Sequence[Iterable[fx.Node]],
        pieces: bool = True,
    ) -> fx.Node:
        """Put in a node for `region`; its n-th buffer takes the place of nodes[n] for users[n].

        `pieces`: reductions over all rows come in pieces, one a program.
        """
        readers = [set(u) for u in users]
        like = nodes[0]
        place = self.place((u for some in readers for u in some), tensors)
        named = [self.size_node(s, like) for s in sizes]
        if self.waits_for_itself([size for size in named if isinstance(size, fx.Node)], nodes):
            raise RefusedError("a size that it needs is that of what is made of it")
        schedule = choose_schedule.choose(region)
        call = self.emit(
            ops.region, list(tensors), named, region.to_json(), schedule.to_json(), before=place, like=like
        )
        for n, (node, some) in enumerate(zip(nodes, readers, strict=True)):
            result = self.replaced[node] = self._result(call, n, node, place, pieces)
            node.replace_all_uses_with(result, delete_user_cb=lambda user, some=some: user in some)
        for node in nodes:
            self._erase_dead(node)
        self.settle(call)
        return call

    def _erase_dead(self, node: fx.Node) -> None:
        """Erase `node`, and what only it read, if nobody reads it."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node.op != "call_function" or node.users or node._erased or node.is_impure():
                continue
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            stack += inputs

    def _result(self, call: fx.Node, n: int, node: fx.Node, place: fx.Node, pieces: bool) -> fx.Node:
        """Return the value of `node`, made of the n-th buffer."""
        out = self.emit(operator.getitem, call, n, before=place, like=node)
        if not pieces:
            return self._shaped(out, node, place)
        if fusible.is_col_sum(node):
            bands = fusible.bands_of(node)
            if bands > 1:
                programs, columns = value(out).shape
                out = self.emit(aten.view.default, out, [bands, programs // bands, columns], before=place, like=node)
            out = self.emit(aten.sum.dim_IntList, out, [int(bands > 1)], before=place, like=node)
            out = self._shaped(out, node, place)
            if value(node).dtype != torch.float32:
                out = self.emit(
                    fusible.prims.convert_element_type.default, out, value(node).dtype, before=place, like=node
                )
            return out
        if fusible.is_global_amax(node):
            if is_amax_of_tensor(node):
                return self.emit(ops.amax, out, "tensor", before=place, like=node)
            out = self.emit(aten.amax.default, out, [0], before=place, like=node)
        return self._shaped(out, node, place)

    def _shaped(self, out: fx.Node, node: fx.Node, place: fx.Node) -> fx.Node:
        shape = value(node).shape
        if len(shape) == value(out).dim() and all(same(a, b) for a, b in zip(shape, value(out).shape, strict=True)):
            return out
        dims = [self.size_node(s, node) for s in shape]
        return self.emit(aten.view.default, out, dims, before=place, like=node)

    def size_node(self, size: Any, like: fx.Node) -> Any:
        """Return a node that computes a symbolic size; raises `RefusedError` where the graph has nothing to make it
        of."""
        if isinstance(size, int):
            return size
        if self._sizes is None:
            self._sizes = self._find_sizes()
        return self._computed(size.node.expr, like)

    def _find_sizes(self) -> dict[str, fx.Node]:
        """Return nodes by the sizes that they are; not such as are read off a tensor that the graph computes, if they
        can be had otherwise: a region that makes this tensor would wait for itself."""
        found: dict[str, fx.Node] = {}
        of_inputs: set[fx.Node] = set()
        self._late = {}
        for node in self.graph.nodes:
            val = node.meta.get("val")
            if node.op == "placeholder" or (
                isinstance(val, torch.SymInt) and all(i in of_inputs for i in node.all_input_nodes)
            ):
                of_inputs.add(node)
            if isinstance(val, torch.SymInt):
                (found if node in of_inputs else self._late).setdefault(str(val), node)
        for node in self.graph.find_nodes(op="placeholder"):
            for dim, size in enumerate(value(node).shape if is_tensor(node) else ()):
                if isinstance(size, torch.SymInt) and str(size) not in found:
                    found[str(size)] = self._size_call(aten.sym_size.int, node, dim, like=node)
        return found

    def _computed(self, expr: sympy.Expr, like: fx.Node) -> Any:
        """Return an expression of sizes as nodes."""
        assert self._sizes is not None
        if isinstance(expr, sympy.Integer):
            return int(expr)
        key = str(expr)
        if key not in self._sizes:
            try:
                self._sizes[key] = self._of_parts(expr, like)
            except RefusedError:
                if key not in self._late:
                    raise
                return self._late[key]
        return self._sizes[key]

    def _of_parts(self, expr: sympy.Expr, like: fx.Node) -> fx.Node:
        """Return an expression of sizes as a new node, computed from its parts."""
        call = SIZE_CALLS.get(type(expr).__name__)
        if call is None:
            raise RefusedError(f"a size {expr} that the graph does not compute")
        factor, rest = expr.as_coeff_Mul()  # the graph may know `rest`, and not what it is made of
        args: Any = (factor, rest) if factor != 1 else expr.args
        computed = [self._computed(arg, like) for arg in args]
        return functools.reduce(lambda a, b: self._size_call(call, a, b, like=like), computed)

    def _size_call(self, target: Callable[..., Any], *args: Any, like: fx.Node) -> fx.Node:
        """Emit `target` of numbers and nodes, as early as it can be computed: the next to need it may stand
        anywhere."""
        place = max(arg for arg in args if isinstance(arg, fx.Node)).next
        while place.op == "placeholder":
            place = place.next
        return self.emit(target, *args, before=place, like=like)


def put_in_order(graph: fx.Graph) -> None:
    """Move every node behind its inputs, and writes into inputs of the graph behind all else: a region stands where its
    first result is read, which may be the output, and must find in memory what the nodes found that it replaces."""
    for node in list(graph.find_nodes(op="call_function", target=aten.copy_.default)):
        if Copy(node).written.op == "placeholder":
            graph.output_node().prepend(node)
    sort_topologically(graph)


def regions_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the region nodes of `graph`, in order."""
    return list(graph.find_nodes(op="call_function", target=ops.region))


def spec_of(node: fx.Node) -> tuple[Region, Schedule]:
    """Return spec and schedule of a region node."""
    call = RegionCall(node)
    return generated.parse(call.spec, call.schedule)


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that a region node reads, in the order of its spec."""
    return RegionCall(node).inputs


def sizes_of(node: fx.Node) -> list[Any]:
    """Return the sizes that a region node is given, in the order of its spec: numbers or nodes."""
    return RegionCall(node).sizes


def rewrite(node: fx.Node, tensors: Sequence[fx.Node], region: Region, sizes: Sequence[Any] | None = None) -> None:
    """Make `node` another region, of other tensors, and of other sizes if these are given."""
    given = sizes_of(node) if sizes is None else list(sizes)
    node.args = (list(tensors), given, region.to_json(), choose_schedule.choose(region).to_json())


def is_from_region(node: Any) -> bool:
    """Return True if `node` is a buffer that a region fills."""
    item = Getitem.of(node)
    return item is not None and item.source.target is ops.region
