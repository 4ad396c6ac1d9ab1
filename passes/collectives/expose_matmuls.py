"""Expose matmuls: those beside a collective become aten._scaled_mm, which Inductor can pipeline with it.

Before      %b = view(%q, uint8)  %w = wait(all_gather(%b))  %p = view(view(%w, [R, K]), e4m3)
            %y = fp8.scaled_mm(%p, %s, tensor, %weight, %t, tensor, None, bf16, False)
After       %w = wait(all_gather(%q))  %p = view(%w, [R, K])
            %y = _scaled_mm(%p, permute(%weight, [1, 0]), %s, %t, None, None, bf16, False)

Only under torch._inductor.config._micro_pipeline_tp (asynchronous tensor parallelism, a private setting whose users
know it): that pass of Inductor's splits a matmul into the parts that ranks hand each other, and knows aten.mm and
aten._scaled_mm alone, of what was gathered as it is. So this runs before it. Sound because
`kernels/matmul/scaled_mm.py` makes the same call of such a matmul. Where a matmul is neither fed by an all-gather nor
feeds a reduce-scatter, nothing changes.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor import config as inductor_config  # whether matmuls are to be pipelined

from fp8compile import ops
from fp8compile.passes.core.collectives import ALL_GATHER, AS_BYTES, CARRIERS
from fp8compile.passes.core.compilation import aten, update_value
from fp8compile.passes.core.marker_views import ScaledMM
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.core.walk import walk
from fp8compile.passes.lower.call_matmuls import RESHAPED, call, is_one_call
from fp8compile.passes.regions.region_graph import GraphEditor

REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
STEPS = {*CARRIERS, *RESHAPED, aten.cat.default, aten.permute.default, aten.clone.default}


def is_wanted(_: HalfGraph) -> bool:
    """Return True if Inductor is to pipeline matmuls with collectives."""
    return bool(inductor_config._micro_pipeline_tp)  # type: ignore[attr-defined]


def run(c: HalfGraph) -> None:
    """Expose the matmuls of a half that are beside a collective."""
    expose_matmuls(c.graph)


def expose_matmuls(graph: fx.Graph) -> None:
    """Expose the matmuls of `graph` that are beside a collective."""
    editor = GraphEditor(graph)
    for node in list(graph.find_nodes(op="call_function", target=ops.scaled_mm)):
        payload = ScaledMM(node).a
        gathered = _gathered(payload)
        if not is_one_call(node) or not (gathered or _is_scattered(node)):
            continue
        if gathered is not None:
            _gather_as_it_is(editor, gathered, payload)
        call(editor, node)


def _gathered(node: fx.Node) -> fx.Node | None:
    """Return the all-gather whose result, in another order or dtype, `node` is."""
    while node.op == "call_function" and node.target in STEPS:
        if node.target is ALL_GATHER:
            return node
        if node.target is aten.cat.default:
            gathers = {_gathered(part) for part in node.all_input_nodes}
            return gathers.pop() if len(gathers) == 1 else None
        node = node.all_input_nodes[0]
    return None


def _is_scattered(node: fx.Node) -> bool:
    """Return True if nothing but reduce-scatters read `node`, in another order."""
    readers = list(node.users)
    while readers and all(r.target in STEPS or r.target is REDUCE_SCATTER for r in readers):
        steps = [r for r in readers if r.target is not REDUCE_SCATTER]
        if not steps:
            return True
        readers = list(dict.fromkeys(u for r in steps for u in r.users))
    return False


def _gather_as_it_is(editor: GraphEditor, gather: fx.Node, payload: fx.Node) -> None:
    """Let a payload that travels as bytes travel as what it is, if nobody reads the bytes."""
    sent = first_input(gather)
    if payload.target is not AS_BYTES or sent.target is not AS_BYTES:
        return
    shown = first_input(payload)
    way = {gather, *walk([shown], through=lambda node: node is not gather)}
    if any(user not in way and user is not payload for node in way for user in node.users):
        return
    gather.update_arg(0, first_input(sent))
    for node in editor.graph.nodes:
        if node in way:
            update_value(node)
    payload.replace_all_uses_with(shown)
    editor.graph.erase_node(payload)
