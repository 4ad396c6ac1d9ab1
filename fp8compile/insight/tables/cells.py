"""Cells of tables: short texts of what a row says."""

from __future__ import annotations

from fp8compile.insight.tables.numbers import WIDTH, size
from fp8compile.plan.rows import FP8, Kernel, Matmul, Recomputed, Saved, Transfer


def shape(row: Matmul) -> str:
    """Return "4·64×128×256": batch, M, N, K; "64×128×256 in 4": of a matmul in 4 groups."""
    batch = "" if row.batch == 1 else f"{row.batch}·"
    groups = "" if row.groups == 1 and row.kind != "grouped" else f" in {row.groups}"
    return f"{batch}{row.m}×{row.n}×{row.k}{groups}" if 0 not in (row.m, row.n, row.k) else "?"


def casts(row: Matmul) -> str:
    """Return how both operands are cast; "" for a matmul that is left."""
    return f"{row.left} × {row.right}" if row.decision == FP8 else ""


def estimate(row: Matmul) -> str:
    """Return the estimated milliseconds, where the cost model has any."""
    if row.milliseconds_bf16 is None or row.milliseconds_fp8 is None:
        return ""
    return f"{row.milliseconds_bf16:.3g} → {row.milliseconds_fp8:.3g}"


def reason(row: Matmul) -> str:
    """Return why, and what was padded."""
    return "; ".join([row.reason, *(f"{p}" for p in row.padded)])


def transfer(row: Transfer) -> str:
    """Return "forward all-gather bfloat16[64, 128]"."""
    return f"{row.half} {row.kind} {value(row)}"


def times(text: str, count: int) -> str:
    """Return "text ×3"; of one, the text."""
    return f"{text} ×{count}" if count > 1 else text


def value(row: Saved | Recomputed | Transfer) -> str:
    """Return "bfloat16[64, 128]": what the model computes."""
    return f"{row.dtype}[{', '.join(map(str, row.shape))}]"


def moved(kernel: Kernel) -> str:
    """Return the bytes that a kernel reads and writes; "?" where only the data knows."""
    return size(kernel.moved) if kernel.moved else "?"


def cut(text: str, room: int = WIDTH) -> str:
    """Return `text` in `room` columns."""
    return text if len(text) <= room else text[: room - 1] + "…"


def end_of(text: str, room: int) -> str:
    """Return `text` in `room` columns; of a longer one, its end."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]
