"""Totals as labelled lines, and a graph in one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fp8compile.insight.tables.numbers import WIDTH, counted, si, size
from fp8compile.insight.tables.totals import Totals, totals
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Loss

INDENT = 12  # columns in front of a text: those of its label
MASKS = {"causal": "attention is causal by a constant mask", "everything": "a constant mask lets everything through"}


def title(plan: Plan) -> str:
    """Return "training · recipe mixed · cpu": which graph this is."""
    return " · ".join(x for x in (plan.graph, plan.recipe and f"recipe {plan.recipe}", plan.device) if x)


def one_line(plan: Plan) -> str:
    """Return a graph in one line, for a log."""
    t = totals([plan])
    if t.states:
        return f"fp8: optimizer graph: {states_change(t)}"
    parts = [f"{t.fp8} of {t.matmuls} matmuls in FP8 ({t.share:.1%} of {si(t.flops)}FLOP)"]
    parts += [f"{count}× left: {why}" for why, count in list(t.left.items())[:2]]
    parts += [f"saved for backward {size(t.saved_before)} → {size(t.saved_after)}"] if t.saved else []
    parts += [f"FAILED: {failure}" for failure in t.failures]
    return f"fp8: {plan.graph} graph, recipe {plan.recipe}, {plan.device}: " + "; ".join(parts)


def summary(t: Totals) -> list[str]:
    """Return the totals as labelled lines."""
    return [line for label, texts in summary_items(t) for line in labelled(label, texts)]


def summary_items(t: Totals) -> Iterator[tuple[str, list[str]]]:
    """Yield the totals as texts under labels; what a graph does not have is left out."""
    items = (
        ("FAILED", list(t.failures)),
        ("FP8", _converted(t)),
        ("not FP8", [f"{count}× {reason}" for reason, count in t.left.items()]),
        ("loss", list(map(loss, t.losses))),
        ("masks", [f"{n}× {MASKS[kind]}, so none is made" for kind, n in t.masks.items()]),
        ("estimated", _estimated(t)),
        ("saved", _saved(t)),
        ("kernels", [f"{t.kernels} generated, which read and write {size(t.moved)}"] if t.kernels else []),
        ("weights", [f"{size(t.casts_kept)} of casts are kept until a weight is written"] if t.casts_kept else []),
        ("wire", _wire(t)),
        ("states", [states_change(t)] if t.states else []),
        ("updates", [f"{t.updated} parameters in {counted(t.updates, 'launch', 'es')}"] if t.updates else []),
    )
    yield from (item for item in items if item[1])


def _converted(t: Totals) -> list[str]:
    if not t.matmuls:
        return [] if t.states else ["nothing" if t.failures else "a graph without matmuls"]
    flops = f", {t.share:.1%} of {si(t.flops)}FLOP in matmuls" if t.flops else ""
    unsized = f"; {t.unsized} of unknown size are not counted" if t.unsized and t.flops else ""
    none = "" if t.fp8 else "NOTHING: "
    return [f"{none}{t.fp8} of {t.matmuls} matmuls{flops} (fused attention apart){unsized}"]


def _estimated(t: Totals) -> list[str]:
    if not t.milliseconds_bf16:
        return []
    return [f"{t.milliseconds_bf16:.3g} ms in BF16 → {t.milliseconds_decided:.3g} ms as decided, casts counted"]


def _saved(t: Totals) -> list[str]:
    if not t.saved:
        return []
    again = f"; {t.recomputed} operators are computed again" if t.recomputed else ""
    is_rounded = not t.fp8 and t.saved_after + t.saved_on_host < t.saved_before
    rounded = "; rounded to FP8 though no matmul is in it" if is_rounded else ""
    change = f"{size(t.saved_before)} → {size(t.saved_after)}"
    change += f" and {size(t.saved_on_host)} on the host," if t.saved_on_host else ""
    return [f"{change} for backward in {t.saved} tensors, parameters left out{again}{rounded}"]


def _wire(t: Totals) -> list[str]:
    change = f"{size(t.wire_before)} → {size(t.wire_after)} that ranks hand each other"
    return [f"{change} in {counted(t.transfers, 'collective')}, sums left out"] if t.transfers else []


def states_change(t: Totals) -> str:
    """Return optimizer states before and after, in a phrase."""
    change = f"{size(t.states_before)} → {size(t.states_after)}"
    return f"{t.states_8bit} of {t.states} optimizer states in 8 bits, {change}"


def loss(row: Loss) -> str:
    """Return what became of the logits of a loss, in a phrase."""
    if row.chunk:
        return f"in chunks of {row.chunk} rows: {size(row.bytes)} of logits never exist"
    return f"{size(row.bytes)} of logits exist at once: {row.reason}"


def labelled(label: str, texts: Sequence[str], width: int = WIDTH) -> Iterator[str]:
    """Yield lines of at most `width` columns: the label once, the texts beside it."""
    for i, text in enumerate(texts):
        for j, line in enumerate(textwrap.wrap(text, width - INDENT)):
            yield f"  {label if i == j == 0 else '':<{INDENT - 2}}{line}"
