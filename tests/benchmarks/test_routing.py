"""Where a mixture's tokens go: counted as they are routed, and compared by layer; the example trains in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_convergence import TEXT

from benchmarks.training import convergence, routing
from benchmarks.training.convergence_report import read_runs
from mixture import Experts, Mixture, MixtureConfig

CONFIG = MixtureConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=64, experts=4, top_k=2)


def by_hand(layer: Experts, x: torch.Tensor) -> torch.Tensor:
    """What `layer` makes of tokens [T, dim], one at a time and in FP64."""
    gate_up, down, out = layer.gate_up.double(), layer.down.double(), []
    for token in x.double():
        scores = (layer.router.weight.double() @ token).softmax(0)
        shares, chosen = scores.topk(layer.top_k)
        made = torch.zeros_like(token)
        for share, expert in zip(shares / shares.sum(), chosen, strict=True):
            gate, up = (gate_up[expert] @ token).chunk(2)
            made += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
        out.append(made)
    return torch.stack(out)


def test_experts_are_what_each_token_meets() -> None:
    torch.manual_seed(0)
    layer = Mixture(CONFIG, max_seq=8).blocks[0].mlp
    torch.nn.init.normal_(layer.router.weight)  # shares that differ
    x = torch.randn(2, 8, 64)
    made, balance = layer(x)
    torch.testing.assert_close(made.flatten(0, 1).double(), by_hand(layer, x.flatten(0, 1)), rtol=1e-4, atol=1e-5)
    assert balance >= 1 - 1e-5


def test_tokens_are_counted_by_layer_and_expert() -> None:
    torch.manual_seed(0)
    model = Mixture(CONFIG, max_seq=8)
    for n, block in enumerate(model.blocks):  # all tokens to experts n and n + 1
        torch.nn.init.zeros_(block.mlp.router.weight)
        block.mlp.router.register_forward_hook(lambda _, x, y, n=n: y + torch.eye(4)[n] * 9 + torch.eye(4)[n + 1] * 8)
    tokens = torch.randint(256, (3, 8))
    with routing.counted(model) as shares, torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens)
    assert shares() == [[0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]]
    assert not any(block.mlp.router._forward_hooks_with_kwargs for block in model.blocks)


def test_moves_are_the_least_that_explain_the_shares() -> None:
    assert routing.moved([[0.5, 0.5], [1.0, 0.0]], [[0.25, 0.75], [1.0, 0.0]]) == pytest.approx(0.125)


@pytest.fixture
def _short() -> Iterator[None]:
    tiny = convergence.SIZES["tiny mixture"]
    small = replace(tiny, held_out_batches=1, batch=4, seq=32)
    with mock.patch.dict(convergence.SIZES, {"tiny mixture": small}), mock.patch.multiple(convergence, FINAL=1):
        yield


@pytest.mark.usefixtures("_short")
def test_a_mixture_trains_in_fp8_and_says_where_tokens_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)
    given = ["--tiny", "--size", "mixture", "--steps", "4", "--seeds", "1", "--text", str(TEXT), "--out", str(tmp_path)]
    convergence.main([*given, "--configurations", "BF16", "O3 mixed"])
    runs = {run.name: run for run in read_runs(tmp_path)}
    assert runs["O3 mixed"].fp8_matmuls > 0
    assert runs["O3 mixed"].loss == pytest.approx(runs["BF16"].loss, rel=0.01)
    for run in runs.values():
        assert [sum(layer) for layer in run.routing] == pytest.approx([1.0, 1.0])
    assert "moved beside BF16" in capsys.readouterr().out
