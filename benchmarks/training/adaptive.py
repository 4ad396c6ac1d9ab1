"""Models that are made to fail in FP8: BF16, fixed FP8, and what follows the training, with every change it makes.

    python -m benchmarks.training.adaptive [--steps 240] [--seeds 3] [--json FILE] [NAME …]

| name | what is planted |
|---|---|
| outliers  | four channels of an activation are a million times the others |
| swiglu    | one channel of a SwiGLU product grows by a factor of 1.1 a step, to a million |
| vanishing | half of the examples have gradients ten million times smaller; Adam would learn from them all the same |
| jump      | early in training one token of each batch becomes a million times the others (an attention sink) |
| tame      | nothing: there is nothing to do, and nothing is done |

Modes: BF16; "fixed", the recipe `mixed` as it is; "rowwise", that recipe; "auto", options={"adaptive": "auto"};
"recipe", options={"recipe": "auto"}, which also spends time on casts that add less noise.

Each is a teacher's targets with noise that nobody can learn, so that a loss has a floor and losses of runs that learn
the same differ little. What is planted has no influence on what the model computes: only a cast that gives everything
one scale is disturbed by it. Held-out losses are those of the model as it runs (the FP8 graph in automatic mode).
A run takes some seconds on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile

WIDTH, INNER, OUT, BATCH = 64, 256, 32, 256
LARGE = 1e6
OPTIONS = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
ADAPTIVE = {"every": 8}
MODES: dict[str, dict[str, Any] | None] = {
    "bf16": None, "fixed": {}, "rowwise": {"recipe": "rowwise"}, "auto": {"adaptive": ADAPTIVE},
    "recipe": {"recipe": "auto", "adaptive": ADAPTIVE},
}  # fmt: skip


class Masked(nn.Linear):
    """A linear layer that reads some of its inputs only: the others have no influence, but are cast with the rest."""

    mask: Tensor

    def __init__(self, inputs: int, outputs: int, ignored: list[int]) -> None:
        super().__init__(inputs, outputs)
        mask = torch.ones(inputs)
        mask[ignored] = 0.0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Planted(nn.Module):
    """x + f(x) and a linear layer; a subclass plants something in f. `at(step)` is called before each step."""

    classes, lr, noise = 0, 1e-2, 0.3

    def at(self, step: int, steps: int) -> None:
        """Change what is planted."""

    def weights(self, examples: Tensor) -> Tensor:
        """Return the weight of each example's loss."""
        return torch.ones(examples.shape[0])


class Outliers(Planted):
    gain: Tensor

    def __init__(self) -> None:
        super().__init__()
        channels = [3, 77, 150, 201]
        self.first, self.second = nn.Linear(WIDTH, INNER), Masked(INNER, OUT, channels)
        gain = torch.ones(INNER)
        gain[channels] = LARGE
        self.register_buffer("gain", gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.gain)


class SwiGLU(Planted):
    growth: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = Masked(INNER, OUT, [5])
        self.register_buffer("growth", torch.ones(INNER))

    def at(self, step: int, steps: int) -> None:
        self.growth[5] = min(1.1**step, LARGE)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * (self.up(x) * self.growth))


class Vanishing(Planted):
    classes, lr, noise = 32, 1e-1, 0.7

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(self.classes, WIDTH)
        # Frozen: trained by one half, they would be a moving target for the other half in any precision
        self.first = nn.Linear(WIDTH, INNER).requires_grad_(False)
        self.second = nn.Linear(INNER, OUT).requires_grad_(False)
        with torch.no_grad():  # so that targets are within reach
            self.second.weight.mul_(3)

    def weights(self, examples: Tensor) -> Tensor:
        return torch.where(examples % 2 == 0, 1.0, 1e-7)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(self.embedding(x))))


class Jump(Planted):
    sink: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, OUT)
        self.register_buffer("sink", torch.ones(BATCH, 1))

    def at(self, step: int, steps: int) -> None:
        self.sink[0] = LARGE if step >= steps // 12 else 1.0

    def weights(self, examples: Tensor) -> Tensor:
        return (torch.arange(examples.shape[0]) > 0).float()  # nothing is asked of the sink itself

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x * self.sink)))


class Tame(Planted):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


PLANTS: dict[str, Callable[[], Planted]] = {
    "outliers": Outliers, "swiglu": SwiGLU, "vanishing": Vanishing, "jump": Jump, "tame": Tame,
}  # fmt: skip


@dataclass
class Result:
    """One run. changes: those of the automatic mode, as text."""

    plant: str
    mode: str
    seed: int
    held_out: float
    recompiles: int = 0
    changes: list[str] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)  # path and role of each matmul that changed


class Teacher:
    """Examples and their targets; the same for every run of a seed."""

    def __init__(self, classes: int, noise: float, seed: int) -> None:
        self.noise = noise
        self.random = torch.Generator().manual_seed(1000 + seed)
        self.classes = classes
        self.table = torch.randn(classes, OUT, generator=self.random)
        self.hidden = torch.randn(WIDTH, INNER, generator=self.random) / WIDTH**0.5
        self.out = torch.randn(INNER, OUT, generator=self.random) / INNER**0.5

    def batch(self) -> tuple[Tensor, Tensor]:
        """Examples, and targets f32[BATCH, OUT]."""
        noise = self.noise * torch.randn(BATCH, OUT, generator=self.random)
        if self.classes:
            x = torch.randint(self.classes, (BATCH,), generator=self.random)
            return x, self.table[x] + noise
        x = torch.randn(BATCH, WIDTH, generator=self.random)
        return x, torch.tanh(x @ self.hidden) @ self.out + noise


def run(plant: str, mode: str, seed: int = 0, steps: int = 240) -> Result:
    """Train `plant` in one of the `MODES`; its held-out loss is that of the last fifth."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    model = PLANTS[plant]()
    options = MODES[mode]
    forward = model if options is None else torch.compile(model, backend="fp8", options={**OPTIONS, **options})
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=model.lr, eps=1e-20)
    teacher, losses = Teacher(model.classes, model.noise, seed), []
    for step in range(steps):
        model.at(step, steps)
        for group in opt.param_groups:
            group["lr"] = model.lr * (1 - step / steps)
        x, y = teacher.batch()
        with torch.autocast("cpu", torch.bfloat16):
            out = forward(x)
        squared = (out.float() - y).square().mean(1)
        (squared * model.weights(x)).sum().div(BATCH).backward()
        opt.step()
        opt.zero_grad()
        if step >= steps * 4 // 5:  # fresh examples, not trained on yet
            losses.append(squared.detach()[model.weights(x) > 0].mean())
    found = [s for s in fp8compile.adaptive_graphs() if s.is_training][-1:] if mode in ("auto", "recipe") else []
    changes = [str(change) for s in found for change in s.changes]
    changed = sorted({(change.path, change.role) for s in found for change in s.changes if change.role != "saved"})
    held_out = float(torch.stack(losses).mean())
    return Result(plant, mode, seed, held_out, sum(s.recompiles for s in found), changes, changed)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(PLANTS) + " (default: all)")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    results: list[Result] = []
    print(f"{'planted':<10} {'seed':>4} {'BF16':>9}" + "".join(f"{mode:>10}" for mode in MODES if mode != "bf16"))
    for plant in given.names or PLANTS:
        for seed in range(given.seeds):
            bf16, *others = (run(plant, mode, seed, given.steps) for mode in MODES)
            results += [bf16, *others]
            apart = "".join(f"{r.held_out / bf16.held_out - 1:+10.2%}" for r in others)
            print(f"{plant:<10} {seed:4} {bf16.held_out:9.4f}{apart}", flush=True)
        for result in results[-2:]:
            print(f"    {result.mode}: {result.recompiles} recompiles")
            for change in result.changes:
                print(f"        {change}")
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in results], indent=1))


if __name__ == "__main__":
    main()
