"""Grouped heads: attention reads keys and values as they are, where a model has repeated them for groups of queries.

Before                                                       After
    %e  = expand(unsqueeze(%k, 2), [b, h, n, s, d])              %o = attention(%q, %k, %v, …)
    %r  = view(clone(%e), [b, h·n, s, d])                        %g = attention_backward(%do, %q, %k, %v, …)[1]
    %o  = attention(%q, %r, %r', …)                              %dk = unsqueeze(%g, 2)
    %g  = attention_backward(%do, %q, %r, %r', …)[1]             and likewise of values
    %dk = sum(view(%g, [b, h, n, s, d]), [2], keepdim)

A model whose attention has a mask repeats keys and values by itself. In training, both copies would be made in forward
and again in backward, and their gradients be summed by a kernel more; cuDNN's attention does that by itself. A token
that is decoded with a static cache would copy all of the cache, n times as large, and read it again.

Sound because grouped attention means just this: query head i reads head i // n of keys and values, whose gradients are
sums over the group. On the joint graph nothing writes any more, and whatever a hook does to a gradient stands between
attention and the sum: then all stays as it is. So it does where attention has a backward, and a caller may have the
memory of what was repeated (`caller_memory.py`): the copies were safe from what is written there.

Only for kernels that know groups (`KNOW_GROUPS`), and for keys and values that lie in memory as these read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from fp8compile.passes.attention.caller_memory import is_of_caller
from fp8compile.passes.core import operators
from fp8compile.passes.core.aten_views import Permutation, Sum
from fp8compile.passes.core.compilation import Compilation, aten, getitems, update_value, value
from fp8compile.passes.core.node_views import argument, first_input, node_argument, set_argument
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import divides, same_sizes
from fp8compile.passes.core.stride_demands import record_node

# The CPU's kernel knows groups, too, but adds up their gradients in the dtype of the keys, one after the other.
KNOW_GROUPS = {
    "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip
GRADIENTS = {"key": 1, "value": 2}  # argument → its gradient among the results of a backward
HEADS = 1  # the dimension of heads, where attention reads them
RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
ALIGNMENT = 16  # bytes, at multiples of which fused kernels find rows


def run(c: Compilation) -> None:
    """Give attention what was repeated as it was before, forward and backward, or neither."""
    calls: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = defaultdict(list)
    for node in c.graph.nodes:
        if operators.name_of(node.target) in operators.SCALED_DOT_PRODUCT:
            calls[node_argument(node, "key"), node_argument(node, "value")].append(node)
    for (key, val), readers in calls.items():
        _group(c, {"key": key, "value": val}, readers)


def _group(c: Compilation, given: dict[str, fx.Node], readers: list[fx.Node]) -> None:
    """Let all attentions that read a pair of keys and values read them as they were before they were repeated."""
    if any(operators.name_of(node.target) not in KNOW_GROUPS for node in readers):
        return
    repeats = {name: repeat for name, node in given.items() if (repeat := Repeat.of(node))}
    if len(repeats) != len(given) or len({repeat.count for repeat in repeats.values()}) != 1:
        return
    backwards = [node for node in readers if _is_backward(node)]
    if backwards and any(is_of_caller(repeat.x) for repeat in repeats.values()):
        return
    gradients = [(item, repeats[name]) for node in backwards for name, item in _gradients(node)]
    sums = {item: total for item, repeat in gradients if (total := repeat.sum_of(item))}
    if len(sums) != len(gradients):
        return
    narrow = {name: repeat.narrow(c, given[name]) for name, repeat in repeats.items()}
    if not all(map(_is_readable, narrow.values())):
        return  # nobody reads what was made, and it goes
    for node in readers:
        for name, x in narrow.items():
            set_argument(node, name, x)
        update_value(node)
        for item in getitems(node).values():
            update_value(item)
        record_node(node)
    for item, repeat in gradients:
        replace_value(c, sums[item].node, repeat.widened(c, item, sums[item]))


def _is_backward(node: fx.Node) -> bool:
    return operators.name_of(node.target).endswith("_backward")


def _gradients(node: fx.Node) -> Iterator[tuple[str, fx.Node]]:
    """Yield the gradients of keys and values that somebody reads."""
    results = getitems(node)
    for name, i in GRADIENTS.items():
        if i in results and results[i].users:
            yield name, results[i]


def _is_readable(node: fx.Node) -> bool:
    """Return True if fused kernels can read a tensor: no element twice, rows side by side and aligned."""
    x = value(node)
    multiple = ALIGNMENT // x.itemsize
    *outer, inner = ((n, step) for n, step in zip(x.shape, x.stride(), strict=True))
    side_by_side = isinstance(inner[1], int) and inner[1] == 1
    steps = [x.storage_offset(), *(step for n, step in outer if not (isinstance(n, int) and n == 1))]
    expanded = any(isinstance(step, int) and step == 0 for step in steps[1:])
    return side_by_side and not expanded and all(divides(multiple, step) for step in steps)


@dataclass(frozen=True)
class Repeat:
    """Heads that were repeated.

    x: the tensor that was expanded. count: how often each head is there. dim: the dimension of the copies, behind that
    of the heads. order: for each of the four dimensions that attention reads, that of `x` without `dim`.
    """

    expand: fx.Node
    count: int
    dim: int
    order: tuple[int, ...]

    @property
    def x(self) -> fx.Node:
        """The tensor that was expanded, with one copy."""
        return first_input(self.expand)

    @staticmethod
    def of(node: fx.Node) -> Repeat | None:
        """Return what keys or values of an attention repeat along their heads; None if they repeat nothing there."""
        order, merged = _through_permutations(node)
        if len(order) != 4 or merged.target not in RESHAPES:
            return None
        expand = first_input(merged)
        while expand.target is aten.clone.default:
            expand = first_input(expand)
        if expand.target is not aten.expand.default:
            return None
        narrow, wide = value(first_input(expand)).shape, value(expand).shape
        dim = order[HEADS] + 1
        if len(narrow) != len(wide) or len(wide) != 5 or not isinstance(count := wide[dim], int) or count < 2:
            return None
        once = [*narrow[:dim], count, *narrow[dim + 1 :]]
        joined = [*wide[: dim - 1], wide[dim - 1] * count, *wide[dim + 1 :]]
        is_repeat = same_sizes(once, wide) and same_sizes(joined, value(merged).shape)
        has_one = isinstance(narrow[dim], int) and narrow[dim] == 1
        return Repeat(expand, count, dim, order) if is_repeat and has_one else None

    def narrow(self, c: Compilation, repeated: fx.Node) -> fx.Node:
        """Return the heads as they were, [b, h, s, d], in front of what repeats them."""
        is_unsqueezed = self.x.target is aten.unsqueeze.default and argument(self.x, "dim") in (self.dim, self.dim - 5)
        x = first_input(self.x) if is_unsqueezed else c.emit(aten.squeeze.dim, self.x, self.dim, like=repeated)
        return _permuted(c, x, self.order, repeated)

    def sum_of(self, gradient: fx.Node) -> Sum | None:
        """Return the sum over the copies of the gradient of repeated heads, if all that reads it is that."""
        node, order = gradient, tuple(range(4))
        while len(node.users) == 1:
            node = next(iter(node.users))
            if (view := Permutation.of(node)) is not None:
                order = tuple(order[d] for d in view.dims)
            elif node.target in RESHAPES:
                break
            elif node.target is not aten.clone.default:
                return None
        if node.target not in RESHAPES or len(node.users) != 1 or order != self._order_back:
            return None
        total = Sum.of(next(iter(node.users)))
        if total is None or not same_sizes(value(node).shape, value(self.expand).shape):
            return None
        is_over_copies = total.dims is not None and [d % 5 for d in total.dims] == [self.dim]
        return total if is_over_copies and value(total.node).dtype == value(gradient).dtype else None

    def widened(self, c: Compilation, gradient: fx.Node, total: Sum) -> fx.Node:
        """Return the gradient of the heads as they were, as the sum would give it."""
        x = _permuted(c, gradient, self._order_back, total.node)
        return c.emit(aten.unsqueeze.default, x, self.dim, like=total.node) if total.keeps_dims else x

    @property
    def _order_back(self) -> tuple[int, ...]:
        return tuple(self.order.index(d) for d in range(4))


def _through_permutations(node: fx.Node) -> tuple[tuple[int, ...], fx.Node]:
    """Return what `node` is but for copies and the order of its dimensions, and for each of these that of the other."""
    order = tuple(range(value(node).dim()))
    while True:
        if (view := Permutation.of(node)) is not None:
            order, node = tuple(view.dims[d] for d in order), view.x
        elif node.target is aten.clone.default:
            node = first_input(node)
        else:
            return order, node


def _permuted(c: Compilation, x: fx.Node, order: tuple[int, ...], like: fx.Node) -> fx.Node:
    return x if order == tuple(range(4)) else c.emit(aten.permute.default, x, [*order], like=like)
