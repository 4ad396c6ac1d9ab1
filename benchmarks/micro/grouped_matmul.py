"""FP8 matmuls of a mixture's experts beside BF16: torch's grouped kernels, with groups of equal size and others.

    python -m benchmarks.micro.grouped_matmul [--only Mixtral] --json FILE    one Hopper GPU
    python -m benchmarks.micro.grouped_matmul --tiny    tiny shapes by the reference, on a CPU: no times

TFLOP/s of the three matmuls of each layer, operands cast already, medians of device times. even: every expert gets as
many of 16384 tokens; skewed: the expert of rank r gets a share of 1/r, and one gets none; "16 each": 16 tokens.

BF16       torch's grouped matmul
FP8        ours, kernels/matmul/scaled_mm.py, by rows; "fast": with fast accumulation, as `output` has it
torch's    torch's kernel with fast accumulation, where ours is another
of dense   the fastest of these as a share of a plain FP8 matmul, by rows, of as many operations
cast       of grad_weight: the same TFLOP/s with both operands cast first, kernels/casts/grouped_cast.py: each expert's
           with one scale, of amaxes that are known ("mixed"); by columns: a scale a column ("rowwise")
TB/s       of each two casts, of the bytes that they must move: each element read once and written once

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
EACH = " each"  # so many tokens for every expert, however many that makes
HOWS = ("even", "skewed", *(f"{tokens}{EACH}" for tokens in (16, 64, 256, 1024, 4096, 8192)))
SYSTEMS = [f"{layer}: {role}, {how}" for layer in ("gate+up", "down") for role in ROLES for how in HOWS]
Call = Callable[[], object]


def sizes(rows: int, experts: int, how: str) -> list[int]:
    """Return how many of `rows` rows each expert gets."""
    shares = [1.0 / r for r in range(1, experts)] + [0.0] if how == "skewed" else [1.0] * experts
    ends = [round(rows * sum(shares[: i + 1]) / sum(shares)) for i in range(experts)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def routed(of: Mixture, how: str) -> int:
    """Return how many rows all experts get together."""
    return of.experts * int(how.removesuffix(EACH)) if how.endswith(EACH) else of.top_k * TOKENS


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
    if device == "cuda":
        flat, turned = (scale_a.reshape(-1), scales.squeeze(-1)), matrices.transpose(1, 2)
        how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
        yield "torch's", lambda: torch._scaled_grouped_mm(a, turned, *flat, offs, **how)


def contractions(m: int, n: int, k: int, groups: list[int], device: str) -> Iterator[tuple[str, Call]]:
    """Every way to multiply m rows by n rows, of which these groups of k are contracted, by name; and the casts."""
    offs = torch.tensor(groups, device=device).cumsum(0).int()
    dy, x = (torch.randn(k, columns, device=device, dtype=torch.bfloat16) for columns in (m, n))
    yield "BF16", lambda: torch.nn.functional.grouped_mm(dy.t(), x, offs=offs)
    multiply = scaled_mm.scaled_mm if device == "cuda" else markers.scaled_mm

    known = [ops.amax(operand, "row") for operand in (dy, x)]

    def cast(amaxes: Sequence[Tensor | None]) -> tuple[Any, ...]:
        made = [ops.grouped_cast(*of, amax=amax) for of, amax in zip(given, amaxes, strict=True)]
        (a, scale_a, ends), (b, scale_b, _) = made
        return a, scale_a, "row", b, scale_b, "row", None, torch.bfloat16, False, ends

    given = [(operand, offs, "e4m3") for operand in (dy, x)]
    operands = cast(known)
    for fast in (False, True):
        args = (*operands[:-2], fast, operands[-1])
        yield f"FP8{', fast' if fast else ''}", partial(multiply, *args)
    a, b = (operand[:, : k // ALIGNMENT * ALIGNMENT].contiguous() for operand in (operands[0], operands[3]))
    yield "dense", partial(multiply, a, operands[1][0], "row", b, operands[4][0], *operands[5:9])
    for name, amaxes in (("cast", known), ("by columns", [None, None])):
        yield name, lambda amaxes=amaxes: multiply(*cast(amaxes))
        yield f"{name} alone", partial(cast, amaxes)


def measure(case: Case) -> dict[str, Any]:
    """TFLOP/s of every way to multiply one shape."""
    layer, role, how = case.system.replace(",", ":").split(": ")
    of = TINY if case.tiny else MODELS[case.model]
    rows = of.top_k * TINY_TOKENS if case.tiny else routed(of, how)
    outputs, inputs = (2 * of.inner, of.width) if layer == "gate+up" else (of.width, of.inner)
    m, n, k = shape(role, rows, outputs, inputs)
    figures: dict[str, Any] = {"m": m, "n": n, "k": k, "experts": of.experts}
    ways = contractions if role == "grad_weight" else calls
    for name, call in ways(m, n, k, sizes(rows, of.experts, how), case.device):
        call()
        ms = statistics.median(intervals(call, 2, "cpu")) if case.tiny else device_milliseconds(call, 15, SLEEP)
        figures[name] = (CAST_BYTES * (m + n) * k if name.endswith(" alone") else 2 * m * n * k) * 1e-9 / ms
    return {**figures, "of_dense": max(figures["FP8"], figures["FP8, fast"]) / figures["dense"]}


def _sizes(row: Row) -> str:
    return " × ".join(str(row.get(size)) for size in "mnk") + f" in {row.get('experts')}"


COLUMNS: tuple[Column, ...] = (
    Column(f"{'M × N × K in E':>27}", lambda row, _: _sizes(row)),
    *(figure(name, name, ".0f") for name in ("BF16", "FP8", "FP8, fast", "torch's")),
    figure("of dense", "of_dense", ".0%"),
    *(
        column
        for name in ("cast", "by columns")
        for column in (figure(name, name, ".0f"), figure("TB/s", f"{name} alone", ".2f"))
    ),
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
