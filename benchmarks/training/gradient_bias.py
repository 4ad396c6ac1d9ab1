"""Do the gradients of FP8 err by chance, or always in one direction? Over many batches, from one state of a training.

    python -m benchmarks.training.branches --size 1b --at 0.3 --branches --out runs/branches    # trains the state
    python -m benchmarks.training.gradient_bias --size 1b --state runs/branches/checkpoints/trunk-seed0.pt --json FILE
    python -m benchmarks.training.gradient_bias --tiny    # on a CPU, from first weights: that it runs

Errors that rounding makes by chance are gone after some steps of an optimizer that averages; one that always points the
same way (small elements that become zero) is followed by the training as if it were the loss. So each batch's gradients
are computed in BF16 by Inductor and as each configuration does, at the same weights, and both are averaged. By group of
parameters, with g the gradient in BF16, e what the configuration's differs from it by:

    noise    root of the mean of |e|² over the mean of |g|²: the error of one batch's gradient
    bias     norm of the mean e over the norm of the mean g: what is left of it, however many batches are averaged
    along    the part of the mean e that lies along the mean g, over |mean g|: negative where gradients are too short
    beside   |mean e| over the root of the mean of |g|², by which AdamW divides

The squares of means are freed of what a mean of so many batches has by chance, so a bias can come out as 0.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.training.convergence import Settings, Trainer, add_settings, settings_and_text
from benchmarks.training.convergence_report import KNOWN, Run
from corpus import Corpus

DEFAULT = ("O2 mixed", "O3 mixed", "O3 two passes", "O3 E5M2 gradients", "O3 rowwise")
ALL = "all"


def group_of(name: str) -> str:
    """Return what a parameter is, by the end of its name: "layers.3.attn.wq.weight" is "wq"."""
    parts = [part for part in name.split(".") if not part.isdigit() and part not in ("weight", "bias", "_orig_mod")]
    return parts[-1] if parts else name


class Bias:
    """Sums over batches of gradients and of their errors, by group of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.errors = [torch.zeros_like(p) for p in model.parameters()]
        self.gradients = [torch.zeros_like(p) for p in model.parameters()]
        device = self.errors[0].device
        self.squares = torch.zeros(len(self.names), 3, dtype=torch.float64, device=device)  # e·e, g·g, e·g
        self.batches = 0

    def add(self, gradients: Sequence[Tensor], found: Sequence[Tensor]) -> None:
        """Add a batch's gradients in BF16 and as a configuration computed them."""
        for i, (g, other) in enumerate(zip(gradients, found, strict=True)):
            e = other.float() - g
            self.errors[i] += e
            self.gradients[i] += g
            self.squares[i] += _products(e, g)
        self.batches += 1

    def rows(self) -> dict[str, dict[str, float]]:
        """Return by group, and of all together, the numbers at the top of this file."""
        n = self.batches
        sums = torch.stack([_products(e, g) for e, g in zip(self.errors, self.gradients, strict=True)])
        means = (sums - self.squares) / (n * (n - 1))  # of pairs of different batches: chance is not in them
        groups: dict[str, list[int]] = {ALL: list(range(len(self.names)))}
        for i, name in enumerate(self.names):
            groups.setdefault(group_of(name), []).append(i)
        return {group: _row(means[mine].sum(0).tolist(), (self.squares[mine].sum(0) / n).tolist())
                for group, mine in groups.items()}  # fmt: skip


def _products(e: Tensor, g: Tensor) -> Tensor:
    return torch.stack([(a * b).sum(dtype=torch.float64) for a, b in ((e, e), (g, g), (e, g))])


def _row(mean: Sequence[float], each: Sequence[float]) -> dict[str, float]:
    signal = math.sqrt(max(mean[1], 0.0)) or math.nan
    bias = math.sqrt(max(mean[0], 0.0))
    return {"noise": math.sqrt(each[0] / each[1]), "bias": bias / signal, "along": mean[2] / signal**2,
            "beside": bias / math.sqrt(each[1])}  # fmt: skip


def measure(
    settings: Settings, corpus: Corpus, name: str, state: Path | None, batches: int
) -> dict[str, dict[str, float]]:
    """Return the rows of a configuration, from the weights in `state`, on batches that a training would go on with."""
    trainer = Trainer(settings, corpus, Run(name, 0, settings.size.steps))
    if state is not None:
        saved = torch.load(state, map_location="cpu", weights_only=False, mmap=True)
        trainer.model.load_state_dict(saved["model"])
        trainer.done = saved["done"]
    base = trainer.model if settings.executor == "eager" else torch.compile(trainer.model)
    bias = Bias(trainer.model)
    for starts in trainer.starts[trainer.done : trainer.done + batches]:
        gradients = list(_gradients(trainer, starts, base))
        bias.add(gradients, list(_gradients(trainer, starts, trainer.step)))
    return bias.rows()


def _gradients(trainer: Trainer, starts: Tensor, step: Callable[[Tensor, Tensor], Tensor]) -> Iterator[Tensor]:
    trainer.loss(trainer.corpus.train, starts, step).backward()
    for p in trainer.model.parameters():
        assert p.grad is not None
        yield p.grad
        p.grad = None


def table(rows: dict[str, dict[str, dict[str, float]]]) -> str:
    columns = ("noise", "bias", "along", "beside")
    lines = []
    for name, groups in rows.items():
        lines.append(f"{name:<34}" + "".join(f"{c:>10}" for c in columns))
        lines += [f"  {g:<32}" + "".join(f"{row[c]:>10.4f}" for c in columns) for g, row in groups.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    settings, corpus = settings_and_text(given, steps=None)
    torch.set_float32_matmul_precision("high")
    rows = {}
    for name in given.configurations:
        rows[name] = measure(settings, corpus, name, given.state, given.batches)
        print(table({name: rows[name]}), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps({"batches": given.batches, "rows": rows}, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_settings(p, select="profitable")
    p.add_argument("--out", type=Path, default=Path("runs/branches"), help="the folder that keeps a text's subwords")
    p.add_argument("--state", type=Path, help="of `branches.py`; default: the first weights")
    p.add_argument("--batches", type=int, default=32)
    p.add_argument("--configurations", nargs="+", choices=KNOWN, default=DEFAULT)
    p.add_argument("--json", type=Path)
    return p


if __name__ == "__main__":
    main()
