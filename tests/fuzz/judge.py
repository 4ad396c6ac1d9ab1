"""What is wrong with a random model: the same step by eager PyTorch and by the backend in several ways."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import poison

import fp8compile
from fp8compile import process_state

from .bounds import References, closest, noise, wrong
from .rounded import rounding
from .source import source
from .spec import Spec
from .stepping import Step, Subject, imported
from .watching import watched

DRAWS = (1.0, 2**0.25, 2**0.5, 2**0.75)
AGAIN = (1, 2)  # seeds of data and weights with which a mismatch must come again
COMPILED = ("inductor, compiled", "generated, compiled")
OK, WRONG, RAISES, SKIPPED = "ok", "wrong", "raises", "skipped"


@dataclass(frozen=True)
class Settings:
    """How models are run. kernels: see `watching.py`; compiled: by Inductor as well; share: of kernels on a GPU."""

    device: str = "cpu"
    kernels: str = "reference"
    compiled: bool = False
    share: float = 1.0


@dataclass
class Verdict:
    """What became of a model: its status, reasons, and figures."""

    seed: int
    status: str = OK
    reasons: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0  # seconds of this process alone
    matmuls: int = 0  # in FP8
    kernels: int = 0  # that were launched and compared
    new: int = 0  # kernels that this process had not compiled
    compared: int = 0  # tensors
    closest: float = 0.0  # the share of its bound that the worst tensor takes
    kinds: list[str] = field(default_factory=list)

    @property
    def is_failure(self) -> bool:
        """Whether something is to be mended."""
        return self.status in (WRONG, RAISES)


def judge(spec: Spec, settings: Settings) -> Verdict:
    """Run the model of `spec` in all ways, and compare."""
    started, processed = time.perf_counter(), time.process_time()
    verdict = Verdict(spec.seed, kinds=[step.kind for step in spec.steps])
    with imported(source(spec)) as module, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            subject = Subject(module, settings.device, spec.seed)
            references = _references(subject, 0)
        except Exception as error:
            verdict.status, verdict.reasons = SKIPPED, [f"eager: {_said(error)}"]
        else:
            _compare(subject, references, spec, settings, verdict)
    process_state.reset()
    verdict.seconds, verdict.cpu = time.perf_counter() - started, time.process_time() - processed
    return verdict


def _references(subject: Subject, data: int) -> References:
    options = subject.module.OPTIONS
    drawn = [subject.eager(data, around=partial(rounding, options=options, headroom=h)) for h in DRAWS]
    is_wide = subject.precision == "fp32" and options.get("recipe") != "blockwise"
    return References(subject.eager(data, exact=True), subject.eager(data), drawn, is_wide)


def _compare(subject: Subject, references: References, spec: Spec, settings: Settings, verdict: Verdict) -> None:
    ways = ["inductor", "generated", *(COMPILED if settings.compiled else ())]
    byte = (poison.NAN, poison.LARGE)[spec.seed % 2]
    runs: dict[str, Callable[[int], Step]] = {}
    steps: dict[str, Step] = {}
    with watched(settings.kernels, byte, settings.share, spec.seed) as watch:
        for way in ways:
            runs[way] = _poisoned(subject.compiled(way, dict(spec.options)), settings, byte)
            try:
                steps[way] = runs[way](0)
            except Exception as error:
                _raised(subject, way, error, verdict)
                return
            verdict.matmuls = sum(len(plan.converted) for plan in fp8compile.compiles())
        found = wrong(references, steps)
        for data in AGAIN if found else ():
            again = wrong(_references(subject, data), {way: runs[way](data) for way in ways})
            found = {key: text for key, text in found.items() if key in again}
        if found:
            found = _ours(subject, references, found, steps)
    verdict.closest = closest(references, steps)
    verdict.kernels, verdict.new = watch.launched, watch.fresh
    verdict.compared = sum(references.is_compared(name) for name in references.exact)
    verdict.reasons = [*dict.fromkeys(watch.complaints), *found.values()]
    verdict.status = WRONG if verdict.reasons else OK


def _ours(subject: Subject, references: References, found: dict[str, str], steps: dict[str, Step]) -> dict[str, str]:
    """Without what torch.compile alone has: a checkpointed BatchNorm counts its rows once, eager twice."""
    theirs = {key.removeprefix("traced ") for key in wrong(references, {"traced": subject.traced(0)})}
    found = {key: text for key, text in found.items() if not any(f" {name}" in key for name in theirs)}
    if not any(key.startswith(way) for key in found for way in COMPILED):
        return found
    inductor = subject.traced(0, backend="inductor")
    excused = {
        f"{way} {name}{suffix}"
        for way in COMPILED
        for name in steps.get(way, {}).keys() & inductor.keys()
        if references.is_off(name, inductor[name])
        and noise(inductor[name], steps[way][name]) <= references.against_exact(name)
        for suffix in ("", " apart")
    }
    return {key: text for key, text in found.items() if key not in excused}


def _poisoned(run: Callable[[int], Step], settings: Settings, byte: int) -> Callable[[int], Step]:
    def step(data: int) -> Step:
        if settings.device == "cuda":
            poison.poison_free_memory(byte, largest=1 << 24)
        return run(data)

    return step


def _raised(subject: Subject, way: str, error: Exception, verdict: Verdict) -> None:
    """An error of ours, unless torch.compile without us raises as well."""
    text = f"{way}: {_said(error)}"
    try:
        subject.traced(0)
    except Exception as theirs:
        verdict.status, verdict.reasons = SKIPPED, [f"aot_eager raises as well: {_said(theirs)}", text]
        return
    verdict.status, verdict.reasons = RAISES, [text]


def _said(error: Exception) -> str:
    """The error with the innermost lines of the project in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/site-packages/" not in f.filename]
    where = " < ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in reversed(frames[-2:]))
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:400]} ({where})"
