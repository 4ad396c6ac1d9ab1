"""A plan exported, edited and handed back: exactly what was edited changes, and what cannot be says why."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ZOO
from torch import nn

import fp8compile
from fp8compile.errors import Fp8Warning, OptionError
from fp8compile.options import Options
from fp8compile.plan import overrides
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import BY_PLAN
from fp8compile.plan.rows import Matmul, Operand, Saved

ALL = {"select": "all", "executor": "eager", "strict": True}


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))
    return layers.bfloat16(), torch.randn(16, 32).bfloat16()


def gradients(model: nn.Module, x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.compiler.reset()
    torch.compile(model, backend="fp8", options={**ALL, **options})(x).float().square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def edited(plan: Plan, path: str, role: str, **changes: Any) -> Plan:
    """`plan` with one row changed, through JSON as a person would."""
    data = json.loads(plan.to_json())
    rows = [row for row in data["matmuls"] if (row["path"], row["role"]) == (path, role)]
    assert len(rows) == 1
    rows[0].update(changes)
    return Plan.from_json(json.dumps(data))


def differing(a: Plan, b: Plan) -> list[tuple[str, str]]:
    """Paths and roles of the rows that differ in anything but their node's name."""
    pairs = zip(a.matmuls, b.matmuls, strict=True)
    return [(x.path, x.role) for x, y in pairs if dataclasses.replace(x, node="") != dataclasses.replace(y, node="")]


def explained(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> Plan:
    return fp8compile.explain(model, *inputs, options={**ALL, **options}).plans[0]


@functools.cache
def of_mlp() -> Plan:
    """What becomes of `mlp`, explained once."""
    return explained(*mlp())


@functools.cache
def of_llama() -> fp8compile.Explanation:
    """What becomes of a Llama, explained once."""
    case = ZOO["llama"]()
    return fp8compile.explain(case.model, loss=case.loss, options=ALL, **case.inputs)


# ---- what changes ---------------------------------------------------------------------------------------------------


def test_an_unedited_plan_changes_nothing(tmp_path: Path):
    case, before = ZOO["llama"](), of_llama()
    file = tmp_path / "plan.json"
    file.write_text(before.to_json())
    after = fp8compile.explain(case.model, loss=case.loss, options={**ALL, "plan": file}, **case.inputs)
    for table in ("matmuls", "saved", "kernels"):
        rows = [sorted(map(str, explanation.rows(table))) for explanation in (before, after)]
        assert rows[0] == rows[1]


def test_a_plan_alone_says_what_becomes_fp8(tmp_path: Path):
    """Without select="all", which would leave everything on a CPU."""
    (model, x), file = mlp(), tmp_path / "plan.json"
    file.write_text(edited(of_mlp(), "2", "output", decision="bf16").to_json())
    pinned = fp8compile.explain(model, x, options={"strict": True, "plan": str(file)}).plans[0]
    assert [(m.path, m.role) for m in pinned.kept] == [("2", "output")]
    casts = [[(m.left, m.right) for m in plan.matmuls if m not in pinned.kept] for plan in (pinned, of_mlp())]
    del casts[1][[(m.path, m.role) for m in of_mlp().matmuls].index(("2", "output"))]
    assert casts[0] == casts[1]


def test_one_matmul_to_bf16():
    model, x = mlp()
    before = of_mlp()
    plan = edited(before, "2", "grad_weight", decision="bf16")
    after = explained(model, x, plan=plan)
    assert differing(before, after) == [("2", "grad_weight")]
    row = next(m for m in after.matmuls if (m.path, m.role) == ("2", "grad_weight"))
    assert (row.decision, row.reason, row.left, row.right) == ("bf16", "the plan says so", None, None)
    usual, changed = gradients(model, x), gradients(model, x, plan=plan)
    assert [torch.equal(a, b) for a, b in zip(usual, changed, strict=True)] == [True, True, False, True, True, True]
    reference = gradients(model, x, recipe={"base": "mixed", "grad_weight": None})  # every weight gradient in BF16
    assert torch.equal(changed[2], reference[2])


def test_casts_of_one_matmul():
    model, x = mlp()
    before = of_mlp()
    rows = {"left": {"format": "e5m2", "granularity": "row"}, "right": {"format": "e4m3", "granularity": "row"}}
    plan = edited(before, "4", "grad_input", **rows)
    after = explained(model, x, plan=plan)
    assert differing(before, after) == [("4", "grad_input")]
    row = next(m for m in after.matmuls if (m.path, m.role) == ("4", "grad_input"))
    assert (row.left, row.right) == (Operand("e5m2", "row"), Operand("e4m3", "row"))
    role = {"left": {"format": "e5m2", "granularity": "row"}, "right": {"granularity": "row"}}
    usual, changed = gradients(model, x), gradients(model, x, plan=plan)
    assert torch.equal(changed[-1], usual[-1])  # of the last bias: no cast takes part
    assert not torch.equal(changed[0], usual[0])
    of_all = explained(model, x, recipe={"base": "mixed", "grad_input": role})
    assert (row.left, row.right) == next((m.left, m.right) for m in of_all.matmuls if m.role == "grad_input")


class Gated(nn.Module):
    """Two layers that become one, of an input that needs its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(32, 48, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).sigmoid() * self.up(x)


def test_a_merged_row_speaks_of_its_members():
    model, x = Gated().bfloat16(), torch.randn(16, 32).bfloat16().requires_grad_()
    before = explained(model, x)
    after = explained(model, x, plan=edited(before, "(gate+up)", "output", decision="bf16"))
    assert [(m.path, m.role) for m in after.kept] == [("gate", "output"), ("up", "output")]
    assert {m.reason for m in after.kept} == {"the plan says so"}
    # The gradients of both are still FP8, now each by itself: they are merged together with their outputs.
    assert sum(m.decision == "fp8" for m in before.matmuls) == 3
    assert sum(m.decision == "fp8" for m in after.matmuls) == 4


def test_bf16_to_fp8_takes_the_casts_of_the_recipe():
    model, x = nn.Sequential(OrderedDict(up=nn.Linear(32, 64), lm_head=nn.Linear(64, 48))).bfloat16(), mlp()[1]
    before = explained(model, x)
    assert {m.path for m in before.kept} == {"lm_head"}
    after = explained(model, x, plan=edited(before, "lm_head", "output", decision="fp8"))
    assert differing(before, after) == [("lm_head", "output")]
    row = next(m for m in after.matmuls if (m.path, m.role) == ("lm_head", "output"))
    assert (str(row.left), str(row.right), row.reason) == ("e4m3 row", "e4m3 tensor", "the plan says so")


def test_repeated_modules_are_told_apart_by_occurrence():
    case = ZOO["shared_module"]()
    before = explained(case.model, *case.inputs.values())
    data = json.loads(before.to_json())
    second = [row for row in data["matmuls"] if (row["path"], row["role"]) == ("block.up", "output")][1]
    second["decision"] = "bf16"
    after = explained(case.model, *case.inputs.values(), plan=Plan.from_json(json.dumps(data)))
    assert [m.decision for m in after.matmuls if (m.path, m.role) == ("block.up", "output")] == ["fp8", "bf16", "fp8"]


def test_rows_may_be_deleted_and_the_batch_may_differ():
    model, x = mlp()
    data = json.loads(edited(of_mlp(), "0", "output", decision="bf16").to_json())
    data["matmuls"] = [row for row in data["matmuls"] if row["decision"] == "bf16"]
    after = explained(model, torch.randn(32, 32).bfloat16(), plan=Plan.from_json(json.dumps(data)))
    assert [(m.path, m.role) for m in after.kept] == [("0", "output")]
    with torch.no_grad():  # a training graph's plan speaks of the outputs of an inference graph
        inference = explained(model, x, plan=Plan.from_json(json.dumps(data)))
    assert (inference.graph, [(m.path, m.role) for m in inference.kept]) == ("inference", [("0", "output")])


def test_path_role_and_decision_are_enough(tmp_path: Path):
    model, x = mlp()
    file = tmp_path / "plan.json"
    file.write_text('{"matmuls": [{"path": "0", "role": "output", "decision": "bf16"}]}')
    assert [(m.path, m.role) for m in explained(model, x, plan=file).kept] == [("0", "output")]


def test_where_the_weight_is_on_the_left_columns_are_tokens():
    class Left(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(48, 32).bfloat16())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight @ x

    model, x = Left(), torch.randn(32, 16).bfloat16().requires_grad_()
    plan = explained(model, x)
    assert {m.role for m in plan.converted} == {"output", "grad_input", "grad_weight"}
    wider = torch.randn(32, 64).bfloat16().requires_grad_()
    assert len(explained(model, wider, plan=plan).converted) == 3


class Broken(nn.Module):
    """Two layers of a kind, with a graph break between them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.RMSNorm(32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Broken.Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_a_plan_of_several_graphs():
    model, x = Broken().bfloat16(), torch.randn(16, 32).bfloat16()  # a graph for it, and one for what takes a gradient
    both = fp8compile.explain(model, x, options=ALL)
    assert len(both.plans) == 2
    again = fp8compile.explain(model, x, options={**ALL, "plan": both})
    assert again == both
    both.plans[1] = edited(both.plans[1], "layers.*.up", "output", decision="bf16")
    with pytest.raises(Exception, match="several graphs with the same modules and different decisions"):
        fp8compile.explain(model, x, options={**ALL, "plan": both})


# ---- what cannot be -------------------------------------------------------------------------------------------------


def _another_path(row: dict[str, Any]) -> None:
    row["path"] = "22"


def _another_role(row: dict[str, Any]) -> None:
    row["role"] = "grad_input"


def _another_size(row: dict[str, Any]) -> None:
    row.update(n=128, k=512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_path, r"no matmul of this graph is 22 output\. Did you mean '2'"),
        (_another_role, r"0 grad_input is in the plan and not in this graph, which has its output, grad_weight"),
        (_another_size, r"2 output is M×N×K = 16×128×512 there, 16×48×64 here: a plan of another model"),
        (lambda row: row["left"].update(granularity="group(128)"), "have no matmul kernel"),
        (lambda row: row["left"].update(format="e3m4"), "unknown format 'e3m4'"),
        (lambda row: row.update(decision="fp4"), "'fp4' is neither 'fp8' nor 'bf16'"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_carried_out_is_an_error(change: Callable[[dict[str, Any]], None], message: str):
    model, x = mlp()
    data = json.loads(of_mlp().to_json())
    which = "0" if "grad_input" in message else "2"
    change(next(row for row in data["matmuls"] if (row["path"], row["role"]) == (which, "output")))
    for strict in (True, False):  # a plan that does not fit is never passed over
        with pytest.raises(Exception, match=message):
            explained(model, x, plan=Plan.from_json(json.dumps(data)), strict=strict)


@pytest.mark.parametrize("role", ["output", "grad_input", "grad_weight"])
def test_of_the_sizes_that_of_the_tokens_alone_may_differ(role: str):
    model, x = mlp()
    plan = of_mlp()
    row = next(m for m in plan.matmuls if (m.path, m.role) == ("2", role))
    tokens = "k" if role == "grad_weight" else "m"
    for size in ("m", "n", "k"):
        other = Plan(matmuls=[dataclasses.replace(row, **{size: 160})])
        if size == tokens:
            explained(model, x, plan=other)
        else:
            with pytest.raises(Exception, match=f"2 {role} is M×N×K = .* a plan of another model"):
                explained(model, x, plan=Plan(matmuls=[*other.matmuls, plan.matmuls[0]]))


def test_sizes_of_a_merged_row_are_those_of_its_members_together():
    model, x = Gated().bfloat16(), torch.randn(16, 32).bfloat16().requires_grad_()
    plan = explained(model, x)
    merged = [m for m in plan.converted if m.merged]
    assert {m.role for m in merged} == {"output", "grad_input", "grad_weight"}
    for row in merged[:3]:
        for size in ("m", "n", "k"):
            if size != ("k" if row.role == "grad_weight" else "m"):
                other = dataclasses.replace(plan, matmuls=list(plan.matmuls))
                other.update(row.node, **{size: 160})
                with pytest.raises(Exception, match=r" \+ .* is M×N×K = .*a plan of another model"):
                    explained(model, x, plan=other)


def test_a_plan_of_another_model_is_refused():
    model, x = mlp()
    other = explained(nn.Sequential(nn.Sequential(nn.Linear(32, 32))), torch.randn(16, 32))
    with pytest.raises(Exception, match=r"no row about this graph. Its paths: 0.0. Paths here: 0, 2, 4"):
        explained(model, x, plan=other)


class Scores(nn.Module):
    """A product of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys = (nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.queries(x) @ self.keys(x).t()


def test_what_can_never_be_fp8():
    before = explained(Scores().bfloat16(), torch.randn(16, 32).bfloat16())
    row = next(m for m in before.matmuls if m.role == "other")
    before.update(row.node, decision="fp8")
    with pytest.raises(OptionError, match="cannot be FP8: neither operand comes from"):
        Options.parse({"plan": before})
    model = nn.Linear(16, 16).double()
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        plan = explained(model, torch.randn(4, 16).double())
    plan.matmuls = [dataclasses.replace(m, decision="fp8") for m in plan.matmuls]
    with pytest.raises(Exception, match="which cannot be: float64 is not a dtype"):
        explained(model, torch.randn(4, 16).double(), plan=plan)


def test_files_that_are_no_plan(tmp_path: Path):
    for text in ("[1]", "{", '{"matmuls": [{"nod": 1}]}'):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(OptionError, match="cannot be read"):
            Options.parse({"plan": tmp_path / "plan.json"})
    with pytest.raises(OptionError, match="there is no file"):
        Options.parse({"plan": tmp_path / "other.json"})
    with pytest.raises(OptionError, match="it is a folder; name a file in it"):
        Options.parse({"plan": tmp_path})
    with pytest.raises(OptionError, match="is a path, a Plan or an Explanation"):
        Options.parse({"plan": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comment": "too lossy"}, r"matmuls\[0\] \(a output\) of the plan: unknown field 'comment'"),
        ({"desicion": "fp8"}, r"unknown field 'desicion'. Did you mean 'decision'"),
        ({"path": None}, r"\(None output\) of the plan: 'path' is str, and not None"),
        ({"m": 1.5}, r"'m' is int or str, and not 1.5"),
        ({"merged": "b"}, r"'merged' is a list of str, and not 'b'"),
        ({"left": "e4m3 row"}, r"'left' in matmuls\[0\] \(a output\) of the plan is a JSON object, and not 'e4m3 row'"),
        ({"left": {"format": "e4m3"}}, r"'left' in matmuls\[0\] .*: there is no 'granularity'"),
        (
            {"decision": "fp8", "left": {"format": "e4m3", "granularity": "row"}},
            r"a output: 'left' is given without 'right'",
        ),
    ],
)
def test_errors_name_row_and_field(change: dict[str, Any], message: str, tmp_path: Path):
    row = {"path": "a", "role": "output", "decision": "bf16", **change}
    (tmp_path / "plan.json").write_text(json.dumps({"matmuls": [row]}))
    with pytest.raises(OptionError, match=message):
        Options.parse({"plan": tmp_path / "plan.json"})


# ---- keys -----------------------------------------------------------------------------------------------------------


def test_the_content_of_a_plan_is_part_of_the_options(tmp_path: Path):
    plan = of_mlp()
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json())
    one = Options.parse({"plan": file})
    file.write_text(edited(plan, "2", "output", decision="bf16").to_json())
    other = Options.parse({"plan": file})
    assert repr(one) != repr(other)
    assert hash(one) != hash(other)


def test_forms_of_saved_tensors():
    x = Saved("x", "layers.0", "m.py:2  x", (64, 128), "bfloat16", "e4m3 group(128)", 8448, "policy")
    row = Matmul("mm", "layers.0", "", "mm", "output", 1, 1, 1)
    plan = Plan(matmuls=[row], saved=[x, dataclasses.replace(x, node="y", form="bfloat16")])
    known = overrides.load(plan)
    key = overrides.saved_key("layers.0", "m.py:2  x", "bfloat16", (32, 128), 0)  # of another batch
    assert overrides.saved_form(known, key) == "e4m3 group(128)"
    assert overrides.saved_form(known, (*key[:4], 1)) == "bfloat16"
    assert overrides.saved_form(known, (*key[:4], 2)) is None
    assert overrides.saved_form(None, key) is None
    with pytest.raises(OptionError, match=r"saved tensor x of .*: unknown form 'fp8'"):
        overrides.load(Plan(saved=[dataclasses.replace(x, form="fp8")]))
    twice = [plan, Plan(matmuls=[row], saved=[dataclasses.replace(x, form="e4m3 row")])]
    with pytest.raises(OptionError, match=r"two graphs save a tensor of .* in different forms"):
        overrides.saved_form(overrides.load(twice), key)


def test_one_saved_tensor_is_kept_as_it_is_and_the_others_as_before():
    def compiled(**options):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
        given = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0, **options}
        x = torch.randn(16, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(model, backend="fp8", options=given)(x).sum().backward()
        return fp8compile.last_compile().plans[-1], [p.grad for p in model.parameters()]

    usual, gradients = compiled()
    rounded = [n for n, row in enumerate(usual.saved) if row.form.startswith("e4m3")]
    assert len(rounded) >= 2
    rows = list(usual.saved)
    rows[rounded[1]] = dataclasses.replace(rows[rounded[1]], form="bfloat16")
    edited, others = compiled(plan=dataclasses.replace(usual, saved=rows))
    changed = [n for n, (a, b) in enumerate(zip(usual.saved, edited.saved, strict=True)) if a.form != b.form]
    assert changed == [rounded[1]]
    assert edited.saved[rounded[1]].reason == BY_PLAN.text
    assert any(not torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    rows[rounded[1]] = dataclasses.replace(rows[rounded[1]], form="e5m2 group(16)")
    with pytest.raises(Exception, match=r"kept as 'e5m2 group\(16\)'; it can be kept as 'bfloat16' or 'e4m3"):
        compiled(plan=dataclasses.replace(usual, saved=rows))
