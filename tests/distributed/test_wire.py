"""What travels between ranks in FP8: activations and gradients of sequence parallelism, rows of experts.

The reference is the same program with wire="bf16", which casts where a tensor arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from experts import Experts, ends
from ranks import Ranks
from sharding import backend, full
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from where import device_type, seeded

import fp8compile
from fp8compile.plan import store

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


@pytest.fixture(scope="module")
def ranks(start: Callable[[int], Ranks]) -> Iterator[Ranks]:
    """Processes that have compiled nothing else: what DTensor and AOT Autograd keep of other meshes is in none."""
    started = start(2)
    yield started
    started.close()


def compiled(function: Any, **options: Any) -> Any:
    """The function, compiled for the first time."""
    torch.compiler.reset()
    store.reset()
    return torch.compile(function, backend=backend(**options))


def transfers() -> list[fp8compile.Transfer]:
    return [row for plan in fp8compile.compiles() for row in plan.transfers]


def step(rank: int, evaluated: bool = False, **options: Any) -> Result:
    """Losses of two steps, the gradients of the second; and `evaluated`, the last time with a nan."""
    torch.manual_seed(5)
    mesh = init_device_mesh(device_type(), (2,))
    block = parallelize_module(Block().bfloat16(), mesh, SEQUENCE)
    run = compiled(block, **options)
    opt = torch.optim.SGD(block.parameters(), lr=0.1)
    found: dict[str, Tensor] = {}
    for i in range(2):
        x = torch.randn(2, 16, DIM, generator=seeded(i)).bfloat16()
        x[0, 3 * i + 1] *= 100  # one rank has the amax
        local = DTensor.from_local(x.chunk(2, 1)[rank].contiguous(), mesh, [Shard(1)]).requires_grad_()
        opt.zero_grad()
        loss = run(local).float().square().mean()
        loss.backward()
        found |= {f"loss {i}": full(loss), "input": full(local.grad)}  # type: ignore[arg-type]
        found |= {name: full(p.grad) for name, p in block.named_parameters()}  # type: ignore[arg-type]
        opt.step()
    training = transfers()
    if not evaluated:
        return found, training
    with torch.no_grad():
        found["evaluated"] = full(run(local.detach()))
        local.to_local()[0, 0, 0] = torch.nan if rank else 1.0  # the library's maximum may drop it
        found["finite"] = full(run(local.detach())).isfinite()
    return found, training


def differing(a: Result, b: Result) -> set[str]:
    return {name for name in b[0] if not torch.equal(a[0][name], b[0][name])}


def rows(result: Result) -> list[tuple[str, str, int, int]]:
    return [(row.half, row.form, row.before, row.after) for row in result[1]]


BYTES = 2 * 16 * DIM * 2  # of the whole sequence in BF16


def sequence(rank: int) -> None:
    """`tensorwise`: one payload serves output and grad_weight, so both halves gather half the bytes, exactly."""
    whole, half = (step(rank, evaluated=True, recipe="tensorwise", wire=wire) for wire in ("bf16", "exact"))
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
    assert "loss 0" not in differing(whole, rounded)
    for name in ("mlp.gate.weight", "mlp.up.weight"):
        a, b = rounded[0][name], whole[0][name]
        # rounded once more, to 3 bits of mantissa: 2^-4 / sqrt(3) of each element at most; the second step has
        # weights that differ by this as well
        assert 0 < (a - b).norm() / b.norm() < 0.08


def delayed_scales(rank: int) -> None:
    """Scales with a history stay each rank's own: one rank's pass may overflow, which only its history leaves out."""
    cast = {"delayed": {"history": 8}}
    role = {"left": cast, "right": cast}
    recipe = {"base": "tensorwise", "output": role, "grad_input": role, "grad_weight": role}
    whole, early = (step(rank, recipe=recipe, wire=wire) for wire in ("bf16", "exact"))
    assert differing(whole, early) == set(), differing(whole, early)
    assert {row.form for row in early[1]} == {"bfloat16"}
    assert all("its delayed scale is each rank's own" in row.reason for row in early[1]), early[1]


def automatic(rank: int) -> None:
    """Where each rank decides alone, one may expect a payload where another sends none: all send values."""
    together, alone = (step(rank, recipe="tensorwise", adaptive={"ranks": by}) for by in ("world", None))
    assert {row.form for row in alone[1]} == {"bfloat16"}
    assert {row.form for row in together[1]} == {"e4m3 tensor", "e5m2 tensor"}
    with pytest.warns(fp8compile.Fp8Warning, match="where each rank decides alone"):
        asked = step(rank, recipe="tensorwise", adaptive="auto", wire="fp8")
    assert {row.form for row in asked[1]} == {"bfloat16"}


@pytest.mark.parametrize("case", [sequence, mixed, delayed_scales, automatic], ids=lambda case: case.__name__)
def test_sequence_parallel(ranks: Ranks, case: Any) -> None:
    ranks.run(case)


# --- experts

SENT = [[10, 22], [16, 16]]  # rows that each rank sends to each


def tokens(rank: int, rows: int = 32) -> Tensor:
    return torch.randn(rows, DIM, generator=seeded(7 + rank)).bfloat16()


@dynamo_config.patch(capture_scalar_outputs=True)
def mixture(
    rank: int, train: bool, frozen: bool = False, routed: bool = False, sent: Any = SENT, **options: Any
) -> Result:
    """Tokens go to the experts of both ranks, in groups there, and back. `routed`: only the data says how many."""
    torch.manual_seed(3 + rank)
    experts = Experts(2).requires_grad_(train and not frozen)
    given = sent[rank]
    taken = [to[rank] for to in sent]
    order, offs = torch.randperm(sum(taken)), ends([sum(taken) // 4, sum(taken) - sum(taken) // 4])

    def forward(x: Tensor, numbers: Tensor) -> Tensor:
        to, of = numbers.tolist() if routed else (given, taken)
        there = funcol.all_to_all_single_autograd(x * 2, of, to, dist.group.WORLD)
        back = torch.empty_like(there).index_put((order,), experts(there[order], offs))
        return funcol.all_to_all_single_autograd(back, to, of, dist.group.WORLD)

    x = tokens(rank, sum(given)).requires_grad_(train)
    y = compiled(forward, **options)(x, torch.tensor([given, taken]))
    found = {"y": y.detach().float()}
    if train:
        (y.float() - tokens(rank + 2).float()).square().mean().backward()
        found |= {name: full(p.grad) for name, p in experts.named_parameters() if p.grad is not None}
        found["x"] = full(x.grad)  # type: ignore[arg-type]
    return found, transfers()


def in_rows(y: Tensor) -> Tensor:
    """y with each row rounded to E4M3, written down independently."""
    scale = y.abs().amax(1, keepdim=True) / 448
    return ((y / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16().float()


def experts(rank: int) -> None:
    """Where nothing but FP8 matmuls reads what comes, and only the data says how much, it is cast before it travels."""
    for train, halves in ((False, ["forward"]), (True, ["forward", "backward"])):
        whole, exact = (mixture(rank, train, frozen=True, routed=True, wire=wire) for wire in ("bf16", "exact"))
        assert differing(whole, exact) == set()
        cast = [row for row in exact[1] if row.form == "e4m3 row"]
        assert [row.half for row in cast] == halves
        for row in cast:
            assert (row.kind, row.reason) == ("all-to-all", "cast before it travels: the same values")
            assert row.after * 2 * DIM == row.before * (DIM + 4)


def unequal_experts(rank: int) -> None:
    """Ranks that know their own numbers of rows decide alike: also one whose parts are equal, and one with no row."""
    for sent in ([[16, 16], [16, 40]], [[30, 2], [32, 0]], [[16, 16], [16, 16]]):
        exact = mixture(rank, False, sent=sent)
        assert {row.form for row in exact[1]} == {"bfloat16"}
        assert exact[1][0].reason.startswith("other ranks may get other numbers of rows")
        rounded = mixture(rank, False, sent=sent, wire="fp8", select="profitable")
        assert {row.form for row in rounded[1]} == {"e4m3 row"}
        assert (rounded[0]["y"] - exact[0]["y"]).norm() < 0.06 * exact[0]["y"].norm()


def rounded_experts(rank: int) -> None:
    """With wire="fp8" all four travel in FP8: forward and backward, there and back."""
    whole, exact, rounded = (mixture(rank, True, wire=wire) for wire in ("bf16", "exact", "fp8"))
    assert differing(whole, exact) == set()
    assert {row.form for row in exact[1]} == {"bfloat16"}
    assert [row.half for row in rounded[1]] == ["forward", "forward", "backward", "backward"]
    assert {row.form for row in rounded[1]} == {"e4m3 row"}
    # experts compute the same of the same payloads, so y is rounded once: below 2^-4 of each element
    assert torch.equal(rounded[0]["y"], in_rows(whole[0]["y"]))
    routed = mixture(rank, True, routed=True, wire="fp8")
    assert differing(rounded, routed) == set()
    assert [(row.half, row.form) for row in routed[1]] == [(row.half, row.form) for row in rounded[1]]
    errors = {name: float((rounded[0][name] - y).norm() / y.norm()) for name, y in whole[0].items()}
    assert errors["y"] < 0.03
    assert errors["x"] < 0.06, errors  # y in the loss, then the gradient there and back
    # of each operand of grad_weight: rounded by rows, 0.026, and its cast by columns falls otherwise, √2 · 0.026
    assert max(errors["up"], errors["down"]) < 0.064, errors


@pytest.mark.parametrize("case", [experts, unequal_experts, rounded_experts], ids=lambda case: case.__name__)
def test_experts(ranks: Ranks, case: Any) -> None:
    ranks.run(case)
