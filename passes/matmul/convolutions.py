"""Convolutions: one whose patches neither overlap nor leave gaps (1×1, patch embedding) becomes a matmul.

Before      %y = convolution(%x [B, C, S…], %w [O, C, P…], %b, stride=P)           S = G·P in every dimension
After       %a = view(permute(view(%x, [B, C, G, P, …]), …), [B·G…, C·P…])
            %y = permute(view(addmm(%b, %a, permute(view(%w, [O, C·P…]))), [B, G…, O]), …)
Backward    %dw = mm(permute(%dy'), %a)      %dx = mm(%dy', view(%w)) put back in place      %db = sum(%dy)

Only what the plan converts is touched: cuDNN's convolution keeps the rest. A weight gradient chosen without its input
gradient takes that along as a plain matmul, for both come from one node.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8compile.passes.core.compilation import Compilation, aten, getitems, reshape, value
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.matmul.roles import Site


def run(c: Compilation) -> None:
    """Rewrite the convolutions that the plan converts."""
    chosen = {row.node for row in c.plan.converted if row.kind == "convolution"}
    done: set[fx.Node] = set()
    for key in list(c.sites):
        site = c.sites.get(key)  # None: it was renamed with the rewrite of another site of its node
        if site is None or key not in chosen or site.node in done:
            continue
        done.add(site.node)
        if site.node.target is aten.convolution.default:
            _forward(c, site)
        else:
            _backward(c, site.node)


def _forward(c: Compilation, site: Site) -> None:
    node = site.node
    x, weight, bias = node.args[:3]
    kernel = list(value(weight).shape[2:])  # type: ignore[arg-type]
    rows = _patches(c, x, kernel, node)  # type: ignore[arg-type]
    columns = c.transposed(_flat_weight(c, weight, node), like=node)  # type: ignore[arg-type]
    if bias is None:
        product = c.emit(aten.mm.default, rows, columns, like=node)
    else:
        product = c.emit(aten.addmm.default, bias, rows, columns, like=node)
    out = value(node)
    grid = list(out.shape[2:])
    folded = c.emit(aten.view.default, product, [out.shape[0], *grid, out.shape[1]], like=node)
    order = [0, len(grid) + 1, *range(1, len(grid) + 1)]
    result = c.emit(aten.permute.default, folded, order, like=node)
    _move(c, site, product, rows, columns, bias)
    replace_value(c, node, result)


def _backward(c: Compilation, node: fx.Node) -> None:
    grad, x, weight = node.args[:3]
    dims = value(grad).dim()  # type: ignore[arg-type]
    channels = value(grad).shape[1]  # type: ignore[arg-type]
    last = c.emit(aten.permute.default, grad, [0, *range(2, dims), 1], like=node)
    rows = reshape(c, last, [_product(value(last).shape[:-1]), channels], node)
    results = getitems(node)
    for site in [s for s in c.sites.values() if s.node is node]:
        if site.key.endswith(".grad_input"):
            flat = _flat_weight(c, weight, node)  # type: ignore[arg-type]
            product = c.emit(aten.mm.default, rows, flat, like=node)
            _move(c, site, product, rows, flat, None)
            replace_value(c, results[0], _unpatched(c, product, value(x), value(weight), node))  # type: ignore[arg-type]
        else:
            columns, left = _patches(c, x, list(value(weight).shape[2:]), node), c.transposed(rows, like=node)  # type: ignore[arg-type]
            product = c.emit(aten.mm.default, left, columns, like=node)
            _move(c, site, product, left, columns, None)
            replace_value(c, results[1], c.emit(aten.view.default, product, list(value(weight).shape), like=node))  # type: ignore[arg-type]
    if 2 in results:
        replace_value(c, results[2], c.emit(aten.sum.dim_IntList, rows, [0], like=node))


def _move(c: Compilation, site: Site, node: fx.Node, left: fx.Node, right: fx.Node, bias: Any) -> None:
    """Let the site and its plan row speak of the matmul `node`."""
    old = site.key
    site.node, site.key, site.left, site.right, site.bias = node, node.name, left, right, bias
    site.kind, site.weight_on_left = "addmm" if bias is not None else "mm", False
    c.sites[node.name] = c.sites.pop(old)
    c.plan.update(old, node=node.name)


def _flat_weight(c: Compilation, weight: fx.Node, like: fx.Node) -> fx.Node:
    w = value(weight)
    return reshape(c, weight, [w.shape[0], _product(w.shape[1:])], like)


def _patches(c: Compilation, x: fx.Node, kernel: list[int], like: fx.Node) -> fx.Node:
    """x [B, C, S…] as rows of patches [B·G…, C·P…]."""
    batch, channels, *sizes = value(x).shape
    n = len(kernel)
    grid = [s // p for s, p in zip(sizes, kernel, strict=True)]
    split = [d for pair in zip(grid, kernel, strict=True) for d in pair]
    cut = reshape(c, x, [batch, channels, *split], like)
    order = [0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2)]
    moved = c.emit(aten.permute.default, cut, order, like=like)
    return reshape(c, moved, [batch * _product(grid), channels * _product(kernel)], like)


def _unpatched(c: Compilation, rows: fx.Node, x: Any, weight: Any, like: fx.Node) -> fx.Node:
    """The inverse of `_patches`: rows [B·G…, C·P…] back in the shape of x."""
    batch, channels, *sizes = x.shape
    kernel = list(weight.shape[2:])
    n = len(kernel)
    grid = [s // p for s, p in zip(sizes, kernel, strict=True)]
    cut = c.emit(aten.view.default, rows, [batch, *grid, channels, *kernel], like=like)
    order = [0, n + 1, *(d for i in range(n) for d in (1 + i, n + 2 + i))]
    moved = c.emit(aten.permute.default, cut, order, like=like)
    return reshape(c, moved, list(x.shape), like)


def _product(sizes: Any) -> Any:
    total: Any = 1
    for s in sizes:
        total = total * s
    return total
