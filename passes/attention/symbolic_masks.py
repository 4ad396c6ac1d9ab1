"""Symbolic masks: what a mask of symbolic sizes says, proven for all of them.

An element of a mask is written as an expression of its own indices, through the operators that made it:

    %p = iota(s)             [i]        i
    %q = unsqueeze(%p, 1)    [i, 0]     i
    %m = le(%p, %q)          [i, j]     j - i <= 0
    where(%m, 0, -inf)       [i, j]     0 if j - i <= 0, else -inf

It is causal if it says this and no more. Only integers of 64 bits are compared and added, so that nothing is rounded.
What is not understood (`UnknownElementError`) is read, as it was written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean, BooleanFalse, BooleanTrue
from torch import Tensor, fx

from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.node_views import argument, first_input

prims = torch.ops.prims
CAUSAL, EVERYTHING = "causal", "everything"
NEVER = -65504.0  # what torch makes of False for cuDNN: zero in softmax, unless logits are as far apart
MOST_TERMS = 200  # of an expression
Element = Any  # a sympy expression, or a sympy Boolean
Indices = tuple[Any, ...]  # a sympy expression for each dimension


class UnknownElementError(Exception):
    """Says that an element cannot be written as an expression of its indices."""


def symbolic_kind(mask: fx.Node) -> str | None:
    """Return `CAUSAL` or `EVERYTHING`, if `mask` is proven to be that in every batch and head; else None."""
    shape = value(mask).shape
    if len(shape) < 2:
        return None
    names = tuple(sympy.Symbol(f"index{n}", integer=True, nonnegative=True) for n in range(len(shape)))
    try:
        allowed = _allowed(_element(mask, names))
        if allowed == sympy.true:
            return EVERYTHING
        is_causal = all(_at_most_zero(part) == names[-1] - names[-2] for part in sympy.And.make_args(allowed))
    except UnknownElementError:
        return None
    finally:
        _computed.cache_clear()  # it holds nodes of this graph
    return CAUSAL if is_causal and _size(shape[-2]) == _size(shape[-1]) else None


def _allowed(x: Element) -> Boolean:
    """Return where an element lets a query see a key."""
    if _is_truth(x):
        return x
    if isinstance(x, sympy.Piecewise):
        found: Any = sympy.false
        before: Any = sympy.false
        for pair in x.args:
            given, when = pair.args
            found |= ~before & when & _allowed(given)
            before |= when
        return found
    if x.is_zero:
        return sympy.true
    if x.is_number and x <= NEVER:
        return sympy.false
    raise UnknownElementError


def _at_most_zero(x: Boolean) -> sympy.Expr:
    """Return what a comparison of integers says to be zero or less."""
    forms: dict[Any, Callable[[Any, Any], Any]] = {
        sympy.Le: lambda a, b: a - b, sympy.Lt: lambda a, b: a - b + 1,
        sympy.Ge: lambda a, b: b - a, sympy.Gt: lambda a, b: b - a + 1,
    }  # fmt: skip
    if type(x) not in forms:
        raise UnknownElementError
    return sympy.expand(forms[type(x)](*x.args))


# ---- an element of a node --------------------------------------------------------------------------------------------


def _element(x: Any, indices: Indices) -> Element:
    """Return element `indices` of what an operator reads, broadcast to as many dimensions; a number is its own."""
    if not isinstance(x, fx.Node):
        return _size(x)
    if not isinstance(x.meta.get("val"), Tensor):
        return _size(x.meta.get("val"))
    if x.op != "call_function" or x.target not in RULES:
        raise UnknownElementError
    shape = value(x).shape
    at = indices[len(indices) - len(shape) :]
    return _computed(x, tuple(sympy.Integer(0) if _is_one(n) else i for i, n in zip(at, shape, strict=True)))


@functools.cache
def _computed(node: fx.Node, at: Indices) -> Element:
    """Return an element of a node, once for all that read it. One that says much is not understood: sympy's time
    grows with it, and it is neither causal nor everything."""
    found = RULES[node.target](node, at)
    if next(islice(sympy.preorder_traversal(found), MOST_TERMS, None), None) is not None:
        raise UnknownElementError
    return found


def _size(n: Any) -> Element:
    """Return a number of Python's, or a symbolic size, for sympy."""
    if isinstance(n, fx.Node):
        n = n.meta.get("val")
    if isinstance(n, torch.SymInt):
        return n.node.expr
    if isinstance(n, (bool, int, float)):
        return sympy.sympify(n)
    raise UnknownElementError


def _is_one(n: Any) -> bool:
    return isinstance(n, int) and n == 1


def _is_truth(x: Element) -> bool:
    """Return True for true, false and what decides between them; a symbol could be that for sympy, and is a number."""
    return isinstance(x, Boolean) and not isinstance(x, sympy.Symbol)


def _integer(x: Element) -> sympy.Expr:
    """Return an element as an integer."""
    if isinstance(x, (BooleanTrue, BooleanFalse)):
        return sympy.Integer(bool(x))
    if _is_truth(x) or not x.is_integer:
        raise UnknownElementError
    return x


def _boolean(x: Element) -> Boolean:
    if not _is_truth(x):
        raise UnknownElementError
    return x


def _dim(node: fx.Node, dim: int) -> int:
    """Return a dimension of the result, counted from the first."""
    return dim % value(node).dim()


def _at(indices: Indices, dim: int, index: Any) -> Indices:
    return (*indices[:dim], index, *indices[dim + 1 :])


def _is_at_least_zero(x: sympy.Expr) -> bool:
    return bool(sympy.expand(x).is_nonnegative)


# ---- rules: (a node, indices of an element) → the element ------------------------------------------------------------


def _same(node: fx.Node, at: Indices) -> Element:
    return _element(first_input(node), at)


def _filled(name: str) -> Callable[[fx.Node, Indices], Element]:
    return lambda node, at: _size(argument(node, name))


def _iota(node: fx.Node, at: Indices) -> Element:
    _of_64_bits(node)
    return _size(argument(node, "start")) + at[0] * _size(argument(node, "step"))


def _of_64_bits(node: fx.Node) -> None:
    if value(node).dtype != torch.int64:
        raise UnknownElementError


def _converted(node: fx.Node, at: Indices) -> Element:
    """Return the same number in another dtype: as it is, or if it is no more than something to compare with zero."""
    x = _element(first_input(node), at)
    wanted = value(node).dtype
    if wanted == torch.int64:
        return _integer(x)
    if wanted == torch.bool and _is_truth(x):
        return x
    if wanted.is_floating_point and value(first_input(node)).is_floating_point():
        return x  # of a constant, as no rule gives another: zero, or never
    raise UnknownElementError


def _sum(sign: int) -> Callable[[fx.Node, Indices], Element]:
    def rule(node: fx.Node, at: Indices) -> Element:
        _of_64_bits(node)
        alpha = _size(argument(node, "alpha"))
        a, b = (_integer(_element(argument(node, name), at)) for name in ("self", "other"))
        return sympy.expand(a + sign * alpha * b)

    return rule


def _compared(relation: Callable[[Any, Any], Any]) -> Callable[[fx.Node, Indices], Element]:
    def rule(node: fx.Node, at: Indices) -> Element:
        a, b = (_integer(_element(argument(node, name), at)) for name in ("self", "other"))
        return relation(sympy.expand(a - b), sympy.Integer(0))

    return rule


def _combined(connective: Callable[..., Boolean]) -> Callable[[fx.Node, Indices], Element]:
    return lambda node, at: connective(*(_boolean(_element(x, at)) for x in node.args))


def _where(node: fx.Node, at: Indices) -> Element:
    condition, yes, no = (_element(argument(node, name), at) for name in ("condition", "self", "other"))
    return _chosen(_boolean(condition), yes, no)


def _chosen(condition: Boolean, yes: Element, no: Element) -> Element:
    if _is_truth(yes) and _is_truth(no):
        return sympy.ITE(condition, yes, no)
    if _is_truth(yes) or _is_truth(no):
        raise UnknownElementError
    return sympy.Piecewise((yes, condition), (no, True))


def _triangle(is_kept: Callable[[Any, Any], Boolean]) -> Callable[[fx.Node, Indices], Element]:
    def rule(node: fx.Node, at: Indices) -> Element:
        x = _element(first_input(node), at)
        nothing = sympy.false if _is_truth(x) else sympy.Integer(0)
        kept = is_kept(sympy.expand(at[-1] - at[-2] - _size(argument(node, "diagonal"))), sympy.Integer(0))
        return _chosen(kept, x, nothing)

    return rule


def _unsqueezed(node: fx.Node, at: Indices) -> Element:
    dim = _dim(node, argument(node, "dim"))
    return _element(first_input(node), (*at[:dim], *at[dim + 1 :]))


def _permuted(node: fx.Node, at: Indices) -> Element:
    dims = [_dim(node, d) for d in argument(node, "dims")]
    return _element(first_input(node), tuple(at[dims.index(d)] for d in range(len(at))))


def _viewed(node: fx.Node, at: Indices) -> Element:
    """Return the element of a view that has the same sizes, but for those of one."""
    x = first_input(node)
    wide = [(n, i) for n, i in zip(value(node).shape, at, strict=True) if not _is_one(n)]
    if [_size(n) for n, _ in wide] != [_size(n) for n in value(x).shape if not _is_one(n)]:
        raise UnknownElementError
    remaining = (i for _, i in wide)
    return _element(x, tuple(sympy.Integer(0) if _is_one(n) else next(remaining) for n in value(x).shape))


def _sliced(node: fx.Node, at: Indices) -> Element:
    dim, start = _dim(node, argument(node, "dim")), _size(argument(node, "start") or 0)
    if argument(node, "step") != 1 or not _is_at_least_zero(start):
        raise UnknownElementError
    return _element(first_input(node), _at(at, dim, at[dim] + start))


def _concatenated(node: fx.Node, at: Indices) -> Element:
    """Return the element of one of two pieces; of either, where the first has one row that continues the second."""
    pieces, dim = argument(node, "tensors"), _dim(node, argument(node, "dim"))
    if len(pieces) != 2:
        raise UnknownElementError
    first, second = pieces
    index, size = at[dim], _size(value(first).shape[dim])
    if _is_at_least_zero(size - 1 - index):
        return _element(first, at)
    behind = _element(second, _at(at, dim, index - size))
    if not _is_at_least_zero(index - size):
        if size != 1 or not isinstance(index, sympy.Symbol) or _is_truth(behind):
            raise UnknownElementError
        if behind.subs(index, 0) != _element(first, _at(at, dim, sympy.Integer(0))):
            raise UnknownElementError
    return behind


def _summed_up(node: fx.Node, at: Indices) -> Element:
    """Return the element of a sum over equal elements."""
    _of_64_bits(node)
    dim = _dim(node, argument(node, "dim"))
    other = sympy.Dummy(integer=True, nonnegative=True)
    each = _integer(_element(first_input(node), _at(at, dim, other)))
    if other in each.free_symbols:
        raise UnknownElementError
    return sympy.expand(each * (at[dim] + 1))


def _indexed(node: fx.Node, at: Indices) -> Element:
    """Return the element that tensors of positions choose, one for each of the first dimensions."""
    x, positions = first_input(node), argument(node, "indices")
    if any(p is None or value(p).dtype == torch.bool for p in positions):
        raise UnknownElementError
    shared = max(value(p).dim() for p in positions)
    chosen = tuple(_integer(_element(p, at[:shared])) for p in positions)
    if not all(map(_is_at_least_zero, chosen)):
        raise UnknownElementError
    return _element(x, (*chosen, *at[shared:]))


RULES: dict[Any, Callable[[fx.Node, Indices], Element]] = {
    aten.full.default: _filled("fill_value"),
    aten.full_like.default: _filled("fill_value"),
    aten.scalar_tensor.default: _filled("s"),
    prims.iota.default: _iota,
    prims.convert_element_type.default: _converted,
    aten.clone.default: _same,
    aten.expand.default: _same,
    aten.unsqueeze.default: _unsqueezed,
    aten.permute.default: _permuted,
    aten.view.default: _viewed,
    aten.slice.Tensor: _sliced,
    aten.cat.default: _concatenated,
    aten.cumsum.default: _summed_up,
    aten.index.Tensor: _indexed,
    aten.add.Tensor: _sum(1),
    aten.sub.Tensor: _sum(-1),
    aten.where.self: _where,
    aten.tril.default: _triangle(sympy.Le),
    aten.triu.default: _triangle(sympy.Ge),
    aten.bitwise_not.default: _combined(sympy.Not),
    aten.logical_not.default: _combined(sympy.Not),
    **{op: _combined(sympy.And) for op in (aten.bitwise_and.Tensor, aten.logical_and.default)},
    **{op: _combined(sympy.Or) for op in (aten.bitwise_or.Tensor, aten.logical_or.default)},
    **{
        form: _compared(relation)
        for op, relation in (
            (aten.eq, sympy.Eq), (aten.ne, sympy.Ne), (aten.le, sympy.Le), (aten.lt, sympy.Lt), (aten.ge, sympy.Ge),
            (aten.gt, sympy.Gt),
        )
        for form in (op.Tensor, op.Scalar)
    },
}  # fmt: skip
