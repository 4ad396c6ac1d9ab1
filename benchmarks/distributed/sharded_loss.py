"""Does FSDP2 with FP8 train as one GPU does? Losses of the same weights on the same batches, on 1, 2 and 4 GPUs.

    python -m benchmarks.distributed.sharded_loss [--ranks 1,2] [--only ours*,bf16] [--json FILE] [--picture FILE.svg]
    python -m benchmarks.distributed.sharded_loss --json FILE --report    # the table of what the file has
    python -m benchmarks.distributed.sharded_loss --tiny    # one and two processes on a CPU: that it runs

The model is the 125m of `convergence.py`, with its text, optimizer, clipping and schedule, over --steps steps. A step
trains the same 32 × 1024 bytes everywhere: each rank has its slice of them. One GPU trains under FSDP2 as well, on a
mesh of one rank, so that the same is cast to BF16 everywhere (FP32 parameters, BF16 policy, gradients reduced in FP32).
Weights are made whole, from one seed, and then sharded. What differs is the order of additions, which BF16 shows by
itself, and in FP8 that a rank's scales are those of its slice of the activations.

at 1, 10, …   training loss, mean of ranks: of the first step, else of the ten steps up to that one
last          the mean of the last 50 steps
one GPU       last beside that of the same system on one GPU; with * beside that of ours
BF16          last beside that of BF16 on one GPU
ms            of a step: median over readings of ten steps, of the slowest rank

All matmuls of a block are in FP8 that can be (`select="all"`), so that none depends on how many tokens a GPU has. One
GPU trains BF16 and ours, with --more all systems. A row is added to --json when its system has ended, and what the file
has is not trained again. Runs beside each other, on GPUs of their own by CUDA_VISIBLE_DEVICES, may share a file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import fp8compile
from benchmarks.distributed.fsdp import POLICY
from benchmarks.distributed.ranks_of_host import agreed, failure, forget, join_group
from benchmarks.distributed.sharded_loss_report import READING, SYSTEMS, Row, System, add, picture, read, table
from benchmarks.harness.measuring import MIB, bytes_of
from benchmarks.harness.runs import selected
from benchmarks.training.convergence import SIZES
from corpus import Corpus, load_corpus, random_starts, windows
from llama import Llama, LlamaConfig
from training import MAX_GRADIENT_NORM, Size, lr_factor, make_optimizer

# rows of 128 elements, which 8-bit states of shards need
TINY = replace(SIZES["tiny"], model=LlamaConfig(dim=128, n_layers=1, n_heads=4, n_kv_heads=2, hidden=256))
SEED, UNTIMED = 0, 2  # readings that are not timed


@dataclass(frozen=True)
class Job:
    """What all processes share."""

    size: Size
    corpus: Corpus
    on_gpu: bool
    file: Path
    deadline: float  # of time.monotonic, which processes share

    @property
    def settings(self) -> dict[str, Any]:
        text = {"source": self.corpus.source, "bytes": len(self.corpus.train)}
        return {"size": asdict(self.size), "text": text, "torch": torch.__version__}


# ---- training -------------------------------------------------------------------------------------------------------


class Training:
    """One system at work, on this rank."""

    def __init__(self, system: System, job: Job, corpus: Corpus, device: torch.device) -> None:
        size, rank, world = job.size, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        with device:
            model = Llama(size.model, max_seq=size.seq)
        if system.gather:
            fp8compile.prepare_fsdp(model)
        for block in model.blocks:
            block.compile(**compiler(system, job.on_gpu))
            fully_shard(block, mp_policy=POLICY)
        self.model: Any = fully_shard(model, mp_policy=POLICY)
        self.opt = make_optimizer(self.model, size.lr)
        self.schedule = LambdaLR(self.opt, lambda done: lr_factor(done, size.steps))
        self.update: Callable[[], Any] = self.opt.step
        if system.eight_bit:
            for group in self.opt.param_groups:
                group["fused"] = False
            self.update = torch.compile(self.opt.step, **compiler(system, job.on_gpu))
        self.text, self.seq, self.world = corpus.train, size.seq, world
        self.starts = random_starts(self.text, size.steps, size.batch, size.seq, SEED).chunk(world, dim=1)[rank]

    def step(self, starts: Tensor) -> Tensor:
        """Train the windows that begin at starts i64[batch / ranks]; their loss, f32[]."""
        loss = self.model(*windows(self.text, starts, self.seq))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.update()
        self.schedule.step()
        self.opt.zero_grad()
        return loss.detach()

    def run(self) -> tuple[list[float], float]:
        """Return the losses of all steps, means over ranks, and milliseconds a step."""
        losses, times, before = [], [], time.perf_counter()
        for starts in self.starts.split(READING):
            reading = torch.stack([self.step(each) for each in starts])
            dist.all_reduce(reading)
            losses += (reading / self.world).tolist()  # waits for the device
            now = time.perf_counter()
            times.append((now - before) / len(starts) * 1e3)
            before = now
        return losses, statistics.median(times[UNTIMED:] or times[-1:])


def compiler(system: System, on_gpu: bool) -> dict[str, Any]:
    """Return what torch.compile is told."""
    if not system.fp8:
        return {"backend": "inductor" if on_gpu else "eager"}
    on_cpu = {"executor": "eager", "save_min_bytes": 0}
    return {"backend": "fp8", "options": {"select": "all", "strict": True, **({} if on_gpu else on_cpu)}}


def train(system: System, job: Job, corpus: Corpus, device: torch.device, row: Row) -> None:
    """Fill in the row of a system, the same on all ranks."""
    training = Training(system, job, corpus, device)
    row.losses, ms = training.run()
    row.ms, row.batch = agreed(ms, device), training.starts.shape[1]
    row.fp8_matmuls = len(fp8compile.last_compile().converted) if system.fp8 else 0
    row.states_mib = sum(bytes_of(x) for states in training.opt.state.values() for x in states.values()) / MIB


def work(rank: int, ranks: int, names: Sequence[str], job: Job, meeting: str) -> None:
    """Train on each rank; rank 0 writes."""
    device = torch.device("cuda", rank) if job.on_gpu else torch.device("cpu")
    join_group(rank, ranks, device, meeting)
    kind = torch.cuda.get_device_name(device) if job.on_gpu else "cpu"
    corpus = job.corpus.to(device)
    for name in names:
        row = Row(ranks, name, kind)
        begin = time.monotonic()
        longest = max((r.seconds for r in read(job.file, job.settings)), default=0.0)
        if agreed(begin + longest - job.deadline, device) > 0:
            row.note = "left out: it may not end in time"
        else:
            attempt(lambda name=name, row=row: train(SYSTEMS[name], job, corpus, device, row), row, device)
            row.seconds = agreed(time.monotonic() - begin, device)
        if rank == 0:
            result = row.note or f"{row.last:.4f}, {row.ms:.1f} ms a step, {row.seconds:.0f} s in all"
            print(f"{ranks} × {name}: {result}", flush=True)
            if row.seconds:  # it was not left out
                add(row, job.file, job.settings)
    dist.destroy_process_group()


def attempt(call: Callable[[], None], row: Row, device: torch.device) -> None:
    """Measure a system: what it cannot do, or leaves behind, must not cost the others' figures."""
    try:
        call()
    except Exception as error:
        row.note = failure(error)
    forget(device)


# ---- command line ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    p = parser()
    given = p.parse_args(arguments)
    if given.report and not given.json:
        p.error("--report needs the --json of earlier runs")
    with tempfile.TemporaryDirectory() as folder:
        file = given.json or Path(folder) / "rows.json"
        if not given.report:
            run(p, given, file, folder)
        rows = read(file)
        devices = ", ".join(dict.fromkeys(r.device for r in rows))
        print(f"\n{devices}\n{table(rows)}")
        if given.picture and any(not r.note for r in rows):
            given.picture.write_text(picture(rows))


def run(p: argparse.ArgumentParser, given: argparse.Namespace, file: Path, folder: str) -> None:
    """Train what was asked for and is not in the file, one number of ranks after the other."""
    deadline = time.monotonic() + given.seconds
    size = TINY if given.tiny else SIZES["125m"]
    size = replace(size, steps=given.steps or (20 if given.tiny else 300))
    numbers = given.ranks or ([1, 2] if given.tiny else [1, 2, 4])
    if not selected(list(SYSTEMS), given.only):
        p.error(f"--only {given.only}: there are {'; '.join(SYSTEMS)}")
    if uneven := [n for n in numbers if n < 1 or size.batch % n]:
        p.error(f"--ranks {uneven[0]}: {size.batch} sequences cannot be shared out evenly")
    job = Job(size, load_corpus(given.text, size.seq), not given.tiny, file, deadline)
    there = {(r.ranks, r.system) for r in read(file, job.settings) if not r.note}
    for ranks in numbers:
        if job.on_gpu and (gpus := torch.cuda.device_count()) < ranks:
            print(f"{ranks} ranks: left out, there are {gpus} GPUs", flush=True)
            continue
        names = [n for n in SYSTEMS if ranks > 1 or given.more or SYSTEMS[n].alone]
        names = [n for n in selected(names, given.only) if (ranks, n) not in there]
        if not names:
            continue
        try:
            start = "spawn" if job.on_gpu else "fork"  # a fork has imported everything; CUDA would not bear it
            meeting = f"file://{folder}/ranks{ranks}"
            mp.start_processes(work, args=(ranks, names, job, meeting), nprocs=ranks, start_method=start)
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            print(f"{ranks} ranks ended: {str(error).strip().splitlines()[-1]}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tiny", action="store_true", help="a tiny model in processes on a CPU")
    p.add_argument("--ranks", type=lambda s: [int(n) for n in s.split(",")], help="default: 1,2,4")
    p.add_argument("--only", default="*", help="patterns of systems, with commas between them")
    p.add_argument("--more", action="store_true", help="all systems on one GPU too")
    p.add_argument("--steps", type=int, help="default: 300, or 20 with --tiny")
    p.add_argument("--text", type=Path, help="as for examples/train_lm.py")
    p.add_argument("--seconds", type=float, default=3600.0, help="no system is begun that may not end by then")
    p.add_argument("--json", type=Path, help="a file to which rows are added")
    p.add_argument("--picture", type=Path, help="an SVG of the losses")
    p.add_argument("--report", action="store_true", help="train nothing, show what --json has")
    return p


if __name__ == "__main__":
    main()
