"""Plans as HTML for a notebook: the same tables as in a terminal, without a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from fp8compile.insight.tables import cells as texts
from fp8compile.insight.tables import numbers, optimizer_text
from fp8compile.insight.tables.grouping import (
    Layers,
    kernel_groups,
    matmul_groups,
    restored_groups,
    saved_groups,
    state_groups,
    transfer_groups,
)
from fp8compile.insight.tables.summary import summary, title
from fp8compile.insight.tables.totals import bytes_before, totals
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import FP8

STYLE = (
    "<style>.fp8compile td,.fp8compile th{text-align:left!important;padding:1px 10px 1px 0}"
    ".fp8compile .fp8{color:#17803d;font-weight:bold}.fp8compile .bf16{color:#b45309}"
    ".fp8compile small{color:#777}</style>"
)


def explanation_html(plans: Sequence[Plan]) -> str:
    """Return all tables of all graphs as one <div>."""
    body = "".join(_plan(plan, i, len(plans)) for i, plan in enumerate(plans))
    whole = _lines(summary(totals(plans))) if len(plans) > 1 else ""
    return f'<div class="fp8compile">{STYLE}{whole}{body or "nothing has been compiled"}</div>'


def _plan(plan: Plan, index: int, count: int) -> str:
    prefix = f"graph {index}: " if count > 1 else ""
    heading = f"<h4>{escape(prefix + title(plan))}</h4>"
    tables = _matmuls(plan) + _transfers(plan) + _saved(plan) + _restored(plan) + _kernels(plan)
    tables += _groups(plan) + _states(plan) + _updates(plan)
    return heading + _lines(summary(totals([plan]))) + tables


def _lines(lines: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _matmuls(plan: Plan) -> str:
    rows = []
    for group in matmul_groups(plan):
        rows.append(_heading(group, 7))
        for row, count in group.rows:
            times = f" ×{count}" if count > 1 else ""
            kind = "fp8" if row.decision == FP8 else "bf16"
            cells = [texts.shape(row), row.decision, texts.casts(row), texts.estimate(row), texts.reason(row)]
            cells = [f'<td class="{kind}">{c}</td>' if c == row.decision else f"<td>{escape(c)}</td>" for c in cells]
            rows.append(f"<tr><td></td><td>{row.role}{times}</td>{''.join(cells)}</tr>")
    return _table(["matmul", "role", "M×N×K", "", "left × right", "ms BF16 → FP8", "reason"], rows)


def _heading(group: Layers, columns: int) -> str:
    times = f" ×{group.count}" if group.count > 1 else ""
    path = escape(group.path or "(the model itself)")
    return f"<tr><td colspan={columns}><b>{path}</b>{times} <small>{escape(group.source)}</small></td></tr>"


def _transfers(plan: Plan) -> str:
    rows = []
    for group in transfer_groups(plan):
        rows.append(_heading(group, 6))
        for row, count in group.rows:
            times = f" ×{count}" if count > 1 else ""
            before, after = numbers.size(row.before), numbers.size(row.after)
            cells = ["", texts.transfer(row) + times, row.form, before, after, row.reason]
            rows.append(_line(cells))
    return _table(["between ranks", "", "as", "before", "after", "reason"], rows)


def _saved(plan: Plan) -> str:
    rows = []
    for group in saved_groups(plan):
        rows.append(_heading(group, 6))
        for row, count in group.rows:
            times = f" ×{count}" if count > 1 else ""
            before, after = numbers.size(bytes_before(row, plan)), numbers.size(row.bytes)
            cells = ["", texts.value(row) + times, row.form, before, after, row.reason]
            rows.append(_line(cells))
    return _table(["saved for backward", "", "as", "before", "after", "reason"], rows)


def _restored(plan: Plan) -> str:
    rows = []
    for group in restored_groups(plan):
        rows.append(_heading(group, 4))
        for row, count in group.rows:
            times = f" ×{count}" if count > 1 else ""
            cells = ["", texts.value(row) + times, numbers.size(row.bytes), ", ".join(row.sources)]
            rows.append(_line(cells))
    return _table(["computed again", "", "instead of", "from"], rows)


def _kernels(plan: Plan) -> str:
    rows = []
    for kernel, count in kernel_groups(plan):
        cells = [kernel.name, kernel.half, str(count), texts.moved(kernel), ", ".join(kernel.operations)]
        rows.append(_line(cells))
    return _table(["kernel", "half", "count", "bytes each", "operations"], rows)


def _states(plan: Plan) -> str:
    rows = []
    for g in state_groups(plan):
        form = g.first.format or g.first.dtype
        cells = [g.first.name, str(g.count), form, numbers.size(g.before), numbers.size(g.after), g.reason]
        rows.append(_line(cells))
    return _table(["state of the optimizer", "count", "as", "before", "after", "reason"], rows)


def _groups(plan: Plan) -> str:
    rows = []
    for g in plan.groups:
        counts = [str(g.group), str(g.parameters), str(g.elements), str(g.in_8_bits)]
        sizes = [numbers.size(g.before), numbers.size(g.after)]
        rows.append(_line([*counts, *sizes, optimizer_text.settings(g), "; ".join(optimizer_text.others(g))]))
    titles = ["group", "parameters", "elements", "in 8 bits", "states before", "after", "settings", "others"]
    return _table(titles, rows)


def _updates(plan: Plan) -> str:
    rows = [
        _line([str(u.parameters), str(u.elements), ", ".join(u.formats), str(u.values), u.reason]) for u in plan.updates
    ]
    return _table(["updated together", "elements", "formats", "values", "reason"], rows)


def _line(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in cells)}</tr>"


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(t)}</th>" for t in titles)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
