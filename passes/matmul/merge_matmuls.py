"""Merge matmuls: those that share an operand become one, over concatenated weights.

Before                               After
    %q = mm(%x, permute(%wq))            %w  = cat([%wq, %wk, %wv], 0)
    %k = mm(%x, permute(%wk))            %y  = mm(%x, permute(%w));  q, k, v = slices of %y
    %v = mm(%x, permute(%wv))
    %dx = mm(%dq, %wq) + mm(%dk, %wk)    %dx = mm(cat([%dq, %dk, %dv], 1), %w)
          + mm(%dv, %wv)
    %dwq = mm(permute(%dq), %x) …        %dw = mm(permute(cat(…)), %x);  dwq, dwk, dwv = rows of %dw

Sound because a block matrix multiplies block by block, and the sum of products is the product over the concatenated
contraction (with one rounding instead of several). No concatenation is materialised: `quantize_matmuls` casts the
parts into one buffer. Only FP8 matmuls with equal casts are merged; the sums may hold other terms, which stay.
Weights that arrived in FP8 are not merged: they have scales of their own, and a concatenation would be a copy.
Results and gradients that are not alive at one time stay separate (`lifetimes.py`): one tensor of all would be more
memory.

A merged group shares one tensor scale. A member whose gradients are 10⁻³ of another's keeps them
(`tests/passes/matmul/test_merge.py`); of far smaller ones, as behind a loss that counts next to nothing, E4M3 with one
scale makes zeros. Then `skip` one of the two, or take rows or groups for scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from fp8compile.formats import ALIGNMENT
from fp8compile.passes.core.aten_views import Permutation
from fp8compile.passes.core.compilation import (
    VIEWS,
    Compilation,
    aten,
    depends_on,
    is_transpose_of,
    sort_topologically,
    value,
)
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import argument, first_input, node_argument
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.matmul.lifetimes import split_by_lifetime


def run(c: Compilation) -> None:
    """Merge output matmuls that read one activation, then the gradients that belong to them."""
    for group in _groups(c):
        gradients = [_gradients(c, group, role) for role in ("grad_input", "grad_weight")]
        _merge_outputs(c, group)
        for merge, matmuls in zip((_merge_grad_inputs, _merge_grad_weights), gradients, strict=True):
            if matmuls:
                merge(c, matmuls)
    sort_topologically(c.graph)


def _groups(c: Compilation) -> list[list[MatmulNode]]:
    """Return output matmuls that may become one: same activation, casts, dtype, checkpointed region and lifetime."""
    groups: dict[tuple[Any, ...], list[MatmulNode]] = {}
    for matmul in c.matmuls.converted:
        if matmul.role != "output" or matmul.weight_on_left or not matmul.is_plain or _has_wide_bias(matmul):
            continue
        if matmul.right_cast is not None and matmul.right_cast.gathered:  # each has its own scale, and is not copied
            continue
        region = (matmul.node.meta.get("recompute"), matmul.node.meta.get("ac_graph_id"))
        groups.setdefault((matmul.left, *_casts(matmul), matmul.dtype, region), []).append(matmul)
    order = {n: i for i, n in enumerate(c.graph.nodes)}
    alive = [part for g in groups.values() if len(g) > 1 for part in split_by_lifetime(g, order)]
    return [g for g in alive if len(g) > 1 and _are_independent(g, order) and _are_aligned(g)]


def _casts(matmul: MatmulNode) -> tuple[Any, ...]:
    return matmul.left_cast, matmul.right_cast, matmul.fast_accumulation


def _has_wide_bias(matmul: MatmulNode) -> bool:
    return matmul.bias is not None and not same_sizes(value(matmul.bias).shape, [matmul.n])


def _are_independent(matmuls: list[MatmulNode], order: dict[fx.Node, int]) -> bool:
    inputs = [i for m in matmuls for i in m.node.all_input_nodes]
    return not depends_on(inputs, {m.node for m in matmuls}, order)


def _are_aligned(matmuls: list[MatmulNode]) -> bool:
    """Return True if no part needs padding, or ends inside a 128×128 block."""
    multiple = 128 if "128" in matmuls[0].casts[1].granularity else ALIGNMENT
    weights = {m.right for m in matmuls}
    return len(weights) == len(matmuls) and all(isinstance(m.n, int) and m.n % multiple == 0 for m in matmuls)


def _gradients(c: Compilation, group: list[MatmulNode], role: str) -> list[MatmulNode]:
    """Return the FP8 matmuls of this role, one for each member of the group, in its order; [] if any is missing."""
    found = []
    for matmul in group:
        mine = [g for g in matmul.grads if g.role == role and g.node.target is aten.mm.default]
        if len(mine) != 1 or not mine[0].is_fp8 or mine[0].weight_on_left:
            return []
        found.append(mine[0])
    order = {n: i for i, n in enumerate(c.graph.nodes)}
    return found if len(set(map(_casts, found))) == 1 and _are_independent(found, order) else []


def _merge_outputs(c: Compilation, group: list[MatmulNode]) -> None:
    first, left = group[0].node, group[0].left
    weights = [c.transposed(m.pair[1], like=m.node) for m in group]
    columns = c.transposed(_cat(c, weights, 0, first), like=first)
    if any(m.bias is not None for m in group):
        bias = _cat(c, [m.bias if m.bias is not None else _no_bias(c, m) for m in group], 0, first)
        product = c.emit(aten.addmm.default, bias, left, columns, like=first)
    else:
        product = c.emit(aten.mm.default, left, columns, like=first)
    _merge_records(c, group, product, n=sum(m.n for m in group))
    _replace_by_slices(c, group, product, 1, [m.n for m in group])


def _replace_by_slices(c: Compilation, matmuls: list[MatmulNode], product: fx.Node, dim: int, sizes: list[int]) -> None:
    """Give the users of each matmul their part of `product`, the parts lying one after the other along `dim`."""
    ends = list(accumulate(sizes))
    parts = [
        c.emit(aten.slice.Tensor, product, dim, end - size, end, like=matmuls[0].node)
        for size, end in zip(sizes, ends, strict=True)
    ]
    for matmul, part in zip(matmuls, parts, strict=True):
        replace_value(c, matmul.node, part)


def _no_bias(c: Compilation, matmul: MatmulNode) -> fx.Node:
    v = value(matmul.node)
    with c.graph.inserting_before(matmul.node):
        node = c.graph.call_function(aten.full.default, ([matmul.n], 0.0), {"dtype": v.dtype, "device": v.device})
    with v.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.full([matmul.n], 0.0, dtype=v.dtype, device=v.device)
    return node


def _merge_grad_inputs(c: Compilation, matmuls: list[MatmulNode]) -> None:
    """Merge them where they are terms of one sum."""
    tree = _sum_of(matmuls)
    if tree is None:
        return
    root, shape, rest = tree
    last = matmuls[-1].node
    lefts, rights = zip(*(m.pair for m in matmuls), strict=True)
    weights = _cat(c, [*rights], 0, last)
    product = c.emit(aten.mm.default, _cat(c, [*lefts], 1, last), weights, like=last)
    _merge_records(c, matmuls, product, k=sum(m.k for m in matmuls))
    total = product if shape is None else c.emit(aten.view.default, product, shape, like=root)
    for term in rest:
        total = c.emit(aten.add.Tensor, total, term, like=root)
    added = root.all_input_nodes
    replace_value(c, root, total)
    _erase_additions(c, added)


def _erase_additions(c: Compilation, nodes: list[fx.Node]) -> None:
    """Erase what is left of a sum, so that another group finds its own terms read once."""
    unread = list(nodes)
    while unread:
        node = unread.pop()
        if not node.users and (node.target in VIEWS or _is_addition(node)):
            unread += node.all_input_nodes
            c.graph.erase_node(node)


def _sum_of(matmuls: list[MatmulNode]) -> tuple[fx.Node, Any, list[fx.Node]] | None:
    """Return the sum whose terms the matmuls are, seen through views; None if there is none.

    It is given as its last addition, the shape in which the matmuls enter it (as a view's argument; None without a
    view), and its other terms.
    """
    wanted = {m.node for m in matmuls}
    climbing: fx.Node | None = matmuls[0].node
    while climbing is not None:
        terms = _terms(climbing)
        if wanted <= {t for t, _ in terms}:
            entry = next(shown for t, shown in terms if t in wanted)
            shape = None if entry in wanted else argument(entry, "size")
            return climbing, shape, [shown for t, shown in terms if t not in wanted]
        climbing = _next_addition(climbing)
    return None


def _next_addition(node: fx.Node) -> fx.Node | None:
    while len(node.users) == 1:
        node = next(iter(node.users))
        if _is_addition(node):
            return node
        if node.target not in VIEWS:
            return None
    return None


def _is_addition(node: fx.Node) -> bool:
    return (
        node.target is aten.add.Tensor
        and not node.kwargs
        and all(isinstance(a, fx.Node) and same_sizes(value(a).shape, value(node).shape) for a in node.args)
    )


def _terms(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the terms of a sum of which nothing else is used: (the node that computes it, as it enters the sum)."""
    if not _is_addition(node):
        return [(node, node)]
    terms: list[tuple[fx.Node, fx.Node]] = []
    for shown in (node_argument(node, "self"), node_argument(node, "other")):
        inner = shown
        while inner.target is aten.view.default and len(inner.users) == 1:
            inner = first_input(inner)
        nested = _is_addition(inner) and inner is shown and len(inner.users) == 1
        terms += _terms(inner) if nested else [(inner if len(inner.users) == 1 else shown, shown)]
    return terms


def _merge_grad_weights(c: Compilation, matmuls: list[MatmulNode]) -> None:
    """Merge them where they have the form gradientᵀ @ activation, whose parts are whole rows of the result."""
    gradients = [_transposed_by(m.pair[0]) for m in matmuls]
    parts = [gradient for gradient in gradients if gradient is not None]
    if len({m.right for m in matmuls}) != 1 or len(parts) < len(matmuls):
        return
    last = matmuls[-1].node
    left = c.transposed(_cat(c, parts, 1, last), like=last)
    product = c.emit(aten.mm.default, left, matmuls[0].right, like=last)
    _merge_records(c, matmuls, product, m=sum(m.m for m in matmuls))
    _replace_by_slices(c, matmuls, product, 0, [m.m for m in matmuls])


def _transposed_by(node: fx.Node) -> fx.Node | None:
    """Return the node that `node` is the transpose of; None for any other node."""
    turned = Permutation.of(node)
    return turned.x if turned is not None and is_transpose_of(node, turned.x) else None


def _cat(c: Compilation, parts: list[fx.Node], dim: int, like: fx.Node) -> fx.Node:
    """Return the concatenation of `parts`: the one that is there already, or a new one."""
    for user in parts[0].users:
        if user.target is aten.cat.default and user.args == (parts, dim):
            return user
    return c.emit(aten.cat.default, parts, dim, like=like)


def _merge_records(c: Compilation, members: list[MatmulNode], product: fx.Node, **sizes: Any) -> None:
    """Let `product` be the matmul of all its members."""
    merged = replace(
        members[0], node=product, name=product.name, kind="mm", path=common_path([m.path for m in members]),
        merged=tuple(m.path for m in members), weight_on_left=False, grads=[],
        milliseconds_bf16=_sum(m.milliseconds_bf16 for m in members),
        milliseconds_fp8=_sum(m.milliseconds_fp8 for m in members),
        milliseconds_by_casts=_sums_by_name([m.milliseconds_by_casts for m in members]), **sizes,
    )  # fmt: skip
    c.matmuls.merge(members, merged)


def _sum(times: Iterable[float | None]) -> float | None:
    """Return the sum of estimates; None where there are none."""
    known = [t for t in times if t is not None]
    return sum(known) if known else None


def _sums_by_name(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the estimates that all have."""
    return {name: sum(t[name] for t in times) for name in times[0] if all(name in t for t in times)}


def common_path(paths: list[str]) -> str:
    """Return one path for several: "layers.0.q" and "layers.0.k" → "layers.0.(q+k)"."""
    split = [p.split(".") for p in paths]
    shared = 0
    while all(len(s) > shared + 1 for s in split) and len({s[shared] for s in split}) == 1:
        shared += 1
    head = ".".join(split[0][:shared])
    tails = "+".join(dict.fromkeys(".".join(s[shared:]) for s in split))
    return f"{head}.({tails})" if head else f"({tails})"
