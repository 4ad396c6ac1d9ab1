"""The loop of the recipes beside this file: a task in BF16 and in FP8, from the same weights and on the same data.

A recipe says how its model is made and what a batch is; `main` has the command line, trains twice and prints a table.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile

LAST = 0.2  # of the steps: what the final loss is the mean of
UNTIMED = 3  # steps: compilation
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """What to train. make: the model, whose forward returns a loss or something with a `loss`; batch: from a generator.

    autocast: FP32 parameters under BF16 autocast; without, the model has the dtypes it wants.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    steps: int
    lr: float
    autocast: bool = True


@dataclass
class Outcome:
    """What one run measured."""

    name: str
    losses: list[float]
    seconds: list[float]
    converted: int = 0
    matmuls: int = 0
    peak_bytes: int = 0

    @property
    def final(self) -> float:
        last = self.losses[-max(1, round(LAST * len(self.losses))) :]
        return sum(last) / len(last)

    def line(self) -> str:
        steps = sorted(self.seconds[UNTIMED:] or self.seconds)
        memory = f"{self.peak_bytes / 2**30:9.2f} GiB" if self.peak_bytes else ""
        fp8 = f"{self.converted} of {self.matmuls}" if self.matmuls else "-"
        median = 1000 * steps[len(steps) // 2]
        return f"{self.name:<6}{self.losses[0]:>11.4f}{self.final:>12.4f}{fp8:>16}{median:>10.1f} ms{memory}"


def main(description: str | None, sizes: Mapping[str, Task], arguments: list[str] | None = None) -> list[Outcome]:
    """Return the command line of a recipe; `sizes`: its tasks by name, the first for a CPU, the last for a GPU."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(sizes), default=list(sizes)[-1 if on_gpu else 0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=["O1", "O2", "O3"], default="O3")
    parser.add_argument("--recipe", default="mixed")
    parser.add_argument("--adaptive", choices=["auto"])
    parser.add_argument("--select", choices=["all", "profitable"], default="profitable" if on_gpu else "all")
    given = parser.parse_args(arguments)
    task = sizes[given.size] if given.steps is None else replace(sizes[given.size], steps=given.steps)
    executor = "inductor" if on_gpu else "eager"
    options: dict[str, Any] = {"level": given.level, "executor": executor, "strict": True}
    model = {**options, "recipe": given.recipe, "select": given.select, "adaptive": given.adaptive}
    device = torch.device("cuda" if on_gpu else "cpu")
    outcomes = [train(task, None, {}, device, given.seed), train(task, model, options, device, given.seed)]
    print(f"{'':<6}{'first loss':>11}{'final loss':>12}{'matmuls in FP8':>16}{'step':>13}")
    for outcome in outcomes:
        print(outcome.line())
    print(f"FP8 against BF16: {outcomes[1].final / outcomes[0].final - 1:+.2%}")
    for graph in fp8compile.adaptive_graphs() if given.adaptive else ():
        print(graph)
    return outcomes


def train(task: Task, model_options: Any, step_options: Any, device: torch.device, seed: int) -> Outcome:
    """Train in BF16 (`model_options` None), or in FP8 with a compiled optimizer."""
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(seed)
    model = task.make().to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trained, lr=task.lr, betas=(0.9, 0.95), weight_decay=0.0)
    forward: Callable[..., Any] = torch.compile(model) if device.type == "cuda" else model
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, partial(_factor, steps=task.steps))
    step: Callable[[], Any] = opt.step
    if model_options is not None:
        forward = torch.compile(model, backend="fp8", options=model_options)
        step = torch.compile(opt.step, backend="fp8", options=step_options)
    generator = torch.Generator().manual_seed(seed + 1)
    losses, outcome = [], Outcome("BF16" if model_options is None else "FP8", [], [])
    for number in range(task.steps):
        batch = {name: x.to(device) for name, x in task.batch(generator).items()}
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16) if task.autocast else nullcontext():
            loss = forward(**batch)
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss.item())
        outcome.seconds.append(time.perf_counter() - began)
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the {outcome.name} run diverged at step {number}: try a smaller learning rate")
        if number == 0 and model_options is not None:
            rows = [row for plan in fp8compile.compiles()[-8:] for row in plan.matmuls if plan.graph == "training"]
            outcome.converted, outcome.matmuls = sum(r.decision == "fp8" for r in rows), len(rows)
    outcome.losses = losses
    if device.type == "cuda":
        outcome.peak_bytes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return outcome


def _factor(step: int, steps: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))
