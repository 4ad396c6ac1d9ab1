"""A training step of 8 Llama-8B blocks under FSDP2, with FP8 and beside its peers: time, memory, bytes on the wire.

    torchrun --nproc-per-node 2 -m benchmarks.distributed.fsdp [--only ours*,bf16] [--more] [--json FILE]
        # GPUs of one host
    python -m benchmarks.distributed.fsdp    # the same, one process for each GPU that there is
    python -m benchmarks.distributed.fsdp --tiny    # two processes on a CPU: that it runs, no times

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fp8compile
from benchmarks.distributed import ranks_of_host
from benchmarks.distributed.ranks_of_host import Table, measure_all, measure_steps, parser_of, start, synchronize
from benchmarks.distributed.sharded_blocks import TINY, Blocks, Size, compile_bf16, compile_fp8, eight_b, initialise
from benchmarks.harness.measuring import MIB
from fp8compile.distributed.gradients import CompressedReduceScatter
from llama import Rotary

# torch 2.13 has renamed these, and warns at every call
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SIZES = {"8b": Size(eight_b(8), 2, 4096, 4, 36, "cuda"), "tiny": Size(TINY, 2, 32, 1, 2, "cpu")}


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


def ours_gathering(model: nn.Module, size: Size) -> None:
    fp8compile.prepare_fsdp(model, keep_casts=True)  # nothing here writes to weights behind torch's back
    compile_fp8(model, size)


def torchao(gather: bool, model: nn.Module, size: Size) -> None:
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=size.device == "cpu")
    float8.convert_to_float8_training(model, config=config)
    compile_bf16(model, size)


def torchao_scales(model: nn.Module) -> None:
    import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


SYSTEMS = (
    System("bf16", compile_bf16),
    System("ours + FP8 gather", ours_gathering),
    System("ours", compile_fp8),
    System(
        "torchao tensorwise + FP8 gather", lambda m, s: torchao(True, m, s), after_step=torchao_scales, needs="torchao"
    ),
    System("torchao tensorwise", lambda m, s: torchao(False, m, s), needs="torchao"),
    System("ours + FP8 gather, FP8 gradients", ours_gathering, fp8compile.compress_gradients, extra=True),
    System("ours + FP8 gather, 8-bit states", ours_gathering, extra=True, eight_bit=True),
)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Row(ranks_of_host.Row):
    reduce_mib: float = 0.0


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
        initialise(self.model, device)
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

    def step(self) -> None:
        self.opt.zero_grad()
        self.x.grad = None
        out = self.model(self.x, self.rotary)
        loss = out.float().square().mean()
        loss.backward()
        self.opt_step()
        self.system.after_step(self.model)
        self.loss = loss.detach()


def measure(system: System, size: Size, device: torch.device) -> Row:
    """Return the figures of a system, the same on all ranks."""
    row, began = Row(system.name), time.perf_counter()
    training = Training(system, size, device)
    measure_steps(row, training.step, size, device, began)
    loss = training.loss.clone()
    dist.all_reduce(loss)
    row.loss = float(loss) / dist.get_world_size()
    row.tokens_per_second = size.batch * size.length * dist.get_world_size() / row.ms * 1e3
    inner = CompressedReduceScatter("e4m3") if "gradients" in system.name else None
    gathered, reduced = counted(training.model, training.step, inner)
    synchronize(device)
    row.gather_mib, row.reduce_mib = gathered / MIB, reduced / MIB
    return row


# ---- printing -------------------------------------------------------------------------------------------------------

HEAD = f"{'system':34}{'ms':>9}{'tokens/s':>11}{'peak GiB':>10}{'gather':>9}{'reduce':>9}{'loss':>9}{'compile s':>11}"


def line(row: Row) -> str:
    if row.note:
        return f"{row.name:34}  {row.note}"
    return (
        f"{row.name:34}{row.ms:9.1f}{row.tokens_per_second:11.0f}{row.peak_gib:10.2f}{row.gather_mib:9.1f}"
        f"{row.reduce_mib:9.1f}{row.loss:9.4f}{row.compile_seconds:11.1f}"
    )


def work(device: torch.device, given: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 prints."""
    systems = [system for system in SYSTEMS if given.more or not system.extra]
    measure_all(systems, measure, Table(Row, HEAD, line), SIZES["tiny" if given.tiny else "8b"], device, given)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--more", action="store_true", help="FP8 gradients and 8-bit optimizer states too")
    given = parser.parse_args(arguments)
    if not given.tiny and torch.cuda.device_count() < 2:
        parser.error("this needs two GPUs of one host; --tiny runs anywhere")
    start(work, given)


if __name__ == "__main__":
    main()
