"""When a pass on Dynamo's graph fails: graph and buffers are as they were, with a warning; `strict` raises."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import replace_pass
from torch import Tensor, nn

import fp8compile
from fp8compile.errors import Fp8Warning, StateError
from fp8compile.passes.core.stages import DynamoGraph
from fp8compile.passes.optimizer import unscale_gradients

NOTHING = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
OPTIONS = {"select": "all", "executor": "eager"}


def fail_half_way(c: DynamoGraph) -> None:
    """A half-done rewrite, which must not survive: results are doubled, and a buffer is there that nobody has."""
    (returned,) = c.graph.output_node().args
    returned = returned[0] if isinstance(returned, tuple) and returned else None
    if isinstance(returned, torch.fx.Node):
        with c.graph.inserting_before(c.graph.output_node()):
            doubled = c.graph.call_function(torch.add, (returned, returned))
        c.graph.output_node().args = ((doubled,),)
    for name in list(c.gm._buffers)[:1]:
        del c.gm._buffers[name]
    c.gm.register_buffer("left_over", torch.zeros(3))
    c.opened["left_over"] = "nobody", "payload"
    raise NotImplementedError("no such method")


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.BatchNorm1d(64), nn.Linear(64, 32))


def trained(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    out = run(torch.randn(16, 32, generator=torch.Generator().manual_seed(1)))
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@NOTHING
@pytest.mark.parametrize("name", ["attention_strides", "derivatives"])
def test_a_model_is_compiled_without_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pass(monkeypatch, name, fail_half_way)
    model, other = mlp(), mlp()
    with pytest.warns(Fp8Warning, match="no such method.*compiled without FP8.*ready at") as caught:
        got = trained(model, torch.compile(model, backend="fp8", options=OPTIONS))
    for a, b in zip(got, trained(other, torch.compile(other, backend="aot_eager")), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # FP8 is three decimals farther off
    assert fp8compile.last_compile().converted == []
    report = re.search(r"ready at (\S+);", " ".join(str(w.message) for w in caught))
    assert report is not None
    assert "no such method" in Path(report[1]).read_text()


@pytest.mark.parametrize("name", ["attention_strides", "derivatives"])
def test_strict_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pass(monkeypatch, name, fail_half_way)
    model = mlp()
    with pytest.raises(Exception, match="no such method"):
        trained(model, torch.compile(model, backend="fp8", options={**OPTIONS, "strict": True}))


def updated(scaled: bool = False, overflows: bool = False, **options: Any) -> list[Tensor]:
    """The weights after steps of AdamW with 8-bit states. scaled: the step unscales its gradients; overflows: one is
    infinite at the second of four steps, which is skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), unscale=scaled)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled or overflows)
    opt.step = torch.compile(opt.step, backend="fp8", options={"executor": "eager", **options})
    for i in range(4):
        loss = model(torch.randn(16, 64, generator=torch.Generator().manual_seed(i))).square().mean()
        scaler.scale(loss).backward()
        if overflows and i == 1:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@functools.cache
def expected(scaled: bool) -> list[Tensor]:
    """The weights after steps in which nothing fails, made once."""
    torch.compiler.reset()
    found = updated(scaled, overflows=scaled)
    torch.compiler.reset()
    return found


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    """A step of AdamW at 1e-2 moves a weight by up to that; states are rounded more often, or not at all."""
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-2
        assert (a - b).abs().mean() < 1e-3


@pytest.mark.parametrize(
    ("name", "scaled"), [("spread_scalars", True), ("hoist_state_load_store", False), ("open_states", True)]
)
def test_a_step_goes_on_with_whole_states(name: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = expected(scaled)
    replace_pass(monkeypatch, name, fail_half_way)
    with pytest.warns(Fp8Warning, match="no such method.*loads and stores 8-bit states"):
        got = updated(scaled, overflows=scaled)
    assert_near(got, wanted)


def test_gradients_are_never_left_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the pass that unscales them fails itself, nothing is left but to raise."""
    wanted = expected(False)
    replace_pass(monkeypatch, "hoist_state_load_store", fail_half_way)
    with pytest.warns(Fp8Warning, match="no such method"):
        assert_near(updated(scaled=True), wanted)
    torch.compiler.reset()
    monkeypatch.setattr(unscale_gradients, "run", fail_half_way)
    with pytest.raises(Exception, match="no such method"), pytest.warns(Fp8Warning, match="no such method"):
        updated(scaled=True)


def test_a_strict_step_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pass(monkeypatch, "open_states", fail_half_way)
    with pytest.raises(Exception, match="no such method"):
        updated(strict=True)


def test_what_is_the_users_to_mend_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(c: DynamoGraph) -> None:
        raise StateError("line 3 writes to a view of a state")

    replace_pass(monkeypatch, "refuse_view_writes", refuse)
    with pytest.raises(Exception, match="StateError: line 3"):
        updated()
