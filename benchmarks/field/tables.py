"""Tables of the field suite: a line a row, and which rows fall short of what, with the cause.

A row is to be right, not to crash where BF16 `torch.compile` does not, to be no slower than 0.98 of its speed, to hold
no more memory at any step, and to have its first step finished within 1.6 times its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.columns import MISSING, Row, markdown

SPEED, SPREAD, COLD = 0.98, 1.005, 1.6  # peaks are equal within what allocators round
HOST = 0.95  # a step that takes this share of its time to be queued waits for the host
HEAD = ["row", "parameters", "ms", "speed", "first steps, GiB", "later, GiB", "first step, s", "FP8 of FLOPs",
        "worst dB", "median dB (of)", "BF16 compile: worst, median", ""]  # fmt: skip


def shortfalls(baseline: Row, ours: Row) -> Iterator[tuple[str, str]]:
    """Of all that a row falls short in: what it is, and its cause as far as figures tell."""
    if baseline.get("ms") is None:
        return  # BF16 cannot either
    if ours.get("ms") is None:
        yield "crash" if not ours.get("too_long") else "not done in time", ours.note
        return
    for wrong in ours.get("wrong") or ():
        yield "wrong", wrong
    for failure in ours.get("failures") or ():
        yield "fell back to BF16", failure
    if not ours.get("plans"):
        yield "nothing compiled", "; ".join(ours.get("warnings") or ()) or "no graph was seen, and nothing said so"
    yield from _slow(baseline, ours)
    yield from _large(baseline, ours)
    yield from _late(baseline, ours)


def _slow(baseline: Row, ours: Row) -> Iterator[tuple[str, str]]:
    speed = baseline.get("ms") / ours.get("ms")
    if speed >= SPEED:
        return
    causes = [f"{ours.get('fp8_share') or 0:.0%} of FLOPs in FP8"]
    if ours.get("host_ms") >= HOST * ours.get("ms"):
        causes.append(f"the host: {baseline.get('host_ms'):.1f} → {ours.get('host_ms'):.1f} ms to queue a step")
    if ours.get("graphs") != baseline.get("graphs"):
        causes.append(f"graphs: {baseline.get('graphs')} → {ours.get('graphs')}")
    yield f"speed {speed:.2f}×", "; ".join(causes)


def _large(baseline: Row, ours: Row) -> Iterator[tuple[str, str]]:
    for key, name in (("first_peak_gib", "peak of the first steps"), ("peak_gib", "peak")):
        wanted, got = baseline.get(key), ours.get(key)
        if got <= wanted * SPREAD:
            continue
        cause = "steady steps"
        if key == "first_peak_gib" and ours.get("peak_gib") <= baseline.get("peak_gib") * SPREAD:
            update = ours.get("update_peak_gib") >= ours.get("backward_peak_gib")
            cause = "the first update" if update else "the first backward"
        yield f"{name} {wanted:.2f} → {got:.2f} GiB", cause


def _late(baseline: Row, ours: Row) -> Iterator[tuple[str, str]]:
    ratio = ours.get("cold_seconds") / baseline.get("cold_seconds")
    if ratio > COLD:
        parts = (
            f"{name} {baseline.get(key):.0f} → {ours.get(key):.0f} s"
            for name, key in (("model", "model_seconds"), ("optimizer", "optimizer_seconds"))
        )
        yield f"first step {ratio:.1f}×", ", ".join(parts)


# ---- as Markdown ----------------------------------------------------------------------------------------------------


def pairs(measured: dict[str, Any]) -> list[tuple[Row, Row]]:
    """BF16's row and ours of each model."""
    return [(rows[0], rows[1]) for _, rows in measured.values() if len(rows) == 2]


def lines(measured: dict[str, Any]) -> str:
    """Return a line a row."""
    made = [line(baseline, ours) for baseline, ours in pairs(measured)]
    return markdown(HEAD, made) if made else "Nothing has been measured yet.\n"


def line(baseline: Row, ours: Row) -> list[str]:
    if baseline.get("ms") is None or ours.get("ms") is None:
        notes = dict.fromkeys(f"{row.system}: {row.note}" for row in (baseline, ours) if row.note)
        return [ours.model, *[""] * (len(HEAD) - 2), "; ".join(notes).replace("|", "\\|")]
    faster, cold = (baseline.get(k) / ours.get(k) for k in ("ms", "cold_seconds"))
    return [
        ours.model, f"{ours.get('parameters') / 1e6:.0f} M", change(baseline, ours, "ms", ".1f"), f"{faster:.2f}×",
        change(baseline, ours, "first_peak_gib", ".2f"), change(baseline, ours, "peak_gib", ".2f"),
        f"{change(baseline, ours, 'cold_seconds', '.0f')} ({1 / cold:.1f}×)",
        f"{ours.get('fp8_share'):.0%} ({ours.get('fp8_matmuls')} of {ours.get('matmuls')})",
        f"{decibels(ours, 'worst')} {ours.get('worst_name', '')}".strip(),
        f"{decibels(ours, 'median')} ({ours.get('telling')} of {ours.get('gradients')})",
        f"{decibels(baseline, 'worst')}, {decibels(baseline, 'median')}", ours.note,
    ]  # fmt: skip


def change(baseline: Row, ours: Row, key: str, form: str) -> str:
    return f"{baseline.get(key):{form}} → {ours.get(key):{form}}"


def decibels(row: Row, key: str) -> str:
    return MISSING if row.get(key) is None else f"{row.get(key):.1f}"


def short(measured: dict[str, Any]) -> str:
    """Return how many rows meet every bound, and a line for each bound that one misses."""
    rows = [(baseline, ours, list(shortfalls(baseline, ours))) for baseline, ours in pairs(measured)]
    rows = [row for row in rows if row[0].get("ms") is not None]
    if not rows:
        return "Nothing has been measured yet.\n"
    whole = f"{sum(not found for *_, found in rows)} of {len(rows)} rows meet every bound.\n"
    made = [[ours.model, what, cause.replace("|", "\\|")] for _, ours, found in rows for what, cause in found]
    return whole + ("\n" + markdown(["row", "what", "cause"], made) if made else "")
