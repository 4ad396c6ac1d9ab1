"""Wide ranges: results of exponentials, and products of them, of which the small ones decide as much as the large.

    (b · exp(-c)).cumsum(t) · exp(c)      a recurrence h_t = a_t h_{t-1} + b_t written with c = log(a).cumsum(t)

Each factor spans many powers of ten, so that a group of FP8 numbers with one scale turns the small ones into zeros.
Multiplied by the other factor they are numbers like all others. A lone exponential bears it, since what is small in it
stays small; so does a softmax by hand, exp(x) / sum(exp(x)).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import aten, is_tensor, value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.save.signs import DIVISIONS, copied, square_of

EXPONENTIALS = {
    aten.exp.default, aten.exp2.default, aten.pow.Scalar, aten.pow.Tensor_Tensor, aten.cumprod.default
}  # fmt: skip
PRODUCTS = {aten.mul.Tensor, *DIVISIONS}
SUMS = {aten.add.Tensor, aten.sub.Tensor}
KEPT_BY = {  # operators whose result spans as much as what they are given
    aten.neg.default, aten.abs.default, aten.reciprocal.default, aten.sqrt.default, aten.rsqrt.default,
    aten.cumsum.default, *fusible.REDUCTIONS, *fusible.CONVERSIONS,
}  # fmt: skip


def find_wide_factors(
    graph: fx.Graph, is_bounded: Callable[[fx.Node], bool], is_backward: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Return the wide values of which forward multiplies or divides two, also in a matmul, and the factors of those.

    is_bounded: True for an exponential of which no more is made than a sigmoid or a softplus.
    """
    wide: set[fx.Node] = set()
    factors: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function" or is_backward(node) or not is_tensor(node):
            continue
        sources = [a for a in node.all_input_nodes if a in wide]
        is_product = node.target in PRODUCTS and not _is_share(node)
        if (is_product or _is_matmul(node)) and len(sources) == 2:
            factors += sources
        is_source = node.target in EXPONENTIALS and not is_bounded(node) and not _is_number(node)
        if is_source or (sources and (is_product or _keeps_ranges(node, sources))):
            wide.add(node)
    found: set[fx.Node] = set()
    while factors:
        node = factors.pop()
        if node in found:
            continue
        found.add(node)
        factors += [a for a in node.all_input_nodes if a in wide]
        if node.target in PRODUCTS:  # the gradient of an exponent is a difference of products with either factor
            found.update(node.all_input_nodes)
    return found


def _keeps_ranges(node: fx.Node, wide: list[fx.Node]) -> bool:
    """Return True if the result of `node` is as wide as its wide inputs."""
    if node.target in SUMS:
        return len(wide) == len(set(node.args[:2]))  # beside an ordinary number a small one decides nothing
    return node.target in KEPT_BY or operators.moves(node.target) or square_of(node) is not None


def _is_number(node: fx.Node) -> bool:
    """Return True if `node` has one element, which changes no range: a temperature, a scale that is learned."""
    return same_sizes([1] * value(node).dim(), value(node).shape)


def _is_matmul(node: fx.Node) -> bool:
    return operators.is_operator(node.target) and operators.name_of(node.target) in operators.MATMULS


def _is_share(node: fx.Node) -> bool:
    """Return True if `node` divides a value by its own sum, or by its largest element."""
    if node.target not in DIVISIONS:
        return False
    over, below = (copied(a) if isinstance(a, fx.Node) else None for a in node.args[:2])
    return below is not None and below.target in fusible.REDUCTIONS and copied(below.all_input_nodes[0]) is over
