"""An output head with its cross-entropy, forward and backward: time, peak memory and errors of gradients.

    python -m benchmarks.micro.chunked_loss             a CUDA GPU
    python -m benchmarks.micro.chunked_loss --count     any machine: the peak by counting the graph, no times

Whole logits (eager, torch.compile, ours) beside chunks of several sizes, with the head in BF16 and in FP8, and Liger's
fused kernel where it is installed. Errors are relative, in the norm, beside the same head in FP32.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # counts a graph of any size on any machine

from fp8compile.errors import Fp8Warning

GIB = 2**30
SHAPES = {  # rows, features, classes
    "Llama-8B, 4 × 4096": (16384, 4096, 128256),
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


@dataclass
class Measured:
    """A way to run one head."""

    milliseconds: float
    gib: float
    errors: dict[str, float]


def liger(model: nn.Module) -> Callable[..., Tensor] | None:
    """Liger's fused linear cross-entropy, if it is installed."""
    try:
        from liger_kernel.transformers import (  # type: ignore[import-not-found]  # an optional peer
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        return None
    loss, head = LigerFusedLinearCrossEntropyLoss(), model
    assert isinstance(head, Head)
    return lambda x, labels: loss(head.lm_head.weight, head.norm(x), labels)


def step(model: nn.Module, run: Any, x: Tensor, labels: Tensor) -> None:
    """Forward and backward, gradients anew."""
    model.zero_grad(set_to_none=True)
    x.grad = None
    run(x, labels).backward()


def measure(model: nn.Module, run: Any, x: Tensor, labels: Tensor, exact: dict[str, Tensor]) -> Measured:
    """Time, peak above what is there before a step, errors beside `exact`."""
    for _ in range(3):
        step(model, run, x, labels)
    errors = {name: _error(g, exact[name]) for name, g in gradients(model, x).items()}
    model.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, run, x, labels)
    torch.cuda.synchronize()
    gib = (torch.cuda.max_memory_allocated() - before) / GIB
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(10):
        step(model, run, x, labels)
    events[1].record()
    torch.cuda.synchronize()
    return Measured(events[0].elapsed_time(events[1]) / 10, gib, errors)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of the input and the head."""
    assert isinstance(model, Head)
    assert x.grad is not None
    assert model.lm_head.weight.grad is not None
    return {"x": x.grad, "weight": model.lm_head.weight.grad}


def _error(a: Tensor, b: Tensor) -> float:
    parts = zip(a.split(4096), b.split(4096), strict=True)  # of a gradient of 2 GiB no second FP32 copy
    squares = torch.stack([torch.stack([(p.float() - q).square().sum(), q.square().sum()]) for p, q in parts]).sum(0)
    return float((squares[0] / squares[1]).sqrt())


def exact_gradients(model: Head, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """In FP32, a few rows at a time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    weight = model.lm_head.weight.detach().float().requires_grad_()
    of_x = []
    for part, at in zip(x.detach().split(1024), labels.split(1024), strict=True):
        given = part.float().requires_grad_()
        normed = F.rms_norm(given, given.shape[-1:], model.norm.weight.detach().float())
        (F.cross_entropy(normed @ weight.t(), at, reduction="sum") / len(labels)).backward()
        of_x.append(given.grad)
    assert weight.grad is not None
    return {"x": torch.cat(of_x), "weight": weight.grad}


def measure_all() -> None:
    """Print a table of times for each shape."""
    for name, (m, k, n) in SHAPES.items():
        print(f"\n{name}: M {m}, K {k}, N {n}\n{'':26}{'ms':>9}{'GiB':>9}{'error x':>10}{'error weight':>14}")
        torch.manual_seed(0)
        model = Head(k, n).cuda().bfloat16()
        nn.init.normal_(model.lm_head.weight, std=2 * k**-0.5)
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = (torch.rand(m, device="cuda") ** 3 * n).long()  # some classes are frequent
        exact = exact_gradients(model, x, labels)
        ways: dict[str, Any] = {"eager": model, "torch.compile": torch.compile(model), "Liger": liger(model)}
        ways |= {"ours, whole": ours(model, False), "ours, auto": ours(model, "auto")}
        ways |= {f"ours, chunks of {rows}": ours(model, rows) for rows in CHUNKS}
        ways |= {
            f"ours, FP8, {way}": ours(model, c, lm_head=True, select="all")
            for way, c in (("whole", False), ("auto", "auto"))
        }
        ways |= {f"ours, FP8, chunks of {r}": ours(model, r, lm_head=True, select="all") for r in CHUNKS}
        for way, run in ways.items():
            if run is None:
                continue
            torch.cuda.empty_cache()
            try:
                r = measure(model, run, x, labels, exact)
            except torch.OutOfMemoryError:
                print(f"{way:26}  out of memory")
                continue
            e = r.errors
            print(f"{way:26}{r.milliseconds:9.2f}{r.gib:9.2f}{e['x']:10.2e}{e['weight']:14.2e}", flush=True)
            torch.compiler.reset()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count bytes, without a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fp8Warning)
        if parser.parse_args(argv).count or not torch.cuda.is_available():
            print_counts()
        else:
            measure_all()


if __name__ == "__main__":
    main()
