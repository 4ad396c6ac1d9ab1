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

A merged group shares one tensor scale. A member whose gradients are 10⁻³ of another's keeps them
(`tests/passes/matmul/test_merge.py`); of far smaller ones, as behind a loss that counts next to nothing, E4M3 with one
scale makes zeros. Then `skip` one of the two, or take rows or groups for scales.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from fp8compile.formats import ALIGNMENT
from fp8compile.passes.core.compilation import (
    VIEWS,
    Compilation,
    aten,
    depends_on,
    is_transpose_of,
    same_sizes,
    sort_topologically,
    value,
)
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.matmul.roles import Site
from fp8compile.plan.rows import FP8


def run(c: Compilation) -> None:
    """Merge output matmuls that read one activation, then what belongs to them in backward."""
    for group in _groups(c):
        gradients = [_gradients(c, group, role) for role in ("grad_input", "grad_weight")]
        _merge_outputs(c, group)
        for role, sites in zip(("grad_input", "grad_weight"), gradients, strict=True):
            if sites:
                (_merge_grad_inputs if role == "grad_input" else _merge_grad_weights)(c, sites)
    sort_topologically(c.graph)


def _groups(c: Compilation) -> list[list[Site]]:
    """Output matmuls that may become one: same activation, casts, dtype and checkpointed region."""
    groups: dict[tuple[Any, ...], list[Site]] = {}
    for row in c.plan.converted:
        site = c.sites[row.node]
        if row.role != "output" or site.weight_on_left or site.kind not in ("mm", "addmm") or _wide_bias(site):
            continue
        if row.right is not None and row.right.gathered:  # each has its own scale, and is not to be copied
            continue
        region = (site.node.meta.get("recompute"), site.node.meta.get("ac_graph_id"))
        key = (site.left, row.left, row.right, row.fast_accumulation, row.dtype, region)
        groups.setdefault(key, []).append(site)
    order = {n: i for i, n in enumerate(c.graph.nodes)}
    return [g for g in groups.values() if len(g) > 1 and _independent(g, order) and _aligned(g, c)]


def _wide_bias(site: Site) -> bool:
    return site.bias is not None and not same_sizes(value(site.bias).shape, [site.n])


def _independent(sites: list[Site], order: dict[fx.Node, int]) -> bool:
    inputs = [i for s in sites for i in s.node.all_input_nodes]
    return not depends_on(inputs, {s.node for s in sites}, order)


def _aligned(sites: list[Site], c: Compilation) -> bool:
    """No part may need padding, or end inside a 128×128 block."""
    row = c.plan.row(sites[0].key)
    assert row is not None
    assert row.right is not None
    multiple = 128 if "128" in row.right.granularity else ALIGNMENT
    weights = {s.right for s in sites}
    return len(weights) == len(sites) and all(isinstance(s.n, int) and s.n % multiple == 0 for s in sites)


def _gradients(c: Compilation, group: list[Site], role: str) -> list[Site]:
    """The FP8 matmuls of this role, one for each member of the group, in its order; [] if any is missing."""
    found = []
    for site in group:
        mine = [g for g in site.grads if g.role == role and g.kind == "mm" and g.key in c.sites]
        rows = [c.plan.row(g.key) for g in mine]
        if len(mine) != 1 or rows[0] is None or rows[0].decision != FP8 or mine[0].weight_on_left:
            return []
        found.append(mine[0])
    casts = {(r.left, r.right, r.fast_accumulation) for s in found if (r := c.plan.row(s.key))}
    order = {n: i for i, n in enumerate(c.graph.nodes)}
    return found if len(casts) == 1 and _independent(found, order) else []


def _merge_outputs(c: Compilation, group: list[Site]) -> None:
    first = group[0].node
    weights = [c.transposed(s.right, like=s.node) for s in group]  # type: ignore[arg-type]
    columns = c.transposed(_cat(c, weights, 0, first), like=first)
    if any(s.bias is not None for s in group):
        bias = _cat(c, [s.bias if s.bias is not None else _no_bias(c, s) for s in group], 0, first)
        product = c.emit(aten.addmm.default, bias, group[0].left, columns, like=first)
    else:
        product = c.emit(aten.mm.default, group[0].left, columns, like=first)
    _record(c, group, product, n=sum(s.n for s in group), right=columns)
    _replace_by_slices(c, group, product, 1, [s.n for s in group])


def _replace_by_slices(c: Compilation, sites: list[Site], product: fx.Node, dim: int, sizes: list[int]) -> None:
    """Give each site's users its part of `product`, the parts lying one after the other along `dim`."""
    ends = list(accumulate(sizes))
    parts = [
        c.emit(aten.slice.Tensor, product, dim, end - size, end, like=sites[0].node)
        for size, end in zip(sizes, ends, strict=True)
    ]
    for site, part in zip(sites, parts, strict=True):
        replace_value(c, site.node, part)


def _no_bias(c: Compilation, site: Site) -> fx.Node:
    v = value(site.node)
    with c.graph.inserting_before(site.node):
        node = c.graph.call_function(aten.full.default, ([site.n], 0.0), {"dtype": v.dtype, "device": v.device})
    with v.fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = torch.full([site.n], 0.0, dtype=v.dtype, device=v.device)
    return node


def _merge_grad_inputs(c: Compilation, sites: list[Site]) -> None:
    """Only where the matmuls are terms of one sum."""
    tree = _sum_of(sites)
    if tree is None:
        return
    root, shape, rest = tree
    last = sites[-1].node
    weights = _cat(c, [s.right for s in sites], 0, last)  # type: ignore[misc]
    product = c.emit(aten.mm.default, _cat(c, [s.left for s in sites], 1, last), weights, like=last)  # type: ignore[misc]
    _record(c, sites, product, k=sum(s.k for s in sites), left=product.args[0], right=weights)
    total = product if shape is None else c.emit(aten.view.default, product, shape, like=root)
    for term in rest:
        total = c.emit(aten.add.Tensor, total, term, like=root)
    replace_value(c, root, total)


def _sum_of(sites: list[Site]) -> tuple[fx.Node, Any, list[fx.Node]] | None:
    """The sum whose terms the matmuls are, seen through views: its last addition, the shape in which they enter it
    (as a view's argument; None without a view), and its other terms."""
    wanted = {s.node for s in sites}
    climbing: fx.Node | None = sites[0].node
    while climbing is not None:
        terms = _terms(climbing)
        if wanted <= {t for t, _ in terms}:
            entry = next(shown for t, shown in terms if t in wanted)
            shape = None if entry in wanted else entry.args[1]
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
    """The terms of a sum of which nothing else is used: (what computes it, as it enters the sum)."""
    if not _is_addition(node):
        return [(node, node)]
    terms = []
    for arg in node.args:
        inner: fx.Node = arg  # type: ignore[assignment]
        while inner.target is aten.view.default and len(inner.users) == 1:
            inner = inner.args[0]  # type: ignore[assignment]
        nested = _is_addition(inner) and inner is arg and len(inner.users) == 1
        terms += _terms(inner) if nested else [(inner if len(inner.users) == 1 else arg, arg)]  # type: ignore[list-item]
    return terms  # type: ignore[return-value]


def _merge_grad_weights(c: Compilation, sites: list[Site]) -> None:
    """Only in the form gradientᵀ @ activation, whose parts are whole rows of the result."""
    if len({s.right for s in sites}) != 1 or not all(_is_transposed(s.left) for s in sites):
        return
    last = sites[-1].node
    gradient = _cat(c, [s.left.args[0] for s in sites], 1, last)  # type: ignore[union-attr, misc]
    left = c.transposed(gradient, like=last)
    product = c.emit(aten.mm.default, left, sites[0].right, like=last)
    _record(c, sites, product, m=sum(s.m for s in sites), left=left)
    _replace_by_slices(c, sites, product, 0, [s.m for s in sites])


def _is_transposed(node: fx.Node | None) -> bool:
    source = node.args[0] if node is not None and node.args else None
    return node is not None and isinstance(source, fx.Node) and is_transpose_of(node, source)


def _cat(c: Compilation, parts: list[fx.Node], dim: int, like: fx.Node) -> fx.Node:
    """The concatenation of `parts`: the one that is there already, or a new one."""
    for user in parts[0].users:
        if user.target is aten.cat.default and user.args == (parts, dim):
            return user
    return c.emit(aten.cat.default, parts, dim, like=like)


def _record(c: Compilation, merged: list[Site], product: fx.Node, **sizes: Any) -> None:
    """Put the merged matmul in the place of its members, in the plan and among the sites."""
    first = merged[0]
    row = c.plan.row(first.key)
    assert row is not None
    changes = {name: size for name, size in sizes.items() if name in ("m", "n", "k")}
    members = {s.key for s in merged}
    rows = [r for r in c.plan.matmuls if r.node in members]
    times = {name: _sum(getattr(r, name) for r in rows) for name in ("milliseconds_bf16", "milliseconds_fp8")}
    c.plan.matmuls = [r for r in c.plan.matmuls if r.node == first.key or r.node not in members]
    c.plan.update(
        first.key, node=product.name, kind="mm", path=common_path([s.path for s in merged]),
        merged=tuple(s.path for s in merged), **changes, **times,
    )  # fmt: skip
    for key in members:
        del c.sites[key]
    left, right = sizes.get("left", first.left), sizes.get("right", first.right)
    bias: Any = product.args[0] if product.target is aten.addmm.default else None
    c.sites[product.name] = Site(
        product, product.name, "mm" if bias is None else "addmm", left, right, bias,
        changes.get("m", first.m), changes.get("n", first.n), changes.get("k", first.k),
        role=first.role, forward=first.forward,
    )  # fmt: skip


def _sum(times: Iterable[float | None]) -> float | None:
    """Of estimates; None where there are none."""
    known = [t for t in times if t is not None]
    return sum(known) if known else None


def common_path(paths: list[str]) -> str:
    """ "layers.0.q" and "layers.0.k" → "layers.0.(q+k)"."""
    split = [p.split(".") for p in paths]
    shared = 0
    while all(len(s) > shared + 1 for s in split) and len({s[shared] for s in split}) == 1:
        shared += 1
    head = ".".join(split[0][:shared])
    tails = "+".join(dict.fromkeys(".".join(s[shared:]) for s in split))
    return f"{head}.({tails})" if head else f"({tails})"
