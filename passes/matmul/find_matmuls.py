"""Find matmuls: the nodes of a graph that multiply matrices, with their sizes as M, N and K.

A convolution is a matmul over its patches where these neither overlap nor leave gaps. Operators that multiply in some
other way are found as well, so that the plan says that they stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.compilation import aten, getitems, value
from fp8compile.passes.core.matmul_node import CONVOLUTION, GRAD_INPUT, GRAD_WEIGHT, MatmulNode
from fp8compile.passes.core.matmul_views import Addmm, Convolution, ConvolutionBackward, GroupedMM, Product
from fp8compile.plan.reasons import Reason, Why

GROUPED_MM = aten._grouped_mm.default
MATMULS = {aten.mm.default: "mm", aten.addmm.default: "addmm", aten.bmm.default: "bmm", GROUPED_MM: "grouped"}
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
FOREIGN = {
    "_scaled_mm": "scaled matmul",
    "_scaled_mm_v2": "scaled matmul",
    "_scaled_grouped_mm": "scaled grouped matmul",
    "_scaled_grouped_mm_v2": "scaled grouped matmul",
    "grouped_mm_fallback": "loop over experts, whose weights are not BF16",  # transformers'
    "grouped_mm_fallback_backward": "loop over experts, whose weights are not BF16",
    "_int_mm": "integer matmul",
    "_addmm_activation": "matmul with activation",
}


def matmuls_of(node: fx.Node) -> list[MatmulNode]:
    """Return the matmuls that `node` computes: none, one, or two gradients of a convolution. They have no role yet."""
    if node.op != "call_function":
        return []
    if node.target in MATMULS:
        return [_grouped(grouped) if (grouped := GroupedMM.of(node)) is not None else _matmul(node)]
    if (convolution := Convolution.of(node)) is not None:
        return [_convolution(convolution)]
    if (backward := ConvolutionBackward.of(node)) is not None:
        return _convolution_gradients(backward)
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in FOREIGN or getattr(node.target, "_opname", "") in FOREIGN or "grouped_mm" in name:
        kind = FOREIGN.get(name, "grouped matmul")
        return [MatmulNode(node, kind, why_other=_unsupported(f"{kind}: left as it is"))]
    return []


def _unsupported(text: str) -> Why | None:
    return Why(Reason.UNSUPPORTED, text) if text else None


def _matmul(node: fx.Node) -> MatmulNode:
    product: Addmm | Product = Addmm.of(node) or Product(node)
    *batch, m, k = value(product.left).shape
    kind = next(name for target, name in MATMULS.items() if target is node.target)
    matmul = MatmulNode(node, kind, m, value(product.right).shape[-1], k, batch[0] if batch else 1)
    matmul.dtype = value(product.left).dtype
    if node.kwargs:
        matmul.why_other = _unsupported("addmm with alpha or beta other than 1")
    return matmul


def _grouped(grouped: GroupedMM) -> MatmulNode:
    *_, m, k = value(grouped.left).shape
    matmul = MatmulNode(grouped.node, "grouped", m, value(grouped.right).shape[-1], k)
    matmul.dtype = value(grouped.left).dtype
    if grouped.offs is None or value(grouped.left).dim() != 2:
        matmul.why_other = _unsupported("grouped matmul whose rows are not what is grouped: left as it is")
    else:
        matmul.groups = value(grouped.offs).shape[0]
    return matmul


def _convolution(convolution: Convolution) -> MatmulNode:
    x, weight, node = convolution.input, convolution.weight, convolution.node
    m, n, k = _convolution_sizes(value(x), value(weight), value(node))
    return MatmulNode(node, CONVOLUTION, m, n, k, dtype=value(x).dtype, why_other=_unsupported(not_a_matmul(node)))


def _convolution_gradients(backward: ConvolutionBackward) -> list[MatmulNode]:
    node, gradient = backward.node, value(backward.gradient)
    m, n, k = _convolution_sizes(value(backward.input), value(backward.weight), gradient)
    why, live = _unsupported(not_a_matmul(node)), getitems(node)
    sizes = {GRAD_INPUT: (m, k, n), GRAD_WEIGHT: (n, k, m)}
    names = {GRAD_INPUT: f"{node.name}.grad_input", GRAD_WEIGHT: f"{node.name}.grad_weight"}
    return [
        MatmulNode(
            node, CONVOLUTION, *sizes[result], result=result, name=names[result], dtype=gradient.dtype, why_other=why
        )
        for result in (GRAD_INPUT, GRAD_WEIGHT)
        if backward.wanted[result] and result in live
    ]


def _convolution_sizes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[Any, Any, Any]:
    m: Any = out.shape[0]
    for size in out.shape[2:]:
        m = m * size
    k: Any = weight.shape[1]
    for size in weight.shape[2:]:
        k = k * size
    return m, weight.shape[0], k


def not_a_matmul(node: fx.Node) -> str:
    """Return why a convolution is not a matmul over patches that do not overlap; "" if it is one."""
    convolution = Convolution.of(node) or ConvolutionBackward.of(node)
    assert convolution is not None
    sizes, kernel = list(value(convolution.input).shape), list(value(convolution.weight).shape[2:])
    if convolution.is_transposed:
        return "a transposed convolution is not a matmul"
    if convolution.groups != 1:
        return f"a convolution in {convolution.groups} groups is not one matmul"
    if any(p != 0 for p in convolution.padding) or any(d != 1 for d in convolution.dilation):
        return "a convolution with padding or dilation is not a matmul"
    if convolution.stride != kernel:
        return f"a convolution whose {'×'.join(map(str, kernel))} patches overlap or leave gaps is not a matmul"
    if not all(isinstance(s, int) for s in sizes):
        return "a convolution of symbolic size is left as it is"
    if any(s % p for s, p in zip(sizes[2:], kernel, strict=True)):
        return f"the input {'×'.join(map(str, sizes[2:]))} does not divide into {'×'.join(map(str, kernel))} patches"
    return ""
