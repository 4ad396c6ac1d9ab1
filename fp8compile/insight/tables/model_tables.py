"""Tables of a model's graph as lines of text: matmuls, transfers, saved and recomputed tensors, kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8compile.insight.tables.cells import casts, cut, estimate, moved, reason, shape, times, transfer, value
from fp8compile.insight.tables.grouping import (
    Layers,
    kernel_groups,
    matmul_groups,
    restored_groups,
    saved_groups,
    transfer_groups,
)
from fp8compile.insight.tables.numbers import WIDTH, size
from fp8compile.insight.tables.summary import MASKS, loss
from fp8compile.insight.tables.totals import bytes_before
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import FP8, Saved, Transfer


def matmuls_table(plan: Plan) -> Iterator[str]:
    """Yield the matmuls by module, with casts and reasons."""
    groups = matmul_groups(plan)
    if not groups:
        return
    rows = [row for group in groups for row, _ in group.rows]
    widths = [max(len(text(row)) for row in rows) for text in (shape, casts, estimate)]
    titles = ("B·M×N×K" if any(r.batch != 1 for r in rows) else "M×N×K", "left × right", "ms BF16 → FP8")
    widths = [max(w, len(title)) if w else 0 for w, title in zip(widths, titles, strict=True)]
    yield _columns("matmul", widths, titles, "    ", "reason")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name = row.role + (f" ×{count}" if count > 1 else "")
            yield _columns(name, widths, [shape(row), casts(row), estimate(row)], row.decision, reason(row))


def _columns(name: str, widths: Sequence[int], texts: Sequence[str], decision: str, why: str) -> str:
    size, cast, time = (f"{text:<{width}}  " if width else "" for text, width in zip(texts, widths, strict=True))
    if decision not in (FP8, "    ") and time == " " * len(time):
        cast, time = "", ""  # a refusal has neither: its reason may use their room
    return cut(f"    {name:<15} {size}{decision:<4}  {cast}{time}{why}")


def _heading(group: Layers) -> str:
    times = f"  ×{group.count}" if group.count > 1 else ""
    path = f"  {group.path or '(the model itself)'}{times}"
    room = WIDTH - len(path) - 4
    return f"{path}    {cut(group.source, room)}" if room > 20 else cut(path)


def transfers_table(plan: Plan) -> Iterator[str]:
    """Yield what ranks hand each other, by module."""
    groups = transfer_groups(plan)
    if not groups:
        return
    rows = [(row, count) for group in groups for row, count in group.rows]
    title = "between ranks"
    names = [title, *(times(transfer(row), count) for row, count in rows)]
    changes = ["bytes", *(_less(row, count) for row, count in rows)]
    widths = [max(map(len, texts)) for texts in (names, [row.form for row, _ in rows], changes)]
    yield cut(f"    {title:<{widths[0]}}  {'as':<{widths[1]}}  {'bytes':<{widths[2]}}  reason")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name, change = times(transfer(row), count), _less(row, count)
            yield cut(f"    {name:<{widths[0]}}  {row.form:<{widths[1]}}  {change:<{widths[2]}}  {row.reason}")


def _less(row: Transfer, count: int) -> str:
    return f"{size(row.before * count)} → {size(row.after * count)}"


def saved_table(plan: Plan) -> Iterator[str]:
    """Yield the tensors that are saved for backward, by module."""
    groups = saved_groups(plan)
    if not groups:
        return
    rows = [(row, count) for group in groups for row, count in group.rows]
    head = "saved for backward"
    names = [head, *(times(value(row), count) for row, count in rows)]
    changes = [" " * 22, *(_change(row, count, plan) for row, count in rows)]
    widths = [max(map(len, texts)) for texts in (names, [row.form for row, _ in rows], changes)]
    yield cut(f"    {head:<{widths[0]}}  {'as':<{widths[1]}}  {'bytes':<{widths[2]}}  reason")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name, change = times(value(row), count), _change(row, count, plan)
            yield cut(f"    {name:<{widths[0]}}  {row.form:<{widths[1]}}  {change:<{widths[2]}}  {row.reason}")


def _change(row: Saved, count: int, plan: Plan) -> str:
    return f"{size(bytes_before(row, plan) * count)} → {size(row.bytes * count)}"


def restored_table(plan: Plan) -> Iterator[str]:
    """Yield the values that backward computes again, by module."""
    groups = restored_groups(plan)
    if not groups:
        return
    head = "computed again"
    width = max(len(text) for g in groups for text in (head, *(times(value(row), count) for row, count in g.rows)))
    yield cut(f"    {head:<{width}}  {'instead of':<11}  from")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name = times(value(row), count)
            yield cut(f"    {name:<{width}}  {size(row.bytes * count):<11}  {', '.join(row.sources)}")


def kernels_table(plan: Plan) -> Iterator[str]:
    """Yield the generated kernels, the largest traffic first, and casts that were left to Inductor."""
    for half, lowered in plan.halves.items():
        for left in lowered.left:
            yield cut(f"    left to Inductor ({half}): {left}")
    groups = kernel_groups(plan)
    if not groups:
        return
    name, half = (max(len(text) for text in texts) for texts in ([k.name for k, _ in groups], ["inference"]))
    yield cut(f"    {'kernel':<{name}}  {'half':<{half}}  {'each':>10}  {'':>5} operations")
    for kernel, count in groups:
        times = f"×{count}" if count > 1 else ""
        operations = ", ".join(kernel.operations)
        yield cut(f"    {kernel.name:<{name}}  {kernel.half:<{half}}  {moved(kernel):>10}  {times:>5} {operations}")


def losses_table(plan: Plan) -> Iterator[str]:
    """Yield what became of cross-entropies with large logits."""
    for row in plan.losses:
        yield cut(f"  {row.path or '(the model itself)'}    {row.source}")
        yield cut(f"    {row.dtype}[{row.rows}, {row.classes}]  {loss(row)}")


def masks_table(plan: Plan) -> Iterator[str]:
    """Yield the attention masks that are not made."""
    for row in plan.masks:
        yield cut(f"  {row.path or '(the model itself)'}    {row.source}")
        yield cut(f"    [{', '.join(map(str, row.shape))}]  {MASKS[row.kind]}")
