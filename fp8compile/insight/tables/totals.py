"""Sums over plans: shares of FLOPs, bytes before and after, reasons with their counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fp8compile.optimizer.parameter_groups import PLAIN, plain_bytes
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import FP8, Loss, Matmul, Saved


@dataclass(frozen=True)
class Totals:
    """Sums over all graphs.

    flops, fp8_flops: of the matmuls (two for each product), all of them and those in FP8; operators that are no plain
    matmul (fused attention) are no rows of a plan, so they are not counted. unsized: matmuls whose sizes no row knows.
    left: reasons with counts of what stays in its precision. milliseconds_*: estimates for the matmuls that have them,
    as all-BF16 and as decided. saved_before, saved_after: bytes kept for backward, as the model computes the values
    (for a payload, the tensor that was cast: `Saved.before`) and in the form that is kept. saved_on_host: those that
    wait in the host's memory, which saved_after leaves out. moved: bytes that generated kernels read and write.
    losses: cross-entropies with large logits. masks: attention masks that are not made, by what they say. transfers:
    collectives that reduce nothing; wire_before, wire_after: what they bring, in bytes, as the model computes it and as
    it travels. states, states_8bit, states_before, states_after: those of optimizers, and their bytes as plain tensors
    and as they are kept. casts_kept: bytes of casts of weights that are kept. updates: launches that update parameters;
    updated: parameters that they update.
    """

    graphs: int = 0
    matmuls: int = 0
    fp8: int = 0
    flops: int = 0
    fp8_flops: int = 0
    unsized: int = 0
    left: dict[str, int] = field(default_factory=dict)
    milliseconds_bf16: float = 0.0
    milliseconds_decided: float = 0.0
    saved: int = 0
    saved_before: int = 0
    saved_after: int = 0
    saved_on_host: int = 0
    recomputed: int = 0
    kernels: int = 0
    moved: int = 0
    transfers: int = 0
    wire_before: int = 0
    wire_after: int = 0
    states: int = 0
    states_8bit: int = 0
    states_before: int = 0
    states_after: int = 0
    casts_kept: int = 0
    updates: int = 0
    updated: int = 0
    losses: tuple[Loss, ...] = ()
    masks: dict[str, int] = field(default_factory=dict)
    failures: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """FP8's share of the matmuls' FLOPs, 0 to 1; 0 where there are none."""
        return self.fp8_flops / self.flops if self.flops else 0.0


def totals(plans: Sequence[Plan]) -> Totals:
    """Return the `Totals` of these graphs."""
    rows = [(m, flops(m, plan)) for plan in plans for m in plan.matmuls]
    estimated = [m for m, _ in rows if m.milliseconds_bf16 is not None and m.milliseconds_fp8 is not None]
    saved = [(row, bytes_before(row, plan)) for plan in plans for row in plan.saved]
    kernels = [k for plan in plans for k in plan.kernels]
    states = [row for plan in plans for row in plan.states]
    transfers = [row for plan in plans for row in plan.transfers]
    updates = [update for plan in plans for update in plan.updates]
    failures = [plan.failure for plan in plans] + [
        f"{name} graph: {half.failure}" for plan in plans for name, half in plan.halves.items() if half.failure
    ]
    return Totals(
        graphs=len(plans),
        matmuls=len(rows),
        fp8=sum(m.decision == FP8 for m, _ in rows),
        flops=sum(n for _, n in rows),
        fp8_flops=sum(n for m, n in rows if m.decision == FP8),
        unsized=sum(n == 0 and m.code != Reason.EMPTY for m, n in rows),
        left=dict(Counter(m.reason for m, _ in rows if m.decision != FP8).most_common()),
        milliseconds_bf16=sum(m.milliseconds_bf16 or 0.0 for m in estimated),
        milliseconds_decided=sum(_decided(m) for m in estimated),
        saved=len(saved),
        saved_before=sum(before for _, before in saved),
        saved_after=sum(row.gpu_bytes for row, _ in saved),
        saved_on_host=sum(row.bytes for row, _ in saved if row.on_host),
        recomputed=sum(sum(plan.recomputed.values()) for plan in plans),
        kernels=len(kernels),
        moved=sum(k.moved for k in kernels),
        transfers=len(transfers),
        wire_before=sum(row.before for row in transfers),
        wire_after=sum(row.after for row in transfers),
        states=len(states),
        states_8bit=sum(row.format not in PLAIN for row in states),
        states_before=sum(map(plain_bytes, states)),
        states_after=sum(row.bytes for row in states),
        casts_kept=sum(half.kept for plan in plans for half in plan.halves.values()),
        updates=len(updates),
        updated=sum(update.parameters for update in updates),
        losses=tuple(row for plan in plans for row in plan.losses),
        masks=dict(Counter(row.kind for plan in plans for row in plan.masks).most_common()),
        failures=tuple(f for f in failures if f),
    )


def _decided(row: Matmul) -> float:
    return (row.milliseconds_fp8 if row.decision == FP8 else row.milliseconds_bf16) or 0.0


def flops(row: Matmul, plan: Plan) -> int:
    """Return 2 · batch · M · N · K, at the sizes that the compiler saw; 0 if one of them is unknown."""
    sizes = [plan.size(s) for s in (row.batch, row.m, row.n, row.k)]
    return 2 * math.prod(sizes)


def bytes_before(row: Saved, plan: Plan) -> int:
    """Return the bytes of a value as the model computes it: of a payload, of the tensor that was cast, counted once."""
    if row.before is not None:
        return row.before
    return math.prod(plan.size(s) for s in row.shape) * getattr(torch, row.dtype).itemsize
