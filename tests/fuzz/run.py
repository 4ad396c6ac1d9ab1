"""Many random models in many processes: the command behind `make fuzz`.

    python -m tests.fuzz --models 5000 --device cuda --jobs 32              on all GPUs of a machine
    python -m tests.fuzz --models 500 --kernels interpreter                 on a CPU, kernels in Triton's interpreter
    python -m tests.fuzz --seed 17 --models 1 --show                        one model: its source, and what is wrong
    python -m tests.fuzz --script runs/fuzz/seed17.py                       a shrunk one again

One line of JSON a model goes to --out; a run that finds the file leaves out the seeds that are in it. What fails is
shrunk, each manner of failing once, and written beside it. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .draw import draw
from .judge import RAISES, SKIPPED, Settings, Verdict, judge
from .shrink import manner, script, shrink
from .source import source
from .spec import Spec, from_json
from .stepping import WAYS

LONGEST = 300  # seconds for one model
MODELS_A_PROCESS = 200  # then a new one takes over: compilers keep what they have made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as the command line says; returns the exit status."""
    a = _parse(arguments)
    kernels = a.kernels or ("cuda" if a.device == "cuda" else "reference")
    settings = Settings(a.device, kernels, share=a.share)
    if a.script:
        spec, settings = _from_script(a.script)
        return _report_one(spec, settings, show=False)
    if a.show:
        return max(_report_one(draw(seed), settings, show=True) for seed in range(a.seed, a.seed + a.models))
    out = Path(a.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    known = {v.seed: v for v in _read(out)} if out.exists() else {}
    seeds = [s for s in range(a.seed, a.seed + a.models) if s not in known]
    print(f"{len(seeds)} models, {len(known)} known from {out}", flush=True)
    verdicts, started = [v for s, v in known.items() if a.seed <= s < a.seed + a.models], time.perf_counter()
    with out.open("a") as file:
        for verdict in run_all(seeds, settings, a.jobs, a.compiled_every, a.seconds):
            verdicts.append(verdict)
            file.write(json.dumps(asdict(verdict)) + "\n")
            file.flush()
            if verdict.is_failure:
                print(f"seed {verdict.seed} {verdict.status}: {verdict.reasons[0]}", flush=True)
    print(summary(verdicts, time.perf_counter() - started, a.jobs), flush=True)
    failures = [v for v in verdicts if v.is_failure]
    if failures and a.shrink:
        _shrink_some(failures, settings, a.shrink, a.compiled_every, out.parent)
    return 1 if failures else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", choices=("reference", "interpreter", "cuda"), help="how generated kernels run")
    parser.add_argument("--share", type=float, default=1.0, help="of a GPU's kernels that are compiled")
    parser.add_argument("--compiled-every", type=int, default=0, help="one of so many models by Inductor as well")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--shrink", type=int, default=5, help="most failures to shrink (0: none)")
    parser.add_argument("--out", default="runs/fuzz/models.jsonl")
    parser.add_argument("--show", action="store_true", help="print each model's source, in this process")
    parser.add_argument("--script", help="a shrunk model to judge again")
    return parser.parse_args(arguments)


def _read(path: Path) -> Iterator[Verdict]:
    for line in path.read_text().splitlines():
        yield Verdict(**json.loads(line))


def _from_script(path: str) -> tuple[Spec, Settings]:
    spec = importlib.util.spec_from_file_location("shrunk", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return from_json(module.SPEC), Settings(**module.SETTINGS)


def _report_one(spec: Spec, settings: Settings, show: bool) -> int:
    if show:
        print(source(spec))
    prepare(settings)
    verdict = judge(spec, settings)
    print(f"seed {spec.seed}: {verdict.status}, {verdict.seconds:.1f} s, {verdict.matmuls} FP8 matmuls", flush=True)
    print("\n".join(f"  {reason}" for reason in verdict.reasons))
    return int(verdict.is_failure)


def summary(verdicts: Sequence[Verdict], seconds: float, jobs: int) -> str:
    """What came of a run, in some lines."""
    if not verdicts:
        return "no models"
    times, closest = sorted(v.seconds for v in verdicts), [v.closest for v in verdicts]
    states = Counter(v.status for v in verdicts)
    kinds = Counter(kind for v in verdicts for kind in v.kinds)
    reasons = Counter(v.reasons[0].split(":")[1][:60] for v in verdicts if v.status == SKIPPED)
    return "\n".join([
        f"{len(verdicts)} models: " + ", ".join(f"{n} {name}" for name, n in states.most_common()),
        f"{seconds:.0f} s in {jobs} processes; a model takes {statistics.mean(v.cpu for v in verdicts):.2f} s of a "
        f"core, {statistics.mean(times):.2f} s on the clock (most {times[-1]:.1f})",
        f"{sum(v.matmuls for v in verdicts)} matmuls in FP8, {sum(v.compared for v in verdicts)} tensors compared, "
        f"{sum(v.kernels for v in verdicts)} kernels launched, {sum(v.new for v in verdicts)} compiled",
        "share of its bound that a model's worst tensor takes: median "
        f"{statistics.median(closest):.3f}, 99 % {_quantile(closest, 0.99):.3f}",
        "steps: " + ", ".join(f"{name} {n}" for name, n in kinds.most_common()),
        *(f"skipped {n}: {reason}" for reason, n in reasons.most_common(5)),
    ])  # fmt: skip


def _quantile(numbers: Sequence[float], share: float) -> float:
    return sorted(numbers)[int(share * (len(numbers) - 1))]


# ---- processes ------------------------------------------------------------------------------------------------------


def prepare(settings: Settings) -> None:
    """Make this process ready for models."""
    import torch
    import torch._inductor.config as inductor_config
    from quick import quicken

    torch.set_num_threads(1)
    quicken()
    inductor_config.force_disable_caches = True  # seeds have next to nothing in common
    inductor_config.compile_threads = 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if settings.kernels == "interpreter":
        import interpreter

        interpreter.prepare()


def _work(pipe: Connection, settings: Settings) -> None:
    """Judge specs that come through `pipe`, one by one, until None comes."""
    prepare(settings)
    signal.signal(signal.SIGALRM, _too_long)
    while (asked := pipe.recv()) is not None:
        text, compiled = asked
        spec = from_json(text)
        signal.alarm(LONGEST)
        try:
            verdict = judge(spec, replace(settings, compiled=compiled))
        except BaseException as error:
            verdict = Verdict(spec.seed, RAISES, [f"the check: {type(error).__name__}: {error}"], LONGEST)
        signal.alarm(0)
        pipe.send(asdict(verdict))


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"took more than {LONGEST} s")


class Worker:
    """A process that judges models; a new one if it dies, or has judged many."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.number, self.settings = number, settings
        self.spec: Spec | None = None
        self._start()

    def _start(self) -> None:
        self.done = 0
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        gpus = _gpus() if self.settings.device == "cuda" else 0
        variables = {"OMP_NUM_THREADS": "1"}
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = str(self.number % gpus)
        if self.settings.kernels == "interpreter":
            variables["TRITON_INTERPRET"] = "1"  # before triton is imported
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        self.process = multiprocessing.get_context("spawn").Process(target=_work, args=(theirs, self.settings))
        self.process.start()
        theirs.close()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def ask(self, spec: Spec, compiled: bool) -> None:
        """Hand over a model."""
        if self.done >= MODELS_A_PROCESS or not self.process.is_alive():
            self.stop()
            self._start()
        self.spec = spec
        self.pipe.send((spec.to_json(), compiled))

    def answer(self) -> Verdict:
        """What became of it; of a process that died, that it did."""
        assert self.spec is not None
        spec, self.spec = self.spec, None
        self.done += 1
        try:
            verdict = Verdict(**self.pipe.recv())
        except (EOFError, ConnectionError):
            self.process.join()
            verdict = Verdict(spec.seed, RAISES, [f"process: died with {self.process.exitcode}"])
            self._start()
            return verdict
        if any("CUDA error" in reason or "AcceleratorError" in reason for reason in verdict.reasons):
            self.stop()  # the device is lost to this process
            self._start()
        return verdict

    def stop(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self.pipe.send(None)
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run_all(
    seeds: Iterable[int], settings: Settings, jobs: int, compiled_every: int, seconds: float
) -> Iterator[Verdict]:
    """Verdicts of the models of `seeds`, as they come."""
    end = time.perf_counter() + seconds
    left = iter(seeds)
    workers = [Worker(i, settings) for i in range(jobs)]

    def next_one(worker: Worker) -> None:
        seed = next(left, None) if time.perf_counter() < end else None
        if seed is not None:
            worker.ask(draw(seed), bool(compiled_every) and seed % compiled_every == 0)

    try:
        for worker in workers:
            next_one(worker)
        while busy := {w.pipe: w for w in workers if w.spec is not None}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                yield worker.answer()
                next_one(worker)
    finally:
        for worker in workers:
            worker.stop()


def _shrink_some(failures: Sequence[Verdict], settings: Settings, most: int, compiled_every: int, folder: Path) -> None:
    """Shrink failures, one for each manner of failing first, and write them as scripts."""
    chosen: dict[frozenset[str], Verdict] = {}
    for verdict in failures:
        chosen.setdefault(frozenset(manner(verdict)), verdict)
    worker = Worker(0, settings)
    try:
        for verdict in list(chosen.values())[:most]:
            compiled = bool(compiled_every) and verdict.seed % compiled_every == 0

            def ask(spec: Spec, compiled: bool = compiled) -> Verdict:
                worker.ask(spec, compiled)
                return worker.answer()

            print(_shrunk(verdict.seed, ask, replace(settings, compiled=compiled), folder), flush=True)
    finally:
        worker.stop()


def _shrunk(seed: int, ask: Callable[[Spec], Verdict], settings: Settings, folder: Path) -> str:
    """Shrink the model of `seed` and write it as a script; what to tell about it."""
    spec, found = shrink(draw(seed), ask)
    if not found.is_failure:
        return f"seed {seed} did not fail again"
    ways = [w for w in reversed(WAYS) if any(reason.startswith(f"{w}:") for reason in found.reasons)]
    path = folder / f"seed{seed}.py"
    path.write_text(script(spec, found, settings, WAYS[ways[0] if ways else "generated"]))
    return f"seed {seed}: {len(spec.steps)} steps of {list(spec.lead)} rows are left: {path}\n  {found.reasons[0]}"
