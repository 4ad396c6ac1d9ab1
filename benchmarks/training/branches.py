"""Which cast costs what? Trainings that branch off one training in BF16, each with one part of FP8.

    python -m benchmarks.training.branches --out runs/branches --minutes 9     # one GPU; again, until all is done
    python -m benchmarks.training.branches --out runs/branches --report    # the table of what there is
    python -m benchmarks.training.branches --tiny --out /tmp/branches    # on a CPU: that it runs

Trainings are chaotic: two that differ in one rounding at their beginning end some tenths of a percent apart, which
hides what FP8 costs (`convergence.py`). So a seed is trained in BF16 to `--at` of its steps, and all branches go on
from there for `--steps` more: from the same weights and averages of AdamW, on the same batches, at the rates of the
whole training.

"output", "grad_input" and "grad_weight alone" have that matmul of each layer in FP8, "saved alone" what is kept for
backward, "8-bit states" the averages of AdamW, "FP8 head alone" the head, of a large `--vocabulary`; O2 and O3 are as
in `convergence.py`. "BF16 nudged" is BF16 from weights that are each changed by a ten-thousandth: what chaos does by
itself.

    at first    mean, over the first quarter of a branch, of its loss / BF16's on the same batch - 1
    training    the same over its second half, when a nudge may have grown as large as what FP8 does
    as run      loss of the last weights on 2 M held-out tokens, as the branch computes, / BF16's - 1
    weights     the same, computed in eager BF16: what the training cost, without the rounding of the evaluation

± is the half width of a 95 % interval over seeds. Where a nudge hides all that, `--branches combined` trains half of
all combinations of the five parts of O3 (each alone, any three, all), and a second table gives what each part adds, by
least squares over all of them with BF16 and its nudges. Half of the branches have a part and half do not, so all of
them tell of each. ± is there of a 95 % interval by what the sum of the parts leaves unexplained.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.training.convergence import Settings, Trainer, add_settings, check_folder, nudge, settings_and_text
from benchmarks.training.convergence_report import (
    IN_BF16,
    LAST,
    NUDGED,
    OURS,
    PARTS,
    PARTS_OF_O3,
    STATES,
    THREE_PARTS,
    Run,
    without_nudge,
)
from benchmarks.training.intervals import Interval, student
from corpus import Corpus

BASE = "BF16"
BRANCHES = (BASE, NUDGED, *PARTS, STATES, *(name for name in OURS if name not in PARTS))
STUDY = (BASE, NUDGED, *PARTS, STATES, "O2 mixed", "O3 mixed", "O3 blockwise", "O3 rowwise")
COMBINED = (BASE, *PARTS, STATES, *THREE_PARTS, "O3 mixed")
PARTS_IN: dict[str, tuple[str, ...]] = {  # configurations that differ in parts of O3 alone
    BASE: (), NUDGED: (), **{name: (name.removesuffix(" alone"),) for name in PARTS}, STATES: ("states",),
    **{name: tuple(name.split(" + ")) for name in THREE_PARTS}, "O3 mixed": PARTS_OF_O3,
}  # fmt: skip
OF_THE_OPTIMIZER = ("fused", "foreach", "capturable")  # settings that belong to an implementation
MEASURES = {"as run": LAST, "weights": LAST + IN_BF16}  # of held-out text, by the columns of the table
TOGETHER = "all five"
COLUMNS = ("at first", "training", *MEASURES)
CHUNK = 50  # steps of the trunk between two looks at the clock


@dataclass
class Branch:
    """What one branch came to. losses: of each step; held_out: by measure."""

    name: str
    seed: int
    at: int
    losses: list[float]
    held_out: dict[str, float]
    seconds_per_step: float
    peak_bytes: int
    fp8_matmuls: int


def trunk(settings: Settings, corpus: Corpus, seed: int, at: int, file: Path, deadline: float) -> bool:
    """Train a seed in BF16 to step `at`, and save its state to `file`; return False if time was over before."""
    if file.exists():
        return True
    begun = file.with_suffix(".begun")
    trainer = Trainer(settings, corpus, Run(BASE, seed, settings.size.steps))
    if begun.exists():
        trainer.load(torch.load(begun, map_location=settings.device, weights_only=False))
    while trainer.done < at and time.monotonic() < deadline:
        trainer.train(min(CHUNK, at - trainer.done))
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(trainer.state(), begun)
    return trainer.done == at and bool(begun.rename(file))


def branch_off(settings: Settings, corpus: Corpus, name: str, seed: int, steps: int, file: Path) -> Branch:
    """Train `steps` more from the state in `file`, as the configuration `name`, and return what came of it."""
    trainer = Trainer(settings, corpus, Run(name, seed, settings.size.steps))
    state = torch.load(file, map_location=settings.device, weights_only=False)
    for mine, saved in zip(trainer.opt.param_groups, state["opt"]["param_groups"], strict=True):
        saved.update({setting: mine[setting] for setting in OF_THE_OPTIMIZER})
    trainer.load(state)
    at = trainer.done
    del state
    if without_nudge(name) != name:
        nudge(trainer.model, name, seed)
    if settings.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, _ = trainer.train(steps // 2)
    _wait(settings.device)
    began = time.perf_counter()
    losses += trainer.train(steps - steps // 2)[0]
    _wait(settings.device)
    seconds = (time.perf_counter() - began) / (steps - steps // 2)
    peak, matmuls = torch.cuda.max_memory_allocated() if settings.device == "cuda" else 0, trainer.fp8_matmuls()
    return Branch(name, seed, at, torch.stack(losses).tolist(), trainer.last(), seconds, peak, matmuls)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- results --------------------------------------------------------------------------------------------------------


def gaps(branch: Branch, base: Branch) -> dict[str, float]:
    """Return how far a branch is from BF16's of the same seed, by each measure: a share of the loss."""
    of_steps = [a / b - 1 for a, b in zip(branch.losses, base.losses, strict=True)]
    first, half = max(1, len(of_steps) // 4), len(of_steps) // 2
    held_out = {what: branch.held_out[key] / base.held_out[key] - 1 for what, key in MEASURES.items()}
    return {"at first": statistics.mean(of_steps[:first]), "training": statistics.mean(of_steps[half:]), **held_out}


def effects(branches: Sequence[Branch], bases: Mapping[int, Branch]) -> dict[str, dict[str, Interval]]:
    """Return what each part of O3 and all add, by measure, where enough combinations have run to tell; else nothing."""
    used = [b for b in branches if b.name in PARTS_IN and b.seed in bases]
    ones = [[float(part in PARTS_IN[b.name]) for part in PARTS_OF_O3] + [1.0] for b in used]
    has = torch.tensor(ones, dtype=torch.float64).reshape(len(used), len(PARTS_OF_O3) + 1)
    free = len(used) - has.shape[1]
    if free < 1 or int(torch.linalg.matrix_rank(has)) < has.shape[1]:
        return {}
    found = [gaps(b, bases[b.seed]) for b in used]
    measured = torch.tensor([list(each.values()) for each in found], dtype=torch.float64)
    added = torch.linalg.lstsq(has, measured).solution
    variance = (has @ added - measured).square().sum(0) / free
    quantile, spread = student(free), torch.linalg.inv(has.T @ has)
    each, every = torch.eye(has.shape[1], dtype=torch.float64)[:-1], torch.ones(1, has.shape[1], dtype=torch.float64)
    every[:, -1] = 0
    asked = torch.cat([each, every])  # each part, and their sum
    means, halves = asked @ added, quantile * ((asked @ spread @ asked.T).diag()[:, None] * variance).sqrt()
    return {
        part: {what: Interval(means[i, j].item(), halves[i, j].item()) for j, what in enumerate(found[0])}
        for i, part in enumerate((*PARTS_OF_O3, TOGETHER))
    }


def report(folder: Path) -> str:
    """Return the table of the branches in a folder, and write `results.json` beside them."""
    files = sorted(folder.glob("*-seed*.json"))
    branches = [Branch(**json.loads(file.read_text())) for file in files]
    bases = {b.seed: b for b in branches if b.name == BASE}
    rows, lines = [], [f"{'branch':<34}{'seeds':>6}{'ms':>8}" + "".join(f"  {m:<17}" for m in COLUMNS)]
    for name in BRANCHES:
        mine = [b for b in branches if b.name == name and b.seed in bases]
        if not mine:
            continue
        found = [gaps(b, bases[b.seed]) for b in mine]
        intervals = {what: Interval.of([each[what] for each in found]) for what in found[0]}
        ms = 1e3 * statistics.median(b.seconds_per_step for b in mine)
        rows.append({"name": name, "seeds": [b.seed for b in mine], "ms": ms,
                     "gaps": {what: asdict(x) for what, x in intervals.items()}})  # fmt: skip
        cells = "" if name == BASE else "".join(f"  {x.text('+.3%'):<17}" for x in intervals.values())
        lines.append(f"{name:<34}{len(mine):>6}{ms:>8.1f}{cells}")
    added = effects(branches, bases)
    if added:
        lines += ["", f"{'adds':<34}" + "".join(f"  {m:<17}" for m in COLUMNS)]
    for part, each in added.items():
        lines.append(f"{part:<34}" + "".join(f"  {x.text('+.3%'):<17}" for x in each.values()))
    settings = json.loads((folder / "settings.json").read_text())
    parts = {part: {what: asdict(x) for what, x in each.items()} for part, each in added.items()}
    whole = {"settings": settings, "rows": rows, "parts": parts}
    (folder / "results.json").write_text(json.dumps(whole, indent=1) + "\n")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Train what there is time for, and print the table; see the top of this file."""
    given = parser().parse_args(arguments)
    began = time.monotonic()
    if given.report:
        print(report(given.out))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    settings, corpus = settings_and_text(given, steps=None)
    whole = settings.size.steps
    at, steps = round(given.at * whole), min(given.steps, whole - round(given.at * whole))
    check_folder(given.out, {**asdict(settings), "at": at, "steps_of_a_branch": steps})
    torch.set_float32_matmul_precision("high")
    deadline = began + 60 * given.minutes
    for seed in range(given.first, given.first + given.seeds):
        state = (given.scratch or given.out / "checkpoints") / f"trunk-seed{seed}.pt"
        if not trunk(settings, corpus, seed, at, state, deadline):
            break
        for name in _named(given.branches):
            file = given.out / f"{name.replace(' ', '-')}-seed{seed}.json"
            if not file.exists() and time.monotonic() < deadline:
                branch = branch_off(settings, corpus, name, seed, steps, state)
                (part := file.with_suffix(".part")).write_text(json.dumps(asdict(branch)) + "\n")
                part.rename(file)  # another process may be reading the folder
                print(f"{name:<20} seed {seed}: {branch.held_out[LAST]:.5f}", flush=True)
    print(report(given.out))


def _named(given: Sequence[str] | None) -> Sequence[str]:
    return STUDY if given is None else [name for each in given for name in (COMBINED if each == "combined" else [each])]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("runs/branches"))
    p.add_argument("--scratch", type=Path, help="where the states are from which branches begin (default: in --out)")
    p.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after so long")
    p.add_argument("--seeds", type=int, default=1)
    p.add_argument("--first", type=int, default=0, help="the first seed")
    add_settings(p, select="profitable")
    p.add_argument("--at", type=float, default=0.7, help="the share of a training's steps after which branches begin")
    p.add_argument("--steps", type=int, default=400, help="of a branch")
    p.add_argument(
        "--branches", nargs="*", choices=[*BRANCHES, "combined"], help="none: only what they begin from is trained"
    )
    p.add_argument("--report", action="store_true", help="train nothing, show what there is")
    return p


if __name__ == "__main__":
    main()
