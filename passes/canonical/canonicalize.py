"""Canonicalize: one form for matmuls, one node for one view.

Before                                               After
    %v1 = view(%norm, [64, 32])                          %v1 = view(%norm, [64, 32])
    %v2 = view(%norm, [64, 32])                          (v2 is v1)
    %p  = permute(%w, [1, 0])
    %pp = permute(%p, [1, 0])                            (pp is w)
    %y  = bmm(%x [1, 64, 32], %w [1, 32, 16])            mm(squeeze(x), squeeze(w)) and unsqueeze
    %y  = bmm(%x [8, 64, 32], expand(%w [32, 16]))       mm(view(x, [512, 32]), w) and view
    %g  = sum(bmm(%xᵀ [8, 32, 64], %dy [8, 64, 16]), 0)  mm(view(x)ᵀ, view(dy))
    %y  = baddbmm(%b, %x, %w)                            add(%b, bmm(%x, %w))
    %z  = _efficientzerotensor([64, 32])                 full([64, 32], 0)
    %y  = mm(%x [0, 32], %w [32, 16])                    full([0, 16], 0)                   in inference
    %g  = add(slice_scatter(%zeros, %a, …), …)           cat([%a, %b])                (`scattered_slices.py`)
    %y  = where(%rows [T, 1], 0, cat([%a, %b], 1))       cat([where(%rows, 0, %a), …], 1)   (`row_masks.py`)
    %g  = index_put(%zeros, [%inverse], %x, accumulate)  index(%x, [%order])                (`permutations.py`)

Sound because two views of one base with equal sizes, strides and offset are the same tensor, a batch of one is a
matrix, and a broadcast weight multiplies all batches alike (its gradient sums over them). Forward-mode differentiation
makes zeros without memory, which Inductor does not take as what forward hands to backward; made of a number they are
made again there.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fp8compile.passes.canonical import permutations, row_masks, scattered_slices
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, base, sort_topologically, update_value, value
from fp8compile.passes.core.node_views import argument, first_input, node_argument
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.matmul import gathered_weights

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


def run(c: Compilation) -> None:
    """Bring the graph into the form above."""
    gathered_weights.normalize(c)
    _give_zeros_memory(c)
    scattered_slices.concatenate(c)
    permutations.gather_back(c)
    row_masks.mask_pieces(c)
    _merge_equal_views(c)
    _multiply_nothing(c)
    for node in list(c.graph.nodes):
        if node.target is aten.baddbmm.default and not node.kwargs:
            _split_baddbmm(c, node)
    for node in list(c.graph.nodes):
        if node.target is aten.sum.dim_IntList:
            _fold_batch_of_gradient(c, node)
    for node in list(c.graph.nodes):
        if node.target is aten.bmm.default:
            _drop_batch(c, node)
    sort_topologically(c.graph)  # a transpose may have been taken from further down
    _merge_equal_views(c)


def _give_zeros_memory(c: Compilation) -> None:
    for node in c.graph.nodes:
        if not isinstance(node.meta.get("val"), torch.Tensor) or not value(node)._is_zerotensor():
            continue
        if node.target is aten._efficientzerotensor.default:
            node.target, node.args = aten.full.default, (node.args[0], 0)
        update_value(node)


def _multiply_nothing(c: Compilation) -> None:
    """Let matmuls of empty batches read no weight, which inference would otherwise be known to need as it is."""
    if c.is_training:
        return
    for node in list(c.graph.nodes):
        if node.target in MATMULS and _is_empty(v := value(node)):
            how = {"dtype": v.dtype, "device": v.device, "pin_memory": False}
            replace_value(c, node, c.emit(aten.full.default, [*v.shape], 0, like=node, **how))


def _is_empty(x: torch.Tensor) -> bool:
    """Return True if `x` is known to have no elements. Of sizes that only the data knows nothing may be asked."""
    return all(isinstance(size, int) for size in x.shape) and 0 in x.shape


def _geometry(node: fx.Node) -> tuple[object, ...]:
    v = value(node)
    sizes = (str(v.dtype), *map(str, v.shape), "|", *map(str, v.stride()), str(v.storage_offset()))
    return (base(node), *sizes)


def _merge_equal_views(c: Compilation) -> None:
    known: dict[tuple[object, ...], fx.Node] = {}
    for node in list(c.graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.target not in VIEWS:
            continue
        owner = base(node)
        if not isinstance(owner.meta.get("val"), torch.Tensor):
            continue
        known.setdefault(_geometry(owner), owner)
        same = known.setdefault(_geometry(node), node)
        if same is not node:
            node.replace_all_uses_with(same)
            c.graph.erase_node(node)


def _split_baddbmm(c: Compilation, node: fx.Node) -> None:
    bias, a, b = (node_argument(node, name) for name in ("self", "batch1", "batch2"))
    product = c.emit(aten.bmm.default, a, b, like=node)
    replace_value(c, node, c.emit(aten.add.Tensor, product, bias, like=node))


def _drop_batch(c: Compilation, node: fx.Node) -> None:
    a, b = first_input(node), node_argument(node, "mat2")
    batch = value(a).shape[0]
    if isinstance(batch, int) and batch == 1:
        product = c.emit(aten.mm.default, *(c.emit(aten.squeeze.dim, x, 0, like=node) for x in (a, b)), like=node)
        replace_value(c, node, c.emit(aten.unsqueeze.default, product, 0, like=node))
    elif _is_broadcast(b) and _rows_collapse(a):
        _one_matmul(c, node, a, b)
    elif _is_broadcast(a) and _rows_collapse(rows := c.transposed(b, like=node)):
        # (W xᵀ)[i] = (x[i] Wᵀ)ᵀ: one matmul over all batches, whose result is read transposed
        columns = c.transposed(a, like=node)
        mirror = c.emit(aten.bmm.default, rows, columns, like=node)
        back = c.transposed(mirror, like=node)
        replace_value(c, node, back)
        _one_matmul(c, mirror, rows, columns)


def _one_matmul(c: Compilation, node: fx.Node, a: fx.Node, b: fx.Node) -> None:
    """Replace bmm(a, broadcast b) by one mm over the collapsed rows of `a`."""
    batch, m, k = value(a).shape
    n = value(b).shape[-1]
    if not all(isinstance(s, int) for s in (batch, m, k, n)):
        return
    rows = c.emit(aten.view.default, a, [batch * m, k], like=node)
    product = c.emit(aten.mm.default, rows, c.emit(aten.select.int, b, 0, 0, like=node), like=node)
    replace_value(c, node, c.emit(aten.view.default, product, [batch, m, n], like=node))


def _is_broadcast(node: fx.Node) -> bool:
    v = value(node)
    return isinstance(v.shape[0], int) and v.shape[0] > 1 and v.stride(0) == 0


def _rows_collapse(node: fx.Node) -> bool:
    """Return True if [B, M, K] can be viewed as [B·M, K]."""
    v = value(node)
    return same_sizes([v.stride(0)], [v.shape[1] * v.stride(1)])


def _fold_batch_of_gradient(c: Compilation, node: fx.Node) -> None:
    """Replace the sum over the batch of bmm(xᵀ, dy), the gradient of a broadcast weight, by one mm."""
    product, dims = first_input(node), list(argument(node, "dim") or [])  # None: over all
    keep = bool(argument(node, "keepdim"))
    if product.target is not aten.bmm.default or len(product.users) != 1:
        return
    left, right = first_input(product), node_argument(product, "mat2")
    sizes = (*value(left).shape, value(right).shape[-1])
    if dims != [0] or node.kwargs or not all(isinstance(s, int) for s in sizes):
        return
    batch, k, m, n = sizes
    x = c.transposed(left, like=node)
    if not (_rows_collapse(x) and _rows_collapse(right)):
        return
    rows = c.emit(aten.view.default, x, [batch * m, k], like=product)
    grads = c.emit(aten.view.default, right, [batch * m, n], like=product)
    total = c.emit(aten.mm.default, c.transposed(rows, like=product), grads, like=product)
    shape = [1, k, n] if keep else [k, n]
    replace_value(c, node, c.emit(aten.view.default, total, shape, like=node))
    if math.prod(sizes) and not product.users:
        c.graph.erase_node(product)
