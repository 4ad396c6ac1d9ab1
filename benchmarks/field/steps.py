"""One system on one row of the field suite: its gradients beside eager, its first step, and its steady ones."""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters  # of graphs; breaks make several

import fp8compile
from benchmarks.field.bounds import Comparison, Reference
from benchmarks.field.models import BY_NAME
from benchmarks.field.models.task import Batch, FieldModel, Task
from benchmarks.harness import peers
from benchmarks.harness.columns import Row
from benchmarks.harness.measuring import GIB, intervals, peak_gib
from benchmarks.harness.peers import BASELINE, System, compile_arguments, ours
from benchmarks.harness.processes import Case, prepare_process
from benchmarks.harness.turns import Turns
from fp8compile.insight.tables.totals import totals
from tests.fuzz.rounded import rounding

OURS = ours("8-bit states", eight_bit=True)
SYSTEMS = (BASELINE, OURS)
T = TypeVar("T")
STEPS, QUEUED = 5, 2  # few, as others wait meanwhile; what was run before is warm
WAITS, WAIT = 12, 5.0  # for memory that others hold


def compiled(system: System, task: Task, device: str) -> Any:
    """Return what a loop calls in place of the task's model, compiled as a whole or part by part."""
    if not task.parts:
        return peers.prepare(system, task.model, device)
    for part in parts(task):
        part.compile(**compile_arguments(system, device))
    return task.model


def parts(task: Task) -> list[nn.Module]:
    """Return the submodules that the task compiles by themselves; a * is one name."""

    def named(name: str, pattern: str) -> bool:
        return name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)

    return [m for name, m in task.model.named_modules() if any(named(name, p) for p in task.parts)]


# ---- gradients ------------------------------------------------------------------------------------------------------


def references(row: FieldModel, task: Task, device: str, exact: bool = False) -> list[Reference]:
    """Loss and gradients of eager steps, one a batch; `exact`: of the same weights in FP32."""
    if exact:
        task.model.float()
        task.batches = [{k: exactly(v) for k, v in batch.items()} for batch in task.batches]
    made = []
    for batch in task.batches:
        loss = backward(row, task, task.model, batch, device, exact)
        made.append(Reference.of(task.model, loss))
    task.model.zero_grad(set_to_none=True)
    return made


def exactly(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(exactly, value))
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def backward(row: FieldModel, task: Task, run: Any, batch: Batch, device: str, exact: bool = False) -> Tensor:
    """Return the loss of a batch, whose gradients are then those of the model."""
    task.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    return task.backward(run, batch, row.forward_in(device, exact))


def compared(row: FieldModel, task: Task, run: Any, wanted: list[Reference], device: str) -> Comparison:
    """Return the gradients of all batches beside their references."""
    found = Comparison()
    for batch, reference in zip(task.batches, wanted, strict=True):
        found.add(task.model, backward(row, task, run, batch, device), reference)
    return found


def bf16_beside_exact(row: FieldModel, wanted: list[Reference], device: str, small: bool) -> Comparison:
    """Return what BF16 eager itself gets right: how far the gradients of FP32 eager are from its own."""
    task = row.built(device, small, dropout=False)
    found = Comparison()
    for reference, exact in zip(wanted, references(row, task, device, exact=True), strict=True):
        for name, parameter in task.model.named_parameters():
            gradient = exact.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        found.add(task.model, torch.tensor(exact.loss), reference)
    return found


def rounded_beside(row: FieldModel, task: Task, wanted: list[Reference], device: str) -> Comparison | None:
    """Return what FP8's roundings leave right: BF16 eager with matmuls' operands and saved activations rounded."""
    try:
        with rounding(task.model, {}, headroom=1.0):
            return compared(row, task, task.model, wanted, device)
    except (NotImplementedError, RuntimeError) as error:  # operators that take no rounded tensors
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return None


def small_gradients(row: FieldModel, system: System) -> tuple[Comparison, Comparison]:
    """Return a small row on a CPU: a system's gradients beside BF16 eager's, and what that gets right itself."""
    task = row.built("cpu", small=True, dropout=False)
    wanted = references(row, task, "cpu")
    exact = bf16_beside_exact(row, wanted, "cpu", small=True)
    return compared(row, task, compiled(system, task, "cpu"), wanted, "cpu"), exact


def torch_can(row: FieldModel) -> bool:
    """Return True if torch.compile itself can train a small row, with a backend that does nothing of its own."""
    torch.compiler.reset()
    task = row.built("cpu", small=True, dropout=False)
    run: Any = torch.compile(task.model, backend="aot_eager")
    try:
        backward(row, task, run, task.batches[0], "cpu")
    except Exception:
        return False
    return True


# ---- a whole training -----------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A system that trains a row's model; a step takes the next batch."""

    row: FieldModel
    task: Task
    run: Any
    opt: torch.optim.Optimizer
    opt_step: Callable[[], Any]
    device: str
    count: int = 0

    def step(self) -> None:
        batch = self.task.batches[self.count % len(self.task.batches)]
        self.count += 1
        self.task.backward(self.run, batch, self.row.forward_in(self.device))
        self.opt_step()
        self.opt.zero_grad(set_to_none=True)


def measure(case: Case, turns: Turns, gpu: str) -> dict[str, Any]:
    """Return all figures of a system on a row, in a process of its own that has GPU number `gpu`."""
    prepare_process(case, gpu)
    turns.join()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", fp8compile.Fp8Warning)
        figures = trained(BY_NAME[case.model], system_of(case), case, turns)
    said = [str(w.message).splitlines()[0] for w in told if issubclass(w.category, fp8compile.Fp8Warning)]
    return {
        **figures,
        "warnings": list(dict.fromkeys(said))[:5],
        "gpu": torch.cuda.get_device_name() if case.device == "cuda" else "none",
    }


def system_of(case: Case) -> System:
    return next(s for s in SYSTEMS if s.name == case.system)


def trained(row: FieldModel, system: System, case: Case, turns: Turns) -> dict[str, Any]:
    """Return the figures; gradients are compared in the first step, or with dropout left out after all else."""
    figures: dict[str, Any] = {}
    task = row.built(case.device, case.tiny)
    wanted = None if row.dropout else eager(row, task, system, case, figures)
    training, found = first_step(row, task, system, wanted, case, turns, figures)
    figures |= plan_figures()
    steady(training, case, turns, figures)
    figures["parameters"] = sum(p.numel() for p in task.model.parameters())
    if row.dropout:
        del training, task
        found = without_dropout(row, system, case, figures)
    if found is not None:
        figures |= gradient_figures(found)
    return figures


def eager(row: FieldModel, task: Task, system: System, case: Case, figures: dict[str, Any]) -> list[Reference] | None:
    """Return the references, and for BF16's own system what they get right; None where eager needs too much memory.

    FP32 needs twice as much. Where that is too much, BF16 compile beside BF16 eager says what BF16 gets right.
    """
    with at_most(row.gib, case.device):
        wanted = within(row, case.device, lambda: references(row, task, case.device))
        task.model.zero_grad(set_to_none=True)
        if wanted is None:
            figures["note"] = f"not compared: BF16 eager takes more than {row.gib:.0f} GiB"
        elif system is BASELINE:
            exact = within(row, case.device, lambda: bf16_beside_exact(row, wanted, case.device, case.tiny))
            if exact is not None:
                figures |= {"bf16_decibels": exact.decibels, "bf16_loss_error": exact.loss_error}
            rounded = within(row, case.device, lambda: rounded_beside(row, task, wanted, case.device))
            if rounded is not None:
                figures["rounded_decibels"] = rounded.decibels
    free(case.device)
    return wanted


def within(row: FieldModel, device: str, run: Callable[[], T]) -> T | None:
    """Return what `run` returns, or None where it needs more than the row's memory; waits for what others hold.

    Others may have taken the memory meanwhile, so one that had enough of it at the beginning is tried twice.
    """
    tries = 2
    for _ in range(WAITS):
        had_enough = device != "cuda" or torch.cuda.mem_get_info()[0] >= row.gib * GIB
        try:
            return run()
        except torch.OutOfMemoryError:
            tries -= had_enough
        free(device)
        if not tries:
            return None
        time.sleep(WAIT)
    return None


@contextlib.contextmanager
def at_most(gib: float, device: str) -> Iterator[None]:
    """Let this process have no more GPU memory, as others are on the same GPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / torch.cuda.get_device_properties().total_memory))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Span:
    """Seconds and peak memory of a part of the first step, without the time in which others had the GPU."""

    def __init__(self, device: str, turns: Turns):
        self.device, self.turns = device, turns

    def __enter__(self) -> Span:
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        end = time.monotonic()
        self.seconds = end - self.start - self.turns.stopped(self.start, end)
        self.gib = torch.cuda.max_memory_allocated() / GIB if self.device == "cuda" else 0.0


def first_step(
    row: FieldModel, task: Task, system: System, wanted: list[Reference] | None, case: Case, turns: Turns,
    figures: dict[str, Any]
) -> tuple[Training, Comparison | None]:  # fmt: skip
    """Compile and run the first step; between its backward and its update gradients are compared, outside the clock."""
    counters.clear()
    with Span(case.device, turns) as of_model:
        run = compiled(system, task, case.device)
        loss = backward(row, task, run, task.batches[0], case.device)
    free(case.device)  # for others; of what is held, not of what is allocated
    found = None
    if wanted is not None:
        found = Comparison()
        found.add(task.model, loss, wanted[0])
        for batch, reference in zip(task.batches[1:], wanted[1:], strict=True):
            found.add(task.model, backward(row, task, run, batch, case.device), reference)
    graphs = counters["stats"]["unique_graphs"]  # of the model: a compiled step of the optimizer traces some of its own
    with Span(case.device, turns) as of_update:
        training = Training(row, task, run, *peers.optimizer(system, task.model, case.device), case.device)
        training.opt_step()
        training.opt.zero_grad(set_to_none=True)
    figures |= {
        "model_seconds": of_model.seconds, "optimizer_seconds": of_update.seconds,
        "cold_seconds": of_model.seconds + of_update.seconds, "loss": float(loss),
        "backward_peak_gib": of_model.gib, "update_peak_gib": of_update.gib,
        "graphs": graphs,
    }  # fmt: skip
    return training, found


def plan_figures() -> dict[str, Any]:
    """Return what the plans say of the model's graphs (BF16's system has none)."""
    plans = [plan for plan in fp8compile.compiles() if plan.graph == "training"]
    of_all = totals(plans)
    return {
        "plans": len(plans), "matmuls": of_all.matmuls, "fp8_matmuls": of_all.fp8, "fp8_share": of_all.share,
        "failures": list(totals(fp8compile.compiles()).failures)[:3], "left": of_all.left,
    }  # fmt: skip


def steady(training: Training, case: Case, turns: Turns, figures: dict[str, Any]) -> None:
    """Peaks of the next steps and of later ones; times with the GPU alone."""
    free(case.device)
    second, _ = peak_gib(training.step, 2 * len(training.task.batches), case.device)
    figures["first_peak_gib"] = max(second, figures["backward_peak_gib"], figures["update_peak_gib"])
    with turns.alone():
        count = max(STEPS, 2 * len(training.task.batches))
        training.step()
        figures["ms"] = statistics.median(intervals(training.step, count, case.device))
        figures["host_ms"] = queueing(training.step, QUEUED, case.device)
    figures["peak_gib"], _ = peak_gib(training.step, len(training.task.batches), case.device)
    free(case.device)


def queueing(step: Callable[[], object], count: int, device: str) -> float:
    """Milliseconds until a step is queued: as long as the step itself where the host is what takes long."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count * 1e3


def without_dropout(row: FieldModel, system: System, case: Case, figures: dict[str, Any]) -> Comparison | None:
    """Gradients of the same model without dropout: masks of a compiled graph are others than those of eager."""
    torch.compiler.reset()
    free(case.device)
    task = row.built(case.device, case.tiny, dropout=False)
    wanted = eager(row, task, system, case, figures)
    if wanted is None:
        return None
    return compared(row, task, compiled(system, task, case.device), wanted, case.device)


def gradient_figures(found: Comparison) -> dict[str, Any]:
    return {
        "loss_error": found.loss_error, "decibels": found.decibels, "elements": found.elements,
        "non_finite": found.non_finite, "missing": found.missing,
    }  # fmt: skip


def comparison_of(row: Row) -> Comparison | None:
    """Return the comparison that figures hold, as long as they are in one process."""
    if row.get("decibels") is None:
        return None
    return Comparison(
        row.get("loss_error"), row.get("decibels"), row.get("elements"), row.get("non_finite"), row.get("missing")
    )
