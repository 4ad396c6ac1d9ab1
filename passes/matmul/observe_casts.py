"""Observe casts: with options={"watch": name}, every scale passes an operator that measures its cast.

Before      %s = fp8.scale(%a, e4m3)                                    After  %s = fp8.scale(%a, e4m3)
            %q = fp8.quantize(%x, %s, e4m3, row)                               %o = fp8.observe(%s, [%x], "e4m3 row", …)
                                                                               %q = fp8.quantize(%x, %o, e4m3, row)

The operator returns the scale as it is, so nothing can remove or reorder it, and no number changes. It is never
computed again in backward, which would count twice. It stands for a border of generated kernels: while watching, less
is fused. A scale that serves two layouts is observed in each, for rows and groups lie differently there.

Operands of matmuls that the automatic mode has changed to BF16 have no cast; they pass `fp8::probe`, which measures
what casts would lose, so that there is evidence for a way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.passes.core.collectives import CARRIERS
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, sort_topologically
from fp8compile.passes.core.marker_views import Quantize, Scale, ScaledMM
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.walk import walk
from fp8compile.passes.matmul.find_matmuls import CONVOLUTIONS, MATMULS
from fp8compile.plan.reasons import Reason

# from a payload to the matmul that reads it
FOLLOWED = {*VIEWS, *CARRIERS, aten.where.self, aten.cat.default, aten.clone.default}
CONVERSIONS = {torch.ops.prims.convert_element_type.default, aten.clone.default, *VIEWS}
PROBED = "e4m3 tensor"
DEPTH = 64  # nodes between a product and the matmuls that it is made of; more is no SwiGLU
Reader = tuple[str, str, int]  # path, role and occurrence of a row


def run(c: Compilation) -> None:
    """Insert the operators; without the option, nothing."""
    if c.options.watch is None:
        return
    readers = _readers(c)
    casts: dict[fx.Node, list[Quantize]] = {}
    for node in c.graph.nodes:
        if (cast := Quantize.of(node)) is not None:
            casts.setdefault(cast.scale, []).append(cast)
    order = {n: i for i, n in enumerate(c.graph.nodes)}
    for scale, quantizes in casts.items():
        _observe(c, scale, quantizes, readers, order)
    _probe_moved(c)
    sort_topologically(c.graph)


def _observe(
    c: Compilation,
    scale: fx.Node,
    quantizes: list[Quantize],
    readers: dict[fx.Node, Reader],
    order: dict[fx.Node, int],
) -> None:
    users = list(scale.users)
    last = max([scale, *(q.x for q in quantizes)], key=order.__getitem__)
    seen = scale
    for transpose in dict.fromkeys(q.transpose for q in quantizes):
        mine = [q for q in quantizes if q.transpose == transpose]
        seen = _emit(c, seen, mine, transpose, readers, last.next)
    for user in users:
        user.replace_input_with(scale, seen)


def _emit(
    c: Compilation,
    scale: fx.Node,
    quantizes: list[Quantize],
    transpose: bool,
    readers: dict[fx.Node, Reader],
    place: fx.Node,
) -> fx.Node:
    operands = list(dict.fromkeys(o for q in quantizes for o in _operands(q.node, readers)))
    cast = f"{quantizes[0].format} {quantizes[0].granularity}"
    tensors = list(dict.fromkeys(q.x for q in quantizes))
    rest = (tensors, cast, transpose, c.options.watch, _key(f"{cast}{_delay(quantizes[0])}", operands, tensors))
    return _saved(c.emit(ops.observe, scale, *rest, like=scale, before=place))


def _saved(node: fx.Node) -> fx.Node:
    """Return `node`, saved in a checkpointed region: computed again, it would measure again."""
    if "recompute" in node.meta:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return node


def _delay(quantize: Quantize) -> str:
    """Return " delayed(16)" for a cast whose scale comes from a history, else ""; its rows say so."""
    node = quantize.scale
    while node.target is ops.observe:
        node = first_input(node)
    scale = Scale.of(node)
    return f" delayed({scale.history})" if scale is not None and scale.history else ""


def _key(cast: str, operands: Any, tensors: list[fx.Node]) -> str:
    trait = ["product"] if any(is_product(t) for t in tensors) else []
    return json.dumps([cast, operands, *trait])


def is_product(node: fx.Node) -> bool:
    """Return True if `node` is the product of two tensors that come from different matmuls, as SwiGLU's is."""
    while node.target in CONVERSIONS:
        node = node.all_input_nodes[0]
    if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return False
    left, right = (_matmuls_above(n) for n in node.all_input_nodes)
    return bool(left - right) and bool(right - left)


def _matmuls_above(node: fx.Node) -> set[fx.Node]:
    """Return the nearest matmuls that `node` is computed from element by element."""
    found, stack, seen = set(), [node], {node}
    while stack and len(seen) < DEPTH:
        node = stack.pop()
        if node.target in MATMULS or node.target is ops.scaled_mm:
            found.add(node)
            continue
        fresh = [i for i in node.all_input_nodes if i not in seen]
        seen.update(fresh)
        stack += fresh
    return found


def _occurrences(matmuls: Iterable[MatmulNode]) -> Iterator[tuple[MatmulNode, Reader]]:
    """Yield each matmul with path, role, and how many matmuls before it have the same."""
    seen: dict[tuple[str, str], int] = {}
    for matmul in matmuls:
        occurrence = seen[matmul.path, matmul.role] = seen.get((matmul.path, matmul.role), -1) + 1
        yield matmul, (matmul.path, matmul.role, occurrence)


def _probe_moved(c: Compilation) -> None:
    """Let the matmuls that the automatic mode changed to BF16 read their operands through a probe."""
    for matmul, reader in _occurrences(c.matmuls):
        moved = not matmul.is_fp8 and matmul.why is not None and matmul.why.code == Reason.ADAPTIVE
        if not moved or matmul.node.target in CONVOLUTIONS:
            continue
        first = 0 if matmul.bias is None else 1  # operands stand behind a bias
        for position, side, transpose in ((first, "left", False), (first + 1, "right", True)):
            operand = matmul.pair[position - first]
            key = _key(PROBED, [(*reader, side)], [operand])
            node = c.emit(ops.probe, operand, transpose, c.options.watch, key, like=matmul.node)
            matmul.node.update_arg(position, _saved(node))


def _readers(c: Compilation) -> dict[fx.Node, Reader]:
    """Return for each FP8 matmul of the graph the path, role and occurrence of its row."""
    found: dict[fx.Node, Reader] = {}
    for matmul, reader in _occurrences(c.matmuls):
        node = matmul.node
        if matmul.is_placed:
            continue
        while matmul.is_fp8 and node.target is not ops.scaled_mm and node.all_input_nodes:
            node = node.all_input_nodes[0]  # a padded result is cut, a wide bias added
        if matmul.is_fp8 and node.target is ops.scaled_mm:
            found[node] = reader
    return found


def _operands(quantize: fx.Node, readers: dict[fx.Node, Reader]) -> Iterator[tuple[str, str, int, str]]:
    """Yield path, role, occurrence and side of every matmul that reads this data."""
    for data in walk([quantize], lambda node: [user for user in node.users if user.target in FOLLOWED]):
        for user in data.users:
            matmul = ScaledMM.of(user)
            if matmul is not None and user in readers:
                sides = {"left": matmul.a, "right": matmul.b}
                yield from ((*readers[user], side) for side, operand in sides.items() if operand is data)
