"""Roles: which matmuls a graph has, and what each of them is for.

    output       activation @ weight, in the forward half
    grad_input   gradient @ weight              } in the backward half, of a matmul that is found in the forward half
    grad_weight  gradientᵀ @ activation         }
    The matmuls of a mixture's experts have the same roles: grouped ones, E weights for E groups of tokens, where a
    plain one is one weight for all (`passes/matmul/grouped_matmuls.py`).
    other        no weight on either side (attention, state-space scans), or an operator that is no plain matmul

A weight is what is computed from parameters (and buffers and constants) alone: a parameter, its cast, its transpose,
its normalised form, the sum of it and a low-rank product. Buffers alone are none (rotary frequencies must not become
FP8), but with a parameter they may be part of one, as in spectral norm. Two weights have no role: their product keeps
the precision of weights. What else has been through a matmul is no weight: attention to learned queries is attention.
Which matmul a gradient belongs to is read off the graph: its second operand is a view of an operand of that matmul,
and the sizes agree; where several agree, the sequence number that autograd gave both decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile.passes.core.compilation import (
    Compilation,
    aten,
    base,
    dependents,
    getitems,
    is_tangent,
    is_tensor,
    same_sizes,
    value,
)
from fp8compile.passes.core.origin import module_path, source_line

GROUPED = aten._grouped_mm.default
MATMULS = {aten.mm.default: "mm", aten.addmm.default: "addmm", aten.bmm.default: "bmm", GROUPED: "grouped"}
CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
SIZES = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
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


@dataclass
class Site:
    """A matmul of the graph: left [.., M, K] @ right [.., K, N], or a convolution in those terms.

    offs: where the groups of a grouped matmul end; groups: how many it has.
    """

    node: fx.Node
    key: str
    kind: str
    left: fx.Node | None
    right: fx.Node | None
    bias: fx.Node | None
    m: Any
    n: Any
    k: Any
    batch: Any = 1
    offs: fx.Node | None = None
    groups: Any = 1
    role: str = "other"
    weight_on_left: bool = False
    forward: Site | None = None
    why_other: str = ""
    grads: list[Site] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Module path of the layer this matmul serves."""
        return (self.forward and self.forward.path) or module_path(self.node)

    @property
    def source(self) -> str:
        """The user's line."""
        return (self.forward and self.forward.source) or source_line(self.node)

    @property
    def weight(self) -> fx.Node | None:
        """The weight operand of an output matmul."""
        return self.left if self.weight_on_left else self.right

    @property
    def activation(self) -> fx.Node | None:
        """The other operand of an output matmul."""
        return self.right if self.weight_on_left else self.left


def find_sites(c: Compilation) -> list[Site]:
    """Every matmul of the graph in graph order, each with its role."""
    weights = weight_nodes(c)
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    forward: dict[fx.Node, list[Site]] = {}  # base of an operand -> the forward matmuls that read it
    sites: list[Site] = []
    for node in c.graph.nodes:
        for site in _sites_of(node):
            if node in backward:
                _assign_backward_role(site, forward, backward, weights)
            else:
                _assign_forward_role(site, weights)
                for owner in {base(x) for x in (site.left, site.right) if x is not None}:
                    forward.setdefault(owner, []).append(site)
            sites.append(site)
    return sites


def weight_nodes(c: Compilation) -> set[fx.Node]:
    """Nodes computed from a parameter, and beside it from parameters, buffers and constants alone."""
    static: dict[fx.Node, bool] = {}  # node -> whether a parameter is in it
    for node in c.graph.nodes:
        if node.op == "placeholder":
            known = c.inputs.get(node.name)
            if known is not None and (known.is_parameter or known.is_buffer):
                static[node] = known.is_parameter
        elif node.op in ("get_attr", "call_function"):
            tensors = [i for i in node.all_input_nodes if not isinstance(i.meta.get("val"), SIZES)]
            if all(i in static for i in tensors):
                static[node] = any(static[i] for i in tensors)
    return {node for node, has_parameter in static.items() if has_parameter}


def _sites_of(node: fx.Node) -> list[Site]:
    if node.op != "call_function":
        return []
    if node.target in MATMULS:
        return [_grouped_site(node) if node.target is GROUPED else _matmul_site(node)]
    if node.target is aten.convolution.default:
        return [_convolution_site(node)]
    if node.target is aten.convolution_backward.default:
        return _convolution_backward_sites(node)
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name in FOREIGN or getattr(node.target, "_opname", "") in FOREIGN or "grouped_mm" in name:
        kind = FOREIGN.get(name, "grouped matmul")
        return [Site(node, node.name, kind, None, None, None, 0, 0, 0, why_other=f"{kind}: left as it is")]
    return []


def _matmul_site(node: fx.Node) -> Site:
    kind = MATMULS[node.target]  # type: ignore[index]
    bias, left, right = (None, *node.args) if kind != "addmm" else node.args
    *batch, m, k = value(left).shape  # type: ignore[arg-type]
    n = value(right).shape[-1]  # type: ignore[arg-type]
    site = Site(node, node.name, kind, left, right, bias, m, n, k, batch[0] if batch else 1)  # type: ignore[arg-type]
    if node.kwargs:
        site.why_other = "addmm with alpha or beta other than 1"
    return site


def _grouped_site(node: fx.Node) -> Site:
    left, right, *rest = node.args
    offs = rest[0] if rest else node.kwargs.get("offs")
    *_, m, k = value(left).shape  # type: ignore[arg-type]
    n = value(right).shape[-1]  # type: ignore[arg-type]
    site = Site(node, node.name, "grouped", left, right, None, m, n, k, offs=offs)  # type: ignore[arg-type]
    if offs is None or value(left).dim() != 2:  # type: ignore[arg-type]
        site.why_other = "grouped matmul whose rows are not what is grouped: left as it is"
    else:
        site.groups = value(offs).shape[0]  # type: ignore[arg-type]
    return site


def _convolution_site(node: fx.Node) -> Site:
    x, weight, bias = node.args[:3]
    m, n, k = _convolution_sizes(value(x), value(weight), value(node))  # type: ignore[arg-type]
    why = not_a_matmul(node)
    return Site(node, node.name, "convolution", x, weight, bias, m, n, k, why_other=why)  # type: ignore[arg-type]


def _convolution_backward_sites(node: fx.Node) -> list[Site]:
    grad, x, weight = node.args[:3]
    m, n, k = _convolution_sizes(value(x), value(weight), value(grad))  # type: ignore[arg-type]
    why = not_a_matmul(node)
    mask, sites = node.args[10], []
    live = getitems(node)
    if mask[0] and 0 in live:  # type: ignore[index]
        sites.append(Site(node, f"{node.name}.grad_input", "convolution", grad, weight, None, m, k, n, why_other=why))  # type: ignore[arg-type]
    if mask[1] and 1 in live:  # type: ignore[index]
        sites.append(Site(node, f"{node.name}.grad_weight", "convolution", grad, x, None, n, k, m, why_other=why))  # type: ignore[arg-type]
    return sites


def _convolution_sizes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[Any, Any, Any]:
    m: Any = out.shape[0]
    for size in out.shape[2:]:
        m = m * size
    k: Any = weight.shape[1]
    for size in weight.shape[2:]:
        k = k * size
    return m, weight.shape[0], k


def not_a_matmul(node: fx.Node) -> str:
    """Why a convolution is not a matmul over patches that do not overlap; "" if it is one."""
    backward = node.target is aten.convolution_backward.default
    x, weight = value(node.args[1 if backward else 0]), value(node.args[2 if backward else 1])  # type: ignore[arg-type]
    stride, padding, dilation, transposed, output_padding, groups = node.args[4 if backward else 3 :][:6]
    kernel = list(weight.shape[2:])
    del output_padding
    if transposed:
        return "a transposed convolution is not a matmul"
    if groups != 1:
        return f"a convolution in {groups} groups is not one matmul"
    if any(p != 0 for p in padding) or any(d != 1 for d in dilation):  # type: ignore[union-attr]
        return "a convolution with padding or dilation is not a matmul"
    if list(stride) != kernel:  # type: ignore[call-overload]
        return f"a convolution whose {'×'.join(map(str, kernel))} patches overlap or leave gaps is not a matmul"
    sizes = list(x.shape[2:])
    if not all(isinstance(s, int) for s in (*sizes, *x.shape[:2])):
        return "a convolution of symbolic size is left as it is"
    if any(s % p for s, p in zip(sizes, kernel, strict=True)):
        return f"the input {'×'.join(map(str, sizes))} does not divide into {'×'.join(map(str, kernel))} patches"
    return ""


def _assign_forward_role(site: Site, weights: set[fx.Node]) -> None:
    if site.why_other:
        return
    left, right = (_is_weight(operand, weights) for operand in (site.left, site.right))
    if left and right:
        site.why_other = "both operands are weights"
    elif not (left or right):
        site.why_other = "neither operand comes from an nn.Parameter"
    else:
        site.role, site.weight_on_left = "output", left


def _is_weight(operand: fx.Node | None, weights: set[fx.Node]) -> bool:
    return operand is not None and operand in weights and (not _has_matmul(operand) or _is_updated_weight(operand))


def _is_updated_weight(node: fx.Node) -> bool:
    """Whether `node` is a weight plus something of its shape that a matmul made, as a low-rank update is."""
    while len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    if not is_tensor(node):  # attention, or another operator of several outputs, which is no sum
        return False
    shape = value(node).shape
    terms = [i for i in node.all_input_nodes if is_tensor(i) and same_sizes(value(i).shape, shape)]
    return node.target is aten.add.Tensor and len(terms) == 2 and not all(map(_has_matmul, terms))


def _has_matmul(node: fx.Node) -> bool:
    """Whether a matmul takes part in what `node` computes; asked of weights only, whose history is short."""
    stack, seen = [node], {node}
    while stack:
        current = stack.pop()
        if current.target in MATMULS:
            return True
        fresh = [i for i in current.all_input_nodes if i not in seen]
        seen.update(fresh)
        stack += fresh
    return False


def _assign_backward_role(
    site: Site, forward: dict[fx.Node, list[Site]], backward: set[fx.Node], weights: set[fx.Node]
) -> None:
    if site.left is None or site.right is None:
        return
    gradients = [operand in backward for operand in (site.left, site.right)]
    if all(gradients):
        site.why_other = "both operands are gradients"
        return
    plain = site.right if gradients[0] else site.left
    matched = _matching(site, plain, forward)
    if matched is None:
        if plain in weights and not site.why_other:
            site.role, site.weight_on_left = "grad_input", not gradients[0]
        else:
            site.why_other = site.why_other or "no matmul of the forward half has these operands"
        return
    site.forward = matched
    if site.why_other or matched.role != "output":
        site.why_other = site.why_other or matched.why_other
        return
    matched.grads.append(site)
    is_weight = base(plain) is base(matched.weight)  # type: ignore[arg-type]
    site.role = "grad_input" if is_weight else "grad_weight"
    site.weight_on_left = plain is site.left  # the operand that is no gradient


def _matching(site: Site, plain: fx.Node, forward: dict[fx.Node, list[Site]]) -> Site | None:
    """The forward matmul that has `plain` among its operands and the same three sizes."""
    sizes = sorted(map(str, (site.m, site.n, site.k)))
    found = [
        f
        for f in forward.get(base(plain), [])
        if sorted(map(str, (f.m, f.n, f.k))) == sizes and same_sizes((f.batch, f.groups), (site.batch, site.groups))
    ]
    number = site.node.meta.get("seq_nr")
    exact = [f for f in found if number is not None and f.node.meta.get("seq_nr") == number]
    return (exact or found or [None])[0]
