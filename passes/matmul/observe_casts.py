"""Observe casts: with options={"watch": name}, every scale passes an operator that measures what is cast with it.

Before      %s = fp8.scale(%a, e4m3)                                    After  %s = fp8.scale(%a, e4m3)
            %q = fp8.quantize(%x, %s, e4m3, row)                               %o = fp8.observe(%s, [%x], "e4m3 row", …)
                                                                               %q = fp8.quantize(%x, %o, e4m3, row)

The operator returns the scale as it is, so no number changes. It stands for a border of generated kernels: while
watching, less is fused. A scale that serves two layouts is observed in each, for rows and groups lie differently there.

Operands of matmuls that the automatic mode has changed to BF16 have no cast; they pass `fp8::probe`, which measures
what casts would lose, so that there is evidence for a way back.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8compile import ops
from fp8compile.passes.core.collectives import CARRIERS
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, sort_topologically
from fp8compile.passes.matmul.roles import MATMULS
from fp8compile.plan import overrides
from fp8compile.plan.rows import BF16, FP8

FOLLOWED = {*VIEWS, *CARRIERS, aten.cat.default, aten.clone.default}  # from a payload to the matmul that reads it
CONVERSIONS = {torch.ops.prims.convert_element_type.default, aten.clone.default, *VIEWS}
PROBED = "e4m3 tensor"
DEPTH = 64  # nodes between a product and the matmuls that it is made of; more is no SwiGLU


def run(c: Compilation) -> None:
    """Insert the operators; without the option, nothing."""
    if c.options.watch is None:
        return
    readers = _readers(c)
    casts: dict[fx.Node, list[fx.Node]] = {}
    for node in c.graph.nodes:
        if node.target is ops.quantize:
            casts.setdefault(node.args[1], []).append(node)
    order = {n: i for i, n in enumerate(c.graph.nodes)}
    for scale, quantizes in casts.items():
        _observe(c, scale, quantizes, readers, order)
    _probe_moved(c)
    sort_topologically(c.graph)


def _observe(
    c: Compilation,
    scale: fx.Node,
    quantizes: list[fx.Node],
    readers: dict[fx.Node, list[Any]],
    order: dict[fx.Node, int],
) -> None:
    users = list(scale.users)
    last = max([scale, *(q.all_input_nodes[0] for q in quantizes)], key=order.__getitem__)
    seen = scale
    for transpose in dict.fromkeys(map(_is_transposed, quantizes)):
        mine = [q for q in quantizes if _is_transposed(q) == transpose]
        seen = _emit(c, seen, mine, transpose, readers, last.next)
    for user in users:
        user.replace_input_with(scale, seen)


def _emit(
    c: Compilation,
    scale: fx.Node,
    quantizes: list[fx.Node],
    transpose: bool,
    readers: dict[fx.Node, list[Any]],
    place: fx.Node,
) -> fx.Node:
    operands = list(dict.fromkeys(o for q in quantizes for o in _operands(q, readers)))
    cast = f"{quantizes[0].args[2]} {quantizes[0].args[3]}"
    tensors = list(dict.fromkeys(q.args[0] for q in quantizes))
    rest = (tensors, cast, transpose, c.options.watch, _key(f"{cast}{_delay(quantizes[0])}", operands, tensors))
    node = c.emit(ops.observe, scale, *rest, like=scale, before=place)
    if "recompute" in node.meta:  # in a checkpointed region: computed again, it would be measured again
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return node


def _delay(quantize: fx.Node) -> str:
    """ " delayed(16)" for a cast whose scale comes from a history; its rows say so."""
    scale: Any = quantize.args[1]
    while scale.target is ops.observe:
        scale = scale.args[0]
    return f" delayed({scale.args[3]})" if scale.target is ops.delayed_scale else ""


def _key(cast: str, operands: Any, tensors: list[Any]) -> str:
    trait = ["product"] if any(is_product(t) for t in tensors) else []
    return json.dumps([cast, operands, *trait])


def is_product(node: fx.Node) -> bool:
    """Whether `node` is the product of two tensors that come from different matmuls, as SwiGLU's is."""
    while node.target in CONVERSIONS:
        node = node.all_input_nodes[0]
    if node.target is not aten.mul.Tensor or len(node.all_input_nodes) != 2:
        return False
    left, right = (_matmuls_above(n) for n in node.all_input_nodes)
    return bool(left - right) and bool(right - left)


def _matmuls_above(node: fx.Node) -> set[fx.Node]:
    """The nearest matmuls that `node` is computed from element by element."""
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


def _probe_moved(c: Compilation) -> None:
    """Let the matmuls that the automatic mode changed to BF16 read their operands through a probe."""
    seen: dict[tuple[str, str], int] = {}
    for row in c.plan.matmuls:
        occurrence = seen[row.path, row.role] = seen.get((row.path, row.role), -1) + 1
        site = c.sites.get(row.node)
        moved = row.decision == BF16 and row.reason.startswith(overrides.ADAPTIVE)
        if not moved or site is None or site.kind == "convolution":
            continue
        for side, operand, transpose in (("left", site.left, False), ("right", site.right, True)):
            assert operand is not None
            key = _key(PROBED, [(row.path, row.role, occurrence, side)], [operand])
            node = c.emit(ops.probe, operand, transpose, c.options.watch, key, like=site.node)
            if "recompute" in node.meta:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            first = 1 if site.kind == "addmm" else 0  # behind its bias
            site.node.update_arg(first + (side == "right"), node)


def _is_transposed(quantize: fx.Node) -> bool:
    return len(quantize.args) > 4 and bool(quantize.args[4])


def _readers(c: Compilation) -> dict[fx.Node, list[Any]]:
    """FP8 matmul node -> (path, role, occurrence) of its plan row."""
    named = {n.name: n for n in c.graph.nodes}
    seen: dict[tuple[str, str], int] = {}
    found: dict[fx.Node, list[Any]] = {}
    for row in c.plan.matmuls:
        occurrence = seen[row.path, row.role] = seen.get((row.path, row.role), -1) + 1
        node = named.get(row.node) if row.decision == FP8 else None
        while node is not None and node.target is not ops.scaled_mm and node.all_input_nodes:
            node = node.all_input_nodes[0]  # a padded result is cut, a wide bias added
        if node is not None and node.target is ops.scaled_mm:
            found[node] = [row.path, row.role, occurrence]
    return found


def _operands(quantize: fx.Node, readers: dict[fx.Node, list[Any]]) -> list[tuple[Any, ...]]:
    """(path, role, occurrence, side) of every matmul that reads this data."""
    found, stack = [], [quantize]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.target is ops.scaled_mm and user in readers:
                sides = [side for side, index in (("left", 0), ("right", 3)) if user.args[index] is node]
                found += [(*readers[user], side) for side in sides]
            elif user.target in FOLLOWED:
                stack.append(user)
    return found
