"""explain(): what it says is true, fits a terminal, and leaves the model as it was."""

from __future__ import annotations

import functools
import json
import linecache
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, NamedTuple

import pytest
import torch
from models import LAYERS, ZOO
from pipelines import replace_pass
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp8compile
from fp8compile import Explanation, delayed
from fp8compile.errors import Fp8Error, Fp8Warning, OptionError
from fp8compile.insight.tables import grouping, numbers
from fp8compile.insight.tables.totals import flops, totals
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import (
    Group,
    Kernel,
    Loss,
    Lowered,
    Mask,
    Matmul,
    MergedUpdate,
    Recomputed,
    Saved,
    State,
    Transfer,
)

ALL = {"select": "all"}


def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), *more, nn.GELU(), nn.Linear(64, 32)).bfloat16()


@functools.cache
def of_graph_break() -> Explanation:
    """What becomes of two blocks with a graph break between them, explained once."""
    case = ZOO["graph_break"]()
    return fp8compile.explain(case.model, loss=case.loss, options={**ALL, "executor": "eager"}, **case.inputs)


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (16, 32)).bfloat16()


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_flops_are_those_that_torch_counts():
    case = ZOO["llama_eager_attention"]()  # all of its attention is matmuls, so that torch counts nothing else
    explanation = fp8compile.explain(case.model, loss=case.loss, options=ALL, **case.inputs)
    with FlopCounterMode(display=False) as counter:
        case.loss(case.model(**case.inputs)).backward()
    assert explanation.totals.flops == counter.get_total_flops()
    head = sum(row["flops"] for row in explanation.rows() if row["path"] == "lm_head")
    attention = sum(row["flops"] for row in explanation.rows() if row["role"] == "other")
    assert explanation.totals.fp8_flops == counter.get_total_flops() - head - attention
    assert explanation.totals.left == {
        "neither operand comes from an nn.Parameter": 6 * LAYERS,
        "the output head (lm_head=True converts it)": 3,
    }


def test_repeated_layers_are_one_and_the_table_fits_a_terminal():
    torch.manual_seed(0)
    layers = nn.ModuleDict({"layers": nn.Sequential(*(nn.Sequential(OrderedDict(mlp=Gated())) for _ in range(2)))})
    model, head, x = layers.bfloat16(), nn.Linear(64, 256).bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head = model, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lm_head(self.model["layers"](x))

    shown = fp8compile.explain(Model(), x, options=ALL).full_text()
    assert max(map(len, shown.splitlines())) <= 120
    assert "model.layers.{0-1}.mlp.(gate+up)  ×2    test_explain.py" in shown
    assert "grad_weight     256×64×32  fp8   e4m3 tensor × e4m3 tensor  every matmul that can run" in shown
    assert shown[: shown.index("saved for backward  ")].count("mlp.down") == 1
    assert "3× the output head (lm_head=True converts it)" in shown


def test_symbolic_sizes_count_as_they_were_seen():
    model, x = mlp(), batch(24, 32)
    torch._dynamo.mark_dynamic(x, 0)
    explanation = fp8compile.explain(model, x, options=ALL)
    assert any(isinstance(row["m"], str) for row in explanation.rows())
    assert explanation.totals.flops == 2 * 24 * 32 * 64 * 5  # five matmuls: the input needs no gradient


def test_kernels_of_symbolic_sizes_move_what_was_seen():
    """As many bytes as the same model with 24 rows, fixed; their space has the symbol. Others differ in what really is
    different: an amax over the pieces of any number of rows, a transposed payload without padding."""
    x = batch(24, 32)
    fixed = fp8compile.explain(mlp(), x, options=ALL).rows("kernels")
    marked = x.clone()
    torch._dynamo.mark_dynamic(marked, 0)
    explanation = fp8compile.explain(mlp(), marked, options=ALL)
    rows = explanation.rows("kernels")
    symbol = next(iter(explanation.plans[0].hints))
    assert any(f"{symbol}×64" in row["space"] for row in rows)
    assert all(row["moved"] > 0 for row in rows)
    for kind in ("rows_e4m3_amax_", "tiles_amax_col_sum_"):
        a, b = ([row["moved"] for row in found if row["name"].startswith(kind)] for found in (fixed, rows))
        assert sorted(a) == sorted(b) != []
    assert "?" not in {part for line in str(explanation).splitlines() for part in line.split()}


def test_modules_of_a_sequential_have_the_line_that_called_it():
    """Torch's own code calls them, and torch leaves that out of a node's trace. A module of the user's has its own."""
    model, x = mlp(), batch()
    here = "called at test_explain.py:"
    explanation = fp8compile.explain(model, x, options=ALL)
    for table in ("matmuls", "saved", "recomputed"):
        rows = [row for row in explanation.rows(table) if row["path"]]
        assert rows
        for row in rows:
            assert row["source"].startswith(here)
            assert row["source"].endswith("explanation = fp8compile.explain(model, x, options=ALL)")
    assert f"  2    {here}" in explanation.table("matmuls")
    assert all(row.source == "" for row in explanation.matmuls)  # by which a plan knows what it kept
    torch.compile(model, backend="fp8", options={**ALL, "executor": "eager"})(x).sum().backward()
    (line,) = {row["source"] for row in fp8compile.last_compile().rows() if row["path"]}
    assert line.endswith(
        'torch.compile(model, backend="fp8", options={**ALL, "executor": "eager"})(x).sum().backward()'
    )
    rows = fp8compile.explain(Gated(), torch.randn(32, 64), options=ALL).rows()
    assert {row["source"].split(":")[0] for row in rows} == {"test_explain.py"}


def test_warnings_point_at_the_user_s_line():
    model, x = mlp(), batch()
    with pytest.warns(Fp8Warning, match="NOTHING was converted") as caught:
        torch.compile(model, backend="fp8", options={"executor": "eager"})(x)
    (warning,) = [w for w in caught if "NOTHING" in str(w.message)]
    assert warning.filename == __file__
    line = linecache.getline(warning.filename, warning.lineno)
    assert "torch.compile(model" in line


def test_a_model_without_anything_to_convert_says_so_and_why():
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        explanation = fp8compile.explain(mlp(), batch())
    t = explanation.totals
    assert (t.fp8, t.matmuls, t.share) == (0, 5, 0.0)
    assert "NOTHING: 0 of 5 matmuls" in str(explanation)
    assert "a CPU has no FP8 matmul units" in str(explanation)
    assert "without matmuls" in str(fp8compile.explain(nn.LayerNorm(8), torch.randn(4, 8)))


def test_every_graph_between_breaks_is_there():
    case, explanation = ZOO["graph_break"](), of_graph_break()
    assert len(explanation.plans) == 2
    assert explanation.totals.fp8 == case.matmuls
    assert {row["graph"] for row in explanation.rows()} == {0, 1}
    assert str(explanation).startswith("2 graphs: 2× training · recipe mixed · cpu")
    assert explanation.full_text().startswith("all 2 graphs")
    assert all(f"graph {i}: training" in explanation.table("saved") for i in (0, 1))
    options = {**ALL, "executor": "eager"}
    assert fp8compile.explain(case.model, loss=case.loss, options=options, **case.inputs) == explanation


def test_the_last_compile_has_every_graph_of_its_call():
    """As explain() tells it: here the same code for two modules, apart by their parameters. Another version is another
    call; an optimizer does not hide the model."""
    case = ZOO["graph_break"]()
    options = {**ALL, "executor": "eager"}
    compiled = torch.compile(case.model, backend="fp8", options=options)
    case.loss(compiled(**case.inputs)).backward()
    last = fp8compile.last_compile()
    assert len(last.plans) == 2
    assert str(last) == str(of_graph_break())
    assert len(last.converted) == last.totals.fp8 == case.matmuls
    assert last.saved_bytes == last.totals.saved_after == sum(plan.saved_bytes for plan in last.plans)
    assert len(last.kernels) == sum(len(half.kernels) for half in last.halves.values()) == last.totals.kernels
    assert sum(last.recomputed.values()) == last.totals.recomputed
    with torch.no_grad():
        compiled(**case.inputs)
    assert {plan.graph for plan in fp8compile.last_compile().plans} == {"inference"}
    last = fp8compile.last_compile()
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    torch.compile(optimizer.step, backend="fp8", options=options)()
    assert fp8compile.last_compile() == last
    other = torch.compile(mlp(), backend="fp8", options=options)
    other(batch())
    assert [row.path for row in fp8compile.last_compile().matmuls] == ["0", "2", "2", "2", "0"]


def test_what_has_no_matmuls_was_compiled_all_the_same():
    torch.compile(nn.LayerNorm(8), backend="fp8", options={"executor": "eager"})(torch.randn(4, 8))
    assert "a graph without matmuls" in str(fp8compile.last_compile())


def test_a_model_in_inference_has_one_half():
    model = mlp().requires_grad_(False)
    explanation = fp8compile.explain(model, batch(), options=ALL)
    assert [plan.graph for plan in explanation.plans] == ["inference"]
    assert {row["role"] for row in explanation.rows()} == {"output"}
    assert {row["half"] for row in explanation.rows("kernels")} == {"inference"}


def test_a_failed_compilation_is_explained(monkeypatch: pytest.MonkeyPatch):
    def fails(c: Any) -> None:
        raise NotImplementedError("no such operator")

    replace_pass(monkeypatch, "exchange_as_fp8", fails)
    with pytest.warns(Fp8Warning, match="compiled without FP8"):
        explanation = fp8compile.explain(mlp(), batch(), options=ALL)
    assert explanation.totals.failures == ("NotImplementedError: no such operator",)
    assert "FAILED    NotImplementedError: no such operator" in str(explanation)
    assert "no such operator" in explanation._repr_html_()


def test_a_training_step_is_explained_up_to_its_optimizer():
    model, x, seen = mlp(), batch(), []
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        seen.append("backward")
        optimizer.step()
        seen.append("optimizer")

    before = [p.detach().clone() for p in model.parameters()]
    explanation = fp8compile.explain(step, x, options=ALL)
    assert explanation.totals.fp8 == 5
    assert seen == ["backward"]
    assert not optimizer.state
    assert len(explanation.rows("states")) == 2 * len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def weights_and_bias() -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.randn(64, 128)),
        torch.nn.Parameter(torch.randn(64, 128)),
        torch.nn.Parameter(torch.randn(64)),
    ]


@pytest.mark.parametrize("stepped", [False, True])
def test_the_states_of_an_optimizer_are_explained(stepped: bool):
    """Before its first step and after it, and without any effect; 8 bits and two FP32 numbers a group of 128."""
    parameters = weights_and_bias()
    optimizer = torch.optim.Adam(parameters)
    if stepped:
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()
    before = [p.detach().clone() for p in parameters]
    explanation = fp8compile.explain(optimizer.step)
    rows = explanation.rows("states")
    assert [r["format"] for r in rows] == ["log", "log/stochastic"] * 2 + ["", ""]
    eight_bit = 64 * 128 + 64 * 8
    assert [r["bytes"] for r in rows] == [eight_bit] * 4 + [256, 256]
    t = explanation.totals
    assert (t.states, t.states_8bit, t.states_before) == (6, 4, 2 * 4 * (2 * 64 * 128 + 64))
    text = str(explanation)
    assert "4 of 6 optimizer states in 8 bits, 128.50 KiB → 34.50 KiB" in text
    assert "exp_avg_sq ×2" in explanation.table("states")
    assert "small: 64 elements" in explanation._repr_html_()
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert stepped or not optimizer.state


def test_small_states_of_mixed_sizes_say_their_range():
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (128, 64, 96, 64)]
    explanation = fp8compile.explain(torch.optim.SGD(parameters, momentum=0.9).step)
    reason = "kept in FP32: small: 64 to 128 elements, fewer than 4096"
    assert [g.reason for g in grouping.state_groups(explanation.plans[0])] == [reason]
    assert reason in explanation._repr_html_()
    assert grouping.ranged(["a vector of 7 elements"] * 2) == "a vector of 7 elements"


def two_groups(prepared: bool = False) -> torch.optim.Optimizer:
    """Decay on weights, none on the bias and a frozen weight."""
    *weights, bias = weights_and_bias()
    frozen = torch.nn.Parameter(torch.randn(64, 128), requires_grad=False)
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": [bias, frozen], "weight_decay": 0.0, "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-3), weight_decay=0.1)
    return fp8compile.prepare_optimizer(optimizer) if prepared else optimizer


@pytest.mark.parametrize("prepared", [False, True])
def test_groups_of_an_optimizer_are_told_one_by_one(prepared: bool):
    """Bytes: two FP32 states of 64·128 numbers each, or 8 bits of them with two FP32 numbers a group of 128."""
    optimizer = two_groups(prepared)
    explanation = fp8compile.explain(optimizer.step)
    decay, rest = explanation.rows("groups")
    assert (decay["parameters"], decay["elements"], decay["in_8_bits"]) == (2, 2 * 64 * 128, 2)
    assert (decay["before"], decay["after"]) == (4 * 4 * 64 * 128, 4 * (64 * 128 + 8 * 64))
    assert (decay["lr"], decay["betas"], decay["weight_decay"]) == (pytest.approx(1e-3), "(0.9, 0.999)", 0.1)
    assert (rest["parameters"], rest["in_8_bits"], rest["before"], rest["after"]) == (2, 0, 512, 512)
    assert (rest["lr"], rest["weight_decay"]) == (1e-4, 0.0)
    small = "1× kept in FP32: small: 64 elements, fewer than 4096"
    assert rest["others"] == f"{small}; 1× frozen: it has no states"
    shown = " ".join(explanation.table("groups").split())
    assert "0 2 of 16.4 kelements 2 128.00 KiB → 34.00 KiB lr 0.001, betas (0.9, 0.999), weight_decay 0.1" in shown
    assert f"not: {small}; 1× frozen" in shown
    assert max(map(len, explanation.full_text().splitlines())) <= 120
    assert "frozen: it has no states" in explanation._repr_html_()
    assert Explanation.from_json(explanation.to_json()) == explanation
    assert not optimizer.state


def test_the_updates_of_an_optimizer_are_those_of_its_compiled_step():
    optimizer = two_groups()
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # which puts a function of its own in the place of `step`
    explained = fp8compile.explain(optimizer.step).rows("updates")
    assert [(r["parameters"], r["elements"], r["reason"]) for r in explained] == [(1, 64, ""), (2, 2 * 64 * 128, "")]
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p) if p.requires_grad else None
    torch.compile(optimizer.step, backend="fp8", options={"executor": "eager"})()
    made = fp8compile.last_compile().rows("updates")
    for row in (*made, *explained):
        del row["values"]  # torch 2.11 counts the move of a rate, a tensor, to a device that is not its own
    assert made == explained
    assert (
        fp8compile.last_compile().rows("groups")[1]["others"]
        == "1× kept in FP32: small: 64 elements, fewer than 4096; 1× frozen: it has no states"
    )


def test_updates_that_nobody_merges_have_a_row_with_the_reason():
    plain = torch.optim.SGD(weights_and_bias(), lr=0.1)
    (row,) = fp8compile.explain(plain.step).rows("updates")
    assert (row["parameters"], row["reason"].split(",")[0]) == (3, "not merged: no state is in 8 bits")

    class Picky(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                assert p.grad.sum().item() != 0.0
                self.state[p]["momentum"] = p.grad.clone()

    picky = Picky(weights_and_bias())
    for p in picky.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    picky.step()
    explanation = fp8compile.explain(picky.step)
    (row,) = explanation.rows("updates")
    assert row["reason"].startswith("not known before it is compiled: a step without data failed: RuntimeError")
    assert explanation.totals.states_8bit == 2


def test_a_pass_that_fails_is_the_reason(monkeypatch: pytest.MonkeyPatch):
    def fail(c: Any) -> None:
        raise RuntimeError("planted")

    replace_pass(monkeypatch, "merge_updates", fail)
    with pytest.warns(Fp8Warning, match="planted"):
        (row,) = fp8compile.explain(torch.optim.Adam(weights_and_bias()).step).rows("updates")
    assert row["reason"] == "not merged: a pass failed: RuntimeError: planted"


def test_frozen_parameters_have_no_states():
    parameters = weights_and_bias()
    parameters[0].requires_grad_(False)
    explanation = fp8compile.explain(torch.optim.Adam(parameters).step)
    assert {r["parameter"] for r in explanation.rows("states")} == {1, 2}


def test_states_are_explained_as_options_have_them():
    optimizer = torch.optim.Adagrad(weights_and_bias())
    compiled = torch.compile(optimizer.step, backend="fp8")
    explanation = fp8compile.explain(compiled, options={"states": "e4m3"})
    assert {r["format"] for r in explanation.rows("states")} == {"e4m3", ""}


def test_what_a_compiled_optimizer_became_is_in_its_plan():
    parameters = weights_and_bias()
    optimizer = torch.optim.AdamW(parameters)
    for p in parameters:
        p.grad = torch.randn_like(p)
    torch.compile(optimizer.step, backend="fp8", options={"executor": "eager"})()
    plan = fp8compile.last_compile()
    assert sum(row["parameters"] for row in plan.rows("updates")) == len(parameters)
    assert "3 parameters in" in str(plan)
    assert "updated together" in plan.table("updates")


def test_states_that_only_a_real_step_tells_are_refused():
    class Lion(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("no step without data")

    with pytest.raises(Fp8Error, match="make one, then explain"):
        fp8compile.explain(Lion([torch.nn.Parameter(torch.randn(4))], {}).step)


class Gated(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(64)
        self.gate, self.up, self.down = (
            torch.nn.Linear(a, b, bias=False) for a, b in ((64, 128), (64, 128), (128, 64))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def test_what_backward_computes_again_says_from_what():
    """The product of gate and up from both of them, the norm's output from its input; sources are what is kept."""
    torch.manual_seed(0)
    model = Gated().bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    explanation = fp8compile.explain(model, x, options={**ALL, "save_min_bytes": 0})
    rows = [row for row in explanation.rows("recomputed") if row["dtype"] == "bfloat16"]
    saved = {row["node"] for row in explanation.rows("saved")}
    product, normed = (
        max((r for r in rows if r["shape"] == s), key=lambda r: r["operators"]) for s in ("32, 128", "32, 64")
    )
    assert product["sources"].count("e4m3 group(128)") == 2
    assert product["bytes"] == 2 * 32 * 128
    assert "parameters" in normed["sources"]
    assert {name.split(" ")[0] for name in product["sources"].split(", ")} <= saved
    assert "computed again" in explanation.table("recomputed")
    assert "computed again" in explanation._repr_html_()
    with torch.no_grad():
        assert fp8compile.explain(model, x, options=ALL).rows("recomputed") == []


def test_before_a_payload_was_the_tensor_that_was_cast():
    """Backward reads a transposed payload of the input: in BF16 it would have kept the input. Amaxes are FP8's own."""
    explanation = fp8compile.explain(mlp(), batch(), options=ALL)
    rows = {row["reason"]: row for row in explanation.rows("saved")}
    payload = rows["a payload that a matmul of backward reads"]
    assert (payload["dtype"], payload["bytes"], payload["bytes_before"]) == ("float8_e4m3fn", 16 * 32, 2 * 16 * 32)
    assert rows["an amax: its tensor is not read again for it"]["bytes_before"] == 0
    assert explanation.totals.saved_before == 2 * 16 * 32 + 2 * 16 * 64  # the input, and what GELU reads


class LossOutput(NamedTuple):
    loss: torch.Tensor


def test_a_loss_that_is_no_scalar_is_refused():
    with pytest.raises(
        Fp8Error, match=r"what loss=… returns is a tensor of shape \[16, 32\]\. Give a loss that reduces it"
    ):
        fp8compile.explain(mlp(), batch(), loss=lambda out: out, options=ALL)
    with pytest.raises(Fp8Error, match=r"what loss=… returns is a dict\. Give a loss"):
        fp8compile.explain(mlp(), batch(), loss=lambda out: {"loss": out}, options=ALL)

    class Unreduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return LossOutput(self.inner(x).float().mean(-1))

    with pytest.raises(Fp8Error, match=r"the `loss` of the model's output is a tensor of shape \[16\]"):
        fp8compile.explain(Unreduced(), batch(), options=ALL)


# ---- what it leaves alone -------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        return self.drop(self.norm(self.fc(x)))


def test_the_model_is_as_it_was():
    model, x = Restless(), torch.randn(16, 32)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    grads = [p.grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, names = torch.get_rng_state(), set(vars(model))
    options = {
        "select": "all",
        "recipe": {"base": "mixed", "output": {"left": {"granularity": "tensor", "delayed": True}}},
    }
    assert fp8compile.explain(model, x, options=options).totals.fp8 == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [p.grad for p in model.parameters()] == grads
    assert all((p.grad == 1).all() for p in model.parameters() if p.grad is not None)
    assert model.calls == 0
    assert set(vars(model)) == names
    assert delayed.state_dict() == {}


def test_a_step_that_updates_parameters_itself_changes_none():
    model, x = mlp(), batch()

    def step() -> None:
        model(x).float().sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad)

    before = [p.detach().clone() for p in model.parameters()]
    assert fp8compile.explain(step, options=ALL).totals.fp8 == 5
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


GLOBAL_MODEL: Any = None


def _step(x: torch.Tensor, scale: float = 1.0, *, shift: float = 0.0) -> None:
    (GLOBAL_MODEL(x).float().sum() * scale + shift).backward()


class Trainer:
    def __init__(self, model: nn.Module):
        self.model = model

    def step(self, x: torch.Tensor) -> None:
        self.model(x).float().sum().backward()


def test_paths_are_those_of_the_compiled_step(monkeypatch: pytest.MonkeyPatch):
    model, x = nn.Sequential(nn.GELU(), nn.Linear(32, 32)).bfloat16(), batch()
    monkeypatch.setitem(globals(), "GLOBAL_MODEL", model)

    def outer(x: torch.Tensor) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        inner(x).float().sum().backward()

    for step in (_step, Trainer(model).step, outer, functools.partial(_step, shift=1.0)):
        explanation = fp8compile.explain(step, x, options=ALL)
        torch.compile(step, backend="fp8", options={**ALL, "executor": "eager"})(x)
        paths = [row.path for row in fp8compile.last_compile().matmuls]
        assert [row["path"] for row in explanation.rows()] == paths
        assert {path.split(".")[-1] for path in paths} == {"1"}
        model.zero_grad()


def test_a_compiled_model_is_explained_with_its_options_and_stays_compiled():
    model, x = mlp(), batch()
    compiled = torch.compile(model, backend="fp8", options={**ALL, "skip": ["2"], "executor": "eager"})
    compiled(x).sum().backward()
    mine, count = fp8compile.last_compile().plans[0], len(fp8compile.compiles())
    explanation = fp8compile.explain(compiled, x)
    assert explanation.totals.left == {"skip='2'": 3}
    assert fp8compile.last_compile().plans[0] is mine
    compiled(x).sum().backward()
    assert len(fp8compile.compiles()) == count
    model.compile(backend="fp8", options={**ALL, "executor": "eager"})
    assert fp8compile.explain(model, x, options=ALL).totals.fp8 == 5
    assert model._compiled_call_impl is not None


def test_whatever_was_compiled_is_explained_with_its_options():
    model, x = mlp(), batch()
    options = {**ALL, "skip": ["2"], "executor": "eager"}
    optimizer = torch.optim.AdamW(weights_and_bias())
    function = torch.compile(lambda x: model(x), backend="fp8", options=options)
    update = torch.compile(optimizer.step, backend="fp8", options={"states": "e4m3"})
    assert fp8compile.explain(function, x).totals.left == {"skip='2'": 3}
    assert {r["format"] for r in fp8compile.explain(update).rows("states")} == {"e4m3", ""}
    model.compile(backend="fp8", options=options)
    assert fp8compile.explain(model, x).totals.left == {"skip='2'": 3}
    sizeless = torch.compile(lambda x: model(x), backend="fp8", dynamic=True, options=options)
    assert fp8compile.explain(sizeless, x).plans[0].hints


class Keeper:
    """Keeps what it compiled; `step` is not compiled itself."""

    def __init__(self, **options: object):
        self.plain = mlp()
        self.model = torch.compile(self.plain, backend="fp8", options={**ALL, "executor": "eager", **options})
        weights = [layer.weight for layer in self.plain if isinstance(layer, nn.Linear)]
        self.optimizer = torch.optim.AdamW(weights[:1])
        fp8compile.prepare_optimizer(self.optimizer, {"smallest": 0})
        self.inductor = torch.compile(torch.nn.Linear(4, 4), options={"max_autotune": False})
        self.other = torch.compile(mlp(), backend="fp8")  # which the step does not call

    def step(self, x: torch.Tensor) -> None:
        self.inductor(x[:, :4].detach())
        self.model(x).float().square().mean().backward()
        self.optimizer.step()


def test_a_step_is_explained_with_the_options_of_what_it_calls():
    keeper, x = Keeper(skip=["2"], recipe="rowwise"), batch()
    compiled = keeper.model
    update = torch.compile(keeper.optimizer.step, backend="fp8")

    def step(x: torch.Tensor) -> None:
        compiled(x).float().square().mean().backward()
        update()

    def of_a_model(model: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
        model(x).float().square().mean().backward()

    for explanation in (
        fp8compile.explain(step, x),
        fp8compile.explain(keeper.step, x),
        fp8compile.explain(of_a_model, compiled, x),
    ):
        assert explanation.totals.left == {"skip='2'": 3}
        assert {m.left.granularity for m in explanation.plans[0].converted if m.left} == {"row"}
    assert fp8compile.explain(keeper.step, x, options=ALL).totals.fp8 == 5


def test_a_step_of_models_with_different_options_asks_for_some():
    first, second = (Keeper(recipe=recipe).model for recipe in ("rowwise", "tensorwise"))
    with pytest.raises(fp8compile.Fp8Error, match=r"rowwise.*tensorwise.*explain each of them"):
        fp8compile.explain(lambda x: (first(x) + second(x)).sum().backward(), batch())


def test_a_model_compiled_for_any_size_is_explained_so():
    compiled = torch.compile(mlp(), backend="fp8", dynamic=True)
    assert fp8compile.explain(compiled, batch(), options=ALL).plans[0].hints
    assert not fp8compile.explain(mlp(), batch(), options=ALL).plans[0].hints


def test_explaining_many_times_keeps_working():
    model, x = mlp(), batch(4, 32)
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(4):  # more often than Dynamo recompiles a function
            assert fp8compile.explain(model, x, options={**ALL, "kernels": "inductor"}).totals.fp8 == 5


def test_sizes_that_were_explained_are_forgotten():
    """Dynamo makes a symbol of a size that differs from one that it has seen, in any function of that name and line."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128)).bfloat16()

    def step(x: torch.Tensor) -> None:
        model(x).float().sum().backward()

    for rows in (32, 48):
        explanation = fp8compile.explain(step, batch(rows, 64), options=ALL)
        assert {(m["m"], m["n"], m["k"]) for m in explanation.rows()} == {(rows, 128, 64), (128, 64, rows)}
    torch.compile(step, backend="fp8", options={**ALL, "executor": "eager"})(batch(16, 64))
    assert {(m.m, m.n, m.k) for m in fp8compile.last_compile().matmuls} == {(16, 128, 64), (128, 64, 16)}


# ---- its forms ------------------------------------------------------------------------------------------------------


def a_plan() -> Plan:
    """Two layers, the second of which differs; saved tensors in two forms; a kernel twice."""
    row = Matmul("", "layers.0.up", "m.py:1  up(x)", "mm", "output", 4, 8, 2, decision="fp8", reason="faster",
                 milliseconds_bf16=2.0, milliseconds_fp8=1.25)  # fmt: skip
    last = replace(row, path="layers.7.up", decision="bf16", reason="too small")
    rows = [replace(row, path=f"layers.{i}.up") for i in (0, 1, 2, 5)]
    saved = [
        Saved("x", f"layers.{i}", "m.py:2  x", (64, 128), "bfloat16", "e4m3 group(128)", 8448, "policy") for i in (0, 1)
    ]
    kernel = Kernel("rows_e4m3", "forward", ("64×128",), ("mul ×2", "quantize e4m3"), 1000)
    return Plan("training", "mixed", "H200", [*rows, last], saved=saved, recomputed={"aten.mul.Tensor": 3},
                halves={"forward": Lowered([kernel, kernel])})  # fmt: skip


def a_crowded_plan(layers: int) -> Plan:
    """Everything at once: long paths, and more reasons, failures, losses and modules than one screen has room for."""
    row = Matmul("", "", "", "mm", "output", 64, 64, 64, decision="fp8", reason="faster", milliseconds_bf16=2.0,
                 milliseconds_fp8=1.0)  # fmt: skip
    rows = [replace(row, path=f"model.{'long_name.' * 9}layers.{i}.part{j}") for i in range(layers) for j in range(30)]
    rows += [replace(row, path=f"odd{i}", decision="bf16", reason=f"{'word ' * i * 9}") for i in range(12)]
    saved = [Saved("", "", "", (64, 64), "bfloat16", f"e4m3 group({8 * i})", 9999, "") for i in range(1, 9)]
    saved += [Saved("", "", "", (64, 64), "bfloat16", "bfloat16", 8192, f"{'because ' * i}") for i in range(20)]
    lost = Loss("", "", "", 64, 64, "float32", 1 << 30, 0, "why " * 60)
    left = [f"cast{i}: {'reason ' * i}" for i in range(30)]
    updates = [MergedUpdate(9, 99, (), 0, f"not merged: {'because ' * i}") for i in range(9)]
    half = Lowered([Kernel("k", "forward", (), (), 99)], left, "it failed " * 50, updates)
    others = {f"kept in FP32: {'why ' * i}": 1 for i in range(30)}
    masks = [Mask("", "", "", (8, 8), kind) for kind in ("causal", "everything")]
    sent = [Transfer("", "", "", "all-gather", "forward", (8,), "bfloat16", "e4m3 row", 16, 8, "")]
    tables = {"losses": [lost] * 9, "masks": masks, "transfers": sent, "groups": [Group(0, 9, 99, 0, 9, 9, others)]}
    halves = {"forward": half, "backward": half}
    states = [State(0, "exp_avg", (64,), "", "")]
    failure = "it failed " * 50
    return Plan("training", "mixed", "H200", rows, failure, saved, {"mul": 3}, halves=halves, states=states, **tables)


@pytest.mark.parametrize("graphs", [1, 7])
@pytest.mark.parametrize("layers", [1, 200])
def test_the_first_screen_is_one_screen(graphs: int, layers: int):
    shown = str(Explanation([a_crowded_plan(layers)] * graphs)).splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 100
    assert any(f"{30 * layers * graphs} of {(30 * layers + 12) * graphs} matmuls" in line for line in shown)
    for label in ("FAILED", "not FP8", "saved", "kernels", "wire", "states", "updates", "modules", "more"):
        assert any(line.strip().startswith(label) for line in shown), label


def test_the_first_screen_of_a_deep_llama_is_that_of_a_flat_one():
    def llama(layers: int) -> str:
        matmuls = [replace(m, path=f"layers.{i}.up") for i in range(layers) for m in a_plan().matmuls[:1]]
        saved = [replace(a_plan().saved[0], path=f"layers.{i}") for i in range(layers)]
        return str(replace(a_plan(), matmuls=matmuls, saved=saved))

    assert len(llama(2).splitlines()) == len(llama(200).splitlines())
    assert "layers.{0-199}.up ×200" in llama(200)


def test_a_table_is_one_of_all_graphs():
    explanation = Explanation([a_plan(), a_plan()])
    assert explanation.table("saved").count("bfloat16[64, 128]") == 2
    assert explanation.table("saved").startswith("graph 0: training · recipe mixed · H200\n    saved for backward")
    assert explanation.table("updates") == "no updates\n"
    assert a_plan().table("kernels") in explanation.table("kernels")
    with pytest.raises(OptionError, match="Did you mean 'saved'"):
        explanation.table("save")
    with pytest.raises(OptionError, match="Did you mean 'saved'"):
        a_plan().rows("save")


def test_totals_add_up():
    t = totals([a_plan(), a_plan()])
    assert (t.graphs, t.matmuls, t.fp8, t.flops, t.fp8_flops) == (2, 10, 8, 10 * 128, 8 * 128)
    assert (t.milliseconds_bf16, t.milliseconds_decided) == (20.0, 2 * (4 * 1.25 + 2.0))
    assert (t.saved, t.saved_before, t.saved_after) == (4, 4 * 64 * 128 * 2, 4 * 8448)
    assert (t.recomputed, t.kernels, t.moved) == (6, 4, 4000)


def test_a_matmul_without_elements_has_a_size():
    plan = a_plan()
    empty = replace(plan.matmuls[-1], n=0, code=Reason.EMPTY)
    unknown = replace(plan.matmuls[-1], n="s9")
    assert "of unknown size" not in str(replace(plan, matmuls=[*plan.matmuls, empty]))
    assert "1 of unknown size" in str(replace(plan, matmuls=[*plan.matmuls, empty, unknown]))


def test_every_table_is_shown():
    lines = [" ".join(line.split()) for line in Explanation([a_plan()]).full_text().splitlines()]
    for line in (
        "layers.{0-2,5}.up ×4 m.py:1 up(x)",
        "output 4×8×2 fp8 None × None 2 → 1.25 faster",
        "output 4×8×2 bf16 2 → 1.25 too small",
        "layers.{0-1} ×2 m.py:2 x",
        "bfloat16[64, 128] e4m3 group(128) 16.00 KiB → 8.25 KiB policy",
        "rows_e4m3 forward 1000 B ×2 mul ×2, quantize e4m3",
        "estimated 10 ms in BF16 → 7 ms as decided, casts counted",
    ):
        assert line in lines
    assert "saved 32.00 KiB → 16.50 KiB for backward in 2 tensors, parameters left out; 3 operators" in " ".join(lines)


def test_counts_stay_in_their_columns_and_lines_that_look_equal_are_one():
    saved = Saved("x", "scan", "m.py:2  x", (64, 128), "bfloat16", "bfloat16", 16384, "policy")
    again = [
        Recomputed(f"mul_{i}", "scan", "m.py:3  y", (64,), "float32", 256, i, (f"add_{i} (bfloat16)",))
        for i in range(1, 16)
    ]
    other = replace(again[0], sources=("add_1 (e4m3 row)",))
    lines = Explanation([Plan(saved=[saved] * 12, restored=[*again, other])]).full_text().splitlines()
    columns = {"as": "bfloat16  ", "bytes": "192.00 KiB", "reason": "policy"}
    title = next(line for line in lines if "saved for backward  " in line)
    row = next(line for line in lines if "bfloat16[64, 128] ×12" in line)
    assert all(row.index(text) == title.index(name) for name, text in columns.items())
    title, _, first, second = lines[-4:]
    assert first == "    float32[64] ×15  3.75 KiB     add_1 (bfloat16)"
    assert second == "    float32[64]      256 B        add_1 (e4m3 row)"
    assert title.index("instead of") == first.index("3.75 KiB")


def test_paths_that_make_no_grid_are_told_by_stars():
    paths = ["layers.0.experts.1.w", "layers.1.experts.0.w"]
    assert grouping.pattern(paths) == "layers.*.experts.*.w"
    assert grouping.pattern(["layers.0.experts.0.w", *paths, "layers.1.experts.1.w"]) == "layers.{0-1}.experts.{0-1}.w"
    assert grouping.pattern(["h.3.conv1d"]) == "h.3.conv1d"
    assert grouping.pattern(["0", "2"]) == "{0,2}"


def test_rows_are_flat_and_json_is_inverse():
    explanation = Explanation([a_plan()])
    for table, count in (("matmuls", 5), ("saved", 2), ("kernels", 2), ("states", 0), ("updates", 0)):
        rows = explanation.rows(table)
        assert len(rows) == count
        assert all(isinstance(v, (str, int, float, bool, type(None))) for row in rows for v in row.values())
    assert explanation.rows("saved")[0]["bytes_before"] == 64 * 128 * 2
    assert explanation.rows()[0]["flops"] == flops(a_plan().matmuls[0], a_plan()) == 128
    assert Explanation.from_json(explanation.to_json()) == explanation
    assert Explanation.from_json(a_plan().to_json()) == explanation
    assert json.loads(explanation.to_json())["totals"]["share"] == 0.8
    with pytest.raises(OptionError, match="Did you mean 'matmuls'"):
        explanation.rows("matmul")
    with pytest.raises(OptionError, match="neither a plan nor"):
        Explanation.from_json("[1]")
    with pytest.raises(OptionError, match="this is no JSON: Expecting property name"):
        Explanation.from_json("{bad")
    assert Explanation.from_json('{"matmuls": []}').plans == [Plan()]


class _Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_well_formed_and_escaped():
    plan = a_plan()
    plan.matmuls[0] = replace(plan.matmuls[0], source="m.py:1  a < b & c")
    shown = Explanation([plan])._repr_html_()
    parser = _Balance()
    parser.feed(shown)
    assert parser.open == []
    assert "a &lt; b &amp; c" in shown
    assert "rows_e4m3" in plan._repr_html_()


def test_numbers_have_units():
    assert [numbers.size(n) for n in (0, 1023, 1024, 3 << 30)] == ["0 B", "1023 B", "1.00 KiB", "3.00 GiB"]
    assert [numbers.si(n) for n in (12, 1234567, 5 * 10**14)] == ["12 ", "1.23 M", "500 T"]
