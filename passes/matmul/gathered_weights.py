"""Gathered weights: take a weight that arrives as FP8 payload and scale as it is.

Before      %t = permute(%payload)   %w = fp8.dequantize(%t, %scale, tensor, bf16)   %y = mm(%x, %w)
After       %w = fp8.dequantize(%payload, %scale, tensor, bf16)   %wt = permute(%w)   %y = mm(%x, %wt)     (normalize)
            %y = fp8.scaled_mm(%qx, %sx, row, %payload, %scale, tensor, …)                      (quantize_matmuls)
            %pt = clone(permute(%payload))   %dx = fp8.scaled_mm(%qdy, %sdy, tensor, %pt, %scale, tensor, …)

Sound because a payload stands for payload · scale, exactly; a scale of the tensor or of 128×128 blocks holds for the
transpose as well (blocks' scales are transposed with it). The weight is not cast a second time, and no BF16 weight is
ever made. FSDP2 hands over such weights (`fp8compile/distributed/sharded_weight.py`).

One dequantize a weight is left at the start, so roles are found as ever; then operands of the plan are marked, and what
they were read from is dead.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fp8compile import ops
from fp8compile.formats import ALIGNMENT, FP8_DTYPES, parse_granularity
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, base, is_transpose_of, value
from fp8compile.passes.core.marker_views import Dequantize
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.core.sizes import divides, same_sizes


@dataclass(frozen=True)
class Gathered:
    """A weight [N, K] that arrived in FP8."""

    payload: fx.Node
    scale: fx.Node
    granularity: str

    @property
    def format(self) -> str:
        """The name of its format."""
        return FP8_DTYPES[value(self.payload).dtype].name


def gathered(node: fx.Node | None) -> Gathered | None:
    """Return the weight that arrived in FP8 of which `node` is a view; None for any other node."""
    weight = Dequantize.of(base(node)) if node is not None else None
    if weight is None or weight.data.op != "placeholder":
        return None
    return Gathered(weight.data, weight.scale, weight.granularity)


def normalize(c: Compilation) -> None:
    """Keep one dequantize for each weight that arrived in FP8 and each dtype, of the payload as it arrived."""
    known: dict[tuple[object, ...], fx.Node] = {}
    start = next((n for n in c.graph.nodes if n.op != "placeholder"), None)
    for node in list(c.graph.find_nodes(op="call_function", target=ops.dequantize)):
        weight = Dequantize(node)
        (root, turned), (factor, _) = _unturned(weight.data), _unturned(weight.scale)
        if root is None or factor is None or start is None:
            continue
        key = (root, factor, weight.granularity, weight.dtype)
        if key not in known:
            known[key] = c.emit(ops.dequantize, *key, like=node, before=start)
        whole = known[key]
        replace_value(c, node, c.transposed(whole, like=node) if turned else whole)


def _unturned(node: fx.Node) -> tuple[fx.Node | None, bool]:
    """Return the input that `node` is a view of, and True if it is seen transposed; None for any other view or node."""
    turned = False
    while node.op == "call_function" and node.target in VIEWS:
        source = node.all_input_nodes[0]
        if is_transpose_of(node, source) or node.target in (aten.t.default, aten.transpose.int):
            turned = not turned
        elif not same_sizes(value(source).shape, value(node).shape):
            return None, False
        node = source
    return (node, turned) if node.op == "placeholder" else (None, False)


def why_not_taken(weight: Gathered, partner: str, format: str) -> str:
    """Return why a matmul cannot take the payload of `weight` beside an operand with these casts; "" if it can."""
    mine, other = parse_granularity(weight.granularity).kind, parse_granularity(partner).kind
    if (mine == "block") != (other == "group"):
        return f"scales of {weight.granularity} do not go with {partner}"
    if weight.format == format == "e5m2":
        return "FP8 units multiply at most one E5M2 operand"
    if not all(divides(ALIGNMENT, size) for size in value(weight.payload).shape):
        return f"its sizes are no multiples of {ALIGNMENT}"
    return ""
