"""Processes that measure: each begins with nothing compiled or allocated, and is stopped when it takes too long."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters  # of graphs; torch.compiler.reset() leaves them
from torch._inductor import config as inductor_config

from benchmarks.harness.columns import Row
from benchmarks.harness.measuring import machine
from benchmarks.harness.peers import LeftOutError
from benchmarks.harness.turns import Turns
from fp8compile import process_state

# Where compilers keep what they have compiled, below one folder
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton"}


@dataclass(frozen=True)
class Case:
    """One system on one model.

    cache: the folder of compile caches; warm: everything has been compiled into it; turns: the folder of those who
    share a GPU, if anybody does.
    """

    model: str
    system: str
    tiny: bool = False
    cache: str = ""
    warm: bool = False
    turns: str = ""

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def alone(self) -> AbstractContextManager[None]:
        """Have the GPU alone, to be timed."""
        return Turns(Path(self.turns)).alone() if self.turns else nullcontext()


class FailedError(RuntimeError):
    """What went wrong in another process, in one line."""


Measure = Callable[[Case], dict[str, Any]]


class Clock:
    """How much of the time is over, and the longest that anything has taken so far."""

    def __init__(self, seconds: float):
        self.start, self.seconds, self.longest = time.monotonic(), seconds, 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    def __enter__(self) -> None:
        self.began = self.spent

    def __exit__(self, *_: object) -> None:
        self.longest = max(self.longest, self.spent - self.began)


def in_this_process(measure: Measure, case: Case) -> dict[str, Any]:
    forget()
    try:
        return measure(case)
    finally:
        forget()


def forget() -> None:
    """Leave nothing behind that the next system could find."""
    process_state.reset()
    counters.clear()
    gc.collect()


def isolated(measure: Measure, case: Case, start: str, seconds: float) -> dict[str, Any]:
    """Return what `measure` returns in a process of its own, which is stopped when it takes longer."""
    process, answer = begin(measure, case, start)
    try:
        if not answer.poll(max(seconds, 0.1)):
            process.kill()
            raise LeftOutError(f"stopped after {seconds:.0f} s")
        return outcome(answer)
    finally:
        end(process)


def first_process(start: str) -> tuple[str, dict[str, Any]]:
    """Return how processes begin, and what one of them says of the machine: a fork may not be able to use the GPU."""
    case = Case("", "")
    try:
        return start, isolated(about_machine, case, start, 60.0)
    except (FailedError, LeftOutError) as error:
        print(f"{start}: {error}; processes are spawned", flush=True)
    try:
        return "spawn", isolated(about_machine, case, "spawn", 60.0)
    except (FailedError, LeftOutError) as error:
        raise SystemExit(f"this needs a GPU ({error}); --tiny runs anywhere") from None


def about_machine(case: Case) -> dict[str, Any]:
    torch.zeros(1, device=case.device)
    return {**machine()}


def begin(measure: Measure, case: Case, start: str) -> tuple[Any, Any]:
    """Return a process that measures, and where its answer will come from."""
    context: Any = multiprocessing.get_context(start)
    answer, its_end = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(measure, case, its_end))
    process.start()
    its_end.close()
    return process, answer


def share_cores(jobs: int) -> None:
    """Give each of `jobs` processes that begin from now on its share of the cores, for what compilers do at once."""
    threads = str(max(1, (os.cpu_count() or 1) // jobs))
    os.environ.update({"TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads})


def prepare_process(case: Case, gpu: str) -> None:
    """Give this process its GPU, and to its threads and its compilers' workers their share of the cores."""
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    inductor_config.compile_threads = threads  # its own variable is read where torch is imported
    sys.argv[1:] = []  # Inductor writes what follows --only into the modules it makes, quotes and all
    if case.device == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


def outcome(answer: Connection) -> dict[str, Any]:
    try:
        found = answer.recv()
    except EOFError:
        raise FailedError("its process died") from None
    if isinstance(found, BaseException):
        raise found
    return found


def end(process: Any) -> None:
    process.join(2.0)
    if process.is_alive():
        process.kill()
        process.join()


def work(measure: Measure, case: Case, answer: Connection) -> None:
    """Measure in a system's process."""
    if case.cache:
        os.environ.update({name: str(Path(case.cache, below)) for name, below in CACHES.items()})
    try:
        found: Any = measure(case)
    except LeftOutError as why:
        found = why
    except Exception as error:
        traceback.print_exc()
        found = FailedError(one_line(error))  # the error itself may not travel
    answer.send(found)
    answer.close()


@contextmanager
def folder() -> Iterator[str]:
    """Yield a folder that is gone afterwards, whoever still writes to it."""
    path = tempfile.mkdtemp(prefix="benchmark-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def one_line(error: BaseException) -> str:
    if isinstance(error, FailedError):
        return str(error)
    error = getattr(error, "inner_exception", error)  # of which Dynamo's says the name of a backend alone, in its first
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def measured(measure: Measure, case: Case) -> Row:
    """Return the row of a case. What one system cannot do must not cost the others' figures."""
    try:
        figures = measure(case)
    except LeftOutError as why:
        return Row(case.model, case.system, str(why))
    except Exception as error:
        return Row(case.model, case.system, f"failed: {one_line(error)}")
    return Row(case.model, case.system, figures.pop("note", ""), figures)
