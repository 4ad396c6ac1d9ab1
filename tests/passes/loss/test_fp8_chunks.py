"""Heads in FP8 whose losses are computed in chunks: every form of a loss, as near to eager as a head in one piece."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint import joint
from test_chunk_loss import AGAIN, CHUNK, FORMS, ROWS, Model, compiled, error, inputs, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import ops
from fp8compile.kernels.loss import fp8_head
from fp8compile.passes.loss import chunk_loss

WHOLE = CHUNK // 16 * 16  # rows of a chunk in FP8
FP8 = {"select": "all", "lm_head": True}
# Of a matmul of two operands in E4M3 with a scale for each row, an element of a product is off by 0.026 · √2 of its
# magnitude (each operand by 2⁻⁴ / √3 at most), in sums of independent terms that of the sum; one of E5M2 by twice that.
# Gradients of x have the slopes' error (E5M2) and the weight's, and what the rounded logits do to the softmax.
BOUND = 0.08


def results(form: str, dtype: torch.dtype, bias: bool = False, **options: Any) -> Any:
    """The plan, what the graph gives, and what eager gives in FP64."""
    model = Model(FORMS[form], bias).to(dtype)
    x, labels = inputs()
    x = x.to(dtype)
    traced = joint(model, x.clone().requires_grad_(), labels, **{"chunk_loss": CHUNK} | FP8 | options)
    plan = traced.run()
    names = ["loss", *(name for name, _ in model.named_parameters()), "x"]
    exact = copy.deepcopy(model).double()
    return plan, dict(zip(names, traced.results(), strict=True)), step(exact, exact, x.double(), labels)


def assert_near(got: dict[str, Tensor], exact: dict[str, Tensor], bound: float = BOUND) -> None:
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        assert got[name].shape == want.shape
        assert error(got[name], want) < bound, (name, error(got[name], want))


@pytest.mark.parametrize(("form", "dtype"), [(f, (torch.bfloat16, torch.float16)[i % 2]) for i, f in enumerate(FORMS)])
def test_every_form_runs_in_fp8_in_chunks(form: str, dtype: torch.dtype) -> None:
    plan, got, exact = results(form, dtype, bias=form == "mean")
    (loss,) = plan.losses
    assert loss.chunk == WHOLE
    roles = {m.role: m.decision for m in plan.matmuls}
    if form == "a gradient that is a constant":  # its matmuls of backward are none of the head's
        assert roles == {"output": "fp8", "other": "bf16"}
    else:
        assert roles == dict.fromkeys(("output", "grad_weight", "grad_input"), "fp8")
    assert_near(got, exact)


def test_the_plan_shows_the_casts_and_no_matmul_is_left() -> None:
    model = Model(F.cross_entropy).bfloat16()
    x, labels = inputs()
    traced = joint(model, x.bfloat16().requires_grad_(), labels, chunk_loss=CHUNK, **FP8)
    plan = traced.run()
    casts = {m.role: (str(m.left), str(m.right)) for m in plan.matmuls}
    assert casts["output"] == ("e4m3 row", "e4m3 row")
    assert set(casts["grad_input"]) == set(casts["grad_weight"]) == {"e4m3 row", "e5m2 row"}
    targets = [n.target for n in traced.compilation.graph.nodes]
    assert targets.count(ops.chunked_loss_in_fp8) == 1
    assert targets.count(ops.scaled_mm) == 1  # grad_weight, in backward
    assert not {ops.chunked_loss, torch.ops.aten.mm.default} & {*targets}
    assert fp8compile.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["mean", "label smoothing, shifted", "half of its gradient"])
def test_a_grad_weight_that_waits_for_backward_is_that_of_a_sum(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no rows have a weight's gradient before others, both are one matmul of the same codes."""
    _, waited, _ = results(form, dtype, bias=True)
    monkeypatch.setattr(chunk_loss, "waits_for_backward", lambda m, k: False)
    _, added, exact = results(form, dtype, bias=True)
    assert_near(added, exact)
    assert waited.keys() == added.keys()
    for name, found in waited.items():
        # the number that backward is given multiplies before rounding to FP32, or after it
        torch.testing.assert_close(found, added[name], rtol=1e-6 if dtype is torch.float32 else 0.01, atol=1e-30)


def test_a_grad_weight_of_many_rows_is_added_up_in_forward() -> None:
    assert fp8_head.waits_for_backward(32768, 4096)
    assert not fp8_head.waits_for_backward(32769, 4096)
    assert not fp8_head.waits_for_backward(0, 4096)


def test_a_grad_weight_that_is_to_be_exact_is() -> None:
    plan, got, exact = results("mean", torch.bfloat16, recipe="rowwise_with_gw_hp")
    assert {m.role: m.decision for m in plan.matmuls} == {"output": "fp8", "grad_input": "fp8", "grad_weight": "bf16"}
    _, all_fp8, _ = results("mean", torch.bfloat16)
    # both have the error of the rounded logits; two roundings to E4M3, of 2⁻⁴ / √3 at most, come to the other
    some, more = (error(x["head.weight"], exact["head.weight"]) for x in (got, all_fp8))
    assert 0.02**2 < more**2 - some**2 < 2 * 0.037**2
    assert_near(got, exact)


@pytest.mark.parametrize("loss", AGAIN)
def test_losses_whose_logits_are_computed_again_in_backward(loss: str) -> None:
    model = Model(AGAIN[loss], bias=True).bfloat16()
    x, labels = inputs()
    got = step(model, compiled(model, **FP8), x.bfloat16(), labels)
    exact = copy.deepcopy(model).double()
    assert [row.chunk for row in fp8compile.last_compile().losses] == [WHOLE]
    assert {m.decision for m in fp8compile.last_compile().matmuls} == {"fp8"}
    assert_near(got, step(exact, exact, x.bfloat16().double(), labels), 2 * BOUND)


def test_inductor_gives_the_same() -> None:
    model = Model(FORMS["a penalty on the normaliser"]).bfloat16()
    x, labels = inputs()
    eager, inductor = (
        step(model, compiled(model, executor=executor, **FP8), x.bfloat16(), labels)
        for executor in ("eager", "inductor")
    )
    for name, want in eager.items():
        assert error(inductor[name], want) < 0.02, name  # x · scale is rounded to BF16 elsewhere


def test_features_that_matmul_units_do_not_take_stay_in_bf16() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, 80, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), y)

    run = compiled(Odd().bfloat16(), **FP8)
    run(torch.randn(96, 36).bfloat16(), inputs()[1]).backward()
    plan = fp8compile.last_compile()
    assert {m.decision for m in plan.matmuls} == {"bf16"}
    assert "its 36 features are no multiple of 16" in plan.matmuls[0].reason
    assert plan.losses[0].chunk == CHUNK


@pytest.mark.parametrize("classes", [77, 81])
def test_classes_that_are_no_multiple_of_16(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_chunk_loss.CLASSES", classes)
    model = Model(F.cross_entropy, bias=True).bfloat16()
    x, labels = inputs()
    got = step(model, compiled(model, **FP8), x.bfloat16(), labels)
    exact = copy.deepcopy(model).double()
    assert {m.decision for m in fp8compile.last_compile().matmuls} == {"fp8"}
    assert_near(got, step(exact, exact, x.bfloat16().double(), labels))


def test_any_number_of_rows() -> None:
    """One graph for all: chunks whose last has 1 row, or 15, or that are one."""
    model = Model(F.cross_entropy).bfloat16()
    options = {"executor": "eager", "strict": True, "chunk_loss": CHUNK, **FP8}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    exact = copy.deepcopy(model).double()
    for rows in (96, 81, 95, 33, 17):
        x, labels = inputs(rows)
        assert_near(step(model, run, x.bfloat16(), labels), step(exact, exact, x.bfloat16().double(), labels))
    assert [row.chunk for row in fp8compile.last_compile().losses] == [WHOLE]
    assert {s.dtype for s in fp8compile.last_compile().saved if s.path == "head"} == {"float8_e5m2"}  # codes that wait


def test_any_number_of_rows_of_which_some_are_dropped() -> None:
    """The last position of every sequence, in batches of any size and length."""
    model = Model(lambda z, y: F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())).bfloat16()
    options = {"executor": "eager", "strict": True, "chunk_loss": CHUNK, **FP8}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    exact = copy.deepcopy(model).double()
    for batch, length in ((4, 24), (3, 31), (7, 9)):
        x, labels = (t.view(batch, length, *t.shape[1:]) for t in inputs(batch * length))
        assert_near(step(model, run, x.bfloat16(), labels), step(exact, exact, x.bfloat16().double(), labels))
    (plan,) = fp8compile.last_compile().plans
    assert [row.chunk for row in plan.losses] == [WHOLE]


def test_inference_computes_losses_alone() -> None:
    model = Model(F.cross_entropy).bfloat16()
    x, labels = inputs()
    with torch.no_grad():
        got = compiled(model, **FP8)(x.bfloat16(), labels)
        assert error(got, model.double()(x.bfloat16().double(), labels)) < 0.02
    (m,) = fp8compile.last_compile().matmuls
    assert m.decision == "fp8"


def test_a_frozen_weight_and_a_frozen_input_have_no_gradient() -> None:
    for frozen in ("weight", "input"):
        torch.compiler.reset()
        head = nn.Linear(32, 80, bias=False).bfloat16().requires_grad_(frozen != "weight")
        run = compiled(lambda x, y, head=head: F.cross_entropy(head(x), y), **FP8)
        x, labels = inputs()
        x = x.bfloat16().requires_grad_(frozen != "input")
        run(x, labels).backward()
        exact = head.weight.detach().double().requires_grad_(), x.detach().double().requires_grad_()
        F.cross_entropy(F.linear(exact[1], exact[0]), labels).backward()
        for got, want, is_frozen in ((head.weight, exact[0], frozen == "weight"), (x, exact[1], frozen == "input")):
            assert (got.grad is None) == is_frozen
            assert is_frozen or error(got.grad, want.grad) < BOUND


def test_a_checkpoint_around_the_loss() -> None:
    model = Model(F.cross_entropy).bfloat16()
    x, labels = inputs()
    run = compiled(lambda x, y: checkpoint(model, x, y, use_reentrant=False), **FP8)
    exact = copy.deepcopy(model).double()
    assert_near(step(model, run, x.bfloat16(), labels), step(exact, exact, x.bfloat16().double(), labels))


def test_fp32_parameters_under_autocast() -> None:
    model = Model(FORMS["widened"])
    x, labels = inputs()
    inner = compiled(model, **FP8)

    def run(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(x, y)

    got = step(model, run, x, labels)
    assert {m.decision for m in fp8compile.last_compile().matmuls} == {"fp8"}
    exact = copy.deepcopy(model).double()
    assert_near(got, step(exact, exact, x.double(), labels))


def test_a_loss_scale_changes_nothing_but_the_scale() -> None:
    model = Model(F.cross_entropy).half()
    x, labels = inputs()
    run = compiled(model, **FP8)
    one, large = (step(model, run, x.half(), labels, scale) for scale in (1.0, 1024.0))
    for name, want in one.items():
        assert error(large[name], want) < 2e-3, name  # FP16 rounds what is small


def test_casts_that_are_measured_are_those_of_other_layers() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 80, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.body(x).tanh()), y)

    model = Two().bfloat16()
    run = compiled(model, adaptive={"every": 2}, save_min_bytes=0, **FP8)
    x, labels = inputs()
    for _ in range(3):  # the first is looked at, and read in the second
        run(x.bfloat16().requires_grad_(), labels).backward()
    (graph,) = fp8compile.adaptive_graphs()
    assert {(m.path, m.decision) for m in graph.plan.matmuls} == {("body", "fp8"), ("head", "fp8")}
    measured = {(row.path, row.role) for row in graph.measured if row.role != "saved"}
    assert measured == {("body", role) for role in ("output", "grad_input", "grad_weight")}


def test_auto_computes_a_head_in_fp8_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 1)
    plan, *_ = results("mean", torch.bfloat16, chunk_loss="auto")
    assert [loss.chunk for loss in plan.losses] == [0]
    assert "fewer than 4 chunks of 512 rows" in plan.losses[0].reason
    monkeypatch.setattr(fp8_head, "LEAST_ROWS", 16)
    plan, got, exact = results("mean", torch.bfloat16, chunk_loss="auto")
    assert [loss.chunk for loss in plan.losses] == [ROWS // 4 // 16 * 16]
    assert [m.decision for m in plan.matmuls] == ["fp8"] * 3
    assert_near(got, exact)


@pytest.mark.parametrize(("m", "rows"), [(1024, 512), (2051, 512), (4096, 1024), (8192, 2048), (100_000, 2048)])
def test_how_many_rows_a_chunk_has(m: int, rows: int) -> None:
    assert fp8_head.rows_by_default(m) == rows


def test_auto_leaves_a_head_in_fp8_whole_where_chunks_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_loss, "LEAST_BYTES", 1)
    monkeypatch.setattr(chunk_loss, "why_not_in_fp8", lambda head: "it is not to be")
    plan, got, exact = results("mean", torch.bfloat16, chunk_loss="auto")
    assert [loss.chunk for loss in plan.losses] == [0]
    assert "and chunks of it would not: it is not to be" in plan.losses[0].reason
    assert_near(got, exact)
