"""Replace a value by an equal one whose strides may differ, and keep everybody right who looks at strides.

Strides travel on through views, and end at operators that compute. Four kinds of users must see the old ones: a graph
output, an operator that is not aten's (a kernel of the user's may have its strides compiled in), `as_strided`, which
reads memory instead of elements, and the backward of attention for its output: torch 2.11 keeps cuDNN's plans by the
strides of q, k and v alone, and runs a plan made for another output's strides without a word. They get a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.passes.compilation import VIEWS, Compilation, aten, is_tensor, same_sizes, update_value, value

STRIDE_BLIND = ("aten", "prims", "fp8")  # operators that take any strides for the same values


def replace_value(c: Compilation, old: fx.Node, new: fx.Node) -> None:
    """Let every user of `old` use `new`, which has the same shape and dtype but perhaps other strides; `old` is erased.

    Sites that read `old` read `new` from now on. A view that cannot be taken of the new strides is taken of a copy.
    """
    for site in c.sites.values():
        for operand in ("left", "right", "bias"):
            if getattr(site, operand) is old:
                setattr(site, operand, new)
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
    stale = [(new, user) for user in users]
    while stale:
        source, user = stale.pop()
        before = _strides(user.meta.get("val"))
        if is_tensor(user):
            shown.setdefault(user, value(user).stride())
        if _sees_strides(user, source):
            user.replace_input_with(source, copied(c, source, shown.get(source), user))
            continue
        try:
            update_value(user)
        except (RuntimeError, ValueError):  # a view that cannot be: fake tensors raise either
            copy = c.emit(aten.clone.default, source, like=source, before=user, contiguous=True)
            user.replace_input_with(source, copy)
            continue
        if _strides(user.meta["val"]) != before:
            stale += [(user, next_user) for next_user in user.users]


def _sees_strides(user: fx.Node, x: fx.Node) -> bool:
    """Whether `user` must find `x` with the strides that it had."""
    if user.op != "call_function":
        return True
    if not isinstance(user.target, torch._ops.OperatorBase):
        return False
    if getattr(user.target, "namespace", "") not in STRIDE_BLIND:
        return True
    if "attention" not in str(user.target) or not isinstance(user.target, torch._ops.OpOverload):
        return False
    arguments = zip(user.target._schema.arguments, user.args, strict=False)
    return any(a is x and argument.name in ("out", "grad_out") for argument, a in arguments)


def _is_restrided(node: fx.Node) -> bool:
    """Whether some view of `node` is taken by its memory, not by its elements."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user.target is aten.as_strided.default:
                return True
            if user.target in VIEWS:
                stack.append(user)
    return False


def copied(c: Compilation, source: fx.Node, strides: Any, before: fx.Node) -> fx.Node:
    """A dense copy of `source` that lies in memory in the order of these strides.

    A contiguous one where they are unknown or symbolic.
    """
    known = [*strides] if strides is not None and all(isinstance(s, int) for s in strides) else []
    order = sorted(range(len(known)), key=lambda d: -known[d])
    if order == sorted(order):
        return c.emit(aten.clone.default, source, like=source, before=before, contiguous=True)
    moved = c.emit(aten.permute.default, source, order, like=source, before=before)
    copy = c.emit(aten.clone.default, moved, like=source, before=before, contiguous=True)
    return c.emit(aten.permute.default, copy, [order.index(d) for d in range(len(order))], like=source, before=before)


def _strides(val: Any) -> Any:
    vals = val if isinstance(val, (tuple, list)) else (val,)
    return [[str(s) for s in v.stride()] for v in vals if isinstance(v, torch.Tensor)]
