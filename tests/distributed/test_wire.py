"""What travels between ranks in FP8: activations and gradients of sequence parallelism.

The reference is the same program with wire="bf16", which casts where a tensor arrives.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from sharding import backend, full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8compile
from fp8compile import plans

Result = tuple[dict[str, Tensor], list[fp8compile.Transfer]]
DIM, HIDDEN = 64, 128
SEQUENCE = {
    "norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


class SwiGLU(nn.Module):
    """Llama's feed-forward: two linears read one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """The norm runs on each rank's part of the sequence, which is gathered for the feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(DIM), SwiGLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def compiled(function: Any, **options: Any) -> Any:
    """The function, compiled for the first time."""
    torch.compiler.reset()
    plans.reset()
    return torch.compile(function, backend=backend(**options))


def transfers() -> list[fp8compile.Transfer]:
    return [row for plan in fp8compile.compiles() for row in plan.transfers]


def step(rank: int, **options: Any) -> Result:
    """Losses of two steps, the gradients of the second, and an evaluation."""
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (2,))
    block = parallelize_module(Block().bfloat16(), mesh, SEQUENCE)
    run = compiled(block, **options)
    opt = torch.optim.SGD(block.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for i in range(2):
        x = torch.randn(2, 16, DIM, generator=torch.Generator().manual_seed(i)).bfloat16()
        x[0, 3 * i + 1] *= 100  # one rank has the amax
        local = DTensor.from_local(x.chunk(2, 1)[rank].contiguous(), mesh, [Shard(1)]).requires_grad_()
        opt.zero_grad()
        loss = run(local).float().square().mean()
        loss.backward()
        found |= {f"loss {i}": full(loss), "input": full(local.grad)}  # type: ignore[arg-type]
        found |= {name: full(p.grad) for name, p in block.named_parameters()}  # type: ignore[arg-type]
        opt.step()
    training = transfers()
    with torch.no_grad():
        found["evaluated"] = full(run(local.detach()))
        local.to_local()[0, 0, 0] = torch.nan if rank else 1.0  # the library's maximum may drop it
        found["finite"] = full(run(local.detach())).isfinite()
    return found, training


def differing(a: Result, b: Result) -> set[str]:
    assert a[0].keys() == b[0].keys()
    return {name for name in a[0] if not torch.equal(a[0][name], b[0][name])}


def rows(result: Result) -> list[tuple[str, str, int, int]]:
    return [(row.half, row.form, row.before, row.after) for row in result[1]]


BYTES = 2 * 16 * DIM * 2  # of the whole sequence in BF16


def sequence(rank: int) -> None:
    """`tensorwise`: one payload serves output and grad_weight, so both halves gather half the bytes, exactly."""
    whole, half = step(rank, recipe="tensorwise", wire="bf16"), step(rank, recipe="tensorwise")
    assert differing(whole, half) == set(), differing(whole, half)
    assert [(a, d) for a, _, _, d in rows(whole)] == [("forward", BYTES), ("backward", BYTES)]
    assert {row.reason for row in whole[1]} == {"wire='bf16'"}
    assert rows(half) == [
        ("forward", "e4m3 tensor", BYTES, BYTES // 2),
        ("backward", "e5m2 tensor", BYTES, BYTES // 2),
    ]


def mixed(rank: int) -> None:
    """`mixed` casts an activation by rows and once more for grad_weight. Only wire="fp8" makes one of these, and then
    nothing but these gradients changes."""
    whole, exact, rounded = (step(rank, wire=wire) for wire in ("bf16", "exact", "fp8"))
    assert differing(whole, exact) == set()
    gradient = ("backward", "e4m3 tensor", BYTES, BYTES // 2)
    assert rows(exact) == [("forward", "bfloat16", BYTES, BYTES), gradient]
    assert exact[1][0].reason == (
        "e4m3 row and e4m3 tensor together are no fewer bytes; wire='fp8' makes one cast of it"
    )
    by_rows = BYTES // 2 + 4 * 2 * 16  # and an amax for each row
    assert rows(rounded) == [("forward", "e4m3 row", BYTES, by_rows), gradient]
    of_first_step = {"loss 0"}
    assert differing(whole, rounded) & of_first_step == set()
    for name in ("mlp.gate.weight", "mlp.up.weight"):
        a, b = rounded[0][name], whole[0][name]
        # rounded once more, to 3 bits of mantissa: 2^-4 / sqrt(3) of each element at most; the second step has
        # weights that differ by this as well
        assert 0 < (a - b).norm() / b.norm() < 0.08


@pytest.mark.parametrize("case", [sequence, mixed], ids=lambda case: case.__name__)
def test_sequence_parallel(ranks: Ranks, case: Any) -> None:
    ranks.run(case)
