"""Plans as text for a terminal: at most 120 columns, repeated layers as one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fp8compile.insight.tables.grouping import (
    Layers,
    kernel_groups,
    matmul_groups,
    restored_groups,
    saved_groups,
    transfer_groups,
)
from fp8compile.insight.tables.numbers import WIDTH, counted, si, size
from fp8compile.insight.tables.optimizer_text import optimizer_tables
from fp8compile.insight.tables.totals import Totals, bytes_before, totals
from fp8compile.plan.cast_statistics import ALTERNATIVES, Row
from fp8compile.plan.rows import FP8, Kernel, Loss, Matmul, Plan, Recomputed, Saved, Transfer

MASKS = {"causal": "attention is causal by a constant mask", "everything": "a constant mask lets everything through"}


def explanation_text(plans: Sequence[Plan]) -> str:
    """All tables of all graphs, ending in a newline; the totals first."""
    if not plans:
        return "fp8: nothing has been compiled.\n"
    blocks = []
    if len(plans) > 1:
        blocks.append("\n".join([f"all {len(plans)} graphs", *summary(totals(plans))]))
    blocks += [plan_text(plan, f"graph {i}: " if len(plans) > 1 else "") for i, plan in enumerate(plans)]
    return "\n".join(blocks)


def plan_text(plan: Plan, prefix: str = "") -> str:
    """Totals and tables of one graph, ending in a newline."""
    lines = [_cut(prefix + title(plan)), *summary(totals([plan]))]
    of_model = (_matmuls(plan), _transfers(plan), _saved(plan), _restored(plan), _kernels(plan))
    for table in (*of_model, *optimizer_tables(plan)):
        body = list(table)
        lines += ["", *body] if body else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def title(plan: Plan) -> str:
    """ "training · recipe mixed · cpu": which graph this is."""
    return " · ".join(x for x in (plan.graph, plan.recipe and f"recipe {plan.recipe}", plan.device) if x)


def one_line(plan: Plan) -> str:
    """A graph in one line, for a log."""
    t = totals([plan])
    if t.states:
        return f"fp8: optimizer graph: {states_change(t)}"
    parts = [f"{t.fp8} of {t.matmuls} matmuls in FP8 ({t.share:.1%} of {si(t.flops)}FLOP)"]
    parts += [f"{count}× left: {why}" for why, count in list(t.left.items())[:2]]
    parts += [f"saved for backward {size(t.saved_before)} → {size(t.saved_after)}"] if t.saved else []
    parts += [f"FAILED: {failure}" for failure in t.failures]
    return f"fp8: {plan.graph} graph, recipe {plan.recipe}, {plan.device}: " + "; ".join(parts)


# ---- totals ---------------------------------------------------------------------------------------------------------


def summary(t: Totals) -> list[str]:
    """The totals, one line each, labelled."""
    lines = [*_labelled("FAILED", *t.failures)]
    if t.matmuls:
        flops = f", {t.share:.1%} of {si(t.flops)}FLOP in matmuls" if t.flops else ""
        unsized = f"; {t.unsized} of unknown size are not counted" if t.unsized and t.flops else ""
        none = "" if t.fp8 else "NOTHING: "
        lines += _labelled("FP8", f"{none}{t.fp8} of {t.matmuls} matmuls{flops} (fused attention apart){unsized}")
    elif not t.states:
        lines += _labelled("FP8", "a graph without matmuls" if not t.failures else "nothing")
    lines += _labelled("left", *(f"{count}× {reason}" for reason, count in t.left.items()))
    lines += _labelled("loss", *map(loss, t.losses))
    lines += _labelled("masks", *(f"{n}× {MASKS[kind]}, so none is made" for kind, n in t.masks.items()))
    if t.milliseconds_bf16:
        estimate = f"{t.milliseconds_bf16:.3g} ms in BF16 → {t.milliseconds_decided:.3g} ms as decided, casts counted"
        lines += _labelled("estimated", estimate)
    if t.saved:
        again = f"; {t.recomputed} operators are computed again" if t.recomputed else ""
        change = f"{size(t.saved_before)} → {size(t.saved_after)}"
        rounded = "" if t.fp8 or t.saved_after >= t.saved_before else "; rounded to FP8 though no matmul is in it"
        lines += _labelled("saved", f"{change} for backward in {t.saved} tensors, parameters left out{again}{rounded}")
    if t.kernels:
        lines += _labelled("kernels", f"{t.kernels} generated, which read and write {size(t.moved)}")
    if t.transfers:
        change = f"{size(t.wire_before)} → {size(t.wire_after)} that ranks hand each other"
        lines += _labelled("wire", f"{change} in {counted(t.transfers, 'collective')}, sums left out")
    lines += _labelled("states", states_change(t)) if t.states else []
    lines += (
        _labelled("updates", f"{t.updated} parameters in {counted(t.updates, 'launch', 'es')}") if t.updates else []
    )
    return lines


def states_change(t: Totals) -> str:
    """Optimizer states before and after, in a phrase."""
    change = f"{size(t.states_before)} → {size(t.states_after)}"
    return f"{t.states_8bit} of {t.states} optimizer states in 8 bits, {change}"


def loss(row: Loss) -> str:
    """What became of the logits of a loss."""
    if row.chunk:
        return f"in chunks of {row.chunk} rows: {size(row.bytes)} of logits never exist"
    return f"{size(row.bytes)} of logits exist at once: {row.reason}"


def _labelled(label: str, *texts: str) -> Iterator[str]:
    for i, text in enumerate(texts):
        for j, line in enumerate(textwrap.wrap(text, WIDTH - 12)):
            yield f"  {label if i == j == 0 else '':<10}{line}"


# ---- tables ---------------------------------------------------------------------------------------------------------


def _matmuls(plan: Plan) -> Iterator[str]:
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
    return _cut(f"    {name:<15} {size}{decision:<4}  {cast}{time}{why}")


def _heading(group: Layers) -> str:
    times = f"  ×{group.count}" if group.count > 1 else ""
    path = f"  {group.path or '(the model itself)'}{times}"
    room = WIDTH - len(path) - 4
    return f"{path}    {_cut(group.source, room)}" if room > 20 else _cut(path)


def shape(row: Matmul) -> str:
    """ "4·64×128×256": batch, M, N, K; "64×128×256 in 4": of a matmul in 4 groups."""
    batch = "" if row.batch == 1 else f"{row.batch}·"
    groups = "" if row.groups == 1 and row.kind != "grouped" else f" in {row.groups}"
    return f"{batch}{row.m}×{row.n}×{row.k}{groups}" if 0 not in (row.m, row.n, row.k) else "?"


def casts(row: Matmul) -> str:
    """How both operands are cast; "" for a matmul that is left."""
    return f"{row.left} × {row.right}" if row.decision == FP8 else ""


def estimate(row: Matmul) -> str:
    """Estimated milliseconds, where the cost model has any."""
    if row.milliseconds_bf16 is None or row.milliseconds_fp8 is None:
        return ""
    return f"{row.milliseconds_bf16:.3g} → {row.milliseconds_fp8:.3g}"


def reason(row: Matmul) -> str:
    """Why, and what was padded."""
    return "; ".join([row.reason, *(f"{p}" for p in row.padded)])


def _transfers(plan: Plan) -> Iterator[str]:
    groups = transfer_groups(plan)
    if not groups:
        return
    rows = [(row, count) for group in groups for row, count in group.rows]
    title = "between ranks"
    names = [title, *(times(transfer(row), count) for row, count in rows)]
    changes = ["bytes", *(_less(row, count) for row, count in rows)]
    widths = [max(map(len, texts)) for texts in (names, [row.form for row, _ in rows], changes)]
    yield _cut(f"    {title:<{widths[0]}}  {'as':<{widths[1]}}  {'bytes':<{widths[2]}}  reason")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name, change = times(transfer(row), count), _less(row, count)
            yield _cut(f"    {name:<{widths[0]}}  {row.form:<{widths[1]}}  {change:<{widths[2]}}  {row.reason}")


def transfer(row: Transfer) -> str:
    """ "forward all-gather bfloat16[64, 128]"."""
    return f"{row.half} {row.kind} {value(row)}"


def _less(row: Transfer, count: int) -> str:
    return f"{size(row.before * count)} → {size(row.after * count)}"


def _saved(plan: Plan) -> Iterator[str]:
    groups = saved_groups(plan)
    if not groups:
        return
    rows = [(row, count) for group in groups for row, count in group.rows]
    head = "saved for backward"
    names = [head, *(times(value(row), count) for row, count in rows)]
    changes = [" " * 22, *(_change(row, count, plan) for row, count in rows)]
    widths = [max(map(len, texts)) for texts in (names, [row.form for row, _ in rows], changes)]
    yield _cut(f"    {head:<{widths[0]}}  {'as':<{widths[1]}}  {'bytes':<{widths[2]}}  reason")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name, change = times(value(row), count), _change(row, count, plan)
            yield _cut(f"    {name:<{widths[0]}}  {row.form:<{widths[1]}}  {change:<{widths[2]}}  {row.reason}")


def _change(row: Saved, count: int, plan: Plan) -> str:
    return f"{size(bytes_before(row, plan) * count)} → {size(row.bytes * count)}"


def _restored(plan: Plan) -> Iterator[str]:
    groups = restored_groups(plan)
    if not groups:
        return
    head = "computed again"
    width = max(len(text) for g in groups for text in (head, *(times(value(row), count) for row, count in g.rows)))
    yield _cut(f"    {head:<{width}}  {'instead of':<11}  from")
    for group in groups:
        yield _heading(group)
        for row, count in group.rows:
            name = times(value(row), count)
            yield _cut(f"    {name:<{width}}  {size(row.bytes * count):<11}  {', '.join(row.sources)}")


def times(text: str, count: int) -> str:
    """ "text ×3"; of one, the text."""
    return f"{text} ×{count}" if count > 1 else text


def value(row: Saved | Recomputed | Transfer) -> str:
    """ "bfloat16[64, 128]": what the model computes."""
    return f"{row.dtype}[{', '.join(map(str, row.shape))}]"


def moved(kernel: Kernel) -> str:
    """Bytes that a kernel reads and writes; "?" where only the data knows."""
    return size(kernel.moved) if kernel.moved else "?"


def _kernels(plan: Plan) -> Iterator[str]:
    for half, lowered in plan.halves.items():
        for left in lowered.left:
            yield _cut(f"    left to Inductor ({half}): {left}")
    groups = kernel_groups(plan)
    if not groups:
        return
    name, half = (max(len(text) for text in texts) for texts in ([k.name for k, _ in groups], ["inference"]))
    yield _cut(f"    {'kernel':<{name}}  {'half':<{half}}  {'each':>10}  {'':>5} operations")
    for kernel, count in groups:
        times = f"×{count}" if count > 1 else ""
        operations = ", ".join(kernel.operations)
        yield _cut(f"    {kernel.name:<{name}}  {kernel.half:<{half}}  {moved(kernel):>10}  {times:>5} {operations}")


def statistics_text(rows: Sequence[Row]) -> str:
    """Rows of `fp8compile.plan.cast_statistics` as a table, the worst SQNR first, ending in a newline."""
    formats = [c.split(" ")[0] for c in ALTERNATIVES]
    names = [c.split(" ")[1].replace("group", "g") for c in ALTERNATIVES]
    first = [f if i == 0 or formats[i - 1] != f else "" for i, f in enumerate(formats)]
    width = max([15, *(len(_cast(row)) for row in rows)])
    room = 36 + 15 - width  # so that all of it fits a terminal
    lines = [
        f"{'':74}what if: SQNR in dB as",
        f"{'operand':<{room}}{'cast':<{width}} SQNR    amax  under    sat" + "".join(f" {f:>6}" for f in first),
        " " * 74 + "".join(f" {n:>6}" for n in names),
    ]
    for row in sorted(rows, key=lambda r: 1e9 if r.sqnr is None else r.sqnr):
        others = "".join(f" {_number(row.what_if.get(c)):>6}" for c in ALTERNATIVES)
        shares = f"{row.underflown:>6.1%} {row.saturated:>6.1%}"
        start = f"{_operand(row, room - 1):<{room}}{_cast(row):<{width}}"
        lines.append(f"{start}{_number(row.sqnr):>5} {row.amax:>7.2g} {shares}{others}")
        if row.skipped:
            lines.append(
                f"{'':37}{row.skipped} of {row.steps + row.skipped} executions were not finite, and are left out"
            )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cast(row: Row) -> str:
    return f"{row.cast} delayed({row.delayed})" if row.delayed else row.cast


def _operand(row: Row, room: int) -> str:
    """Path, role and side in `room` columns; of a long path, its end."""
    rest = f" {row.role} {row.side}"
    path, room = row.path or "(the model itself)", room - len(rest)
    return (path if len(path) <= room else "…" + path[len(path) - room + 1 :]) + rest


def _number(decibels: float | None) -> str:
    return "-" if decibels is None else f"{decibels:.1f}"


def _cut(text: str, room: int = WIDTH) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"
