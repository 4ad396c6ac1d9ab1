"""Output heads: the matmuls that make a model's logits."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, dependents, is_tangent, value
from fp8compile.passes.core.fusible import is_pointwise
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.walk import users_of, walk
from fp8compile.passes.matmul.find_matmuls import MATMULS

HEADS = re.compile(
    r"(^|\.)(lm_head|head|heads|output|output_layer|output_projection|classifier|score|scores|embed_out|proj_out"
    r"|to_logits|logits|cls|unembed|vocab_proj|generator|qa_outputs|(predictions|lm_head)\.decoder)$"
)
SCORES = (aten.gather.default, aten.nll_loss_forward.default, aten.log1p.default)  # the last of binary cross-entropy


def find_heads(c: Compilation, matmuls: list[MatmulNode]) -> list[MatmulNode]:
    """Return the output matmuls that make the model's logits.

    One whose weight is an embedding table, in this graph or in another; or that no later matmul of the forward half
    reads and that either is called like a head (and is not the last layer of a residual block) or is scored: its result
    goes through a softmax over its last dimension, a binary cross-entropy, or a gather by class.
    """
    lookups = [n for n in c.graph.nodes if n.target is aten.embedding.default]
    tables = {table for lookup in lookups for table in _inputs_behind(first_input(lookup))}
    tables |= {n for n in c.graph.find_nodes(op="placeholder") if n.name in c.inputs and c.inputs[n.name].is_table}
    consumers = {m.node for m in matmuls} | {n for n in c.graph.nodes if operators.is_attention(n.target)}
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    found = []
    for matmul in matmuls:
        if matmul.role != "output":
            continue
        weight, node = matmul.weight, matmul.node
        if weight is not None and not tables.isdisjoint(_inputs_behind(weight)):
            found.append(matmul)
            continue
        named = bool(HEADS.search(matmul.path)) and not _enters_residual(node)
        later = dependents(c.graph, [node]) - {node} if named or _is_scored(node) else None
        if later is not None and not (later & consumers) - backward:
            found.append(matmul)
    return found


def _inputs_behind(weight: fx.Node) -> set[fx.Node]:
    """Return the inputs of the graph that a weight is computed of without a matmul or a lookup of rows."""

    def is_passed(node: fx.Node) -> bool:
        return node.target is not aten.embedding.default and node.target not in MATMULS

    return {node for node in walk([weight], through=is_passed) if node.op == "placeholder"}


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


def _is_scored(node: fx.Node) -> bool:
    """Return True if the result of `node` is scored, behind at most 16 steps: see `find_heads`."""
    width = value(node).shape[-1]
    frontier, seen = [node], {node}
    for _ in range(16):
        frontier = [u for n in frontier for u in n.users if u not in seen]
        seen.update(frontier)
        if any(u.target in SCORES or _is_of_softmax(u, width) for u in frontier):
            return True
        frontier = [u for u in frontier if u.target not in MATMULS]
    return False


def _is_of_softmax(node: fx.Node, width: Any) -> bool:
    """Return True for the maximum over a last dimension of `width` that a softmax subtracts."""
    if node.target is not aten.amax.default:
        return False
    x = value(first_input(node))
    given: Any = node.args[1] if len(node.args) > 1 else ()
    if [dim % x.dim() for dim in given] != [x.dim() - 1] or not same(x.shape[-1], width):
        return False
    after = walk([node], users_of, through=lambda n: n is node or is_pointwise(n))
    return any(n.target is aten.exp.default for n in after)
