"""FP8 matmuls of a mixture's experts beside BF16: torch's grouped kernels, with groups of equal size and others.

    python -m benchmarks.micro.grouped_matmul [--only Mixtral] --json FILE    one Hopper GPU
    python -m benchmarks.micro.grouped_matmul --tiny    tiny shapes by the reference, on a CPU: no times

TFLOP/s of the two matmuls of each layer that run in FP8, operands cast already, medians of device times. even: every
expert gets as many tokens; skewed: the expert of rank r gets a share of 1/r, and one gets none.

BF16       torch's grouped matmul
FP8        ours, kernels/matmul/scaled_mm.py, by rows; "fast": with fast accumulation, as `output` has it
of dense   the fastest of these as a share of a plain FP8 matmul, by rows, of as many operations

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import runs
from benchmarks.harness.columns import Column, Row, figure
from benchmarks.harness.measuring import device_milliseconds, intervals
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.micro.matmul import SLEEP, operand, shape
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers


@dataclass(frozen=True)
class Mixture:
    """Experts of a model: how many, how many a token meets, its width and theirs."""

    experts: int
    top_k: int
    width: int
    inner: int


TOKENS = 16384
MODELS = {"Mixtral 8x7B": Mixture(8, 2, 4096, 14336), "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768)}
TINY, TINY_TOKENS = Mixture(4, 2, 64, 48), 48
SYSTEMS = [f"{x}: {y}, {z}" for x in ("gate+up", "down") for y in ("output", "grad_input") for z in ("even", "skewed")]
Call = Callable[[], Tensor]


def sizes(rows: int, experts: int, how: str) -> list[int]:
    """How many of `rows` rows each expert gets."""
    shares = [1.0] * experts if how == "even" else [1.0 / r for r in range(1, experts)] + [0.0]
    ends = [round(rows * sum(shares[: i + 1]) / sum(shares)) for i in range(experts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def calls(m: int, n: int, k: int, groups: list[int], device: str) -> Iterator[tuple[str, Call]]:
    """Every way to multiply m rows in these groups, by name."""
    offs = torch.tensor(groups, device=device).cumsum(0).int()
    x, w = (torch.randn(*s, k, device=device, dtype=torch.bfloat16) for s in ((m,), (len(groups), n)))
    yield "BF16", lambda: torch.nn.functional.grouped_mm(x, w.mT, offs=offs)
    (a, scale_a), (b, scale_b) = operand(m, k, "row", device), operand(len(groups) * n, k, "row", device)
    matrices, scales = b.view(-1, n, k), scale_b.view(-1, n, 1)
    multiply = scaled_mm.scaled_mm if device == "cuda" else markers.scaled_mm
    for fast in (False, True):
        rest = ("row", None, torch.bfloat16, fast)
        yield f"FP8{', fast' if fast else ''}", partial(multiply, a, scale_a, "row", matrices, scales, *rest, offs)
    yield "dense", partial(multiply, a, scale_a, "row", matrices[0], scales[0], *rest)


def measure(case: Case) -> dict[str, Any]:
    """TFLOP/s of every way to multiply one shape."""
    layer, role, how = case.system.replace(",", ":").split(": ")
    of = TINY if case.tiny else MODELS[case.model]
    rows = of.top_k * (TINY_TOKENS if case.tiny else TOKENS)
    outputs, inputs = (2 * of.inner, of.width) if layer == "gate+up" else (of.width, of.inner)
    m, n, k = shape(role, rows, outputs, inputs)
    figures: dict[str, Any] = {"m": m, "n": n, "k": k, "experts": of.experts}
    for name, call in calls(m, n, k, sizes(m, of.experts, how), case.device):
        call()
        ms = statistics.median(intervals(call, 2, "cpu")) if case.tiny else device_milliseconds(call, 15, SLEEP)
        figures[name] = 2e-9 * m * n * k / ms
    return {**figures, "of_dense": max(figures["FP8"], figures["FP8, fast"]) / figures["dense"]}


def _sizes(row: Row) -> str:
    return " × ".join(str(row.get(size)) for size in "mnk") + f" in {row.get('experts')}"


COLUMNS: tuple[Column, ...] = (
    Column(f"{'M × N × K in E':>27}", lambda row, _: _sizes(row)),
    *(figure(name, name, ".0f") for name in ("BF16", "FP8", "FP8, fast")),
    figure("of dense", "of_dense", ".0%"),
)
BENCHMARK = Benchmark(
    "grouped_matmul",
    {model: list(SYSTEMS) for model in MODELS},
    measure,
    COLUMNS,
    baseline="",
    axes=(("BF16", "BF16, TFLOP/s"), ("FP8", "FP8, TFLOP/s")),
    alone=False,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
