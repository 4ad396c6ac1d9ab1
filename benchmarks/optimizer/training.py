"""Training with 8-bit optimizer states beside FP32 states: the example's model, the same seeds and data.

    python -m benchmarks.optimizer.training [--size tiny|120m|1b] [--seeds 3] [--json FILE] [--picture FILE.png]

Only the optimizer's step is compiled with backend="fp8"; the model runs as `--model` says (eager, inductor or fp8).
Held-out losses are those of the example; "apart" is how far they lie apart, as a share of the loss.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from corpus import load_corpus, random_starts
from llama import Llama, LlamaConfig
from train_lm import SIZES
from training import MAX_GRADIENT_NORM, WEIGHT_DECAY, Job, Size, held_out_loss, lr_factor

SMALL = Size(LlamaConfig(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden=384), 8, 128, 300, 2e-3, 16)


@dataclass
class Run:
    """One training run."""

    states: str
    seed: int
    losses: list[float]
    held_out: float
    eight_bit: int


def train(job: Job, states: str, compiled: bool) -> Run:
    """Return a run with `states` ("fp32" or "fp8") from the job's seed."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(job.seed)
    with job.device:
        model = Llama(job.size.model, max_seq=job.size.seq)
    forward = job.compile(model, "fp8" if compiled else "bf16")
    matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) == big] for big in (True, False))
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    opt = torch.optim.AdamW(groups, lr=job.size.lr, betas=(0.9, 0.95))
    schedule = LambdaLR(opt, lambda done: lr_factor(done, job.size.steps))
    executor = "inductor" if job.device.type == "cuda" else "eager"
    step = (
        opt.step
        if states == "fp32"
        else torch.compile(opt.step, backend="fp8", options={"executor": executor, "strict": True})
    )
    losses = []
    for starts in random_starts(job.corpus.train, job.size.steps, job.size.batch, job.size.seq, job.seed):
        loss = job.forward(forward, job.corpus.train, starts)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        step()
        schedule.step()
        opt.zero_grad()
        losses.append(loss.detach())
    kept = [x for state in opt.state.values() for x in state.values() if hasattr(x, "payload")]
    held_out = held_out_loss(job, forward)
    return Run(states, job.seed, [x.item() for x in losses], held_out, len(kept))


def picture(runs: list[Run], path: Path) -> None:
    """Draw all loss curves over each other."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for run in runs:
        smooth = torch.tensor(run.losses).unfold(0, 10, 1).mean(1)
        style = {"color": "C0", "lw": 2.5, "alpha": 0.5} if run.states == "fp32" else {"color": "C1", "lw": 1}
        axes.plot(smooth, label=f"{run.states} states, seed {run.seed}", **style)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, nats per byte (mean of 10)")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["small", *SIZES], default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model", choices=["eager", "inductor", "fp8"], default="eager")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args(arguments)
    size = SMALL if given.size == "small" else SIZES[given.size]
    size = size if given.steps is None else replace(size, steps=given.steps)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = load_corpus(None, size.seq).to(device)
    baseline = "inductor" if given.model == "inductor" else "eager"
    runs = []
    print(f"{'seed':>4} {'FP32 states':>12} {'8-bit states':>12} {'apart':>8}")
    for seed in range(given.seeds):
        job = Job(size, corpus, device, seed, baseline, {"select": "all"})
        full, small = (train(job, states, given.model == "fp8") for states in ("fp32", "fp8"))
        runs += [full, small]
        print(
            f"{seed:4} {full.held_out:12.4f} {small.held_out:12.4f} {small.held_out / full.held_out - 1:+8.2%}",
            flush=True,
        )
    mean = {s: sum(r.held_out for r in runs if r.states == s) / given.seeds for s in ("fp32", "fp8")}
    print(f"mean {mean['fp32']:12.4f} {mean['fp8']:12.4f} {mean['fp8'] / mean['fp32'] - 1:+8.2%}")
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in runs], indent=1))
    if given.picture:
        picture(runs, given.picture)


if __name__ == "__main__":
    main()
