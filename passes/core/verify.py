"""The verifier: what must hold of a graph between any two passes.

- the graph is well-formed, and its outputs have the shapes and dtypes that they had before the first pass
- every node carries its value, and its arguments hold symbolic sizes as nodes, never raw; a marker's value is what the
  operator says of its arguments
- FP8 data comes from fp8.quantize, fp8.grouped_cast (or views and concatenations of such data), or from outside; it is
  contiguous along the contracted dimension where a matmul reads it, and its contracted dimension is a multiple of 16
- FP8 data is read only by fp8.scaled_mm, fp8.chunked_loss_in_fp8, fp8.dequantize and regions (or passes through
  views, concatenations, graph outputs; or is gathered, masked or sent to other ranks as bytes)
- the groups of a grouped matmul: `passes/core/verify_grouped.py`
- a view has its value in the memory of what it is a view of: torch decides by that what backward may overwrite
- operators that demand strides find their inputs as they came (`passes/core/stride_demands.py`)
- data meets the scale it was made with, or arrived with, in the granularity it was made in, and the scale has the shape
  of that; data from other ranks meets a scale of the amaxes that travelled with it

A broken rule is our bug: `VerificationError` names the pass, the node and the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import (  # torch gives them no values
    graphsafe_run_with_rng_state,
    run_and_save_rng_state,
    run_with_rng_state,
)

from fp8compile import ops
from fp8compile.errors import VerificationError
from fp8compile.formats import ALIGNMENT, FP8_DTYPES, parse_granularity
from fp8compile.passes.core.aten_views import Concatenation
from fp8compile.passes.core.collectives import AS_BYTES, CARRIERS
from fp8compile.passes.core.compilation import VIEWS, aten, is_detached, value
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.core.marker_views import Dequantize, Quantize, ScaledMM
from fp8compile.passes.core.node_views import call_of, first_input
from fp8compile.passes.core.run_passes import Check
from fp8compile.passes.core.sizes import divides, same_sizes
from fp8compile.passes.core.stages import StageGraph
from fp8compile.passes.core.stride_demands import Broken, check_strides
from fp8compile.passes.core.verify_grouped import contracts_groups, wrong_groups

TRANSPARENT = VIEWS | {aten.cat.default, aten.clone.default, aten.reshape.default}
MOVERS = CARRIERS | {aten.where.self}  # what may be done to a payload as bytes
HELD = {*FP8_DTYPES, torch.uint8}
READERS = (
    ops.scaled_mm,
    ops.chunked_loss_in_fp8,
    ops.dequantize,
    ops.region,
)  # what a region does with FP8 data: `passes/lower/verify_kernels.py`
Signature = list[tuple[str, list[str]] | None]
Values = dict[str, torch.Tensor | tuple[torch.Tensor, ...]]


def signature(graph: fx.Graph) -> Signature:
    """Return dtypes and shapes of the graph's outputs."""
    outputs = graph.output_node().args[0]
    return [_type(a) for a in (outputs if isinstance(outputs, (list, tuple)) else [outputs])]


def _type(node: Any) -> tuple[str, list[str]] | None:
    val = node.meta.get("val") if isinstance(node, fx.Node) else None
    return (str(val.dtype), [str(s) for s in val.shape]) if isinstance(val, torch.Tensor) else None


def graph_verifier(c: StageGraph) -> Check:
    """Return the check of a joint graph: all rules of this module, and the outputs that it has now."""
    outputs = signature(c.graph)
    expected: Values = {}  # most markers are there after the next pass, too
    return lambda step: verify(c.graph, step, outputs, expected=expected)


def form_verifier(c: StageGraph) -> Check:
    """Return the check of a half in Inductor's hands: the form of its graph, and the outputs that it has now."""
    outputs = signature(c.graph)

    def check(step: str) -> None:
        verify_form(c.graph, step)
        _verify_outputs(c.graph, step, outputs)

    return check


def verify_form(graph: fx.Graph, stage: str) -> None:
    """Raise `VerificationError` if `graph` is not well-formed after `stage`."""
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        raise VerificationError(f"after {stage}: malformed graph: {error}") from error


def _verify_outputs(graph: fx.Graph, stage: str, outputs: Signature) -> None:
    if signature(graph) != outputs:
        raise VerificationError(f"after {stage}: outputs changed from {outputs} to {signature(graph)}")


def verify(
    graph: fx.Graph,
    stage: str,
    outputs: Signature | None = None,
    broken: Broken = (),
    expected: Values | None = None,
) -> None:
    """Check all rules of this module after `stage`; raises `VerificationError`. `broken`: demands of strides that were
    not met before; `expected`: values of markers that earlier calls for this graph have evaluated, which it adds to."""
    verify_form(graph, stage)
    expected = {} if expected is None else expected
    for node in graph.nodes:
        why = _broken_rule(node, expected)
        if why:
            raise VerificationError(f"after {stage}: %{node.name}: {why}\n{excerpt(graph, node)}")
    check_strides(graph, stage, broken)
    if outputs is not None:
        _verify_outputs(graph, stage, outputs)


def _broken_rule(node: fx.Node, expected: Values) -> str:
    if node.op == "call_function" and "val" not in node.meta and _returns(node):
        return "carries no value"
    if _holds_raw_size((node.args, node.kwargs)):
        return "has a raw symbolic size among its arguments"
    if node.target in ops.MARKERS:
        why = _wrong_marker(node, expected)
        if why:
            return why
    if node.op == "call_function" and node.all_input_nodes and is_detached(node):
        return f"has memory of its own, and is a view of %{node.all_input_nodes[0].name}"
    if isinstance(node.meta.get("val"), torch.Tensor) and value(node).dtype in HELD and _is_ours(node):
        return _wrong_users(node)
    return ""


def _holds_raw_size(arg: Any) -> bool:
    if isinstance(arg, (tuple, list)):
        return any(map(_holds_raw_size, arg))
    if isinstance(arg, dict):
        return any(map(_holds_raw_size, arg.values()))
    return isinstance(arg, torch.SymInt)


def _returns(node: fx.Node) -> bool:
    """Return True if an operator has a result with a value: assertions and what keeps a generator's state have none."""
    if node.target in (run_and_save_rng_state, run_with_rng_state, graphsafe_run_with_rng_state):
        return False
    return not (isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns)


def _is_ours(node: fx.Node) -> bool:
    """Return True if FP8 data comes from our quantize; a user's own FP8 tensors are none of our business."""
    while node.target in TRANSPARENT | MOVERS and node.all_input_nodes:
        node = _moved(node)
    return node.target in (ops.quantize, ops.grouped_cast)


def _moved(node: fx.Node) -> fx.Node:
    """Return what a node shows, moves or masks."""
    if node.target is not aten.where.self:
        return node.all_input_nodes[0]
    shown = [x for x in node.args[1:] if isinstance(x, fx.Node) and same_sizes(value(x).shape, value(node).shape)]
    return shown[0] if len(shown) == 1 else node.all_input_nodes[0]


def _wrong_users(node: fx.Node) -> str:
    for user in node.users:
        if not _may_read(node, user):
            return f"FP8 data is read without its scale by %{user.name} ({user.target})"
    return ""


def _may_read(node: fx.Node, user: fx.Node) -> bool:
    if user.op == "output" or user.target in TRANSPARENT:
        return True
    if user.target is AS_BYTES:
        return value(user).dtype in HELD
    as_bytes = value(node).dtype == torch.uint8
    return user.target in (MOVERS if as_bytes else READERS)


def _wrong_marker(node: fx.Node, expected: Values) -> str:
    call = f"{node.target}{fx.map_arg(node.args, lambda n: _describe(n.meta['val']))}"
    if call not in expected:  # layers are alike
        expected[call] = _evaluate(node)
    wanted, actual = (x if isinstance(x, tuple) else (x,) for x in (expected[call], node.meta["val"]))
    if not all(x.dtype == y.dtype and same_sizes(x.shape, y.shape) for x, y in zip(wanted, actual, strict=True)):
        return f"has value {_described(actual)}, its arguments give {_described(wanted)}"
    if node.target is ops.scaled_mm:
        return _wrong_scaled_mm(node)
    if restored := Dequantize.of(node):
        return _wrong_operand(restored.data, restored.scale, restored.granularity)
    cast = Quantize.of(node)
    return _wrong_quantize(cast) if cast else ""


def _wrong_quantize(cast: Quantize) -> str:
    scale, granularity = value(cast.scale), parse_granularity(cast.granularity)
    wanted = granularity.scale_shape(value(cast.node).shape)
    if not same_sizes(scale.shape, wanted):
        return f"its scale has shape {list(scale.shape)}, {granularity} needs {wanted}"
    return "" if scale.dtype == torch.float32 else "its scale is not FP32"


def _evaluate(node: fx.Node) -> torch.Tensor | tuple[torch.Tensor, ...]:
    args: Any = fx.map_arg(node.args, lambda n: n.meta["val"])
    fake: Any = ops.FAKES[call_of(node)]
    return fake(*args)  # takes values of several fake modes, as backward has


def _wrong_scaled_mm(node: fx.Node) -> str:
    mm = ScaledMM(node)
    if contracts_groups(mm):
        return wrong_groups(mm)
    why = _wrong_operand(mm.a, mm.scale_a, mm.granularity_a) or _wrong_operand(mm.b, mm.scale_b, mm.granularity_b)
    if why:
        return why
    a, b = value(mm.a), value(mm.b)
    k_a, k_b = a.shape[-1], b.shape[-1]
    if not same_sizes([k_a], [k_b]):
        return f"contracts {k_a} with {k_b} elements"
    if not divides(ALIGNMENT, k_a) or not divides(ALIGNMENT, b.shape[-2]):
        return f"K {k_a} or N {b.shape[-2]} is not a multiple of {ALIGNMENT}"
    return "" if mm.offs is None else wrong_groups(mm)


def _wrong_operand(data: fx.Node, scale: fx.Node, granularity: str) -> str:
    """Return why `data` and `scale` do not belong together; "" if they do."""
    v = value(data)
    if v.dtype not in FP8_DTYPES:
        return f"%{data.name} is {v.dtype}, not FP8"
    arrived = data.op == "placeholder"  # lies as who made it liked; scaled_mm's tag has Inductor copy it
    if str(v.stride(-1)) != "1" and not arrived and not any(str(s) == "0" for s in v.shape):
        return f"%{data.name} is not contiguous along its contracted dimension"
    for made in quantizes(data):
        if made.granularity != granularity:
            return f"%{data.name} was cast by {made.granularity} and is read as {granularity}"
        own = made.scale
        if own.op == "placeholder":  # of backward: `verify_halves.py` knows what it was made of
            continue
        if own is not scale and own not in scale.all_input_nodes and made_of(own) not in map(made_of, parts_of(scale)):
            return f"%{data.name} was made with %{own} and is read with %{scale.name}"
    if _arrived_with(data) != _arrived_with(scale):
        return f"%{data.name} did not arrive with %{scale.name}"
    wanted = parse_granularity(granularity).scale_shape(v.shape)
    if not same_sizes(value(scale).shape, wanted):
        return f"%{scale.name} has shape {list(value(scale).shape)}, {granularity} of {list(v.shape)} needs {wanted}"
    return ""


def quantizes(data: fx.Node) -> list[Quantize]:
    """Return the casts whose results `data` shows or concatenates."""
    if cast := Quantize.of(data):
        return [cast]
    shows = data.target in TRANSPARENT | MOVERS
    return [q for i in data.all_input_nodes for q in quantizes(i)] if shows else []


def parts_of(scale: fx.Node) -> list[fx.Node]:
    """Return the scales that a concatenation has; those of another are one."""
    cat = Concatenation.of(scale)
    return [part for piece in cat.pieces for part in parts_of(piece)] if cat is not None else [scale]


def made_of(scale: fx.Node) -> object:
    """Return the amax that `scale` is made of, before it has travelled, and how; `scale` itself where it is made
    otherwise."""
    while scale.target is ops.observe:
        scale = first_input(scale)
    return (shown_by(first_input(scale)), scale.args[1:]) if scale.target is ops.scale else scale


def shown_by(node: fx.Node) -> fx.Node:
    """Return what `node` shows, moves or masks parts of, in the end."""
    while node.target in TRANSPARENT | MOVERS:
        node = _moved(node)
    return node


def _arrived_with(node: fx.Node) -> object:
    """Return the input of the user's function of which an input of the graph is a part, through views and copies."""
    while node.target in TRANSPARENT and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return getattr(node.meta.get("desc"), "base", None) if node.op == "placeholder" else None


def _described(values: Sequence[torch.Tensor]) -> str:
    return " and ".join(map(_describe, values))


def _describe(val: Any) -> str:
    return f"{val.dtype}{list(val.shape)}"


def excerpt(graph: fx.Graph, node: fx.Node) -> str:
    """Return the lines of `graph` around `node`, for an error."""
    lines = graph_text(graph).splitlines()
    at = list(graph.nodes).index(node)
    return "\n".join(("-> " if i == at else "   ") + lines[i] for i in range(max(0, at - 4), min(len(lines), at + 3)))
