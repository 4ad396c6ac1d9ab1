"""Output heads: the matmuls that make a model's logits."""

from __future__ import annotations

import re

import torch
from torch import fx

from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, base, dependents, is_tangent, value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.matmul.find_matmuls import MATMULS

HEADS = re.compile(
    r"(^|\.)(lm_head|head|heads|output|output_layer|output_projection|classifier|score|scores|embed_out|proj_out"
    r"|to_logits|logits|cls|unembed|vocab_proj|generator|qa_outputs|(predictions|lm_head)\.decoder)$"
)


def find_heads(c: Compilation, matmuls: list[MatmulNode]) -> list[MatmulNode]:
    """Return the output matmuls that make the model's logits.

    One whose weight is also an embedding table; or that no later matmul of the forward half reads and that either is
    called like a head (and is not the last layer of a residual block) or feeds a cross-entropy.
    """
    embeddings = {base(first_input(n)) for n in c.graph.nodes if n.target is aten.embedding.default}
    consumers = {m.node for m in matmuls} | {n for n in c.graph.nodes if operators.is_attention(n.target)}
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    found = []
    for matmul in matmuls:
        if matmul.role != "output":
            continue
        weight, node = matmul.weight, matmul.node
        if weight is not None and _root(weight) in embeddings:
            found.append(matmul)
            continue
        named = bool(HEADS.search(matmul.path)) and not _enters_residual(node)
        later = dependents(c.graph, [node]) - {node} if named or _feeds_loss(node) else None
        if later is not None and not (later & consumers) - backward:
            found.append(matmul)
    return found


def _root(node: fx.Node) -> fx.Node:
    """Return the parameter behind a cast or a view."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _enters_residual(node: fx.Node) -> bool:
    """Return True if the result of `node` is added to another activation of its shape, as the last layer of a block's
    is."""
    for user in node.users:
        if user.target in VIEWS or user.target is torch.ops.prims.convert_element_type.default:
            if _enters_residual(user):
                return True
        elif user.target is aten.add.Tensor:
            shapes = [list(map(str, value(a).shape)) for a in user.args if isinstance(a, fx.Node)]
            if len(shapes) == 2 and shapes[0] == shapes[1]:
                return True
    return False


def _feeds_loss(node: fx.Node) -> bool:
    """Return True if a gather by class index reads the result of `node`, through at most a dozen pointwise steps."""
    frontier, seen = [node], {node}
    for _ in range(16):
        frontier = [u for n in frontier for u in n.users if u not in seen]
        seen.update(frontier)
        if any(u.target in (aten.gather.default, aten.nll_loss_forward.default) for u in frontier):
            return True
        frontier = [u for u in frontier if u.target not in MATMULS]
    return False
