"""What a run measured, and two runs side by side: as a table, as a picture and as JSON."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # pictures go to files, also where there is no screen
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

GIB = 2**30
FINAL_PART = 0.1  # of the steps, averaged into the final training loss
COLORS = {"bf16": "#4C72B0", "fp8": "#DD8452"}
PATHS_SHOWN = 3


@dataclass(frozen=True)
class MatmulRow:
    """One matmul of the compiled model: where it is, its size (k contracts), and what was decided about it."""

    path: str
    role: str
    m: int
    n: int
    k: int
    decision: str
    reason: str


@dataclass(frozen=True)
class Run:
    """What one training run measured. Losses are in nats per byte."""

    name: str
    losses: list[float]
    held_out: float
    tokens_per_second: float
    compile_seconds: float
    peak_bytes: int | None
    matmuls: list[MatmulRow]

    @property
    def final_loss(self) -> float:
        last = self.losses[-max(1, round(FINAL_PART * len(self.losses))) :]
        return sum(last) / len(last)


def table(runs: list[Run], unigram_entropy: float) -> str:
    """Return the runs side by side, then the matmuls of the FP8 run."""
    lines = [_row("", [run.name.upper() for run in runs], "FP8 against BF16" if len(runs) == 2 else "")]
    lines.append(_quantity("final training loss", runs, lambda run: run.final_loss, ".4f", _relative))
    lines.append(_quantity("held-out loss", runs, lambda run: run.held_out, ".4f", _relative))
    lines.append(_quantity("tokens/s", runs, lambda run: run.tokens_per_second, ",.0f", _ratio))
    if all(run.peak_bytes is not None for run in runs):
        lines.append(_quantity("peak memory, GiB", runs, lambda run: (run.peak_bytes or 0) / GIB, ".2f", _ratio))
    lines.append(_quantity("compile time, s", runs, lambda run: run.compile_seconds, ".1f", None))
    lines.append(f"\nLosses are nats per byte; byte frequencies alone give {unigram_entropy:.4f}.")
    for run in runs:
        if run.matmuls:
            lines += ["", *_matmul_lines(run.matmuls)]
    return "\n".join(lines)


def save(folder: Path, runs: list[Run], unigram_entropy: float, settings: dict[str, Any]) -> list[Path]:
    """Writes results.json and loss.png into folder; returns their paths."""
    results, picture = folder / "results.json", folder / "loss.png"
    content = {
        "settings": settings,
        "unigram_entropy": unigram_entropy,
        "runs": [asdict(run) | {"final_loss": run.final_loss} for run in runs],
    }
    results.write_text(json.dumps(content, indent=1) + "\n")
    _draw(picture, runs, unigram_entropy)
    return [results, picture]


def _draw(path: Path, runs: list[Run], unigram_entropy: float) -> None:
    """Loss curves, faint as measured and bold as averages; below them, with two runs, their difference."""
    panels = len(runs)
    figure = plt.figure(figsize=(8, 3.2 + 1.8 * panels), layout="constrained")
    grid = figure.subplots(panels, sharex=True, squeeze=False, height_ratios=[3, 1][:panels])
    axes = grid[0, 0]
    for run, style in zip(runs, ("-", "--"), strict=False):
        label = f"{run.name.upper()}: held-out {run.held_out:.4f}"
        axes.plot(run.losses, color=COLORS[run.name], alpha=0.2, linewidth=0.8)
        axes.plot(_smooth(run.losses), style, color=COLORS[run.name], linewidth=1.8, label=label)
    axes.axhline(unigram_entropy, color="0.5", linestyle=":", label=f"byte frequencies alone: {unigram_entropy:.4f}")
    axes.set(ylabel="training loss, nats per byte", title=" and ".join(run.name.upper() for run in runs))
    axes.legend(frameon=False)
    if panels == 2:
        _draw_difference(grid[1, 0], *(_smooth(run.losses) for run in runs))
    grid[-1, 0].set_xlabel("step")
    for axes in grid.flat:
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_difference(axes: Axes, bf16: list[float], fp8: list[float]) -> None:
    axes.plot([100 * (b / a - 1) for a, b in zip(bf16, fp8, strict=True)], color=COLORS["fp8"])
    axes.axhline(0, color=COLORS["bf16"], linewidth=0.8)
    axes.set_ylabel("FP8 above BF16, %")


def _smooth(losses: list[float]) -> list[float]:
    """Exponential average over about a fiftieth of the run, corrected for its start."""
    keep = 1 - 1 / max(1.0, len(losses) / 50)
    smoothed, average, weight = [], 0.0, 0.0
    for loss in losses:
        average, weight = keep * average + (1 - keep) * loss, keep * weight + (1 - keep)
        smoothed.append(average / weight)
    return smoothed


def _matmul_lines(matmuls: list[MatmulRow]) -> Iterator[str]:
    converted = [row for row in matmuls if row.decision == "fp8"]
    left = [row for row in matmuls if row.decision != "fp8"]
    roles = ", ".join(f"{count} {role}" for role, count in Counter(row.role for row in converted).items())
    yield f"{len(converted)} of {len(matmuls)} matmuls in FP8" + (f": {roles}" if roles else "")
    for reason, count in Counter(row.reason for row in left).most_common():
        paths = list(dict.fromkeys(row.path for row in left if row.reason == reason))
        more = ", …" if len(paths) > PATHS_SHOWN else ""
        yield f"{count:5d} left in BF16: {reason} ({', '.join(paths[:PATHS_SHOWN])}{more})"


def _quantity(
    label: str, runs: list[Run], value: Callable[[Run], float], form: str, compare: Callable[[float, float], str] | None
) -> str:
    values = [value(run) for run in runs]
    comparison = compare(values[0], values[1]) if compare and len(values) == 2 else ""
    return _row(label, [format(number, form) for number in values], comparison)


def _row(label: str, cells: list[str], comparison: str) -> str:
    return f"{label:<22}" + "".join(f"{cell:>12}" for cell in cells) + f"{comparison:>20}"


def _relative(bf16: float, fp8: float) -> str:
    return f"{fp8 / bf16 - 1:+.2%}"


def _ratio(bf16: float, fp8: float) -> str:
    return f"{fp8 / bf16:.2f}×"
