"""A training step of 8 Llama-8B blocks under FSDP2, with FP8 and beside its peers: time, memory, bytes on the wire.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py [--only ours*,bf16] [--more] [--json FILE]     # GPUs of one host
    python benchmarks/fsdp.py                                    # the same, one process for each GPU that there is
    python benchmarks/fsdp.py --tiny                             # two processes on a CPU: that it runs, no times

FP32 parameters, BF16 policy (gradients reduced in FP32), 2 × 4096 tokens a GPU, fused AdamW; every block is compiled by
itself and sharded by itself. All systems train the same weights on the same data, in one run.

ms        median over steps of the slowest rank: forward, backward, optimizer, and what a system does after it
tokens/s  of all GPUs together          peak    GiB allocated on a GPU, at most
gather    MiB of weights that a GPU receives in a step; reduce: of gradients
loss      mean square of the output at the last timed step, of all ranks

What does not fit into --seconds is left out, and said to be: the whole run must end.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fp8compile
from fp8compile.gradients import CompressedReduceScatter
from llama import Block, LlamaConfig, Rotary

# torch 2.13 has renamed these, and warns at every call
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
GIB, MIB = 1 << 30, 1 << 20
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EIGHT_B = LlamaConfig(dim=4096, n_layers=8, n_heads=32, n_kv_heads=8, hidden=14336, rope_base=500_000.0)
TINY = LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=128)


@dataclass(frozen=True)
class Size:
    """What is trained, on how much, for how long."""

    config: LlamaConfig
    batch: int
    length: int
    warmup: int
    steps: int
    device: str


SIZES = {"8b": Size(EIGHT_B, 2, 4096, 4, 12, "cuda"), "tiny": Size(TINY, 2, 32, 1, 2, "cpu")}


class Blocks(nn.Module):
    """The blocks of a Llama, without embedding and head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        for block in self.blocks:
            x = block(x, rotary)
        return x


# ---- systems --------------------------------------------------------------------------------------------------------

Step = Callable[[], None]


@dataclass(frozen=True)
class System:
    """A way to train: what is done with a model before it is sharded, after, and after each step of the optimizer."""

    name: str
    before: Callable[[nn.Module, Size], None]
    after: Callable[[nn.Module], Any] = lambda model: None
    after_step: Callable[[nn.Module], None] = lambda model: None
    needs: str = ""
    extra: bool = False  # only with --more
    eight_bit: bool = False  # optimizer states


def bf16(model: nn.Module, size: Size) -> None:
    compile_blocks(model, backend="inductor" if size.device == "cuda" else "eager")


def ours(model: nn.Module, size: Size) -> None:
    on_cpu = {"executor": "eager", "select": "all", "save_min_bytes": 0, "strict": True}
    compile_blocks(model, backend="fp8", options=on_cpu if size.device == "cpu" else {})


def ours_gathering(model: nn.Module, size: Size) -> None:
    fp8compile.prepare_fsdp(model)
    ours(model, size)


def compile_blocks(model: nn.Module, **how: Any) -> None:
    assert isinstance(model, Blocks)
    for block in model.blocks:
        block.compile(**how)


def torchao(gather: bool, model: nn.Module, size: Size) -> None:
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=size.device == "cpu")
    float8.convert_to_float8_training(model, config=config)
    bf16(model, size)


def torchao_scales(model: nn.Module) -> None:
    import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


SYSTEMS = (
    System("bf16", bf16),
    System("ours + FP8 gather", ours_gathering),
    System("ours", ours),
    System(
        "torchao tensorwise + FP8 gather", lambda m, s: torchao(True, m, s), after_step=torchao_scales, needs="torchao"
    ),
    System("torchao tensorwise", lambda m, s: torchao(False, m, s), needs="torchao"),
    System("ours + FP8 gather, FP8 gradients", ours_gathering, fp8compile.compress_gradients, extra=True),
    System("ours + FP8 gather, 8-bit states", ours_gathering, extra=True, eight_bit=True),
)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Figures of a system; `note` says why there are none."""

    name: str
    note: str = ""
    ms: float = 0.0
    tokens_per_second: float = 0.0
    peak_gib: float = 0.0
    gather_mib: float = 0.0
    reduce_mib: float = 0.0
    loss: float = 0.0
    compile_seconds: float = 0.0


class Counting:
    """A collective of FSDP2 that counts the bytes which this rank receives."""

    def __init__(self, inner: Any = None):
        self.inner, self.received = inner, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountingGather(Counting):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.received += (output_tensor.numel() - input_tensor.numel()) * input_tensor.element_size()
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduce(Counting):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        ranks = group.size()
        if self.inner is not None:
            before = self.inner.sent
            self.inner(output_tensor, input_tensor, group, op)
            self.received += (self.inner.sent - before) * (ranks - 1) // ranks
            return None
        self.received += (input_tensor.numel() - output_tensor.numel()) * input_tensor.element_size()
        return REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def counted(model: Any, run: Step, inner: Any) -> tuple[int, int]:
    """Bytes of weights and of gradients that a rank receives in a step."""
    gather, reduce = CountingGather(), CountingReduce(inner)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather)  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(reduce)  # type: ignore[arg-type]
    run()
    return gather.received, reduce.received


class Training:
    """One system at work."""

    def __init__(self, system: System, size: Size, device: torch.device):
        torch.manual_seed(11)
        self.system, self.size, self.device = system, size, device
        with torch.device("meta"):
            model = Blocks(size.config)
        system.before(model, size)
        for block in model.blocks:
            fully_shard(block, mp_policy=POLICY)
        self.model: Any = fully_shard(model, mp_policy=POLICY)
        self.model.to_empty(device=device)
        self._initialise()
        system.after(self.model)
        self.rotary = Rotary(size.config.head_dim, size.length, size.config.rope_base).to(device)
        fused = not system.eight_bit
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused or None)
        self.opt_step: Any = self.opt.step if fused else self._compiled_step()
        generator = torch.Generator().manual_seed(13 + dist.get_rank())
        shape = (size.batch, size.length, size.config.dim)
        self.x = torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_()
        self.loss = torch.zeros((), device=device)

    def _compiled_step(self) -> Any:
        options: Any = {"executor": "eager"} if self.size.device == "cpu" else {}
        return torch.compile(self.opt.step, backend="fp8", options=options)

    @torch.no_grad()
    def _initialise(self) -> None:
        """The same weights for every system: values of a shard do not depend on what holds it."""
        for i, p in enumerate(self.model.parameters()):
            local = p.to_local()  # type: ignore[attr-defined]
            if p.dim() < 2:
                local.fill_(1.0)
                continue
            generator = torch.Generator(self.device).manual_seed(1000 * i + dist.get_rank())
            local.copy_(torch.randn(local.shape, generator=generator, device=self.device) * 0.02)

    def step(self) -> None:
        self.opt.zero_grad()
        self.x.grad = None
        out = self.model(self.x, self.rotary)
        loss = out.float().square().mean()
        loss.backward()
        self.opt_step()
        self.system.after_step(self.model)
        self.loss = loss.detach()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(system: System, size: Size, device: torch.device) -> Row:
    """The figures of a system, the same on all ranks."""
    row = Row(system.name)
    start = time.perf_counter()
    training = Training(system, size, device)
    for _ in range(size.warmup):
        training.step()
    synchronize(device)
    row.compile_seconds = time.perf_counter() - start
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(size.steps):
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        training.step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    figures = torch.tensor([statistics.median(times) * 1e3, peak / GIB], device=device)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    loss = training.loss.clone()
    dist.all_reduce(loss)
    row.ms, row.peak_gib = figures.tolist()
    row.loss = float(loss) / dist.get_world_size()
    row.tokens_per_second = size.batch * size.length * dist.get_world_size() / row.ms * 1e3
    inner = CompressedReduceScatter("e4m3") if "gradients" in system.name else None
    gathered, reduced = counted(training.model, training.step, inner)
    synchronize(device)
    row.gather_mib, row.reduce_mib = gathered / MIB, reduced / MIB
    return row


def measure_all(names: Sequence[str], more: bool, size: Size, device: torch.device, seconds: float) -> list[Row]:
    start, longest, rows = time.perf_counter(), 0.0, []
    for system in SYSTEMS:
        if not any(fnmatch.fnmatch(system.name, name) for name in names) or (system.extra and not more):
            continue
        if system.needs and find_spec(system.needs) is None:
            rows.append(Row(system.name, f"{system.needs} is not installed"))
            continue
        spent = agreed(time.perf_counter() - start, device)
        if spent + longest > seconds:
            rows.append(Row(system.name, f"left out: {spent:.0f} of {seconds:.0f} s were over"))
            continue
        try:
            row = measure(system, size, device)
        except Exception as error:  # what one system cannot do must not cost the others' figures
            row = Row(system.name, f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            if dist.get_rank() == 0:
                print(f"{system.name}: {row.note}", file=sys.stderr, flush=True)
        longest = max(longest, agreed(time.perf_counter() - start, device) - spent)
        rows.append(row)
        if dist.get_rank() == 0:
            print(line(row), flush=True)
        torch.compiler.reset()
        for _ in range(2):  # sharded parameters and their casts refer to each other, and compiled graphs to both
            gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def agreed(seconds: float, device: torch.device) -> float:
    """The time of the slowest rank, so that all leave out the same."""
    x = torch.tensor(seconds, device=device)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return float(x)


# ---- printing -------------------------------------------------------------------------------------------------------

HEAD = f"{'system':34}{'ms':>9}{'tokens/s':>11}{'peak GiB':>10}{'gather':>9}{'reduce':>9}{'loss':>9}{'compile s':>11}"


def line(row: Row) -> str:
    if row.note:
        return f"{row.name:34}  {row.note}"
    return (
        f"{row.name:34}{row.ms:9.1f}{row.tokens_per_second:11.0f}{row.peak_gib:10.2f}{row.gather_mib:9.1f}"
        f"{row.reduce_mib:9.1f}{row.loss:9.4f}{row.compile_seconds:11.1f}"
    )


def work(rank: int, world: int, given: argparse.Namespace) -> list[Row]:
    """What each rank does; rank 0 prints."""
    size = SIZES["tiny" if given.tiny else "8b"]
    on_gpu = size.device == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=150),
        device_id=device if on_gpu else None,
    )  # fmt: skip
    kind = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    if rank == 0:
        print(f"{world} × {kind}, torch {torch.__version__}: {size}\n{HEAD}", flush=True)
    rows = measure_all(given.only.split(","), given.more, size, device, given.seconds)
    if rank == 0:
        print("\n".join([HEAD, *map(line, rows)]), flush=True)
        if given.json:
            about = {"device": kind, "ranks": world, "torch": torch.__version__, "size": asdict(size)}
            Path(given.json).write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    dist.destroy_process_group()
    return rows


def spawned(rank: int, world: int, given: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    work(rank, world, given)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two processes on a CPU, a tiny model")
    parser.add_argument("--only", default="*", help="patterns of systems, with commas between them")
    parser.add_argument("--more", action="store_true", help="FP8 gradients and 8-bit optimizer states too")
    parser.add_argument("--seconds", type=float, default=225.0, help="no system is begun that may not end by then")
    parser.add_argument("--json", help="a file for the figures")
    given = parser.parse_args(arguments)
    if not given.tiny and torch.cuda.device_count() < 2:
        parser.error("this needs two GPUs of one host; --tiny runs anywhere")
    if "RANK" in os.environ:  # under torchrun
        work(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), given)
        return
    with socket.socket() as s:
        s.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(s.getsockname()[1]))
    world = 2 if given.tiny else torch.cuda.device_count()
    mp.spawn(spawned, args=(world, given), nprocs=world)


if __name__ == "__main__":
    main()
