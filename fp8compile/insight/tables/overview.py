"""The first screen of an explanation: at most 40 lines of 100 columns, for a model of any depth.

how much is in FP8 · what is not and why · what is saved · what failed · the largest modules · where to look next
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8compile.insight.tables.cells import cut, end_of
from fp8compile.insight.tables.grouping import ANY_NUMBER, alike, matmul_groups, ranged
from fp8compile.insight.tables.numbers import counted, size
from fp8compile.insight.tables.summary import labelled, summary_items, title
from fp8compile.insight.tables.text import TABLES
from fp8compile.insight.tables.totals import Totals, bytes_before, flops, totals
from fp8compile.plan.plan import Plan

LINES, COLUMNS = 40, 100
MOST_TEXTS = 5  # of a label, where there is room
FEWEST_MODULES = 4  # that are shown however much there is to say before
HEADING = 2  # lines in front of modules
OF_PLANS = {"recomputed": "restored"}  # tables that a plan has under another name


def overview_text(plans: Sequence[Plan]) -> str:
    """Return the first screen about all graphs, ending in a newline."""
    if not plans:
        return "fp8: nothing has been compiled.\n"
    t = totals(plans)
    end = ["", *_more(plans)]
    room = LINES - 1 - HEADING - len(end)
    said = [list(_summary(plans, t, most)) for most in range(MOST_TEXTS, 0, -1)]
    lines = next((lines for lines in said if len(lines) <= room - FEWEST_MODULES), said[-1])
    lines = [_title(plans), *lines, *_modules(plans, t, room - len(lines))]
    return "\n".join(cut(line, COLUMNS).rstrip() for line in [*lines, *end]) + "\n"


def _title(plans: Sequence[Plan]) -> str:
    if len(plans) == 1:
        return title(plans[0])
    kinds = Counter(plan.graph for plan in plans)
    parts = [", ".join(f"{count}× {kind}" if count > 1 else kind for kind, count in kinds.items())]
    parts += [f"recipe {', '.join(names)}" for names in [dict.fromkeys(p.recipe for p in plans if p.recipe)] if names]
    parts += dict.fromkeys(plan.device for plan in plans if plan.device)
    return f"{len(plans)} graphs: " + " · ".join(parts)


def _summary(plans: Sequence[Plan], t: Totals, most: int) -> Iterator[str]:
    """Yield what there is under each label: at most so many texts, and how many more."""
    for label, texts in summary_items(t):
        if label == "not FP8":
            texts = [f"{count}× {why}" for why, count in alike(t.left, ANY_NUMBER).items()]
        elif label == "saved":
            texts = [*texts, *_saved(plans)]
        elif label == "kernels":
            texts = [*texts, *_left_to_inductor(plans)]
        elif label == "states":
            texts = [*texts, *_states(plans)]
        elif label == "updates":
            texts = [*texts, *_not_merged(plans)]
        yield from _at_most(most, label, texts)


def _at_most(most: int, label: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield at most so many texts under a label, equal ones as one, each on at most two lines; and how many more."""
    counts = Counter(texts)
    texts = [f"{count}× {text}" if count > 1 else text for text, count in counts.items()]
    if len(texts) > most + 1:
        texts = [*texts[:most], f"… and {len(texts) - most} more"]
    for i, text in enumerate(texts):
        lines = list(labelled("" if i else label, [text], COLUMNS))
        yield from lines if len(lines) <= 2 else [lines[0], cut(f"{lines[1]} …", COLUMNS)]


def _saved(plans: Sequence[Plan]) -> list[str]:
    """Return what is saved by its form, and what keeps its dtype by its reason; the most bytes first."""
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for plan in plans:
        for row in plan.saved:
            why = f"as {row.form}" if row.form != row.dtype else f"as computed: {row.reason}"
            if row.on_host and row.form != row.dtype:
                why += ", on the host"
            groups.setdefault(ANY_NUMBER.sub("…", why), []).append((why, bytes_before(row, plan), row.bytes))
    found = []
    for rows in groups.values():
        before, after = sum(row[1] for row in rows), sum(row[2] for row in rows)
        change = size(after) if before == after else f"{size(before)} → {size(after)}"
        why = ranged([why for why, _, _ in rows], ANY_NUMBER)
        found.append((after, f"{change} in {counted(len(rows), 'tensor')} kept {why}"))
    return [text for _, text in sorted(found, key=lambda pair: -pair[0])]


def _left_to_inductor(plans: Sequence[Plan]) -> list[str]:
    """Return what was left to Inductor, and why, with counts."""
    left = Counter(text.partition(": ")[2] or text for p in plans for half in p.halves.values() for text in half.left)
    return [f"{count}× left to Inductor: {why}" for why, count in alike(left, ANY_NUMBER).items()]


def _states(plans: Sequence[Plan]) -> list[str]:
    """Return why parameters of an optimizer have no states in 8 bits, with counts."""
    others = Counter[str]()
    for plan in plans:
        for group in plan.groups:
            others.update(group.others)
    return [f"{count} parameters not: {why}" for why, count in alike(others).items()]


def _not_merged(plans: Sequence[Plan]) -> list[str]:
    """Return why parameters are not updated together, with counts, and why they are traced one by one."""
    reasons = Counter[str]()
    traced = [f"traced parameter by parameter: {why}" for why in dict.fromkeys(p.traced for p in plans if p.traced)]
    for plan in plans:
        for update in plan.updates:
            reasons.update({update.reason: update.parameters} if update.reason else {})
    return traced + [f"{counted(count, 'parameter')}: {why}" for why, count in alike(reasons).items()]


def _modules(plans: Sequence[Plan], t: Totals, room: int) -> list[str]:
    """Return the modules with most FLOPs, repeated layers as one, in at most `room` lines behind a heading."""
    rows = sorted(_module_rows(plans, t), key=lambda row: -row[1])
    if not rows:
        return []
    shown = rows if len(rows) <= room else rows[: room - 1]
    width = min(48, max(len(path) for path, _, _ in shown))
    lines = ["", f"    {'modules':<{width}}   FLOPs  matmuls"]
    lines += [f"    {end_of(path, width):<{width}}  {share:>6.1%}  {what}" for path, share, what in shown]
    if rest := rows[len(shown) :]:
        lines.append(f"    {f'… and {len(rest)} more':<{width}}  {sum(share for _, share, _ in rest):>6.1%}")
    return lines


def _module_rows(plans: Sequence[Plan], t: Totals) -> Iterator[tuple[str, float, str]]:
    """Yield path, share of the FLOPs and decisions of each module."""
    for plan in plans:
        for group in matmul_groups(plan):
            times = f" ×{group.count}" if group.count > 1 else ""
            work = sum(flops(row, plan) * count for row, count in group.rows) * group.count
            roles: dict[str, list[str]] = {}
            for row, _ in group.rows:
                roles.setdefault(row.decision, []).append(row.role)
            what = "; ".join(f"{decision} {', '.join(dict.fromkeys(names))}" for decision, names in roles.items())
            yield f"{group.path or '(the model itself)'}{times}", work / t.flops if t.flops else 0.0, what


def _more(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield where to look next."""
    counts = {name: sum(len(getattr(plan, OF_PLANS.get(name, name))) for plan in plans) for name in TABLES}
    found = [f'"{name}" {count}' for name, count in counts.items() if count]
    if found:
        first = found[0].replace('" ', '") has ') + " rows"
        yield from labelled("more", [", ".join([f".table({first}", *found[1:]])], COLUMNS)
    dump = 'options={"dump": folder} keeps graphs and kernels; `fp8compile report folder` shows them'
    yield from labelled("" if found else "more", [dump], COLUMNS)
