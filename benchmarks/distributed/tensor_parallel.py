"""Forward and backward of 2 Llama-8B blocks under tensor and sequence parallelism, with FP8 and beside its peers.

    torchrun --nproc-per-node 2 -m benchmarks.distributed.tensor_parallel [--only ours*,bf16] [--json FILE]
        # GPUs of one host
    python -m benchmarks.distributed.tensor_parallel    # the same, one process for each GPU that there is
    python -m benchmarks.distributed.tensor_parallel --tiny    # two processes on a CPU: that it runs, no times

BF16 parameters; 4 × 4096 tokens of all GPUs together, no optimizer. Linears of a block are sharded by columns (q, k, v,
gate, up) and by rows (out, down), the norms and the residual stream along the sequence, which is gathered in front of
attention and feed-forward, as torchtitan does it for Llama. Every block is compiled by itself. All systems have the
same weights and data, in one run; BF16 is the first, and what gradients are compared with.

torchao casts before it gathers, by styles of its own in this plan (on a CPU it fails: gloo gathers no FP8); ours by the
option `wire`.

ms        median over steps of the slowest rank: forward and backward
tokens/s  of all GPUs together          peak    GiB allocated on a GPU, at most
gather    MiB that a GPU receives in all-gathers of a step, scales and amaxes too
loss      mean square of the output     error   of a gradient (the first block's gate), relative to BF16's

With --pipeline Inductor splits matmuls into the parts that ranks hand each other, for all systems (asynchronous tensor
parallelism, over symmetric memory); gathers that are part of a matmul then are in no `gather`.

What does not fit into --seconds is left out, and said to be: the whole run must end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile

from benchmarks.distributed import ranks_of_host
from benchmarks.distributed.ranks_of_host import (
    Table,
    measure_all,
    measure_steps,
    parser_of,
    start,
    synchronize,
    world_size,
)
from benchmarks.distributed.sharded_blocks import TINY, Blocks, Size, compile_bf16, compile_fp8, eight_b, initialise
from benchmarks.harness.measuring import MIB
from llama import Rotary

SIZES = {"8b": Size(eight_b(2), 4, 4096, 4, 12, "cuda"), "tiny": Size(TINY, 2, 32, 1, 2, "cpu")}


# ---- systems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Styles:
    """How linears are sharded, and what gathers the sequence in front of them."""

    columns: Any = ColwiseParallel
    rows: Any = RowwiseParallel
    gathered: Any = PrepareModuleInput

    def plan(self) -> dict[str, Any]:
        """Of a block."""
        linears = [f"attention.{name}" for name in "qkv"] + ["mlp.gate", "mlp.up"]
        return {
            "attention_norm": SequenceParallel(),
            # its other argument is the module of rotary positions
            "attention": self.gathered(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            **{name: self.columns() for name in linears},
            "attention.out": self.rows(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": self.gathered(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.down": self.rows(output_layouts=Shard(1)),
        }


def torchao_linears(model: nn.Module, size: Size) -> Styles:
    float8 = import_module("torchao.float8")
    styles = import_module("torchao.float8.float8_tensor_parallel")
    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig(emulate=size.device == "cpu"))
    return Styles(styles.Float8ColwiseParallel, styles.Float8RowwiseParallel, styles.PrepareFloat8ModuleInput)


@dataclass(frozen=True)
class System:
    """What is done with a model on the meta device, how it is sharded then, and how it is compiled."""

    name: str
    compile: Callable[[nn.Module, Size], None]
    convert: Callable[[nn.Module, Size], Styles] = lambda model, size: Styles()
    needs: str = ""


def ours(recipe: str, wire: str) -> System:
    return System(f"ours {recipe} wire={wire}", partial(compile_fp8, recipe=recipe, wire=wire))


SYSTEMS = (
    System("bf16", compile_bf16),
    System("torchao tensorwise", compile_bf16, torchao_linears, needs="torchao"),
    *(ours("mixed", wire) for wire in ("bf16", "exact", "fp8")),
    *(ours("tensorwise", wire) for wire in ("bf16", "exact")),
)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Row(ranks_of_host.Row):
    """`gradient_error` is None where BF16 did not run."""

    gradient_error: float | None = None


class Training:
    """One system at work."""

    def __init__(self, system: System, size: Size, device: torch.device):
        with torch.device("meta"):
            model = Blocks(size.config).bfloat16()
        styles = system.convert(model, size)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        mesh = init_device_mesh(device.type, (ranks,))
        for block in model.blocks:
            parallelize_module(block, mesh, styles.plan())
        system.compile(model, size)
        self.model: Any = model.to_empty(device=device)
        initialise(self.model, device)
        self.rotary = Rotary(size.config.head_dim, size.length, size.config.rope_base).to(device)
        whole = torch.randn(size.batch, size.length, size.config.dim, generator=torch.Generator().manual_seed(13))
        self.x = whole.chunk(ranks, 1)[rank].to(device, torch.bfloat16, copy=True).contiguous().requires_grad_()
        self.loss = torch.zeros((), device=device)

    def step(self) -> None:
        self.model.zero_grad()
        self.x.grad = None
        out = self.model(self.x, self.rotary)
        loss = out.float().square().mean() / dist.get_world_size()
        loss.backward()
        self.loss = loss.detach()

    def gradient(self) -> Tensor:
        """Return this rank's part of the gradient that is compared."""
        return self.model.blocks[0].mlp.gate.weight.grad.to_local()


BYTES = {"float": 4, "c10::BFloat16": 2, "unsigned char": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}


def received(step: Callable[[], None]) -> int:
    """Bytes that this rank receives in a step's all-gathers.

    Counted by torch's profiler, which sees the operators that compiled code calls as well. A tensor subclass calls the
    operator again inside it, with what really travels: the innermost counts. Any other all-gather is an error.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    gathers = [event for event in events if event.name().startswith("_c10d_functional::all_gather")]
    total = 0
    for event in gathers:
        assert event.name().removesuffix("_out").endswith("all_gather_into_tensor"), event.name()
        if not any(inside(other, event) for other in gathers):
            elements = torch.Size(event.shapes()[0]).numel()
            total += elements * BYTES[event.dtypes()[0]] * (event.concrete_inputs()[1] - 1)
    return total


def inside(event: Any, other: Any) -> bool:
    """Return True if the event is part of the other, on its thread."""
    if event is other or event.start_thread_id() != other.start_thread_id():
        return False
    return other.start_ns() <= event.start_ns() and event.end_ns() <= other.end_ns()


class Measurement:
    """Measures systems, and keeps BF16's gradient for the others."""

    def __init__(self) -> None:
        self.reference: Tensor | None = None

    def __call__(self, system: System, size: Size, device: torch.device) -> Row:
        """Return the figures of a system, the same on all ranks."""
        row, began = Row(system.name), time.perf_counter()
        training = Training(system, size, device)
        measure_steps(row, training.step, size, device, began)
        row.tokens_per_second = size.batch * size.length / row.ms * 1e3
        loss = training.loss.double()
        dist.all_reduce(loss)
        row.loss = float(loss)
        gradient = training.gradient().cpu()  # not on the GPU, where it would be part of others' peaks
        if system.name == "bf16":
            self.reference = gradient.clone()
        row.gradient_error = self.error(gradient, device)
        row.gather_mib = received(training.step) / MIB
        synchronize(device)
        return row

    def error(self, gradient: Tensor, device: torch.device) -> float | None:
        """Norm of the difference from BF16's gradient as a share of that, over all ranks."""
        if self.reference is None:
            return None
        exact = self.reference.double()
        squares = torch.stack([(gradient.double() - exact).square().sum(), exact.square().sum()]).to(device)
        dist.all_reduce(squares)
        return float((squares[0] / squares[1]).sqrt())


# ---- printing -------------------------------------------------------------------------------------------------------

HEAD = f"{'system':28}{'ms':>9}{'tokens/s':>11}{'peak GiB':>10}{'gather':>10}{'loss':>10}{'error':>9}{'compile s':>11}"


def line(row: Row) -> str:
    if row.note:
        return f"{row.name:28}  {row.note}"
    error = "-" if row.gradient_error is None else f"{row.gradient_error:.4f}"
    return (
        f"{row.name:28}{row.ms:9.2f}{row.tokens_per_second:11.0f}{row.peak_gib:10.2f}{row.gather_mib:10.3f}"
        f"{row.loss:10.5f}{error:>9}{row.compile_seconds:11.1f}"
    )


def work(device: torch.device, given: argparse.Namespace) -> None:
    """Measure on each rank; rank 0 prints."""
    if given.pipeline:
        inductor_config._micro_pipeline_tp = True  # type: ignore[attr-defined]
        _symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    measure_all(SYSTEMS, Measurement(), Table(Row, HEAD, line), size_of(given), device, given)


def size_of(given: argparse.Namespace) -> Size:
    size = SIZES["tiny" if given.tiny else "8b"]
    return replace(size, config=replace(size.config, n_layers=given.blocks))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--blocks", type=int, default=2, help="how many")
    parser.add_argument("--pipeline", action="store_true", help="asynchronous tensor parallelism")
    given = parser.parse_args(arguments)
    if given.tiny and given.pipeline:
        parser.error("--pipeline needs GPUs")
    if not given.tiny and torch.cuda.device_count() < 2:
        parser.error("this needs two GPUs of one host; --tiny runs anywhere")
    heads, ranks = size_of(given).config.n_kv_heads, world_size(given)
    if heads % ranks:
        parser.error(f"{heads} heads of keys and values are not divisible by {ranks} ranks (CUDA_VISIBLE_DEVICES)")
    start(work, given)


if __name__ == "__main__":
    main()
