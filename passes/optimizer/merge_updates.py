"""Merge updates: one operator for all parameters that are updated by the same expression.

Before      %q, %s = fp8.store_state(%m, …);  copy_(%payload, %q);  copy_(%side, %s);  copy_(%param, %new)     for each
After       fp8.update_parameters([%param, %payload, %side, %param', …], [%grad, %grad', …], [%step_size, …], spec)

It stands behind all that reads the parameters and states as they were, and before the copies that are left: it reads
numbers (ASGD's rate) that those may overwrite. It writes in place.
Updates that no spec can say (a matmul in the middle is fine, a shape of its own is not) stay as they are, with a
reason in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fp8compile.kernels.optimizer.update_spec import STATE, Update
from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import aten, remove_dead, value
from fp8compile.passes.core.node_views import Copy
from fp8compile.passes.core.stages import OptimizerGraph
from fp8compile.passes.optimizer.find_updates import ParameterUpdate, find_updates
from fp8compile.passes.optimizer.write_update import UpdateSkipError, Written, write_update
from fp8compile.plan.rows import MergedUpdate


def run(c: OptimizerGraph) -> None:
    """Merge what can be merged; note a row for every operator, and one for every update that stays."""
    graph, rows = c.graph, c.lowered.updates
    groups: dict[tuple[str, str], list[Written]] = {}
    for update in find_updates(graph):
        try:
            written = write_update(update, c.overflow)
        except UpdateSkipError as reason:
            rows.append(_left(update, str(reason)))
            continue
        key = written.spec.to_json(), str(value(written.nodes[written.spec.stored[0]][0]).device)
        groups.setdefault(key, []).append(written)
    place = _first_copy(graph)
    for group in groups.values():
        _emit(graph, group, place)
        rows.append(_row(group))
    for copy in {copy for group in groups.values() for written in group for copy in written.copies}:
        copy.replace_all_uses_with(Copy(copy).written)  # the output returns the input itself, which is written by then
        graph.erase_node(copy)
    remove_dead(graph)


def _first_copy(graph: fx.Graph) -> fx.Node:
    """Return a place before which all is computed and nothing written: copies to inputs are moved behind the rest."""
    copies = list(graph.find_nodes(op="call_function", target=aten.copy_.default))
    for copy in copies:
        _read_its_source(copy)
    written = {Copy(copy).written for copy in copies}
    order = {node: i for i, node in enumerate(graph.nodes)}
    late = [n for n in graph.nodes if copies and order[n] > order[copies[0]] and n.op != "output" and n not in copies]
    assert not any(i in written for n in late for i in n.all_input_nodes), "an input is read after it was written"
    for copy in copies:
        graph.output_node().prepend(copy)
    return copies[0] if copies else graph.output_node()


def _read_its_source(copy: fx.Node) -> None:
    """Let who computes with what `copy` returns read what it has written; who returns it, still does."""
    source = Copy(copy).source
    if (value(source).dtype, value(source).shape) == (value(copy).dtype, value(copy).shape):
        copy.replace_all_uses_with(source, delete_user_cb=lambda user: user.op != "output")


def _emit(graph: fx.Graph, group: Sequence[Written], place: fx.Node) -> None:
    spec = group[0].spec
    lists = [
        [node for written in group for i in positions for node in written.nodes[i]]
        for positions in (spec.stored, spec.read, spec.scalars)
    ]
    with graph.inserting_before(place):
        node = graph.call_function(state_ops.update_parameters, (*lists, spec.to_json()))
    node.meta["val"] = None


def _formats(spec: Update) -> tuple[str, ...]:
    return tuple(slot.type for slot in spec.slots if slot.kind == STATE)


def _row(group: Sequence[Written]) -> MergedUpdate:
    spec = group[0].spec
    elements = sum(value(written.nodes[spec.stored[0]][0]).numel() for written in group)
    return MergedUpdate(len(group), int(elements), _formats(spec), len(spec.values))


def _left(update: ParameterUpdate, reason: str) -> MergedUpdate:
    formats = tuple(t.store.format for t in update.targets if t.store is not None)
    elements = int(value(update.targets[0].written).numel())
    asked = {t.parameter_rounding for t in update.targets} - {"nearest"}
    rounded = "".join(f"; its BF16 parameter is rounded to nearest, not {how!r}" for how in sorted(asked))
    return MergedUpdate(1, elements, formats, 0, f"not merged: {reason}{rounded}")
