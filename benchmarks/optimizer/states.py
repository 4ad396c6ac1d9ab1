"""What 8-bit states do over 2000 steps: v, and m / √v, of every format beside FP32 states fed the same gradients.

    python -m benchmarks.optimizer.states [--steps 2000] [--json FILE] [--picture FILE.png]   # CPU, some minutes

Two sources of gradients: a small Llama trained on text by AdamW with FP32 states (the compared states only watch), and
random ones of widely different sizes. Each row stores m in its first format and v in its second after every step.

    error    mean |v̂ / v - 1|                    bias     mean v̂ / v
    MSE      mean (m̂ / (√v̂ + ε) - m / (√v + ε))², as in COAT's table (arXiv 2410.19313, table 1); ratio: to plain FP8's
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fp8compile.kernels.reference import state_reference as states
from fp8compile.state_formats import GROUP

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
SAMPLE = 16 * GROUP  # elements that are watched of each parameter
COAT_RANGE = 448.0**2 / 2
Store = Callable[[Tensor, Tensor], Tensor]  # (x, counter) -> what is read back of it


def coat(x: Tensor, counter: Tensor) -> Tensor:
    """E4M3 by COAT's own rule: real logarithms, k rounded down to 1/16, min over nonzero magnitudes."""
    grouped = x.view(-1, GROUP)
    size = grouped.abs().double()
    high = size.amax(1, keepdim=True)
    low = size.where(size > 0, torch.inf).amin(1, keepdim=True).minimum(high).clamp_min(1e-45)
    ratio = (high / low).clamp_min(1 + 2.0**-10)
    k = (math.log2(COAT_RANGE) / ratio.log2() * 16).floor().clamp_min(1) / 16
    center = (high.clamp_min(1e-45) * low).sqrt()
    stretched = (size / center) ** k
    scale = (stretched.amax(1, keepdim=True) / 448).clamp_min(1e-300)
    q = (stretched / scale).float().clamp_max(448).to(torch.float8_e4m3fn).double()
    return ((q * scale) ** (1 / k) * center * grouped.sign()).float().view(x.shape)


def stored_as(name: str) -> Store:
    if name == "coat":
        return coat

    def store(x: Tensor, counter: Tensor) -> Tensor:
        return states.decode(*states.encode(x, name, counter), name)

    return store


ROWS = [
    ("e4m3/linear", "e4m3/linear"),
    ("e4m3/linear", "e5m2/linear"),
    ("coat", "coat"),
    ("e4m3", "e4m3"),
    ("e4m3/stochastic", "e4m3/stochastic"),
    ("e4m3", "e4m3/stochastic"),
    ("e4m3", "e5m2"),
    ("e4m3/stochastic", "e5m2/stochastic"),
    ("log", "log"),
    ("log/stochastic", "log/stochastic"),
    ("log", "log/stochastic"),
]


@dataclass
class Row:
    """m and v in one pair of formats, and what was measured of them."""

    first: str
    second: str
    m: Tensor
    v: Tensor
    figures: dict[int, dict[str, float]] = field(default_factory=dict)

    def update(self, gradient: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return the unquantized new states, which are stored as well."""
        m = BETA1 * self.m + (1 - BETA1) * gradient
        v = BETA2 * self.v + (1 - BETA2) * gradient * gradient
        counter = torch.tensor([step], dtype=torch.int32)
        self.m = stored_as(self.first)(m, counter)
        self.v = stored_as(self.second)(v, counter + (1 << 20))
        return m, v


def watch(gradients: Iterator[Tensor], steps: int, marks: tuple[int, ...]) -> tuple[list[Row], Row]:
    """Feed `steps` gradients to every row and to FP32 states, measuring at `marks`."""
    first = next(gradients)
    rows = [Row(a, b, torch.zeros_like(first), torch.zeros_like(first)) for a, b in ROWS]
    exact = Row("float32", "float32", torch.zeros_like(first), torch.zeros_like(first))
    for step in range(1, steps + 1):
        gradient = first if step == 1 else next(gradients)
        exact.update(gradient, step)
        for row in rows:
            row.update(gradient, step)
        if step in marks:
            for row in rows:
                row.figures[step] = measure(row, exact)
    return rows, exact


def measure(row: Row, exact: Row) -> dict[str, float]:
    seen = exact.v >= 2.0**-126
    ratio = (row.v[seen] / exact.v[seen]).double()
    update = row.m / (row.v.sqrt() + EPS) - exact.m / (exact.v.sqrt() + EPS)
    return {
        "error": float((ratio - 1).abs().mean()),
        "bias": float(ratio.mean()),
        "mse": float(update[seen].double().square().mean()),
        "zeros": float((ratio == 0).double().mean()),
    }


# ---- gradients ------------------------------------------------------------------------------------------------------


def synthetic() -> Iterator[Tensor]:
    """Normal gradients whose sizes are spread over two decades within a group."""
    torch.manual_seed(0)
    size = torch.exp(1.2 * torch.randn(128 * GROUP)) * 1e-3
    while True:
        yield torch.randn(128 * GROUP) * size


def trained(steps: int) -> Iterator[Tensor]:
    """Gradients of a small Llama on the example's text, a sample of every matrix; AdamW in FP32 moves it."""
    from corpus import load_corpus, random_starts, windows
    from llama import Llama, LlamaConfig

    torch.manual_seed(0)
    seq, batch = 64, 16
    corpus = load_corpus(None, seq)
    model = Llama(LlamaConfig(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden=256), max_seq=seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(BETA1, BETA2), foreach=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    chosen = [torch.randperm(p.numel() // GROUP)[: SAMPLE // GROUP] for p in matrices]
    for start in random_starts(corpus.train, steps, batch, seq, 0):
        tokens, targets = windows(corpus.train, start, seq)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield torch.cat(
            [p.grad.view(-1, GROUP)[c].reshape(-1) for p, c in zip(matrices, chosen, strict=True) if p.grad is not None]
        )
        optimizer.step()
        optimizer.zero_grad()
    print(f"  the model's loss after {steps} steps: {loss.item():.3f} nats per byte")  # pyright: ignore[reportPossiblyUnbound]


# ---- what is shown --------------------------------------------------------------------------------------------------


def table(title: str, rows: list[Row], mark: int) -> str:
    """One source of gradients as text."""
    plain = rows[0].figures[mark]["mse"]
    lines = [
        f"{title}, after {mark} steps",
        f"  {'m':16} {'v':16} {'error of v':>10} {'bias of v':>10} {'v = 0':>7} {'MSE m/√v':>10} {'ratio':>7}",
    ]
    for row in rows:
        f = row.figures[mark]
        lines.append(
            f"  {row.first:16} {row.second:16} {f['error']:10.4f} {f['bias']:10.4f} {f['zeros']:7.2%}"
            f" {f['mse']:10.3g} {f['mse'] / plain:7.4f}"
        )
    return "\n".join(lines)


def picture(rows: list[Row], exact: Row, path: Path) -> None:
    """Histogram of v̂ / v, a curve a row."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    seen = exact.v >= 2.0**-126
    for row in rows:
        if (row.first, row.second) in (ROWS[0], ROWS[2], ROWS[3], ROWS[8], ROWS[9]):
            ratio = (row.v[seen] / exact.v[seen]).log2().clamp(-1, 1)
            axes.hist(ratio.numpy(), bins=200, histtype="step", density=True, label=row.second)
    axes.set_xlabel("log2 of stored v over FP32 v (beyond ±1: at the ends)")
    axes.set_ylabel("density")
    axes.set_yscale("log")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--source", choices=["both", "trained", "synthetic"], default="both")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--picture", type=Path, help="write a histogram of the errors of v here (needs matplotlib)")
    given = parser.parse_args(arguments)
    marks = tuple(sorted({min(200, given.steps), min(1000, given.steps), given.steps}))
    results = {}
    sources = {"trained": lambda: trained(given.steps), "synthetic": synthetic}
    for name, gradients in sources.items():
        if given.source in ("both", name):
            rows, exact = watch(gradients(), given.steps, marks)
            results[name] = [{"m": r.first, "v": r.second, "figures": r.figures} for r in rows]
            for mark in marks:
                print(table(f"{name} gradients", rows, mark), flush=True)
            if given.picture and name in ("trained", given.source):
                picture(rows, exact, given.picture)
    if given.json:
        given.json.write_text(json.dumps({"steps": given.steps, "results": results}, indent=1))


if __name__ == "__main__":
    main()
