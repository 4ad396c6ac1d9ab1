"""Attention layout: attention writes its output as the projection behind it reads it, token by token.

Before      %q [b, h, s, d], contiguous                    After   %q' = a copy that lies in memory as [b, s, h, d]
            %o = attention(%q, …), strides as %q's                 %o = attention(%q', …), likewise
            %x = clone(permute(%o, [0, 2, 1, 3])), a matmul's      %x = permute(%o, [0, 2, 1, 3]), no copy

cuDNN's attention gives its output the layout of the queries. Then the cast behind it reads whole rows, and what is kept
as FP8 in rows goes back to attention's backward without a copy. The copy of the queries costs nothing where a kernel
computes them (a rotary embedding): it writes them in this layout.

Sound because values stay what they are, and everybody who sees strides is shown the new ones
(`passes/core/replace.py`).
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.passes.core import operators
from fp8compile.passes.core.aten_views import Permutation
from fp8compile.passes.core.compilation import VIEWS, Compilation, getitems, is_tensor, update_value, value
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.replace import copied, restride
from fp8compile.passes.core.stride_demands import record_node

TOKENS_FIRST = [0, 2, 1, 3]


def run(c: Compilation) -> None:
    """Change the layout of every attention of which that is true."""
    for node in list(c.graph.nodes):
        if _is_attention(node) and (out := getitems(node).get(0)) is not None and _profits(node, out):
            _change(c, node, out)


def _is_attention(node: fx.Node) -> bool:
    return operators.name_of(node.target) in operators.SCALED_DOT_PRODUCT


def _profits(node: fx.Node, out: fx.Node) -> bool:
    """Return True if a kernel makes the queries, and the output has their layout, heads first, and is read tokens
    first."""
    q = node.args[0]
    if not isinstance(q, fx.Node) or q.target in VIEWS or q.op != "call_function" or value(out).dim() != 4:
        return False
    heads_first = all(
        is_tensor(n) and all(isinstance(s, int) for s in value(n).shape) and value(n).is_contiguous() for n in (q, out)
    )
    readers = [n for n in out.users if not _is_attention(n)]
    return heads_first and value(out).shape[1] > 1 and bool(readers) and all(map(_puts_tokens_first, readers))


def _puts_tokens_first(node: fx.Node) -> bool:
    view = Permutation.of(node)
    return view is not None and view.dims == TOKENS_FIRST


def _change(c: Compilation, node: fx.Node, out: fx.Node) -> None:
    q = first_input(node)
    b, h, s, d = value(q).shape
    tokens_first = torch.empty((b, s, h, d), device="meta", dtype=torch.float32).transpose(1, 2).stride()
    first = min(u for u in q.users if _is_attention(u))
    copy = copied(c, q, tokens_first, first)
    for user in [u for u in q.users if _is_attention(u)]:
        results = {item: value(item).stride() for item in getitems(user).values() if is_tensor(item)}
        user.replace_input_with(q, copy)
        update_value(user)
        for item, strides in results.items():
            update_value(item)
            if value(item).stride() != strides:
                restride(c, item, strides, [u for u in item.users if not _is_attention(u)])
    for user in [u for u in copy.users if _is_attention(u)]:
        record_node(user)
