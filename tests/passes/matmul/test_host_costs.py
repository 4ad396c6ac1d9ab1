"""A short step waits for its host: then FP8, which launches more, would make it longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint import joint
from test_profitability import layers
from torch import Tensor, nn
from torch._inductor import config as inductor_config

from fp8compile import devices
from fp8compile.passes.matmul import host_costs
from fp8compile.passes.matmul.grouped_matmuls import casts_of
from fp8compile.passes.matmul.host_costs import Times
from fp8compile.passes.matmul.matmul_costs import Costs
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import BF16, FP8

H100 = devices.TABLE["H100"]
LAUNCHES = host_costs.host_launches


@pytest.fixture(autouse=True)
def host(no_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "host_launches", LAUNCHES)


def decided(tokens: int, count: int = 1, width: int = 4096, **options: str) -> set[tuple[str, Reason]]:
    rows = layers(tokens, (width,) * count, width, H100, **options).matmuls.rows()
    return {(row.decision, Reason(row.code)) for row in rows}


def test_a_short_step_stays_in_bf16_and_a_long_one_does_not() -> None:
    assert decided(2048) == {(BF16, Reason.HOST)}
    assert {decision for decision, _ in decided(32768)} == {FP8}


def test_the_reason_has_both_times_and_what_to_do() -> None:
    (text,) = {row.reason for row in layers(2048, (4096,), 4096, H100).matmuls.rows()}
    assert "on the GPU" in text
    assert "on the host in BF16" in text
    assert "mode='reduce-overhead'" in text


def test_who_asks_for_all_gets_all() -> None:
    assert {decision for decision, _ in decided(2048, select="all")} == {FP8}


@pytest.mark.parametrize("setting", ["triton.cudagraphs", "cpp_wrapper"])
def test_a_cuda_graph_leaves_the_host_out(setting: str) -> None:
    with inductor_config.patch({setting: True}):
        assert (FP8, Reason.FASTER) in decided(2048)
    assert decided(2048) == {(BF16, Reason.HOST)}


def test_a_plan_that_is_handed_back_is_followed() -> None:
    """Also where it was made for another host."""
    plan = layers(2048, (4096,), 4096, H100, select="all").plan
    plan.matmuls = layers(2048, (4096,), 4096, H100, select="all").matmuls.rows()
    rows = layers(2048, (4096,), 4096, H100, plan=plan).matmuls.rows()  # type: ignore[arg-type]
    assert {row.decision for row in rows} == {FP8}


def test_matmuls_that_become_one_are_launched_once() -> None:
    def added(count: int) -> float:
        c = layers(32768, (4096,) * count, 4096, H100)
        chosen = [(m, casts) for m in c.matmuls.converted if (casts := casts_of(m, c.options.recipe)) is not None]
        assert len(chosen) == 3 * count
        return host_costs.times_in_fp8(Times(0.0, 0.0), chosen, Costs(H100, c.matmuls.converted)).host

    assert added(3) == added(1) == 3 * host_costs.ADDED * 1e-3


class Block(nn.Module):
    """A layer of a decoder: norms, attention, a gated MLP."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 8 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        gate, up = self.up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def test_fused_kernels_are_counted() -> None:
    """Forward GELU with the norm, backward both, and a sum over rows for each of four gradients of a vector."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
    counted = host_costs._fused_kernels(joint(model, torch.randn(32, 64)).compilation.graph)
    assert abs(len(counted) - 6) <= 1
    rows = 32 * 128 * 4  # bytes of an activation
    assert max(counted) < 8 * rows


def test_what_a_library_computes_is_counted_by_its_flops() -> None:
    x = torch.randn(2, 16, 64)
    graph: Any = joint(nn.Sequential(Block(), Block()), x).compilation.graph
    matmuls = [node for node in graph.nodes if host_costs._kind(node) == "matmul"]
    of_a_pass = 2 * (2 * 16) * 64 * 64 * (3 + 1 + 8 + 4)  # of a block, [2, 16] tokens of 64
    assert sum(map(host_costs._flops, matmuls)) == of_a_pass * 3 * 2  # output and two gradients, two blocks
    assert sum(host_costs._kind(node) == "attention" for node in graph.nodes) == 4


def test_the_step_takes_what_the_later_one_takes() -> None:
    assert Times(2.0, 1.0).step == Times(1.0, 2.0).step == 2.0
