"""Roles: which matmuls a graph has, and what each of them is for.

    output       activation @ weight, in the forward half
    grad_input   gradient @ weight              } in the backward half, of a matmul that is found in the forward half
    grad_weight  gradientᵀ @ activation         }
    The matmuls of a mixture's experts have the same roles: grouped ones, E weights for E groups of tokens, where a
    plain one is one weight for all (`passes/matmul/grouped_matmuls.py`).
    other        no weight on either side (attention, state-space scans), or an operator that is no plain matmul

A weight (`passes/matmul/weights.py`) is computed from parameters (and buffers and constants) alone: a parameter, its
cast, its transpose, its normalised form, the sum of it and a low-rank product. Buffers alone are none (rotary
frequencies must not become FP8), but with a parameter they may be part of one, as in spectral norm. Two weights have no
role: their product keeps the precision of weights. Nor has a buffer times a weight, as where a weight is made
orthogonal, unless a graph is given nothing but parameters and buffers. What else has been through a matmul is no
weight: attention to learned queries is attention.
Which matmul a gradient belongs to is read off the graph: its second operand is a view of an operand of that matmul,
and the sizes agree; where several agree, the sequence number that autograd gave both decides.
"""

from __future__ import annotations

from itertools import permutations

from torch import fx

from fp8compile.passes.core.compilation import Compilation, base, dependents, is_tangent, is_tensor
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.matmul.find_matmuls import matmuls_of
from fp8compile.passes.matmul.weights import is_weight, weight_nodes
from fp8compile.plan.reasons import Reason, Why

ONLY_WEIGHTS = Why(Reason.ONLY_WEIGHTS, "both operands are weights")
WITH_A_BUFFER = Why(Reason.ONLY_WEIGHTS, "a weight and a buffer: it may be a weight that is computed")
NO_WEIGHT = Why(Reason.NO_WEIGHT, "neither operand comes from an nn.Parameter")
PRODUCT = Why(Reason.PRODUCT, "an operand is a product of parameters; only a weight plus such products is a weight")
ONLY_GRADIENTS = Why(Reason.ONLY_GRADIENTS, "both operands are gradients")
NO_FORWARD = Why(Reason.NO_FORWARD, "no matmul of the forward half has these operands")


def find_roles(c: Compilation) -> list[MatmulNode]:
    """Return every matmul of the graph in graph order, each with its role."""
    weights, is_fed = weight_nodes(c), _has_data(c)
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    forward: dict[fx.Node, list[MatmulNode]] = {}  # base of an operand -> the forward matmuls that read it
    found: list[MatmulNode] = []
    for node in c.graph.nodes:
        for matmul in matmuls_of(node):
            if node in backward:
                _assign_backward_role(matmul, forward, backward)
            else:
                _assign_forward_role(matmul, weights, is_fed)
                for owner in {base(x) for x in (matmul.left, matmul.right) if x is not None}:
                    forward.setdefault(owner, []).append(matmul)
            _locate(matmul)
            found.append(matmul)
    return found


def _locate(matmul: MatmulNode) -> None:
    """Give it the module and the user's line of the layer that it serves."""
    forward = matmul.forward
    matmul.path = (forward and forward.path) or module_path(matmul.node)
    matmul.source = (forward and forward.source) or source_line(matmul.node)


def _has_data(c: Compilation) -> bool:
    """Return True if a graph is given more than parameters and buffers."""
    given = [n for n in c.graph.find_nodes(op="placeholder") if is_tensor(n) and not is_tangent(n)]
    return not all(_is_static(c, n) for n in given)


def _is_static(c: Compilation, node: fx.Node) -> bool:
    known = c.inputs.get(node.name)
    return known is not None and (known.is_parameter or known.is_buffer)


def _assign_forward_role(matmul: MatmulNode, weights: set[fx.Node], is_fed: bool) -> None:
    if matmul.why_other:
        return
    left, right = (is_weight(operand, weights) for operand in (matmul.left, matmul.right))
    if left and right:
        matmul.why_other = ONLY_WEIGHTS
    elif is_fed and (left or right) and matmul.node in weights and not {matmul.left, matmul.right} <= weights:
        matmul.why_other = WITH_A_BUFFER
    elif not (left or right):
        matmul.why_other = PRODUCT if {matmul.left, matmul.right} & weights else NO_WEIGHT
    else:
        matmul.role, matmul.weight_on_left = "output", left


def _assign_backward_role(matmul: MatmulNode, forward: dict[fx.Node, list[MatmulNode]], backward: set[fx.Node]) -> None:
    left, right, _ = matmul.operands
    if left is None or right is None:
        return
    gradients = [operand in backward for operand in (left, right)]
    if all(gradients):
        matmul.why_other = ONLY_GRADIENTS
        return
    plain = right if gradients[0] else left
    matched = _matching(matmul, plain, forward)
    if matched is None:
        matmul.why_other = matmul.why_other or NO_FORWARD
        return
    matmul.forward = matched
    if matmul.why_other or matched.role != "output":
        matmul.why_other = matmul.why_other or matched.why_other
        return
    matched.grads.append(matmul)
    weight = matched.weight
    matmul.role = "grad_input" if weight is not None and base(plain) is base(weight) else "grad_weight"
    matmul.weight_on_left = plain is left  # the operand that is no gradient


def _has_sizes_of(a: MatmulNode, b: MatmulNode) -> bool:
    """Return True if two matmuls have the same three sizes, in any order and however written; and batch and groups."""
    mine, others = (a.m, a.n, a.k), (b.m, b.n, b.k)
    alike = sorted(map(str, mine)) == sorted(map(str, others))
    alike = alike or any(same_sizes(mine, order) for order in permutations(others))
    return alike and same_sizes((a.batch, a.groups), (b.batch, b.groups))


def _matching(matmul: MatmulNode, plain: fx.Node, forward: dict[fx.Node, list[MatmulNode]]) -> MatmulNode | None:
    """Return the forward matmul that has `plain` among its operands and the same three sizes; None if there is none."""
    candidates = forward.get(base(plain), [])
    found = [f for f in candidates if _has_sizes_of(f, matmul)]
    number = matmul.node.meta.get("seq_nr")
    exact = [f for f in found if number is not None and f.node.meta.get("seq_nr") == number]
    return (exact or found or [None])[0]
