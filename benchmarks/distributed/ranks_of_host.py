"""What benchmarks of several GPUs share: processes, one for each GPU of a host, that measure systems together.

Functions, in order of use:

    start(work, given)                       work(device, given) on every rank: of torchrun, or of processes begun here
    measure_all(systems, measure, table, …)  on every rank: a row for each system; rank 0 prints, and writes them down
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.distributed.sharded_blocks import Size
from benchmarks.harness.measuring import GIB
from benchmarks.harness.runs import selected

Work = Callable[[torch.device, argparse.Namespace], Any]
Measure = Callable[[Any, Size, torch.device], Any]  # (system, size, device) -> row


class System(Protocol):
    """Something to measure; `needs`: a package that it cannot be without."""

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> str: ...


@dataclass
class Row:
    """Figures of a system; `note` says why there are none."""

    name: str
    note: str = ""
    ms: float = 0.0
    tokens_per_second: float = 0.0
    peak_gib: float = 0.0
    gather_mib: float = 0.0
    loss: float = 0.0
    compile_seconds: float = 0.0


@dataclass(frozen=True)
class Table:
    """How rows are made and printed."""

    row: Callable[[str, str], Any]  # from a system's name and why it has no figures
    head: str
    line: Callable[[Any], str]


# ---- processes ------------------------------------------------------------------------------------------------------


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return the options that all have."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two processes on a CPU, a tiny model")
    parser.add_argument("--only", default="*", help="patterns of systems, with commas between them")
    parser.add_argument("--seconds", type=float, default=225.0, help="no system is begun that may not end by then")
    parser.add_argument("--json", help="a file for the figures")
    return parser


def world_size(given: argparse.Namespace) -> int:
    """Return how many ranks there are, or will be."""
    if "RANK" in os.environ:  # under torchrun
        return int(os.environ["WORLD_SIZE"])
    return 2 if given.tiny else torch.cuda.device_count()


def start(work: Work, given: argparse.Namespace) -> None:
    """Run `work` on every rank; it must be a module's function, as other processes import it."""
    world = world_size(given)
    if "RANK" in os.environ:
        joined(int(os.environ["RANK"]), world, work, given)
        return
    with socket.socket() as s:
        s.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(s.getsockname()[1]))
    method = "fork" if given.tiny else "spawn"  # a fork has imported everything; CUDA would not bear it
    mp.start_processes(spawned, args=(world, work, given), nprocs=world, start_method=method)


def spawned(rank: int, world: int, work: Work, given: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    joined(rank, world, work, given)


def joined(rank: int, world: int, work: Work, given: argparse.Namespace) -> None:
    """Run `work` on this rank, in a process group with the others."""
    device = torch.device("cpu") if given.tiny else torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    join_group(rank, world, device)
    work(device, given)
    dist.destroy_process_group()


def join_group(rank: int, world: int, device: torch.device, meeting: str | None = None) -> None:
    """Begin the process group of all ranks; `meeting`: where they find each other (default: what torchrun says)."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=150), device_id=device if on_gpu else None,
    )  # fmt: skip


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def agreed(seconds: float, device: torch.device) -> float:
    """Return the time of the slowest rank, so that all leave out the same."""
    x = torch.tensor(seconds, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_steps(row: Row, step: Callable[[], None], size: Size, device: torch.device, began: float) -> None:
    """Fill in a row's times and memory, the same on all ranks. `began`: when this system did."""
    for _ in range(size.warmup):
        step()
    synchronize(device)
    row.compile_seconds = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(size.steps):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    figures = torch.tensor([statistics.median(times) * 1e3, peak / GIB], device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    row.ms, row.peak_gib = figures.tolist()


def measure_all(
    systems: Sequence[System],
    measure: Measure,
    table: Table,
    size: Size,
    device: torch.device,
    given: argparse.Namespace,
) -> list[Any]:
    """Return the row of every system that is asked for; one that fails, or has no time left, has a row that says so."""
    first = dist.get_rank() == 0
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if first:
        print(f"{dist.get_world_size()} × {kind}, torch {torch.__version__}: {size}\n{table.head}", flush=True)
    wanted = selected([system.name for system in systems], given.only)
    if not wanted:
        raise SystemExit(f"--only {given.only!r}: there are {', '.join(system.name for system in systems)}")
    start, longest, rows = time.perf_counter(), 0.0, []
    for system in systems:
        if system.name not in wanted:
            continue
        spent = agreed(time.perf_counter() - start, device)
        if spent + longest > given.seconds:
            row = table.row(system.name, f"left out: {spent:.0f} of {given.seconds:.0f} s were over")
        else:
            row = row_of(system, measure, table, size, device)
            longest = max(longest, agreed(time.perf_counter() - start, device) - spent)
        rows.append(row)
        if first:
            print(table.line(row), flush=True)
        forget(device)
    if first:
        print("\n".join([table.head, *map(table.line, rows)]), flush=True)
        if given.json:
            about = {"device": kind, "ranks": dist.get_world_size(), "torch": torch.__version__, "size": asdict(size)}
            Path(given.json).write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    return rows


def row_of(system: System, measure: Measure, table: Table, size: Size, device: torch.device) -> Any:
    """Return a system's figures, or why there are none."""
    if system.needs and find_spec(system.needs) is None:
        return table.row(system.name, f"{system.needs} is not installed")
    try:
        return measure(system, size, device)
    except Exception as error:  # what one system cannot do must not cost the others' figures
        row = table.row(system.name, failure(error))
        if dist.get_rank() == 0:
            print(f"{system.name}: {row.note}", file=sys.stderr, flush=True)
        return row


def failure(error: Exception) -> str:
    """Return what a row says of a system that failed."""
    return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def forget(device: torch.device) -> None:
    """Leave nothing behind that the next system could find."""
    torch.compiler.reset()
    for _ in range(2):  # sharded parameters and their casts refer to each other, and compiled graphs to both
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
