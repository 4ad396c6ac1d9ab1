"""Does training in FP8 lose anything? BF16, fp8compile in parts and whole, and torchao, on the same data and seeds.

    python -m benchmarks.training.convergence --out runs/convergence --minutes 9
        # again and again, until nothing is left
    python -m benchmarks.training.convergence --out runs/convergence --report    # the table of what there is
    python -m benchmarks.training.convergence --tiny --out /tmp/tiny    # on a CPU, in a minute

The model is `examples/llama.py` (`--size 125m`), its text `examples/corpus.py`. A seed decides weights and the order of
the data, for every configuration alike. `BF16` is FP32 parameters under BF16 autocast, torch's fused AdamW, Inductor;
the others differ in what their name says: "nudged" ones in their first weights, by a ten-thousandth of each, which is
how far two trainings come apart by themselves ("nudged 2" is another nudge); `8-bit states` in those of the optimizer
alone (its step is compiled), O2 in its matmuls, O3 in matmuls, saved activations and states, "O3 FP32 states" in the
first two; "output alone" in the outputs of matmuls, and so on; "first in BF16" leaves the matmuls of the first block,
"ends in BF16" those of the last too; "two passes" computes every amax first, matmuls named "fast" accumulate fast, "FP8
head" converts the head too, "auto" is the automatic mode, "recipe auto" the recipe of that name. With `--parameters
bf16` the parameters of ours are BF16, with the masters of their level. `--size mixture` has 107 M parameters, of which
a token meets 31 M; the report says where tokens go. With `--vocabulary 32768` tokens are subwords, as a head in FP8 is
about large ones.

**Less noise.** Trainings are chaotic: two runs that differ in one rounding end apart by more than FP8 costs. So the
weights of the last tenth of a run are averaged, and both they and the last weights are evaluated on 2 M held-out
tokens, each as the run computes and in eager BF16. The report says for each of these measures by how much the gap of
one pair scatters, and how many pairs an interval of ± 0.1 % takes.

What is in --out: a JSON for each run, written at each evaluation, `results.json`, `loss.svg`, and in `checkpoints/` (or
--scratch) the state of the run that --minutes interrupted; without it that run begins anew. A run looks at the clock
between two evaluations, and compiling takes a minute or two on a GPU: ask for less than there is. What shares the GPU
with other work (--untimed) gives losses and no times: a configuration's times are those of its other seeds.

    loss       held-out loss of the averaged weights, as the run computes (of runs without: the mean of the last three
               evaluations); ± is the half width of a 95 % interval over seeds
    gap        loss / BF16's of the same seed - 1; its mean, with an interval of the same kind
    spikes     readings of the training loss that lie 0.2 above the least of the five before them, all seeds
    matched    time until the worst configuration's loss is reached, beside BF16's: speed at the same quality
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import fp8compile
from benchmarks.training.convergence_report import (
    AVERAGED,
    CONFIGURATIONS,
    IN_BF16,
    KNOWN,
    LAST,
    OURS,
    READING,
    STATES,
    Run,
    milliseconds,
    report,
    without_nudge,
)
from benchmarks.training.routing import counted
from benchmarks.training.subwords import in_subwords
from corpus import Corpus, even_starts, load_corpus, random_starts, windows
from llama import VOCABULARY, LlamaConfig
from mixture import MixtureConfig
from training import MAX_GRADIENT_NORM, WEIGHT_DECAY, Size, lr_factor

SIZES = {
    "tiny": Size(LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=192), 8, 64, 60, 3e-3, 4),
    "125m": Size(LlamaConfig(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, hidden=3584), 32, 1024, 2000, 6e-4, 8),
    "mixture": Size(MixtureConfig(dim=512, n_layers=8, n_heads=8, n_kv_heads=4, hidden=1024), 32, 1024, 2000, 6e-4, 8),
    "tiny mixture": Size(MixtureConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=64), 8, 64, 60, 3e-3, 4),
    "1b": Size(LlamaConfig(dim=2048, n_layers=25, n_heads=32, n_kv_heads=4, hidden=5632), 16, 1024, 3000, 3e-4, 16),
}
EVALUATIONS = 40  # in a run
LAST_SHARE = 0.1  # of a run's steps are its last ones, of which every tenth's weights are averaged
FINAL = 8  # times the batches of an evaluation on the way, for the weights at the end: 2 M tokens, but for tiny runs
UNTIMED = 5  # steps after a (re)start that are not timed: compilation, autotuning


@dataclass(frozen=True)
class Settings:
    """What all runs of a folder share."""

    size: Size
    device: str
    select: str
    parameters: str
    executor: str
    text: str
    deterministic: bool = False
    vocabulary: int = VOCABULARY


@torch.no_grad()
def nudge(model: nn.Module, name: str, seed: int) -> None:
    """Change each weight by about a ten-thousandth of itself, drawn by `seed` and a number that ends `name`."""
    number = name.rpartition(" ")[2]
    torch.manual_seed(seed + 1000 * int(number) if number.isdigit() else seed)
    for p in model.parameters():
        p.mul_(1 + 1e-4 * torch.randn_like(p))


class Trainer:
    """A model in one configuration, with what updates it."""

    def __init__(self, settings: Settings, corpus: Corpus, run: Run) -> None:
        torch.compiler.reset()
        gc.collect()
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.settings, self.corpus, self.run = settings, corpus, run
        size = settings.size
        torch.manual_seed(run.seed)
        with torch.device(settings.device):
            self.model = size.model.built(size.seq, settings.vocabulary)
        name = without_nudge(run.name)
        if run.name != name:
            nudge(self.model, run.name, run.seed)
        ours = OURS.get(name)
        self.autocast = ours is None or settings.parameters == "fp32"
        if not self.autocast:
            self.model.bfloat16()
        self.step = self._compiled(ours)
        matrices, vectors = ([p for p in self.model.parameters() if (p.dim() >= 2) == big] for big in (True, False))
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ]
        level = "O3" if name == STATES else ours["level"] if ours else None
        compiled = level == "O3" or (level is not None and not self.autocast)
        self.opt = torch.optim.AdamW(groups, lr=size.lr, betas=(0.9, 0.95), fused=not compiled)
        self.schedule = LambdaLR(self.opt, lambda done: lr_factor(done, size.steps))
        self.update: Callable[[], Any] = self.opt.step
        if compiled:
            options = {"level": level, "executor": settings.executor, "strict": True}
            fp8compile.prepare_optimizer(self.opt, fp8compile.Options.parse(options).states)
            self.update = torch.compile(self.opt.step, backend="fp8", options=options)
        self.starts = random_starts(corpus.train, size.steps, size.batch, size.seq, run.seed)
        self.averaged: AveragedModel | None = None  # a running mean, as soon as there is something to average
        self.done = 0

    def _compiled(self, ours: dict[str, Any] | None) -> Callable[[Tensor, Tensor], Tensor]:
        eager = self.settings.executor == "eager"
        if ours is not None:
            ends = {"first": 0, "last": self.settings.size.model.n_layers - 1}
            skip = [pattern.format(**ends) for pattern in ours.get("skip", ())]
            options = {**ours, "skip": skip, "select": self.settings.select, "executor": self.settings.executor}
            options["strict"] = True
            return torch.compile(self.model, backend="fp8", options=options)
        if self.run.name.startswith("torchao"):
            _convert_by_torchao(self.model)
        return self.model if eager else torch.compile(self.model)

    def loss(self, text: Tensor, starts: Tensor, step: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Return the loss, f32[], of the windows that begin at starts i64[batch], by `step` or as the run computes."""
        tokens, targets = windows(text, starts, self.settings.size.seq)
        with torch.autocast(self.settings.device, torch.bfloat16, enabled=self.autocast):
            return (self.step if step is None else step)(tokens, targets)

    def train(self, steps: int) -> tuple[list[Tensor], list[Tensor]]:
        """Train so many steps; returns their losses and norms of gradients, f32[] each."""
        losses, norms = [], []
        for starts in self.starts[self.done : self.done + steps]:
            loss = self.loss(self.corpus.train, starts)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM).detach())
            self.update()
            self.schedule.step()
            self.opt.zero_grad()
            losses.append(loss.detach())
            self.done += 1
            left = self.settings.size.steps - self.done
            if left < LAST_SHARE * self.settings.size.steps and left % READING == 0:
                if self.averaged is None:
                    self.averaged = AveragedModel(self.model)
                self.averaged.update_parameters(self.model)
        return losses, norms

    def held_out(self) -> float:
        """Return the held-out loss, as the run computes, on the few batches of an evaluation on the way."""
        return self._held_out(self.settings.size.held_out_batches, self.step)

    def final(self) -> dict[str, float]:
        """Return the losses of the last weights and of the averaged ones, which then are the model's."""
        found = self.last()
        if self.averaged is not None:
            self.model.load_state_dict(self.averaged.module.state_dict())
        return {**found, **self.last(AVERAGED)}

    def last(self, measure: str = LAST) -> dict[str, float]:
        """Return the losses of the weights as they are, as the run computes and in eager BF16, on 2 M tokens."""
        batches = FINAL * self.settings.size.held_out_batches
        steps = {measure: self.step, measure + IN_BF16: self.model}
        return {name: self._held_out(batches, step) for name, step in steps.items()}

    def routing(self) -> list[list[float]]:
        """Return the shares of tokens that experts meet with the weights as they are, in eager BF16."""
        if not isinstance(self.settings.size.model, MixtureConfig):
            return []
        with counted(self.model) as shares:
            self._held_out(self.settings.size.held_out_batches, self.model)
        return [list(layer) for layer in shares()]

    def fp8_matmuls(self) -> int:
        """Return how many matmuls the training graph has in FP8; call it before anything else is compiled."""
        return len(fp8compile.last_compile().converted) if without_nudge(self.run.name) in OURS else 0

    @torch.no_grad()
    def _held_out(self, batches: int, step: Callable[[Tensor, Tensor], Tensor]) -> float:
        size, text = self.settings.size, self.corpus.held_out
        starts = even_starts(text, batches, size.batch, size.seq)
        return torch.stack([self.loss(text, batch, step) for batch in starts]).double().mean().item()

    def state(self) -> dict[str, Any]:
        """Return all that a later process needs to go on."""
        return {
            "model": self.model.state_dict(), "opt": self.opt.state_dict(), "schedule": self.schedule.state_dict(),
            "delayed": fp8compile.delayed.state_dict(), "done": self.done, "run": asdict(self.run),
            "averaged": None if self.averaged is None else self.averaged.state_dict(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.schedule.load_state_dict(state["schedule"])
        fp8compile.delayed.load_state_dict(state["delayed"])
        if state["averaged"] is not None:
            self.averaged = AveragedModel(self.model)
            self.averaged.load_state_dict(state["averaged"])
        self.done = state["done"]


def _convert_by_torchao(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, path: path != "lm_head")


def train(
    settings: Settings, corpus: Corpus, run: Run, file: Path, checkpoint: Path, deadline: float, timed: bool = True
) -> bool:
    """Train until the run is finished or time is over; returns whether it is finished."""
    trainer = Trainer(settings, corpus, run)
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=settings.device, weights_only=False)
        if (state["run"]["name"], state["run"]["seed"]) == (run.name, run.seed):
            trainer.load(state)
            run.__dict__.update(Run(**state["run"]).__dict__)
        del state
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
    if not trainer.done:
        run.__dict__.update(Run(run.name, run.seed, run.steps).__dict__)
    every = max(1, run.steps // EVALUATIONS)
    begin = trainer.done
    while not run.finished:
        if time.monotonic() > deadline:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save(trainer.state(), checkpoint)
            return False
        end = min(run.steps, (trainer.done // every + 1) * every)
        fresh = trainer.done < begin + UNTIMED
        began, count = time.perf_counter(), end - trainer.done
        losses, norms = trainer.train(count)
        values = torch.stack(losses).tolist()  # waits for the device
        if timed and not fresh:
            run.seconds.append((time.perf_counter() - began) / count)
        run.readings += _means(values)
        run.norms += _means(torch.stack(norms).tolist())
        if begin == 0 and end == every:
            run.fp8_matmuls = trainer.fp8_matmuls()
        run.evaluations.append((trainer.done, trainer.held_out()))
        run.diverged = not all(map(math.isfinite, (*values, run.evaluations[-1][1])))
        if run.finished and not run.diverged:
            run.final = trainer.final()
            run.routing = trainer.routing()
        if settings.device == "cuda" and trainer.averaged is None:
            run.peak_bytes = max(run.peak_bytes, torch.cuda.max_memory_allocated())
        file.write_text(json.dumps(asdict(run)))
    checkpoint.unlink(missing_ok=True)
    return True


def _means(values: Sequence[float]) -> list[float]:
    return [statistics.mean(values[i : i + READING]) for i in range(0, len(values), READING)]


# ---- command line ---------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    began = time.monotonic()
    if given.report:
        print(report(given.out, _settings_of(given.out)))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    if given.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    settings, corpus = settings_and_text(given, given.steps, given.parameters, given.deterministic)
    check_folder(given.out, asdict(settings))
    torch.set_float32_matmul_precision("high")
    names = [name for name in given.configurations if _is_there(name)]
    left = _run_all(given, names, settings, corpus, began + 60 * given.minutes)
    print(f"{left} of {len(names) * given.seeds} runs left: the same command goes on" if left else "all runs done")
    print("\n" + report(given.out, asdict(settings)))


def settings_and_text(
    given: argparse.Namespace, steps: int | None, parameters: str = "fp32", deterministic: bool = False
) -> tuple[Settings, Corpus]:
    """Return what all runs of a folder share, by the arguments of `add_settings`, and their text on the device."""
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    changed = {"steps": steps, "batch": given.batch, "seq": given.seq}
    tiny = "tiny mixture" if given.size == "mixture" else "tiny"
    size = SIZES[tiny if given.tiny else given.size]
    size = replace(size, **{name: value for name, value in changed.items() if value is not None})
    corpus = load_corpus(given.text, size.seq)
    if given.vocabulary != VOCABULARY:
        corpus = in_subwords(corpus, given.vocabulary, given.out / f"subwords-{given.vocabulary}.pt")
    corpus = corpus.to(torch.device(device))
    executor = "eager" if device == "cpu" else "inductor"
    return (
        Settings(size, device, given.select, parameters, executor, corpus.source, deterministic, given.vocabulary),
        corpus,
    )


def add_settings(p: argparse.ArgumentParser, select: str) -> None:
    """Add the arguments for what is trained on what; `select` is the default choice of matmuls."""
    p.add_argument("--size", choices=["125m", "1b", "mixture"], default="125m")
    p.add_argument("--tiny", action="store_true", help="a very small model, on the CPU")
    p.add_argument("--batch", type=int, help="sequences of a step")
    p.add_argument("--seq", type=int, help="tokens of a sequence")
    p.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens are so many subwords (default: bytes)")
    p.add_argument("--text", type=Path, help="as for examples/train_lm.py")
    p.add_argument("--select", choices=["all", "profitable"], default=select, help="which matmuls are in FP8")


def _run_all(
    given: argparse.Namespace, names: Sequence[str], settings: Settings, corpus: Corpus, deadline: float
) -> int:
    """Runs in order, seed by seed, so that what is there can be compared; returns how many are left."""
    checkpoint = (given.scratch or given.out / "checkpoints") / "interrupted.pt"
    todo = [(seed, name) for seed in range(given.first, given.first + given.seeds) for name in names]
    for i, (seed, name) in enumerate(todo):
        file = given.out / f"{name.replace(' ', '-')}-seed{seed}.json"
        run = Run(**json.loads(file.read_text())) if file.exists() else Run(name, seed, settings.size.steps)
        if run.finished:
            continue
        if time.monotonic() > deadline or not train(
            settings, corpus, run, file, checkpoint, deadline, timed=not given.untimed
        ):
            return len(todo) - i
        time_of_step = f"{milliseconds(run.seconds_per_step)} ms a step" if run.seconds else "not timed"
        print(f"{name:<20} seed {seed}: {run.loss:.4f}, {time_of_step}", flush=True)
    return 0


def _is_there(name: str) -> bool:
    if name.startswith("torchao"):
        try:
            import torchao.float8  # type: ignore[import-not-found]  # noqa: F401
        except ImportError:
            print("torchao is not installed: left out")
            return False
    return True


def _settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of the runs in a folder, which may have been made elsewhere."""
    file = folder / "settings.json"
    if not file.exists():
        raise SystemExit(f"{folder} holds no runs")
    return json.loads(file.read_text())


def check_folder(folder: Path, settings: dict[str, Any]) -> None:
    """Write down the settings of the runs in a folder; raise SystemExit if it holds runs of others."""
    file = folder / "settings.json"
    now = json.loads(json.dumps(settings))
    if not file.exists():
        file.write_text(json.dumps(now, indent=1) + "\n")
    elif (before := {"vocabulary": VOCABULARY, **json.loads(file.read_text())}) != now:
        changed = [name for name in now if before.get(name) != now[name]]
        raise SystemExit(f"{folder} holds runs of other settings ({', '.join(changed)}): take another --out")


def configuration(name: str) -> str:
    """Return the name of a configuration from the command line; raises for unknown ones."""
    if without_nudge(name) not in KNOWN:
        raise argparse.ArgumentTypeError(f"there is no configuration {name!r}: {', '.join(KNOWN)}")
    return name


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("runs/convergence"))
    p.add_argument("--scratch", type=Path, help="where the checkpoint of an interrupted run is (default: in --out)")
    p.add_argument("--minutes", type=float, default=math.inf, help="stop, and be ready to go on, after so long")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument(
        "--first", type=int, default=0, help="the first seed: two GPUs can share a study, with a --scratch each"
    )
    p.add_argument("--untimed", action="store_true", help="other work shares the GPU: keep no times")
    p.add_argument("--steps", type=int)
    add_settings(p, select="all")
    p.add_argument("--parameters", choices=["fp32", "bf16"], default="fp32", help="of O2 and O3")
    p.add_argument("--deterministic", action="store_true", help="torch's deterministic algorithms: slower ones")
    p.add_argument(
        "--configurations", nargs="+", type=configuration, metavar="NAME", default=CONFIGURATIONS,
        help=f"of {', '.join(KNOWN)}; each also with \" nudged\" or \" nudged 2\" behind it (default: the first "
        f"{len(CONFIGURATIONS)})",
    )  # fmt: skip
    p.add_argument("--report", action="store_true", help="train nothing, show what there is")
    return p


if __name__ == "__main__":
    main()
