"""Replace a value by an equal one whose strides may differ, and keep everybody right who looks at strides.

Strides travel on through views, and end at operators that compute. Some users must see the old ones: a graph output,
and operators that demand them (`passes/core/stride_demands.py`): whatever nobody knows, as a kernel of the user's may
have its strides compiled in, and the backward of attention for its output: torch 2.11 keeps cuDNN's plans by the
strides of q, k and v alone, and runs a plan made for another output's strides without a word. They get a copy.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, is_tensor, update_value, value
from fp8compile.passes.core.sizes import hint, same_sizes
from fp8compile.passes.core.stride_demands import EXACT, demanded, is_met
from fp8compile.passes.core.walk import users_of, walk

SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


def replace_value(c: Compilation, old: fx.Node, new: fx.Node) -> None:
    """Let every user of `old` use `new`, which has the same shape and dtype but perhaps other strides; `old` is erased.

    A matmul that `old` computed is computed by `new` from now on. A view that cannot be taken of the new strides is
    taken of a copy.
    """
    c.matmuls.replaced(old, new)
    wanted = value(old).stride()
    users = list(old.users)
    old.replace_all_uses_with(new)
    c.graph.erase_node(old)
    if _is_restrided(new):
        copy = c.emit(aten.clone.default, new, like=new, before=new.next, contiguous=True)
        new.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
        new = copy
    if not same_sizes(value(new).stride(), wanted):
        restride(c, new, wanted, users)


def restride(c: Compilation, new: fx.Node, wanted: Any, users: list[fx.Node]) -> None:
    """Carry the new strides of `new` on to its users, as far as they go."""
    shown: dict[fx.Node, Any] = {new: wanted}  # the strides that each node had
    cut: dict[fx.Node, fx.Node] = {}  # what is returned in parts: one copy for all
    stale = [(new, user) for user in users]
    while stale:
        source, user = stale.pop()
        before = _strides(user.meta.get("val"))
        if is_tensor(user):
            shown.setdefault(user, value(user).stride())
        if _misses_strides(user, source, shown.get(source)):
            user.replace_input_with(source, copied(c, source, shown.get(source), user, exactly=True))
            continue
        try:
            update_value(user)
        except (RuntimeError, ValueError):  # a view that cannot be: fake tensors raise either
            copy = c.emit(aten.clone.default, source, like=source, before=user, contiguous=True)
            user.replace_input_with(source, copy)
            continue
        if _strides(user.meta["val"]) != before and _is_returned_in_parts(user):
            if source not in cut:
                cut[source] = copied(c, source, shown.get(source), source.next, exactly=True)
            user.replace_input_with(source, cut[source])
            update_value(user)
        elif _strides(user.meta["val"]) != before:
            stale += [(user, next_user) for next_user in user.users]


def _misses_strides(user: fx.Node, x: fx.Node, wanted: Any) -> bool:
    """Return True if `user` must find `x` with these strides, and does not."""
    if user.op != "call_function":
        return True
    demands = [demand for demand, given in demanded(user).values() if given is x]
    if wanted is None:
        return EXACT in demands
    return any(not is_met(demand, value(x), wanted) for demand in demands)


def _is_returned_in_parts(node: fx.Node) -> bool:
    """Return True if `node` splits a tensor and the graph returns some of the parts.

    They must go on sharing memory: AOTAutograd returns them as they are, without the tensor that they are views of.
    """
    if node.target not in SPLITS:
        return False
    views = walk([node], users_of, through=lambda n: n is node or n.target in (operator.getitem, *VIEWS))
    return any(n.op == "output" for n in views)


def _is_restrided(node: fx.Node) -> bool:
    """Return True if some view of `node` is taken by its memory, not by its elements."""
    views = walk([node], users_of, through=lambda n: n is node or n.target in VIEWS)
    return any(n.target is aten.as_strided.default for n in views if n is not node)


def copied(c: Compilation, source: fx.Node, strides: Any, before: fx.Node, exactly: bool = False) -> fx.Node:
    """Return a dense copy of `source` that lies in memory in the order of these strides; `exactly`: with these strides.

    A contiguous one where they are unknown; symbolic ones are ordered as they are in the sizes that were seen.
    """
    known = [] if strides is None else [*strides]
    fixed = bool(known) and all(isinstance(s, int) for s in known)
    if exactly and fixed and (steps := _steps(value(source).shape, known)) is not None:
        return _spread(c, source, known, steps, before)
    order = sorted(range(len(known)), key=lambda d: -hint(known[d]))
    if order == sorted(order):
        return c.emit(aten.clone.default, source, like=source, before=before, contiguous=True)
    moved = c.emit(aten.permute.default, source, order, like=source, before=before)
    copy = c.emit(aten.clone.default, moved, like=source, before=before, contiguous=True)
    return c.emit(aten.permute.default, copy, [order.index(d) for d in range(len(order))], like=source, before=before)


def _steps(shape: Any, strides: list[int]) -> dict[int, int] | None:
    """Return how long each dimension must be in memory for these strides, outermost first, where they are not dense.

    None where they are, or are symbolic, or no tensor of whole dimensions has them: a slice of one of them, a copy that
    is expanded. A dimension of length 1 takes part in none of that.
    """
    if not all(isinstance(n, int) for n in shape):
        return None
    order = sorted((d for d in range(len(strides)) if strides[d] and shape[d] != 1), key=lambda d: -strides[d])
    lengths: dict[int, int] = {}
    for outer, inner in zip([None, *order], order, strict=False):
        step = strides[outer] if outer is not None else strides[inner] * shape[inner]
        if step % strides[inner] or step // strides[inner] < shape[inner]:
            return None
        lengths[inner] = step // strides[inner]
    whole = not order or strides[order[-1]] == 1
    dense = all(lengths[d] == shape[d] for d in order) and len(order) == sum(n != 1 for n in shape)
    return lengths if whole and not dense else None


def _spread(c: Compilation, source: fx.Node, strides: list[int], lengths: dict[int, int], before: fx.Node) -> fx.Node:
    """Return a copy of `source` in part of a larger tensor, or with dimensions that repeat, as `_steps` has found
    it."""

    def emit(target: Any, *args: Any) -> fx.Node:
        return c.emit(target, *args, like=source, before=before)

    shape, copy = [*value(source).shape], source
    order = [*(d for d in range(len(shape)) if d not in lengths), *lengths]
    for d, n in enumerate(shape):
        if not strides[d] and n > 1:
            copy = emit(aten.slice.Tensor, copy, d, 0, 1)
    copy = emit(aten.permute.default, copy, order)
    copy = c.emit(aten.clone.default, copy, like=source, before=before, contiguous=True)
    room = [lengths.get(d, 1) - (shape[d] if d in lengths else 1) for d in order]
    if any(room):
        copy = emit(aten.constant_pad_nd.default, copy, [n for r in reversed(room) for n in (0, r)])
        for i, r in enumerate(room):
            if r:
                copy = emit(aten.slice.Tensor, copy, i, 0, shape[order[i]])
    copy = emit(aten.permute.default, copy, [order.index(d) for d in range(len(order))])
    return emit(aten.expand.default, copy, shape) if 0 in strides else copy


def _strides(val: Any) -> Any:
    vals = val if isinstance(val, (tuple, list)) else (val,)
    return [[str(s) for s in v.stride()] for v in vals if isinstance(v, torch.Tensor)]
