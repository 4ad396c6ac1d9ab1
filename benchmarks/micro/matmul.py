"""Our FP8 matmuls beside what cuBLAS can do: the shapes of a step of known models, in all three roles of a linear.

    python -m benchmarks.micro.matmul [--only Llama-8B*] --json FILE    one GPU with FP8, less than a minute
    python -m benchmarks.micro.matmul --tiny    tiny shapes by the reference, on a CPU: no times

TFLOP/s of a [M, K] times b [N, K], transposed: random data, medians of device times, BF16 results.

BF16      torch's matmul
raw       torch._scaled_mm as it is, with one scale or one a row; "fast": with fast accumulation
others    ours, kernels/matmul/scaled_mm.py, by granularity of the scales; 128 elements a group
default   what the default recipe runs in this role (fast in `output` alone), as a share of the fastest raw one

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import runs
from benchmarks.harness.columns import Column, Row, figure
from benchmarks.harness.measuring import device_milliseconds, intervals
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.harness.workloads import WORKLOADS, Sizes, Workload
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers
from fp8compile.recipe import Recipe

TINY = (64, 48, 128)
SLEEP = 2_000_000  # cycles, about a millisecond: longer than the host takes to queue a matmul
ROLES = ("output", "grad_input", "grad_weight")
GRANULARITIES = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "row × tensor": ("row", "tensor"),
    "group × block": ("group(128)", "block(128)"),
    "group × group": ("group(128)", "group(128)"),
}
SHOWN = ("tensor, fast", "tensor", "row, fast", "row", "row × tensor, fast", "group × block", "group × group")
RAW = ("raw tensor, fast", "raw tensor", "raw row, fast", "raw row")
Call = Callable[[], Tensor]


# ---- shapes ---------------------------------------------------------------------------------------------------------


def linears(sizes: Sizes) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a model; those that are merged are one."""
    width = sizes.get("hidden_size") or sizes["n_embd"]
    inner = sizes.get("intermediate_size", 4 * width)
    heads = sizes.get("num_key_value_heads")
    keys = width if heads is None else width // sizes["num_attention_heads"] * heads
    layers = {"qkv": (width + 2 * keys, width), "out": (width, width)}
    layers |= {"up": (inner, width)} if heads is None else {"gate+up": (2 * inner, width)}
    return layers | {"down": (width, inner)}


def tokens(workload: Workload) -> int:
    """Rows of activations: tokens of a batch, or patches of its images and a token for the class."""
    patches = (workload.sizes.get("image_size", 224) // workload.sizes.get("patch_size", 16)) ** 2 + 1
    return workload.batch * (workload.length or patches)


def shape(role: str, m: int, n: int, k: int) -> tuple[int, int, int]:
    """M, N and K of a role, of a layer that makes [m, n] of [m, k]."""
    return {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[role]


MODELS = ("Llama 1.1B", "Llama-8B (8 layers)", "Llama 100M", "Qwen2 1.5B", "GPT-2 XL (16 layers)", "ViT-H")
SHAPES = {
    workload.name: {
        f"{layer}: {role}": shape(role, tokens(workload), *layers)
        for layer, layers in linears(workload.sizes).items()
        for role in ROLES
    }
    for workload in WORKLOADS
    if workload.name in MODELS
}


# ---- kernels --------------------------------------------------------------------------------------------------------


def operand(rows: int, cols: int, granularity: str, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """(payload, scale) of random data."""
    x = torch.randn(rows, cols, device=device)
    scale = markers.scale(markers.amax(x, granularity), "e4m3")
    return markers.quantize(x, scale, "e4m3", granularity), scale


def calls(m: int, n: int, k: int, device: str) -> Iterator[tuple[str, Call]]:
    """Every way to multiply, by name; operands live as long as their call is at hand."""
    x, w = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    yield "BF16", lambda: x @ w.t()
    multiply = scaled_mm.scaled_mm if device == "cuda" else markers.scaled_mm
    for name, (how_a, how_b) in GRANULARITIES.items():
        with contextlib.suppress(ValueError, RuntimeError):  # groups that do not divide K
            (a, scale_a), (b, scale_b) = operand(m, k, how_a, device), operand(n, k, how_b, device)
            for fast in (True, False) if "group" not in name else (False,):
                call = partial(multiply, a, scale_a, how_a, b, scale_b, how_b, None, torch.bfloat16, fast)
                yield f"ours {name}{', fast' if fast else ''}", call
                if device == "cuda" and how_a == how_b and "group" not in name:
                    yield f"raw {name}{', fast' if fast else ''}", partial(raw, a, scale_a, b, scale_b, fast)


def raw(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, fast: bool) -> Tensor:
    """cuBLAS itself; a scale of rows is [rows, 1] of a, and transposed of b."""
    scale_b = scale_b.t() if scale_b.dim() else scale_b
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)


def measure(case: Case) -> dict[str, Any]:
    """TFLOP/s of every way to multiply one shape."""
    m, n, k = TINY if case.tiny else SHAPES[case.model][case.system]
    figures: dict[str, Any] = {"m": m, "n": n, "k": k}
    for name, call in calls(m, n, k, case.device):
        call()
        ms = statistics.median(intervals(call, 2, "cpu")) if case.tiny else device_milliseconds(call, 15, SLEEP)
        figures[name] = 2e-9 * m * n * k / ms
    default = figures[f"ours {default_name(case.system.split(': ')[1])}"]
    ceiling = max((figures[name] for name in RAW if name in figures), default=None)
    return {**figures, "default": default, "of_ceiling": default / ceiling if ceiling else None}


def default_name(role: str) -> str:
    """Return what the default recipe runs in a role, as it is called here."""
    how: Any = getattr(Recipe.parse("mixed"), role)
    pair = str(how.left.granularity), str(how.right.granularity)
    name = next(name for name, granularities in GRANULARITIES.items() if granularities == pair)
    return f"{name}{', fast' if how.fast_accumulation else ''}"


COLUMNS: tuple[Column, ...] = (
    Column(f"{'M × N × K':>22}", lambda row, _: " × ".join(str(row.get(size)) for size in "mnk")),
    *(figure(name, name, ".0f") for name in ("BF16", *RAW)),
    *(
        figure(name, f"ours {name}", ".0f")
        for name in ("tensor, fast", "tensor", "row × tensor, fast", "row", "group × block", "group × group")
    ),
    figure("default", "of_ceiling", ".0%"),
)
BENCHMARK = Benchmark(
    "matmul",
    {model: list(shapes) for model, shapes in SHAPES.items()},
    measure,
    COLUMNS,
    baseline="",
    axes=(("BF16", "BF16, TFLOP/s"), ("default", "default recipe, TFLOP/s")),
    alone=False,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
