"""FP8 matmuls of a mixture's experts beside BF16: torch's grouped kernels, with groups of equal size and others.

    python -m benchmarks.micro.grouped_matmul [--only Mixtral] --json FILE    one Hopper GPU
    python -m benchmarks.micro.grouped_matmul --tiny    tiny shapes by the reference, on a CPU: no times

TFLOP/s of the three matmuls of each layer, operands cast already, medians of device times. even: every expert gets as
many tokens; skewed: the expert of rank r gets a share of 1/r, and one gets none.

BF16       torch's grouped matmul
FP8        ours, kernels/matmul/scaled_mm.py, by rows; "fast": with fast accumulation, as `output` has it
of dense   the fastest of these as a share of a plain FP8 matmul, by rows, of as many operations
cast       of grad_weight: the same TFLOP/s with both operands cast first, kernels/casts/grouped_cast.py
TB/s       of those two casts, of the bytes that they must move: each element read once and written once

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.harness import runs
from benchmarks.harness.columns import Column, Row, figure
from benchmarks.harness.measuring import device_milliseconds, intervals
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.micro.matmul import SLEEP, operand, shape
from fp8compile import ops
from fp8compile.formats import ALIGNMENT
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers
from fp8compile.recipe import ROLES


@dataclass(frozen=True)
class Mixture:
    """Experts of a model: how many, how many a token meets, its width and theirs."""

    experts: int
    top_k: int
    width: int
    inner: int


TOKENS = 16384
CAST_BYTES = 3  # of an element: BF16 in, E4M3 out
MODELS = {
    "Mixtral 8x7B": Mixture(8, 2, 4096, 14336),
    "64 experts of Qwen3 30B-A3B": Mixture(64, 8, 2048, 768),
    "Qwen3 30B-A3B": Mixture(128, 8, 2048, 768),
}
TINY, TINY_TOKENS = Mixture(4, 2, 64, 48), 48
SYSTEMS = [f"{layer}: {role}, {how}" for layer in ("gate+up", "down") for role in ROLES for how in ("even", "skewed")]
Call = Callable[[], object]


def sizes(rows: int, experts: int, how: str) -> list[int]:
    """Return how many of `rows` rows each expert gets."""
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


def contractions(m: int, n: int, k: int, groups: list[int], device: str) -> Iterator[tuple[str, Call]]:
    """Every way to multiply m rows by n rows, of which these groups of k are contracted, by name; and the casts."""
    offs = torch.tensor(groups, device=device).cumsum(0).int()
    dy, x = (torch.randn(k, columns, device=device, dtype=torch.bfloat16) for columns in (m, n))
    yield "BF16", lambda: torch.nn.functional.grouped_mm(dy.t(), x, offs=offs)
    multiply = scaled_mm.scaled_mm if device == "cuda" else markers.scaled_mm

    def cast() -> tuple[Any, ...]:
        (a, scale_a, ends), (b, scale_b, _) = (ops.grouped_cast(operand, offs, "e4m3") for operand in (dy, x))
        return a, scale_a, "row", b, scale_b, "row", None, torch.bfloat16, False, ends

    given = cast()
    for fast in (False, True):
        args = (*given[:-2], fast, given[-1])
        yield f"FP8{', fast' if fast else ''}", partial(multiply, *args)
    a, b = (operand[:, : k // ALIGNMENT * ALIGNMENT].contiguous() for operand in (given[0], given[3]))
    yield "dense", partial(multiply, a, given[1][0], "row", b, given[4][0], *given[5:9])
    yield "cast", lambda: multiply(*cast())
    yield "casts", cast


def measure(case: Case) -> dict[str, Any]:
    """TFLOP/s of every way to multiply one shape."""
    layer, role, how = case.system.replace(",", ":").split(": ")
    of = TINY if case.tiny else MODELS[case.model]
    rows = of.top_k * (TINY_TOKENS if case.tiny else TOKENS)
    outputs, inputs = (2 * of.inner, of.width) if layer == "gate+up" else (of.width, of.inner)
    m, n, k = shape(role, rows, outputs, inputs)
    figures: dict[str, Any] = {"m": m, "n": n, "k": k, "experts": of.experts}
    ways = contractions if role == "grad_weight" else calls
    for name, call in ways(m, n, k, sizes(rows, of.experts, how), case.device):
        call()
        ms = statistics.median(intervals(call, 2, "cpu")) if case.tiny else device_milliseconds(call, 15, SLEEP)
        figures[name] = (CAST_BYTES * (m + n) * k if name == "casts" else 2 * m * n * k) * 1e-9 / ms
    return {**figures, "of_dense": max(figures["FP8"], figures["FP8, fast"]) / figures["dense"]}


def _sizes(row: Row) -> str:
    return " × ".join(str(row.get(size)) for size in "mnk") + f" in {row.get('experts')}"


COLUMNS: tuple[Column, ...] = (
    Column(f"{'M × N × K in E':>27}", lambda row, _: _sizes(row)),
    *(figure(name, name, ".0f") for name in ("BF16", "FP8", "FP8, fast")),
    figure("of dense", "of_dense", ".0%"),
    figure("cast", "cast", ".0f"),
    figure("TB/s", "casts", ".2f"),
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
