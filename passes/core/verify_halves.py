"""Verify what the cut made: forward and backward, between which every payload travels with its scale.

- both halves keep the rules of `passes/core/verify.py`, and forward returns what the model does
- backward gets nothing that forward does not return for it
- FP8 data that backward reads meets the scale with which forward made it, in the granularity in which it was made
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.errors import VerificationError
from fp8compile.formats import FP8_DTYPES
from fp8compile.passes.core.compilation import is_tensor, value
from fp8compile.passes.core.marker_views import Dequantize, GroupedPart, ScaledMM
from fp8compile.passes.core.verify import (
    TRANSPARENT,
    Signature,
    excerpt,
    made_of,
    parts_of,
    quantizes,
    shown_by,
    signature,
    verify,
)
from fp8compile.passes.core.verify_grouped import contracts_groups

NOT_SAVED = (
    "tangents",
    "rng_state",
    "fwd_rng",
    "bwd_rng",
    "bwd_base",
    "fwd_base",
)  # inputs of backward that come from outside


def verify_halves(forward: fx.Graph, backward: fx.Graph, outputs: Signature) -> None:
    """Check all rules of this module; raises `VerificationError`. `outputs`: what the model returns."""
    verify(forward, "the cut (forward)")
    verify(backward, "the cut (backward)")
    returns = signature(forward)[: len(outputs)]
    if returns != outputs:
        raise VerificationError(f"after the cut: outputs changed from {outputs} to {returns}")
    returned = {n.name: n for n in forward.output_node().all_input_nodes}
    for node in backward.nodes:
        why = _broken_rule(node, returned)
        if why:
            raise VerificationError(f"after the cut: %{node.name} of backward: {why}\n{excerpt(backward, node)}")


def _broken_rule(node: fx.Node, returned: dict[str, fx.Node]) -> str:
    if node.op == "placeholder" and is_tensor(node) and not _is_from_outside(node):
        return "" if node.name in returned else "forward does not return it"
    if restored := Dequantize.of(node):
        return _unpaired(restored.data, restored.scale, restored.granularity, returned)
    if mm := ScaledMM.of(node):
        if contracts_groups(mm):
            return _unpaired_groups(mm.a, mm.scale_a, returned) or _unpaired_groups(mm.b, mm.scale_b, returned)
        left = _unpaired(mm.a, mm.scale_a, mm.granularity_a, returned)
        return left or _unpaired(mm.b, mm.scale_b, mm.granularity_b, returned)
    return ""


def _is_from_outside(node: fx.Node) -> bool:
    return any(word in str(node.target) for word in NOT_SAVED)


def _unpaired(data: fx.Node, scale: fx.Node, granularity: str, returned: dict[str, fx.Node]) -> str:
    """Return why FP8 data meets another scale than its own; "" if it meets its own."""
    saved = _saved(data, returned)
    if saved is not None and value(saved).dtype not in FP8_DTYPES:
        return ""
    kept = _saved(scale, returned)
    parts = parts_of(_plain(scale if kept is None else kept))
    for made in quantizes(data if saved is None else saved):
        if made.granularity != granularity:
            return f"%{made.node.name} was cast by {made.granularity} and is read as {granularity}"
        own = made.scale
        is_own = own in (scale, *scale.all_input_nodes) if kept is None else own in (kept, *kept.all_input_nodes)
        if not is_own and _made_of(own, returned) not in [_made_of(part, returned) for part in parts]:
            return f"%{data.name} was made with %{own.name} and is read with %{scale.name}"
    return ""


def _made_of(scale: fx.Node, returned: dict[str, fx.Node]) -> object:
    """Return `made_of` for a scale of either half: in forward, if that has saved the scale or its amax."""
    kept = _saved(scale, returned)
    match made_of(_plain(scale) if kept is None else _plain(kept)):
        case (fx.Node() as amax, how) if (saved := _saved(amax, returned)) is not None:
            return shown_by(saved), how
        case made:
            return made


def _unpaired_groups(data: fx.Node, scale: fx.Node, returned: dict[str, fx.Node]) -> str:
    """Return why groups that forward has cast meet other scales than their own; "" if they meet their own."""
    made, kept = (GroupedPart.of(_saved(node, returned)) for node in (data, scale))
    if made is None or (kept is not None and kept.cast.node is made.cast.node):
        return ""
    return f"%{data.name} was not made with %{scale.name}"


def _plain(node: fx.Node) -> fx.Node:
    """Return what `node` is a view or a copy of."""
    while node.op == "call_function" and node.target in TRANSPARENT and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _saved(node: fx.Node, returned: dict[str, fx.Node]) -> fx.Node | None:
    """Return the node of forward whose value `node` of backward shows; None if backward made it."""
    node = _plain(node)
    found = returned.get(node.name) if node.op == "placeholder" else None
    return found if found is not None and isinstance(found.meta.get("val"), torch.Tensor) else None
