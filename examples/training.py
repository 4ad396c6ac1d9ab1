"""The training loop of `train_lm.py`: one run, in BF16 or in FP8, from a seed to a `Run` of measured numbers."""

import gc
import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import fp8compile
from comparison import MatmulRow, Run
from corpus import Corpus, even_starts, random_starts, windows
from llama import Llama, LlamaConfig

WARM_UP_STEPS = 5  # left out of tokens/s and peak memory: compilation, autotuning, growth of the allocator
READ_LOSS_EVERY = 10  # steps; each reading waits for the device
REDRAW_EVERY = 0.5  # seconds, of a progress bar on a terminal
LINE_EVERY = 10.0  # seconds, of one that is written to a file
LR_WARM_UP = 0.1  # of all steps
FINAL_LR = 0.1  # of the peak rate, reached along a cosine
WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0

Step = Callable[[Tensor, Tensor], Tensor]


class DivergedError(RuntimeError):
    """The loss is no longer finite; the message says where and what to do."""


@dataclass(frozen=True)
class Size:
    """A model with the training that suits it."""

    model: LlamaConfig
    batch: int
    seq: int
    steps: int
    lr: float
    held_out_batches: int


@dataclass(frozen=True)
class Job:
    """What both runs share, and how each is compiled."""

    size: Size
    corpus: Corpus
    device: torch.device
    seed: int
    baseline: str
    fp8_options: dict[str, Any] = field(default_factory=dict)

    def compile(self, model: nn.Module, name: str) -> Step:
        if name == "fp8":
            return torch.compile(model, backend="fp8", options=self.fp8_options)
        return model if self.baseline == "eager" else torch.compile(model, backend=self.baseline)

    def forward(self, step: Step, text: Tensor, starts: Tensor) -> Tensor:
        """Return the loss, f32[], on the windows of text that begin at starts i64[batch]."""
        tokens, targets = windows(text, starts, self.size.seq)
        with torch.autocast(self.device.type, torch.bfloat16):
            return step(tokens, targets)


@dataclass
class Clock:
    """Wall time by number of finished steps, read after the device has caught up."""

    device: torch.device
    laps: dict[int, float] = field(default_factory=dict)

    def lap(self, finished: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            if finished == WARM_UP_STEPS:
                torch.cuda.reset_peak_memory_stats()
        self.laps[finished] = time.perf_counter()

    def seconds_per_step(self) -> float:
        last = max(self.laps)
        return (self.laps[last] - self.laps[WARM_UP_STEPS]) / (last - WARM_UP_STEPS)

    def compile_seconds(self) -> float:
        """Return what the first step took beyond a usual one."""
        return max(0.0, self.laps[1] - self.laps[0] - self.seconds_per_step())


@dataclass(frozen=True)
class Trainer:
    """A model from the job's seed, its compiled form, and what updates it."""

    job: Job
    model: nn.Module
    step: Step
    optimizer: Optimizer
    schedule: LambdaLR

    @classmethod
    def start(cls, job: Job, name: str) -> "Trainer":
        torch.manual_seed(job.seed)
        with job.device:
            model = Llama(job.size.model, max_seq=job.size.seq)
        optimizer = make_optimizer(model, job.size.lr)
        schedule = LambdaLR(optimizer, lambda finished: lr_factor(finished, job.size.steps))
        return cls(job, model, job.compile(model, name), optimizer, schedule)

    def update(self, starts: Tensor) -> Tensor:
        """Forward, backward and update on one batch; returns the loss, f32[], without waiting for the device."""
        loss = self.job.forward(self.step, self.job.corpus.train, starts)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(job: Job, name: str) -> Run:
    """Trains and evaluates the run called "bf16" or "fp8"; raises DivergedError."""
    size = job.size
    _forget_earlier_runs(job.device)
    trainer = Trainer.start(job, name)
    clock, losses, matmuls = Clock(job.device), [], []
    clock.lap(0)
    starts = random_starts(job.corpus.train, size.steps, size.batch, size.seq, job.seed)
    bar = progress_bar(starts, name, sys.stderr)
    for finished, batch_starts in enumerate(bar, start=1):
        losses.append(trainer.update(batch_starts))
        if finished in (1, WARM_UP_STEPS, size.steps):
            clock.lap(finished)
        if finished == 1 and name == "fp8":
            matmuls = planned_matmuls()
        if finished % READ_LOSS_EVERY == 0:
            recent = _finite(torch.stack(losses[-READ_LOSS_EVERY:]).mean(), name, finished)
            bar.set_postfix(loss=f"{recent:.3f}", refresh=False)
    peak_bytes = torch.cuda.max_memory_allocated() if job.device.type == "cuda" else None
    return Run(
        name=name,
        losses=[_finite(loss, name, finished) for finished, loss in enumerate(losses, start=1)],
        held_out=held_out_loss(job, trainer.step),
        tokens_per_second=size.batch * size.seq / clock.seconds_per_step(),
        compile_seconds=clock.compile_seconds(),
        peak_bytes=peak_bytes,
        matmuls=matmuls,
    )


class Lines(io.TextIOBase):
    """Text for `stream` in which each state of a progress bar is a line, not one that is drawn over the last."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        if line := text.strip():
            self.stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def progress_bar(steps: Sequence[Any] | Tensor, name: str, stream: TextIO) -> tqdm:
    """Return the steps behind a progress bar; where nobody watches `stream`, a line every ten seconds."""
    if stream.isatty():
        return tqdm(steps, desc=name, unit="step", mininterval=REDRAW_EVERY, file=stream)
    return tqdm(steps, desc=name, unit="step", mininterval=LINE_EVERY, file=Lines(stream), ncols=100)


@torch.no_grad()
def held_out_loss(job: Job, step: Step) -> float:
    """Mean loss over windows spread evenly over the held-out text, through the compiled model as it was trained."""
    size, text = job.size, job.corpus.held_out
    starts = even_starts(text, size.held_out_batches, size.batch, size.seq)
    return torch.stack([job.forward(step, text, batch_starts) for batch_starts in starts]).mean().item()


def make_optimizer(model: nn.Module, lr: float) -> Optimizer:
    """AdamW in FP32, with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def lr_factor(finished: int, steps: int) -> float:
    """Linear warm-up from zero to one, then a cosine down to FINAL_LR."""
    warm_up = max(1, round(LR_WARM_UP * steps))
    if finished < warm_up:
        return (finished + 1) / warm_up
    progress = (finished - warm_up) / max(1, steps - warm_up)
    return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))


def planned_matmuls() -> list[MatmulRow]:
    """Return the decisions of the compilation that has just happened, one row per matmul."""
    plan = fp8compile.last_compile()
    assert plan is not None, "the first step ran and nothing went through the fp8 backend"
    return [
        MatmulRow(row.path, row.role, int(row.m), int(row.n), int(row.k), row.decision, row.reason)
        for row in plan.matmuls
    ]


def _finite(loss: Tensor, name: str, finished: int) -> float:
    value = loss.item()
    if not math.isfinite(value):
        raise DivergedError(f"the {name} run diverged: its loss is {value} at step {finished}; try a smaller --lr")
    return value


def _forget_earlier_runs(device: torch.device) -> None:
    """Compiled code and memory of one run must not help or burden the next."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
