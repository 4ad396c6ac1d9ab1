"""metrics: what FP8 training does, as numbers by name, for TensorBoard, W&B or a Trainer's callback.

    writer = SummaryWriter()
    for name, value in fp8compile.metrics().items():
        writer.add_scalar(name, value, step)

Numbers are gathered when they are asked for: plans are counted, and of casts only what has been measured anyway is
read, by the automatic mode's last look or by a `Watched` model. Reading that waits for the GPU; nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8compile.adaptive.adaptive_graph import AdaptiveGraph, adaptive_graphs
from fp8compile.insight.tables.totals import totals
from fp8compile.insight.watching import Watched
from fp8compile.plan import store
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.plan import Plan

GIB = 2**30


def metrics(watched: Watched | None = None) -> dict[str, float]:
    """Return numbers by name, of what this process has compiled; {} before that. What nothing is known of is left out.

    fp8/graphs           compiled graphs of models, for each size that they were compiled for
    fp8/share            FP8's share of the FLOPs of their matmuls, 0 to 1
    fp8/matmuls          matmuls in FP8; fp8/matmuls_left: those that are not
    fp8/failures         parts of models and optimizers that an error left in BF16
    fp8/saved_gib        what the last call that compiled something keeps for backward; fp8/saved_gib_as_computed: the
                         same values as the model computes them
    fp8/states_gib       states of compiled optimizer steps; fp8/states_gib_plain: the same as plain tensors
    fp8/peak_gib         most memory that torch has allocated on the current GPU
    fp8/changes          casts that the automatic mode has changed; fp8/returns: those that became cheaper again
    fp8/recompiles       how often it compiled a graph again; fp8/looks: how often it measured
    fp8/sqnr_db          of the cast that loses most
    fp8/saturated        the largest share of elements beyond the format's range, 0 to 1; fp8/underflown: of those that
                         become zero
    fp8/not_finite       measured casts of tensors with an inf or nan

    The last four are of `watched` (`fp8compile.watch`), or else of the last looks of the automatic mode.
    """
    graphs = [graph for graph in adaptive_graphs() if graph.is_training]
    replaced = {id(plan) for graph in adaptive_graphs() for plan in graph.replaced}
    seen_aside = watched.statistics.plans if watched else []
    plans = [plan for plan in (*store.compiles(), *seen_aside) if id(plan) not in replaced]
    last = [graph.plan for graph in graphs] or seen_aside or store.last_call()
    found = {**_of_plans(plans), **_of_saved(last), **_of_changes(graphs)}
    found |= _of_casts(watched.statistics.rows() if watched else [row for graph in graphs for row in graph.measured])
    if found and torch.cuda.is_initialized():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
    return {f"fp8/{name}": float(value) for name, value in found.items()}


def _of_plans(plans: Sequence[Plan]) -> dict[str, float]:
    if not plans:
        return {}
    sums = totals(plans)
    found: dict[str, float] = {"failures": len(sums.failures)}
    if models := sum(plan.graph != "optimizer" for plan in plans):
        left = sums.matmuls - sums.fp8
        found |= {"graphs": models, "share": sums.share, "matmuls": sums.fp8, "matmuls_left": left}
    if sums.states:
        found |= {"states_gib": sums.states_after / GIB, "states_gib_plain": sums.states_before / GIB}
    return found


def _of_saved(plans: Sequence[Plan]) -> dict[str, float]:
    if not any(plan.graph == "training" for plan in plans):
        return {}
    sums = totals(plans)
    return {"saved_gib": sums.saved_after / GIB, "saved_gib_as_computed": sums.saved_before / GIB}


def _of_changes(graphs: Sequence[AdaptiveGraph]) -> dict[str, float]:
    if not graphs:
        return {}
    return {
        "changes": sum(len(graph.changes) for graph in graphs),
        "returns": sum(change.is_cheaper for graph in graphs for change in graph.changes),
        "recompiles": sum(graph.recompiles for graph in graphs),
        "looks": sum(graph.looks for graph in graphs),
    }


def _of_casts(rows: Sequence[Row]) -> dict[str, float]:
    if not rows:
        return {}
    known = [row.sqnr for row in rows if row.sqnr is not None]
    found: dict[str, float] = {"sqnr_db": min(known)} if known else {}
    return found | {
        "saturated": max(row.saturated for row in rows),
        "underflown": max(row.underflown for row in rows),
        "not_finite": sum(row.skipped for row in rows),
    }
