"""Plans are plain data: JSON and back gives the same plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.errors import OptionError
from fp8compile.options import Options
from fp8compile.plan import overrides, plan_warnings, store
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.record import Record
from fp8compile.plan.rows import BF16, FP8, Group, Kernel, Lowered, Matmul, MergedUpdate, Operand, Saved


def a_plan() -> Plan:
    operand = Operand("e5m2", "tensor", power_of_two=True, history=16, margin=1)
    common = {"source": "model.py:3  y = x @ w", "kind": "mm", "m": 64, "n": "s0", "k": 32}
    return Plan(
        graph="training",
        recipe="mixed",
        device="cpu",
        matmuls=[
            Matmul(
                "mm", "layers.0.(q+k)", role="output", decision=FP8, reason="every matmul that can run", left=operand,
                right=Operand("e4m3", "tensor"), fast_accumulation=True, merged=("layers.0.q", "layers.0.k"),
                padded=("N s0 to a multiple of 16",), milliseconds_bf16=0.5, milliseconds_fp8=0.25, **common,
            ),
            Matmul("mm_1", "head", role="output", decision=BF16, reason="skip='head'", **common),
            Matmul("mm_2", "gate", role="output", decision=BF16, reason="skip='head'", **common),
            Matmul("bmm", "attention", role="other", reason="neither is a weight", batch="s1", **common),
        ],
        failure="",
        saved=[Saved("x", "layers.0", "model.py:2  x", ("s0", 64), "bfloat16", "e4m3 group(64)", 4352, "default")],
        recomputed={"aten.mul.Tensor": 3},
        halves={"forward": Lowered([Kernel("rows_e4m3_0", "forward", ("n0×64",), ("mul ×2",), 0)], ["%q: why"])},
    )  # fmt: skip


def test_json_and_back_is_the_same_plan():
    plan = a_plan()
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert isinstance(back.matmuls[0].left, Operand)
    assert back.matmuls[0].merged == ("layers.0.q", "layers.0.k")
    assert back.saved_bytes == 4352
    assert [kernel.name for kernel in back.kernels] == ["rows_e4m3_0"]


def test_an_empty_plan_survives_the_round_trip():
    assert Plan.from_json(Plan(failure="ValueError: x").to_json()) == Plan(failure="ValueError: x")


def test_json_is_plain_data():
    data = json.loads(a_plan().to_json())
    assert data["matmuls"][0]["left"]["granularity"] == "tensor"
    assert data["matmuls"][0]["n"] == "s0"
    assert data["matmuls"][1]["left"] is None


def test_rows_are_found_changed_and_counted():
    plan = a_plan()
    assert [m.node for m in plan.converted] == ["mm"]
    assert [m.node for m in plan.kept] == ["mm_1", "mm_2", "bmm"]
    assert plan.reasons() == {"skip='head'": 2, "neither is a weight": 1}
    assert plan.row("mm_1").path == "head"
    assert plan.row("nothing") is None
    plan.update("mm_1", node="renamed", decision=FP8)
    assert [m.node for m in plan.matmuls] == ["mm", "renamed", "mm_2", "bmm"]
    assert len(plan.converted) == 2


def test_an_update_of_an_unknown_row_changes_nothing():
    plan = a_plan()
    plan.update("nothing", decision=FP8)
    assert plan == a_plan()


def test_reasons_have_codes_and_plans_without_them_are_read():
    """A plan that was written before there were codes says by its text alone what followed the training."""
    row = Matmul(
        "mm", "a", "", "mm", "output", 1, 2, 3, reason="its head; and more", code=Reason.HEAD,
        remarks=(Reason.CAST_AGAIN,),
    )  # fmt: skip
    saved = Saved("x", "a", "", (4, 8), "bfloat16", "bfloat16", 64, "a vector", code=Reason.VECTOR)
    text = Plan(matmuls=[row], saved=[saved]).to_json()
    data = json.loads(text)
    assert (data["matmuls"][0]["code"], data["matmuls"][0]["remarks"]) == ("head", ["cast_again"])
    assert data["saved"][0]["code"] == "vector"
    back = Plan.from_json(text)
    assert back == Plan(matmuls=[row], saved=[saved])
    assert Reason.CAST_AGAIN in back.matmuls[0].remarks
    for table in (data["matmuls"], data["saved"]):
        table[0].pop("code")
        table.append({**table[0], "reason": "schedule: SQNR 3.0 dB of 20"})
    del data["matmuls"][0]["remarks"]
    old = Plan.from_json(json.dumps(data))
    assert [m.code for m in old.matmuls] == ["", Reason.ADAPTIVE]
    assert [s.code for s in old.saved] == ["", Reason.ADAPTIVE]


def test_codes_decide_and_not_what_a_reason_says(monkeypatch: pytest.MonkeyPatch):
    """Texts say the opposite of the codes here."""
    told: list[str] = []
    monkeypatch.setattr(plan_warnings, "warn_user", told.append)
    by_default = Matmul("mm", "a", "", "mm", "output", 1, 2, 3, reason="too small", code=Reason.HEAD)
    candidate = Matmul("mm_1", "b", "", "mm", "output", 1, 2, 3, reason="the output head", code=Reason.TOO_SMALL)
    plan_warnings.warn([Plan(matmuls=[by_default])], Options())
    assert not told
    plan_warnings.warn([Plan(matmuls=[by_default, candidate])], Options())
    assert "in a graph with 1 matmuls: 1× the output head" in told.pop()
    gathered = replace(candidate, decision=FP8, reason="fast", remarks=(Reason.CAST_AGAIN,))
    plan_warnings.warn([Plan(matmuls=[gathered])], Options())
    assert "1 matmuls do not take a weight as it was gathered. b output: fast" in told.pop()
    moved = replace(candidate, reason="evidence", code=Reason.ADAPTIVE)
    (graph,) = overrides.load(Plan(matmuls=[moved, replace(candidate, reason="schedule: x")])).graphs
    assert [decision.why.text for _, decision in graph.matmuls] == ["evidence", "the plan says so"]


def test_an_operand_reads_like_its_cast():
    assert str(Operand("e4m3", "group(128)")) == "e4m3 group(128)"
    assert str(Operand("e5m2", "tensor", True, 16)) == "e5m2 tensor^2 delayed(16)"


def test_the_plan_of_a_compilation_survives_the_round_trip():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    options = {"select": "all", "executor": "eager", "strict": True}
    torch.compile(model, backend="fp8", options=options)(torch.randn(16, 32)).sum().backward()
    (plan,) = fp8compile.last_compile().plans
    assert len(plan.converted) == 5
    assert {m.code for m in plan.matmuls} == {Reason.ALL}
    assert {s.code for s in plan.saved} <= {*Reason}
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(fp8compile.last_compile().to_json()) == plan
    with pytest.raises(OptionError, match="an explanation of 2 graphs"):
        Plan.from_json(fp8compile.Explanation([plan, plan]).to_json())


def test_an_optimizer_found_in_a_cache_has_the_settings_of_today():
    def optimizer(rate: float) -> Plan:
        return Plan("optimizer", groups=[Group(0, 1, 8, 0, 64, 64, settings={"lr": rate})])

    with store.collected() as found:
        first = Record("a graph", Options(), optimizer=optimizer(0.1))
        first.add(optimizer(0.1))
        first.add_half("inference", Lowered(updates=[MergedUpdate(1, 8, (), 3)]))
        Record("a graph", Options(), optimizer=optimizer(0.2)).close()
    (plan,) = found
    assert plan.groups[0].settings == {"lr": 0.2}
    assert plan.updates == [MergedUpdate(1, 8, (), 3)]


def test_before_the_first_compilation_there_is_no_plan():
    store.reset()
    with pytest.raises(LookupError, match="nothing has been compiled with backend='fp8' yet"):
        fp8compile.last_compile()
    assert fp8compile.compiles() == []


def test_sizes_made_of_symbols_are_numbers():
    plan = Plan(hints={"s33": 40, "2*s33": 80})
    sizes = (7, "s33", "2*s33", "-16*(((-s33)//16))", "16*((s33 + 15)//16)", "s1", "2*s1")
    assert [plan.size(s) for s in sizes] == [7, 40, 80, 48, 48, 0, 0]
