"""Does fine-tuning in FP8 lose anything? A model trained in BF16 on Python goes on with C++, in several ways.

    python -m benchmarks.training.fine_tuning --seeds 3 --json FILE     # one GPU
    python -m benchmarks.training.fine_tuning --tiny                    # on a CPU, in a minute: that it runs

The model is `examples/llama.py`, the first text the installed Python's library (`examples/corpus.py`), the second the
C++ headers that torch brings. A seed decides the first weights and the order of both texts; the trained base of a seed
is the same for every way. "adapters" are two low-rank factors beside each frozen linear layer of the blocks; "on FP8"
keeps the frozen weights in FP8 as well.

Scores of the fine-tuned weights, in eager BF16, each the share of bytes that are the most probable ones:

    loss       held-out loss of the second text, nats a byte, as the run computes it
    next       of the second text, held out           before   of the first text: what was not forgotten
    closing    where the next byte closes a bracket   copying  of random words, the second time they come

Of BF16 the table has means over seeds; of other ways how far they are from BF16 of the same seed, ± the half width of a
95 % interval: loss in percent, scores in points.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.harness.measuring import machine
from benchmarks.training.intervals import Interval
from corpus import Corpus, even_starts, load_corpus, random_starts, windows
from llama import Llama, LlamaConfig
from training import MAX_GRADIENT_NORM, Size, lr_factor, make_optimizer

BASE = "BF16"
SIZES = {
    "tiny": Size(LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=192), 8, 64, 20, 3e-3, 4),
    "125m": Size(LlamaConfig(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, hidden=3584), 32, 1024, 1000, 6e-4, 16),
}
TUNING_SHARE, TUNING_RATE = 0.4, 0.25  # of the base's steps and of its rate; adapters take its own rate
RANK = 16
CLOSING = b")]}"
LETTERS = range(ord("a"), ord("z") + 1)
SCORES = ("next", "closing", "copying", "before")


@dataclass(frozen=True)
class Way:
    """How a base is fine-tuned: by adapters or as a whole, compiled how, with which states."""

    options: dict[str, Any] | None = None
    adapters: bool = False
    eight_bit: bool = False


WAYS = {
    BASE: Way(),
    "O2": Way({"level": "O2"}),
    "O3": Way({"level": "O3"}, eight_bit=True),
    "adapters on BF16": Way(adapters=True),
    "adapters on FP8": Way({"frozen": True}, adapters=True),
}


@dataclass
class Result:
    """What one way came to with one seed."""

    name: str
    seed: int
    loss: float
    milliseconds: float  # of a step
    scores: dict[str, float] = field(default_factory=dict)


class Adapted(nn.Module):
    """A frozen linear layer, and beside it two factors that are trained: wx + up(down x)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.frozen = linear.requires_grad_(False)
        into, out = linear.in_features, linear.out_features
        self.down = nn.Linear(into, RANK, bias=False, device=linear.weight.device)
        self.up = nn.Linear(RANK, out, bias=False, device=linear.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapt(model: Llama) -> None:
    """Freeze all of `model`, and put adapters beside the linear layers of its blocks."""
    model.requires_grad_(False)
    for parent in [m for block in model.blocks for m in block.modules()]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and not isinstance(parent, Adapted):
                setattr(parent, name, Adapted(child))


@dataclass(frozen=True)
class Study:
    """What all runs share."""

    size: Size
    device: torch.device
    first: Corpus
    second: Corpus
    executor: str = "inductor"

    def model(self) -> Llama:
        with self.device:
            return Llama(self.size.model, max_seq=self.size.seq)

    def compiled(self, model: nn.Module, options: dict[str, Any] | None) -> Any:
        if options is not None:
            chosen = {**options, "executor": self.executor, **({"select": "all"} if self.executor == "eager" else {})}
            return torch.compile(model, backend="fp8", options=chosen)
        return model if self.executor == "eager" else torch.compile(model)

    def loss(self, step: Any, text: Tensor, starts: Tensor) -> Tensor:
        tokens, targets = windows(text, starts, self.size.seq)
        with torch.autocast(self.device.type, torch.bfloat16):
            return step(tokens, targets)

    def train(
        self, model: nn.Module, step: Any, text: Tensor, steps: int, rate: float, seed: int, eight_bit: bool = False
    ) -> float:
        """Train so many steps; returns the median milliseconds of a step, nan where there are too few to say."""
        opt = make_optimizer(model, rate)
        schedule = LambdaLR(opt, lambda done: lr_factor(done, steps))
        update: Callable[[], Any] = opt.step
        if eight_bit:
            update = torch.compile(opt.step, backend="fp8", options={"executor": self.executor})
        trained = [p for p in model.parameters() if p.requires_grad]
        times = []
        for i, starts in enumerate(random_starts(text, steps, self.size.batch, self.size.seq, seed)):
            self.loss(step, text, starts).backward()
            nn.utils.clip_grad_norm_(trained, MAX_GRADIENT_NORM)
            update()
            schedule.step()
            opt.zero_grad()
            if i % 10 == 9:  # each waits for the device
                self._wait()
                times.append(time.perf_counter())
        spans = [1e3 * (b - a) / 10 for a, b in itertools.pairwise(times)]
        return statistics.median(spans) if spans else float("nan")

    @torch.no_grad()
    def held_out(self, step: Any) -> float:
        """Return the loss of the second text, as the run computes it."""
        size, text = self.size, self.second.held_out
        starts = even_starts(text, size.held_out_batches, size.batch, size.seq)
        return torch.stack([self.loss(step, text, batch) for batch in starts]).mean().item()

    @torch.no_grad()
    def scores(self, model: Llama) -> dict[str, float]:
        """Return the `SCORES` of the weights."""
        right = {name: Share() for name in SCORES}
        for name, text in (("next", self.second.held_out), ("before", self.first.held_out)):
            for starts in even_starts(text, self.size.held_out_batches, self.size.batch, self.size.seq):
                tokens, targets = windows(text, starts, self.size.seq)
                hits = self._hits(model, tokens, targets)
                right[name].add(hits)
                if name == "next":
                    closes = torch.isin(targets, torch.tensor(list(CLOSING), device=self.device))
                    right["closing"].add(hits[closes])
        tokens = repeated_words(self.size.batch, self.size.seq + 1).to(self.device)
        hits = self._hits(model, tokens[:, :-1], tokens[:, 1:])
        right["copying"].add(hits[:, self.size.seq // 2 + 4 :])  # a few bytes say which word it is
        return {name: share.value for name, share in right.items()}

    def _hits(self, model: Llama, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return where the most probable byte is the right one, bool[batch, seq], computed in eager BF16."""
        kept: list[Tensor] = []
        hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: kept.append(logits.argmax(-1)))
        with torch.autocast(self.device.type, torch.bfloat16):
            model(tokens, targets)
        hook.remove()
        return kept[0] == targets

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass
class Share:
    """How many of those that were added are true."""

    hits: int = 0
    count: int = 0

    def add(self, found: Tensor) -> None:
        self.hits, self.count = self.hits + int(found.sum()), self.count + found.numel()

    @property
    def value(self) -> float:
        """NaN where nothing was added."""
        return self.hits / self.count if self.count else float("nan")


def repeated_words(batch: int, length: int) -> Tensor:
    """Return random lowercase letters [batch, length] of which the second half is the first one again."""
    half = -(-length // 2)
    letters = torch.randint(LETTERS.start, LETTERS.stop, (batch, half), generator=torch.Generator().manual_seed(0))
    return torch.cat((letters, letters), 1)[:, :length]


def base(study: Study, seed: int) -> dict[str, Tensor]:
    """Return weights trained in BF16 on the first text."""
    _forget()
    torch.manual_seed(seed)
    model = study.model()
    study.train(model, study.compiled(model, None), study.first.train, study.size.steps, study.size.lr, seed)
    return model.state_dict()


def tuned(study: Study, name: str, weights: dict[str, Tensor], seed: int) -> Result:
    """Fine-tune `weights` one way."""
    _forget()
    way = WAYS[name]
    torch.manual_seed(seed)
    model = study.model()
    model.load_state_dict(weights)
    if way.adapters:
        adapt(model)
    step = study.compiled(model, way.options)
    steps = max(1, round(TUNING_SHARE * study.size.steps))
    rate = study.size.lr * (1.0 if way.adapters else TUNING_RATE)
    milliseconds = study.train(model, step, study.second.train, steps, rate, seed + 1000, way.eight_bit)
    return Result(name, seed, study.held_out(step), milliseconds, study.scores(model))


def _forget() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- results --------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Return the results for people."""
    lines = [f"{'':<18}{'seeds':>5}{'ms':>8}  {'loss':<18}" + "".join(f"{name:<18}" for name in SCORES)]
    of_base = {r.seed: r for r in results if r.name == BASE}
    for name in WAYS:
        mine = [r for r in results if r.name == name and r.seed in of_base]
        if not mine:
            continue
        ms = statistics.median(r.milliseconds for r in mine)
        if name == BASE:
            cells = [f"{statistics.mean(r.loss for r in mine):.4f}"]
            cells += [f"{statistics.mean(r.scores[score] for r in mine):.2%}" for score in SCORES]
        else:
            cells = [Interval.of([r.loss / of_base[r.seed].loss - 1 for r in mine]).text("+.2%")]
            for score in SCORES:
                gaps = [100 * (r.scores[score] - of_base[r.seed].scores[score]) for r in mine]
                cells.append(Interval.of(gaps).text("+.2f"))
        lines.append(f"{name:<18}{len(mine):>5}{ms:>8.1f}  " + "".join(f"{cell:<18}" for cell in cells))
    return "\n".join(lines)


def second_text() -> Path:
    """Return the folder of torch's C++ headers."""
    return Path(torch.__file__).parent / "include"


def main(arguments: list[str] | None = None) -> list[Result]:
    """Run what there is time for, and print the table; see the top of this file."""
    given = parser().parse_args(arguments)
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() and not given.tiny else "cpu")
    size = SIZES["tiny" if given.tiny else "125m"]
    size = size if given.steps is None else replace(size, steps=given.steps)
    texts = [load_corpus(path, size.seq).to(device) for path in (given.first, given.second or second_text())]
    study = Study(size, device, *texts, executor="eager" if device.type == "cpu" else "inductor")
    torch.set_float32_matmul_precision("high")
    results: list[Result] = []
    for seed in range(given.seed, given.seed + given.seeds):
        if time.monotonic() - began > given.seconds:
            break
        weights = base(study, seed)
        for name in given.ways or WAYS:
            if time.monotonic() - began < given.seconds:
                results.append(tuned(study, name, weights, seed))
                print(results[-1], flush=True)
                if given.json:
                    figures = {"machine": machine(), "rows": [vars(r) for r in results]}
                    given.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(results))
    return results


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--seed", type=int, default=0, help="the first of them")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after so long")
    p.add_argument("--ways", nargs="+", choices=list(WAYS), help="default: all")
    p.add_argument("--steps", type=int, help="of the base")
    p.add_argument("--first", type=Path, help="a file or folder in place of Python's library")
    p.add_argument("--second", type=Path, help="a file or folder in place of C++ headers")
    p.add_argument("--tiny", action="store_true", help="a very small model, on the CPU")
    p.add_argument("--json", type=Path, help="also write the figures here")
    return p


if __name__ == "__main__":
    main()
