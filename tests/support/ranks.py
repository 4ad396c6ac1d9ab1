"""Processes that tests of several GPUs run on: two of them, on CPUs over gloo, or with a GPU each over NCCL.

They are started once for many tests and wait for functions. Importing torch takes longer than most tests do: those on
CPUs are copies of one process that has imported it, and has compiled once where that can be copied (`warm.py`).

    def worker(rank): …; return value                     # at the top of the test file
    def test_it(ranks): first, second = ranks.run(worker)

What starts its ranks by itself has such a copy of its own: `printed_by(function, *args)`.
"""

from __future__ import annotations

import datetime
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from poison import poison
from quick import quicken
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8compile import process_state

IMPORTED = ["fp8compile", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel", "torch.export._trace"]  # fmt: skip
SECONDS = 240  # for one function; a process that waits for another one longer than that never gets it


# What has used a GPU cannot be copied, nor what has threads: from torch 2.14 on autograd starts some for any backward,
# and 2.11 takes any backward for one that did.
HAS_COMPILED = not torch.cuda.is_available() and "2.13" <= torch.__version__ < "2.14"


def copies() -> Any:
    """The multiprocessing context whose processes are copies of one that has imported torch, and may have compiled."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED, "tests.support.warm"] if HAS_COMPILED else IMPORTED)
    return context


class Ranks:
    """`world` processes with a process group ("gloo", or with "nccl" a GPU each), which all run what they are given.

    parents: they may start processes themselves. device: where they make tensors by default.
    """

    def __init__(self, world: int = 2, backend: str = "gloo", parents: bool = False, device: str = "cpu"):
        self.world = world
        self.failed = False  # a function has: a process may wait for ever for another one
        self.folder = tempfile.TemporaryDirectory(prefix="fp8compile-ranks-")
        context = mp.get_context("spawn") if "nccl" in backend else copies()
        self.tasks = [context.SimpleQueue() for _ in range(world)]
        self.results = context.Queue()
        self.processes = [
            context.Process(
                target=_serve,
                args=(i, world, backend, device, self.folder.name, self.tasks[i], self.results),
                daemon=not parents,
            )
            for i in range(world)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, group: str = "") -> list[Any]:
        """What `function(rank, *args)` returns on each rank. Raises what a rank raised, as text.

        group: what the last function has compiled is not forgotten if it was of the same group: for the same backend
        code is compiled again only where guards say that it must be.
        """
        succeeded, self.failed = not self.failed, True
        for task in self.tasks:
            task.put((function, args, group))
        found, failures = {}, []
        for _ in range(self.world):
            rank, failure, result = self._next()
            found[rank] = result
            failures += [f"rank {rank} failed:\n{failure}"] if failure else []
        if failures:
            raise AssertionError("\n".join(failures))
        self.failed = not succeeded
        here = torch.get_default_device()
        return [tree_map_only(Tensor, lambda x: x.to(here), found[rank]) for rank in range(self.world)]

    def _next(self) -> Any:
        """The next result; raises when a process has died instead, or none comes."""
        for _ in range(SECONDS):
            try:
                return self.results.get(timeout=1)
            except queue.Empty:
                dead = [(i, p.exitcode) for i, p in enumerate(self.processes) if not p.is_alive()]
                if dead:
                    raise AssertionError(f"processes have died, as (rank, exit code): {dead}") from None
        raise AssertionError(f"no result after {SECONDS} s")

    def close(self) -> None:
        """End the processes."""
        for task in self.tasks:
            task.put(None)
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self.folder.cleanup()


def printed_by(function: Callable[..., Any], *args: Any) -> str:
    """What `function(*args)` prints in a process of its own, which may start others."""
    with tempfile.TemporaryDirectory(prefix="fp8compile-printed-") as folder:
        file = Path(folder, "text")
        process = copies().Process(target=_print_into, args=(str(file), function, args))
        process.start()
        process.join(400)
        if process.is_alive():
            process.kill()
            process.join()
        text = file.read_text()
        assert process.exitcode == 0, f"exit code {process.exitcode}:\n{text[-4000:]}"
        return text


def _print_into(file: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    to = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(to, stream)
    torch.set_num_threads(1)
    quicken()
    function(*args)


def _serve(rank: int, world: int, backend: str, device: str, folder: str, tasks: Any, results: Any) -> None:
    torch.set_num_threads(1)
    quicken()
    poison()
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than run what is not compiled
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    if device != "cpu":
        torch.set_default_device(device)
    os.environ.update(MASTER_ADDR="localhost", RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    before = ""
    while (task := tasks.get()) is not None:
        function, args, group = task
        if not group or group != before:
            process_state.reset()
        before = group
        torch.manual_seed(0)
        try:
            results.put((rank, "", function(rank, *args)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))
    dist.destroy_process_group()
