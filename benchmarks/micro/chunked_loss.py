"""An output head with its cross-entropy, forward and backward: time, peak memory and errors of gradients.

    python -m benchmarks.micro.chunked_loss --jobs 4 --json FILE     a CUDA GPU
    python -m benchmarks.micro.chunked_loss --count                  any machine: the peak by counting the graph
    python -m benchmarks.micro.chunked_loss --tiny                   a CPU: that it runs, no times

Whole logits (eager, torch.compile, ours) beside chunks, with the head in BF16 and in FP8, and Liger's fused kernel
where it is installed. "in chunks": of as many rows as they have by default.

ms        median time of forward and backward, from the end of one to the end of the next
peak      GiB at most, above what is there before a step
error     relative, in the norm, of the gradients of the input and of the weight, beside the same head in FP32
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # counts a graph of any size on any machine

from benchmarks.harness import runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.measuring import GIB, intervals
from benchmarks.harness.peers import BASELINE, EAGER
from benchmarks.harness.processes import Case, LeftOutError
from benchmarks.harness.runs import Benchmark
from fp8compile.errors import Fp8Warning

SHAPES = {  # rows, features, classes
    "Llama-8B, 4 × 4096": (16384, 4096, 128256),
    "Llama-8B, 1 × 4096": (4096, 4096, 128256),
    "Llama-1B, 8 × 2048": (16384, 2048, 128256),
    "GPT-2, 16 × 1024": (16384, 768, 50257),
    "Gemma-2B, 2 × 4096": (8192, 2304, 256000),
}
CHUNKS = (1024, 2048, 4096, 8192)


class Head(nn.Module):
    """norm → head → mean cross-entropy in FP32."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(features)
        self.lm_head = nn.Linear(features, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of x [rows, features] and labels [rows]."""
        return F.cross_entropy(self.lm_head(self.norm(x)).float(), labels)


def ours(model: nn.Module, chunks: Any, **options: Any) -> Any:
    """Compiled by this backend, its logits in `chunks`."""
    return torch.compile(model, backend="fp8", options={"chunk_loss": chunks, "save": "bf16", **options})


# ---- counting -------------------------------------------------------------------------------------------------------


def counted(shape: tuple[int, int, int], chunks: Any) -> float:
    """GiB at the highest point of forward and backward, every value of the graph counted, parameters left out."""
    torch.compiler.reset()
    m, k, n = shape
    with tempfile.TemporaryDirectory() as folder, FakeTensorMode(allow_non_fake_inputs=True):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Head(k, n)
        finally:
            torch.set_default_dtype(before)
        x = torch.empty(m, k, dtype=torch.bfloat16, requires_grad=True)
        ours(model, chunks, executor="eager", dump=folder)(x, torch.empty(m, dtype=torch.int64))
        (file,) = Path(folder).glob("*/memory.json")
        timelines = json.loads(file.read_text())["compiled"]
    return max(half["peak"] for half in timelines.values()) / GIB


def print_counts() -> None:
    """Print a table of counts."""
    print(f"{'GiB at the peak, unfused':24} {'whole':>8} {'auto':>8}" + "".join(f"{c:>8}" for c in CHUNKS))
    for name, shape in SHAPES.items():
        found = [counted(shape, chunks) for chunks in (False, "auto", *CHUNKS)]
        print(f"{name:24} " + " ".join(f"{gib:8.2f}" for gib in found), flush=True)


# ---- measuring ------------------------------------------------------------------------------------------------------

FP8: dict[str, Any] = {"lm_head": True, "select": "all"}
OURS: dict[str, dict[str, Any]] = {
    "BF16, whole": {"chunks": False},
    "BF16, in chunks": {"chunks": "auto"},
    "FP8, whole": {"chunks": False, **FP8},
    "FP8, in chunks": {"chunks": "auto", **FP8},
    **{f"BF16, chunks of {rows}": {"chunks": rows} for rows in CHUNKS},
    **{f"FP8, chunks of {rows}": {"chunks": rows, **FP8} for rows in CHUNKS},
}
LIGER = "Liger"
SYSTEMS = (BASELINE.name, EAGER.name, LIGER, *OURS)
TINY, STEPS = (64, 32, 80), 10


def liger(model: nn.Module) -> Callable[..., Tensor]:
    """Return Liger's fused linear cross-entropy. Raises LeftOutError if it is not installed."""
    try:
        from liger_kernel.transformers import (  # type: ignore[import-not-found]  # an optional peer
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        raise LeftOutError("not installed") from None
    loss, head = LigerFusedLinearCrossEntropyLoss(), model
    assert isinstance(head, Head)
    return lambda x, labels: loss(head.lm_head.weight, head.norm(x), labels)


def prepared(system: str, model: nn.Module, tiny: bool) -> Callable[..., Tensor]:
    """Return `model` as a system runs it."""
    if system == LIGER:
        return liger(model)
    if system == EAGER.name:
        return model
    if system == BASELINE.name:
        return torch.compile(model)
    return ours(model, **OURS[system], **({"executor": "eager"} if tiny else {}))


def step(model: nn.Module, run: Any, x: Tensor, labels: Tensor) -> None:
    """Run forward and backward, gradients anew."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    run(x, labels).backward()


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of one system on one head."""
    m, k, n = TINY if case.tiny else SHAPES[case.model]
    torch.manual_seed(0)
    model = Head(k, n).to(case.device).bfloat16()
    nn.init.normal_(model.lm_head.weight, std=2 * k**-0.5)
    x = torch.randn(m, k, device=case.device, dtype=torch.bfloat16, requires_grad=True)
    labels = (torch.rand(m, device=case.device) ** 3 * n).long()  # some classes are frequent
    run = prepared(case.system, model, case.tiny)
    exact = exact_gradients(model, x, labels)
    one = partial(step, model, run, x, labels)
    for _ in range(1 if case.tiny else 3):
        one()
    errors = {f"error_{name}": _error(g, exact[name]) for name, g in gradients(model, x).items()}
    del exact
    peak = 0.0 if case.tiny else peak_of(model, x, one)
    with case.alone():
        ms = statistics.median(intervals(one, 1 if case.tiny else STEPS, case.device))
    return {"ms": ms, "peak_gib": peak, **errors}


def peak_of(model: nn.Module, x: Tensor, one: Callable[[], None]) -> float:
    """Return the GiB that a step takes above what is there before it."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    one()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return those of the input and the head."""
    assert isinstance(model, Head)
    assert x.grad is not None
    assert model.lm_head.weight.grad is not None
    return {"x": x.grad, "weight": model.lm_head.weight.grad}


def _error(a: Tensor, b: Tensor) -> float:
    parts = zip(a.split(4096), b.split(4096), strict=True)  # of a gradient of 2 GiB no second FP32 copy
    squares = torch.stack([torch.stack([(p.float() - q).square().sum(), q.square().sum()]) for p, q in parts]).sum(0)
    return float((squares[0] / squares[1]).sqrt())


def exact_gradients(model: Head, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Return the gradients in FP32, computed a few rows at a time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    weight = model.lm_head.weight.detach().float().requires_grad_()
    of_x = []
    for part, at in zip(x.detach().split(1024), labels.split(1024), strict=True):
        given = part.float().requires_grad_()
        normed = F.rms_norm(given, given.shape[-1:], model.norm.weight.detach().float())
        (F.cross_entropy(normed @ weight.t(), at, reduction="sum") / len(labels)).backward()
        of_x.append(given.grad)
        if x.is_cuda:
            torch.cuda.synchronize()  # what is queued runs on while another process is timed
    assert weight.grad is not None
    return {"x": torch.cat(of_x), "weight": weight.grad}


BENCHMARK = Benchmark(
    "chunked_loss",
    dict.fromkeys(SHAPES, SYSTEMS),
    measure,
    (
        figure("ms", "ms"),
        ratio("speed-up", "ms"),
        figure("peak, GiB", "peak_gib"),
        ratio("of BF16's", "peak_gib", inverse=True),
        figure("error of x", "error_x", ".4f"),
        figure("of weight", "error_weight", ".4f"),
    ),
    BASELINE.name,
    axes=(("peak_gib", "peak above what was there before, GiB"), ("ms", "forward and backward, ms")),
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table, or counts; see the top of this file."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fp8Warning)
        if given == ["--count"]:
            print_counts()
            return []
        return runs.main(BENCHMARK, __doc__, given)


if __name__ == "__main__":
    main()
