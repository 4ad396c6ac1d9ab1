"""The first page's figures, from runs of `benchmarks/training/train_step.py`: a sentence, a short table, a picture.

headline    the first model of the table, in one sentence
table       a line a model: milliseconds and GiB of BF16; of the other systems the speed-up and the share of its peak
picture     time against peak memory of the same systems, both as shares of BF16's
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.columns import MISSING, Row, baseline_of, markdown, ratio
from benchmarks.harness.peers import BASELINE, MASKS_FOLDED
from benchmarks.harness.picture import Point, scatter
from benchmarks.training.train_step import EIGHT_BIT

MODELS = (
    "Llama 1.1B",
    "Llama-8B (8 layers)",
    "Qwen2 1.5B",
    "GPT-2 XL (16 layers)",
    "ViT-H",
    "Mixtral (8 layers)",
    "DeepSeek-V3 (6 layers)",
)
OURS = EIGHT_BIT.name
SYSTEMS = (BASELINE.name, MASKS_FOLDED.name, "torchao tensorwise", OURS)
FASTER, SHARE = ratio("", "ms"), ratio("", "peak_gib", inverse=True)
Measured = Mapping[str, tuple[Any, Sequence[Row]]]  # of each model its run, and the rows of that


def headline(measured: Measured) -> str:
    """Return the first model's result as a sentence: beside BF16 with masks folded, if that was measured."""
    model = next(name for name in MODELS if name in measured)
    run, rows = measured[model]
    bf16, ours = baseline_of(rows, model, BASELINE.name), baseline_of(rows, model, OURS)
    folded = baseline_of(rows, model, MASKS_FOLDED.name)
    if bf16 is None or ours is None:
        raise ValueError(f"{model} was not measured in BF16 and with {OURS}")
    fair = folded or bf16
    aside = f"; {FASTER.cell(ours, bf16)} with its mask read" if folded else ""
    return (
        f"On one {run['machine']['device']} a training step of {model} takes **{ours.get('ms'):.0f} ms** instead of "
        f"{fair.get('ms'):.0f} ({FASTER.cell(ours, fair)}{aside}),\nand at most **{ours.get('peak_gib'):.1f} GiB** "
        f"instead of {fair.get('peak_gib'):.1f}.\n"
    )


def table(measured: Measured) -> str:
    """Return a line a model, a column a system; of systems that were measured on one of the models."""
    there = {row.system for model in MODELS for row in _rows(measured, model)}
    systems = [name for name in SYSTEMS if name in there]
    lines = [[model, *_cells(measured, model, systems)] for model in MODELS if model in measured]
    return markdown(["", *systems], lines)


def picture(measured: Measured) -> str:
    """Return the plot as an SVG document: a point a model and system, the systems as series."""
    points = []
    for system in SYSTEMS[1:]:
        for model in MODELS:
            baseline, row = (_row(measured, model, name) for name in (BASELINE.name, system))
            if baseline and row:
                memory, time = (100 * row.get(key) / baseline.get(key) for key in ("peak_gib", "ms"))
                points.append(Point(memory, time, model.partition(" (")[0], system))
    title = "Training steps beside BF16 torch.compile, one GPU"
    return scatter(points, title, "peak memory, % of BF16", "time, % of BF16", joined=False)


def _cells(measured: Measured, model: str, systems: Sequence[str]) -> list[str]:
    baseline = _row(measured, model, BASELINE.name)
    cells = []
    for row in (_row(measured, model, name) for name in systems):
        if row is None:
            cells.append(MISSING)
        elif row is baseline:
            cells.append(f"{row.get('ms'):.1f} ms · {row.get('peak_gib'):.1f} GiB")
        else:
            cells.append(f"{FASTER.cell(row, baseline)} · {SHARE.cell(row, baseline)}")
    return cells


def _row(measured: Measured, model: str, system: str) -> Row | None:
    return next((row for row in _rows(measured, model) if row.system == system), None)


def _rows(measured: Measured, model: str) -> list[Row]:
    """Return the rows of `model` with times: a peer that cannot run it has a row without."""
    return [row for row in measured[model][1] if row.get("ms") is not None] if model in measured else []
