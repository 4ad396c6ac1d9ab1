"""Convolutions: one whose patches neither overlap nor leave gaps (1×1, patch embedding) becomes a matmul.

Before      %y = convolution(%x [B, C, S…], %w [O, C, P…], %b, stride=P)           S = G·P in every dimension
After       %a = view(permute(view(%x, [B, C, G, P, …]), …), [B·G…, C·P…])
            %y = permute(view(addmm(%b, %a, permute(view(%w, [O, C·P…]))), [B, G…, O]), …)
Backward    %dw = mm(permute(%dy'), %a)      %dx = mm(%dy', view(%w)) put back in place      %db = sum(%dy)

Only what the plan converts is touched: cuDNN's convolution keeps the rest. A weight gradient chosen without its input
gradient takes that along as a plain matmul, for both come from one node.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from fp8compile.passes.core.compilation import Compilation, aten, getitems, reshape, value
from fp8compile.passes.core.matmul_node import GRAD_INPUT, MatmulNode
from fp8compile.passes.core.matmul_views import Convolution, ConvolutionBackward
from fp8compile.passes.core.replace import replace_value


def run(c: Compilation) -> None:
    """Rewrite the convolutions that the plan converts."""
    for matmul in c.matmuls.converted:
        if (convolution := Convolution.of(matmul.node)) is not None:
            _forward(c, matmul, convolution)
        elif (backward := ConvolutionBackward.of(matmul.node)) is not None:
            _backward(c, backward)


def _forward(c: Compilation, matmul: MatmulNode, convolution: Convolution) -> None:
    node, weight, bias = convolution.node, convolution.weight, convolution.bias
    rows = _patches(c, convolution.input, list(value(weight).shape[2:]), node)
    columns = c.transposed(_flat_weight(c, weight, node), like=node)
    if bias is None:
        product = c.emit(aten.mm.default, rows, columns, like=node)
    else:
        product = c.emit(aten.addmm.default, bias, rows, columns, like=node)
    out = value(node)
    grid = list(out.shape[2:])
    folded = c.emit(aten.view.default, product, [out.shape[0], *grid, out.shape[1]], like=node)
    order = [0, len(grid) + 1, *range(1, len(grid) + 1)]
    result = c.emit(aten.permute.default, folded, order, like=node)
    _move(c, matmul, product)
    replace_value(c, node, result)


def _backward(c: Compilation, backward: ConvolutionBackward) -> None:
    node, weight, gradient = backward.node, backward.weight, value(backward.gradient)
    last = c.emit(aten.permute.default, backward.gradient, [0, *range(2, gradient.dim()), 1], like=node)
    rows = reshape(c, last, [math.prod(value(last).shape[:-1]), gradient.shape[1]], node)
    results = getitems(node)
    for matmul in c.matmuls.at(node):
        if matmul.result == GRAD_INPUT:
            product = c.emit(aten.mm.default, rows, _flat_weight(c, weight, node), like=node)
            new = _unpatched(c, product, value(backward.input), value(weight), node)
        else:
            columns = _patches(c, backward.input, list(value(weight).shape[2:]), node)
            product = c.emit(aten.mm.default, c.transposed(rows, like=node), columns, like=node)
            new = c.emit(aten.view.default, product, list(value(weight).shape), like=node)
        _move(c, matmul, product)
        replace_value(c, results[matmul.result], new)
    if 2 in results:
        replace_value(c, results[2], c.emit(aten.sum.dim_IntList, rows, [0], like=node))


def _move(c: Compilation, matmul: MatmulNode, product: fx.Node) -> None:
    """Let `product` compute the matmul."""
    c.matmuls.move(matmul, product)
    matmul.weight_on_left = False


def _flat_weight(c: Compilation, weight: fx.Node, like: fx.Node) -> fx.Node:
    w = value(weight)
    return reshape(c, weight, [w.shape[0], math.prod(w.shape[1:])], like)


def _patches(c: Compilation, x: fx.Node, kernel: list[int], like: fx.Node) -> fx.Node:
    """Return x [B, C, S…] as rows of patches [B·G…, C·P…]."""
    batch, channels, *sizes = value(x).shape
    n = len(kernel)
    grid = [s // p for s, p in zip(sizes, kernel, strict=True)]
    split = [d for pair in zip(grid, kernel, strict=True) for d in pair]
    cut = reshape(c, x, [batch, channels, *split], like)
    order = [0, *range(2, 2 + 2 * n, 2), 1, *range(3, 3 + 2 * n, 2)]
    moved = c.emit(aten.permute.default, cut, order, like=like)
    return reshape(c, moved, [batch * math.prod(grid), channels * math.prod(kernel)], like)


def _unpatched(c: Compilation, rows: fx.Node, x: Any, weight: Any, like: fx.Node) -> fx.Node:
    """Return rows [B·G…, C·P…] in the shape of x again: the inverse of `_patches`."""
    batch, channels, *sizes = x.shape
    kernel = list(weight.shape[2:])
    n = len(kernel)
    grid = [s // p for s, p in zip(sizes, kernel, strict=True)]
    cut = c.emit(aten.view.default, rows, [batch, *grid, channels, *kernel], like=like)
    order = [0, n + 1, *(d for i in range(n) for d in (1 + i, n + 2 + i))]
    moved = c.emit(aten.permute.default, cut, order, like=like)
    return reshape(c, moved, list(x.shape), like)
