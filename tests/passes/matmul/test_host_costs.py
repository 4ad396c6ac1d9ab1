"""A short step waits for its host: then FP8, which launches more, would make it longer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint import joint
from test_profitability import layers
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import devices, ops
from fp8compile.passes.matmul import host_costs
from fp8compile.passes.matmul.grouped_matmuls import casts_of
from fp8compile.passes.matmul.host_costs import Times
from fp8compile.passes.matmul.matmul_costs import Costs
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import BF16, FP8

aten = torch.ops.aten
H100 = devices.TABLE["H100"]
IS_SHORTER = host_costs.is_shorter
WIDTHS = (2048, 2048, 2048)  # of three layers of one input


@pytest.fixture(autouse=True)
def host(no_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "is_shorter", IS_SHORTER)


def decided(tokens: int, **options: str) -> set[tuple[str, Reason]]:
    rows = layers(tokens, WIDTHS, WIDTHS[0], H100, **options).matmuls.rows()
    return {(row.decision, Reason(row.code)) for row in rows}


def test_a_short_step_stays_in_bf16_and_a_long_one_does_not() -> None:
    assert decided(2048) == {(BF16, Reason.HOST)}
    assert {decision for decision, _ in decided(32768)} == {FP8}


def test_the_reason_has_both_times_and_what_to_do() -> None:
    (text,) = {row.reason for row in layers(2048, WIDTHS, WIDTHS[0], H100).matmuls.rows()}
    assert "on the GPU" in text
    assert "on the host" in text
    assert "mode='reduce-overhead'" in text


def test_who_asks_for_all_gets_all() -> None:
    assert {decision for decision, _ in decided(2048, select="all")} == {FP8}


@pytest.mark.parametrize("setting", ["triton.cudagraphs", "cpp_wrapper"])
def test_a_cuda_graph_leaves_the_host_out(setting: str) -> None:
    with inductor_config.patch({setting: True}):
        assert (FP8, Reason.FASTER) in decided(2048)
    assert decided(2048) == {(BF16, Reason.HOST)}


def test_a_cuda_graph_of_a_short_step_needs_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    with inductor_config.patch({"triton.cudagraphs": True}):
        monkeypatch.setattr(host_costs, "times_in_fp8", lambda bf16, *_: Times(bf16.gpu * 0.99, bf16.host))
        assert decided(2048) == {(BF16, Reason.HOST)}
        (text,) = {row.reason for row in layers(2048, WIDTHS, WIDTHS[0], H100).matmuls.rows()}
        assert "host" not in text
        monkeypatch.setattr(host_costs, "times_in_fp8", lambda bf16, *_: Times(bf16.gpu * 0.97, bf16.host))
        assert (FP8, Reason.FASTER) in decided(2048)


def test_a_plan_that_is_handed_back_is_followed() -> None:
    """Also where it was made for another host."""
    plan = layers(2048, WIDTHS, WIDTHS[0], H100, select="all").plan
    plan.matmuls = layers(2048, WIDTHS, WIDTHS[0], H100, select="all").matmuls.rows()
    rows = layers(2048, WIDTHS, WIDTHS[0], H100, plan=plan).matmuls.rows()  # type: ignore[arg-type]
    assert {row.decision for row in rows} == {FP8}


def test_matmuls_that_become_one_are_launched_once() -> None:
    def added(count: int) -> float:
        c = layers(32768, (4096,) * count, 4096, H100)
        chosen = [(m, casts) for m in c.matmuls.converted if (casts := casts_of(m, c.options.recipe)) is not None]
        assert len(chosen) == 3 * count
        return host_costs.times_in_fp8(Times(0.0, 0.0), chosen, Costs(H100, c.matmuls.converted)).host

    assert added(3) == added(1) == 3 * host_costs.ADDED * 1e-3 > 0  # FP8 launches more than BF16


def test_fused_kernels_are_counted() -> None:
    """Forward GELU with the norm, backward both, and a sum over rows for each of four gradients of a vector."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
    counted = host_costs._fused_kernels(joint(model, torch.randn(32, 64)).compilation.graph)
    assert abs(len(counted) - 6) <= 1
    rows = 32 * 128 * 4  # bytes of an activation
    assert max(counted) < 8 * rows


def traced(step: Any, *shapes: tuple[int, ...], mode: str = "fake") -> fx.Graph:
    given = [torch.empty(shape) for shape in shapes]
    graph: fx.Graph = make_fx(step, decomposition_table=select_decomp_table(), tracing_mode=mode)(*given).graph
    return graph


def test_flops_of_attention() -> None:
    """Of fewer heads of keys than of queries as well."""
    graph = fx.Graph()
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 32, 64) for heads in (8, 2, 2))
    inputs = [graph.placeholder(name) for name in "qkv"]
    for node, x in zip(inputs, (q, k, v), strict=True):
        node.meta["val"] = x
    forward = graph.call_function(aten._scaled_dot_product_flash_attention.default, tuple(inputs))
    forward.meta["val"] = (q,)
    assert host_costs._kind(forward) == "attention"
    assert host_costs._attention_flops(forward) == 2 * 2 * 8 * 32 * 32 * (64 + 64)


def test_flops_of_convolutions() -> None:
    def step(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, w, groups=2)
        return y, *aten.convolution_backward(
            dy, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, [True, True, False]
        )

    graph = traced(step, (2, 4, 8, 8), (6, 2, 3, 3), (2, 6, 6, 6))
    forward, backward = (n for n in graph.nodes if host_costs._kind(n) == "convolution")
    once = 2 * (2 * 6 * 6 * 6) * (2 * 3 * 3)
    assert host_costs._convolution_flops(forward) == once
    assert host_costs._convolution_flops(backward) == 2 * once


def test_flops_of_matmuls_are_those_of_the_records() -> None:
    c = layers(2048, (4096,), 4096, H100, select="all")
    longer = host_costs.times_in_bf16(c.graph, c.matmuls, H100).gpu
    without = host_costs.times_in_bf16(c.graph, [], H100).gpu
    assert longer - without == pytest.approx(3 * 2 * 2048 * 4096 * 4096 * 1e-9 / H100.bf16)


def test_a_call_keeps_its_host_whatever_it_launches() -> None:
    graph = fx.Graph()
    graph.output(())
    assert host_costs.times_in_bf16(graph, [], H100).host == host_costs.HALF * 1e-3
    graph = fx.Graph()
    graph.placeholder("tangents_1")
    graph.output(())
    assert host_costs.times_in_bf16(graph, [], H100).host == (2 * host_costs.HALF + host_costs.OUTSIDE) * 1e-3


def test_the_loss_and_the_optimizer_keep_the_host_too() -> None:
    """Of an MLP of three layers, what forward and backward launch takes 1.2 ms."""
    assert decided(12288) == {(BF16, Reason.HOST)}


def test_an_update_reads_and_writes_the_parameters_that_are_trained() -> None:
    c = layers(2048, WIDTHS, WIDTHS[0], H100)
    trained = host_costs.updated_bytes(c)
    assert trained == len(WIDTHS) * WIDTHS[0] ** 2 * 2
    without = host_costs.times_in_bf16(c.graph, [], H100)
    longer = host_costs.times_in_bf16(c.graph, [], H100, updated=trained)
    assert longer.gpu - without.gpu == pytest.approx(host_costs.UPDATES * trained / (H100.casts * 1e9))
    assert longer.host == without.host


def test_what_is_frozen_is_not_updated() -> None:
    c = layers(2048, WIDTHS, WIDTHS[0], H100)
    *others, gradient, last = c.graph.output_node().args[0]  # gradients of the input and of the weights come last
    assert gradient is not None
    c.graph.output_node().args = ([*others, None, last],)
    assert host_costs.updated_bytes(c) == (len(WIDTHS) - 1) * WIDTHS[0] ** 2 * 2


def test_symbolic_sizes_stay_symbols() -> None:
    """A size that was looked at as a number would compile the model again for the next one."""
    graph = traced(lambda x, w: F.gelu(x @ w).sum(0), (32, 64), (64, 128), mode="symbolic")
    (x, *_) = graph.find_nodes(op="placeholder")
    environment = x.meta["val"].shape[0].node.shape_env
    guards = len(environment.guards)
    assert host_costs.times_in_bf16(graph, [], H100).host > 0
    assert len(environment.guards) == guards
    assert not environment.replacements


def test_what_nobody_knows_is_counted_as_a_launch() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4)
        sorted_node = graph.call_function(ops.amax, (x, "row", False))
        sorted_node.meta["val"] = torch.empty(1)
    graph.output((sorted_node,))
    launched = host_costs.times_in_bf16(graph, [], H100).host - host_costs.HALF * 1e-3
    assert launched == pytest.approx(host_costs.HOST["other"] * 1e-3)


@pytest.mark.parametrize(
    ("bf16", "fp8", "expected"),
    [
        (Times(100.0, 10.0), Times(99.9, 12.0), True),  # the GPU is later on any host
        (Times(100.0, 40.0), Times(99.9, 70.0), False),  # a slow host would be later, and little is gained
        (Times(100.0, 40.0), Times(90.0, 70.0), True),
        (Times(100.0, 40.0), Times(90.0, 101.0), False),
        (Times(10.0, 40.0), Times(9.0, 40.0), False),
    ],
)
def test_little_is_not_worth_a_slow_host(bf16: Times, fp8: Times, expected: bool) -> None:
    assert host_costs.is_shorter(fp8, bf16) == expected


@pytest.mark.parametrize(
    ("bf16", "fp8", "expected"),
    [
        (Times(100.0, 10.0), Times(99.9, 12.0), True),  # a long step
        (Times(100.0, 90.0), Times(99.0, 110.0), False),  # within the error of the estimate
        (Times(100.0, 90.0), Times(98.0, 110.0), True),
    ],
)
def test_a_cuda_graph_spares_the_host(bf16: Times, fp8: Times, expected: bool) -> None:
    assert host_costs.is_shorter(fp8, bf16, waits_for_host=False) == expected


def test_the_step_takes_what_the_later_one_takes() -> None:
    assert Times(2.0, 1.0).step == Times(1.0, 2.0).step == 2.0
