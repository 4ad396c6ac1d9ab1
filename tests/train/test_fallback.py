"""When a pass fails: the graph is compiled in its own precision with a warning and a report, or raises if strict."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fake_quantized import sqnr
from pipelines import look_before_stage, replace_pass
from torch import nn

import fp8compile
from fp8compile import ops
from fp8compile.errors import Fp8Warning
from fp8compile.passes.core.compilation import Compilation, aten
from fp8compile.passes.core.stages import HalfGraph, Stage
from fp8compile.plan import overrides
from fp8compile.plan.plan import Plan
from fp8compile.torch_hooks import half_passes


def _break_and_raise(c: Compilation) -> None:
    for node in c.graph.nodes:
        if node.target is aten.addmm.default:
            node.args = node.args[::-1]  # a half-done rewrite must not survive
    raise NotImplementedError("no such operator")


def _lose_a_scale(c: Compilation) -> None:
    """A wrong rewrite that only the verifier can see."""
    for node in c.graph.nodes:
        if node.target is torch.ops.fp8.quantize.default:
            node.replace_all_uses_with(c.emit(aten.neg.default, node.args[0], like=node), lambda user: True)
            return


@pytest.fixture(params=[_break_and_raise, _lose_a_scale])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_pass(monkeypatch, "exchange_as_fp8", request.param)


def _step(model: nn.Module, x: torch.Tensor, **options: object) -> list[torch.Tensor]:
    compiled = torch.compile(model, backend="fp8", options={"select": "all", "executor": "eager", **options})
    out = compiled(x)
    out.sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)).bfloat16(), torch.randn(16, 32).bfloat16()


def _layer() -> tuple[nn.Module, torch.Tensor]:
    """One layer, for what Inductor compiles."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU()).bfloat16(), torch.randn(16, 32).bfloat16().requires_grad_()


@pytest.mark.usefixtures("broken")
def test_graph_is_compiled_as_it_was() -> None:
    model, x = _model()
    with pytest.warns(Fp8Warning, match="compiled without FP8") as caught:
        actual = _step(model, x)
    model, x = _model()
    out = torch.compile(model, backend="aot_eager")(x)
    out.sum().backward()
    expected = [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    report = re.search(r"ready at (\S+);", " ".join(str(w.message) for w in caught))
    assert report is not None
    text = Path(report[1]).read_text()
    assert "Traceback" in text
    assert "addmm" in text
    plan = fp8compile.last_compile()
    assert plan.failure
    assert plan.converted == []
    assert {(m.path, m.role, m.reason) for m in plan.matmuls} == {
        (path, role, "a pass failed; FP8 was decided: every matmul that can run")
        for path, role in [
            ("0", "output"),
            ("0", "grad_weight"),
            *(("2", r) for r in ("output", "grad_input", "grad_weight")),
        ]
    }
    assert overrides.load(plan) == overrides.load(Plan())  # handed back, it decides nothing


@pytest.mark.usefixtures("broken")
def test_strict_raises() -> None:
    model, x = _model()
    with pytest.raises(Exception, match=r"no such operator|VerificationError|not FP8|needs|after share_casts"):
        _step(model, x, strict=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_failure_after_the_cut_costs_the_kernels_and_nothing_else(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operators, and as on a GPU (where the casts then are Inductor's)."""
    failed = []

    def fails_half_way(c: HalfGraph) -> None:
        if c.executor == "inductor":
            return
        failed.append(c.executor)
        node = next(n for n in c.graph.nodes if n.target is ops.scaled_mm)
        node.replace_all_uses_with(node.args[0])  # a half-done rewrite must not survive
        raise RuntimeError("on purpose")

    executor = "eager" if device == "cpu" else "inductor"
    options = {"executor": executor, "select": "all"}
    expected = _step(*_layer(), kernels="inductor", **options)
    look_before_stage(monkeypatch, Stage.HALF, fails_half_way)
    if device == "cuda":
        monkeypatch.setattr(half_passes, "executor_for", lambda *_: "triton")
    torch.compiler.reset()
    with pytest.warns(Fp8Warning, match="compiled without generated kernels"):
        got = _step(*_layer(), **options)
    assert failed == ["operators" if device == "cpu" else "triton"] * 2
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert {half.failure for half in fp8compile.last_compile().halves.values()} == {"RuntimeError: on purpose"}
    if device == "cuda":  # a warm cache runs no pass, and must not hide that one had failed
        torch.compiler.reset()
        with pytest.warns(Fp8Warning, match="found in a cache, was compiled without generated kernels: RuntimeError"):
            _step(*_layer(), **options)
        assert len(failed) == 2


def test_a_failure_after_inductors_passes_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(c: HalfGraph) -> None:
        raise NotImplementedError("no such layout")

    replace_pass(monkeypatch, "keep_strides", fails)
    model, x = _layer()
    run = torch.compile(model, backend="fp8", options={"select": "all"})

    def step() -> torch.Tensor:
        (out := run(x)).float().square().mean().backward()
        return out

    with pytest.warns(Fp8Warning, match="no such layout"):
        out = step()
    assert sqnr(model(x), out) > 20
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    failures = {half.failure for half in fp8compile.last_compile().halves.values()}
    assert failures == {"NotImplementedError: no such layout"}
