"""Recipe "auto": of each matmul the casts that add least noise, as far as a budget of time reaches."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_policy import FINE, ROW, TENSOR, matmul, measured
from torch import nn

import fp8compile
from fp8compile.adaptive.best_casts import SPACING, Way, all_choices, is_better, select, worthwhile
from fp8compile.adaptive.choices import Choice, choice_of, measures, noise
from fp8compile.adaptive.policy import Policy
from fp8compile.adaptive.settings import BUDGET, Adaptive
from fp8compile.errors import OptionError
from fp8compile.insight.tables.grouping import matmul_groups
from fp8compile.kernels.casts.loss_sums import ALTERNATIVES
from fp8compile.options import Options
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Operand
from fp8compile.recipe import RECIPES, Recipe

RUN = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
TIMES = {
    "tensor × tensor": 1.0,
    "row × tensor": 1.0,
    "tensor × row": 1.0,
    "row × row": 1.01,
    "group(128) × group(128)": 2,
}
BETTER, POOR = (34.0, 34.0, 34.0), (25.0, 25.0, 25.0)


# ---- the choice of ways ---------------------------------------------------------------------------------------------


def ways(*pairs: tuple[float, float]) -> list[Way]:
    """Ways by (noise, milliseconds)."""
    return [Way(Choice(fast_accumulation=bool(i % 2)), *pair) for i, pair in enumerate(pairs)]


def test_the_fastest_without_a_budget_and_the_least_noise_with_all_of_it():
    each = [ways((3.0, 1.0), (1.0, 2.0), (2.0, 4.0)), ways((5.0, 2.0), (4.0, 2.0))]
    assert [x.noise for x in select(each, 0.0)] == [3.0, 4.0]
    assert [x.noise for x in select(each, 0.9)] == [3.0, 4.0]
    assert [x.noise for x in select(each, 1.0)] == [1.0, 4.0]


@pytest.mark.parametrize("seed", range(30))
def test_near_to_the_best_of_all_combinations(seed):
    """The selection is within the budget, and no noisier than the best one that leaves the dearest exchange out."""
    r = random.Random(seed)
    each = [ways(*((r.random(), r.random()) for _ in range(r.randint(1, 4)))) for _ in range(4)]
    fastest = sum(min(x.milliseconds for x in w) for w in each)
    allowed = r.random() * 2
    chosen = select(each, allowed)
    assert all(x in w for x, w in zip(chosen, each, strict=True))
    assert sum(x.milliseconds for x in chosen) <= fastest + allowed + 1e-12
    dearest = max(x.milliseconds - min(y.milliseconds for y in w) for w in each for x in w)
    within = [
        sum(x.noise for x in combined)
        for combined in itertools.product(*each)
        if sum(x.milliseconds for x in combined) <= fastest + max(0.0, allowed - dearest) + 1e-12
    ]
    assert sum(x.noise for x in chosen) <= min(within) + 1e-12


def test_what_is_hardly_less_noisy_is_not_worth_other_casts():
    baseline, hardly, clearly, now = ways((1.0, 1.0), (0.85, 0.5), (0.75, 2.0), (0.9, 3.0))
    everything = [baseline, hardly, clearly, now]
    assert worthwhile(everything, baseline, now) == [baseline, clearly, now]
    assert worthwhile(everything, None, now) == [now]  # the recipe's own casts keep too little
    assert is_better(ways((1.0, 1.0), (1.0, 1.0)), ways((0.5, 1.0), (1.0, 1.0)))
    assert not is_better(ways((1.0, 1.0), (1.0, 1.0)), ways((0.95, 1.0), (1.0, 1.0)))


def test_the_noise_is_the_mean_of_the_three_measures_of_both_operands():
    row = matmul()
    sides = {"left": measured(row, "left", {ROW: (30.0, 20.0, 10.0)}), "right": measured(row, "right", {TENSOR: FINE})}
    left, right = (1e-3 + 1e-2 + 1e-1) / 3, 10**-3.1
    assert noise(choice_of(row), sides) == pytest.approx(left + right)
    silent = replace(sides["left"], sqnr=None, by_rows=None, by_columns=None)
    assert noise(choice_of(row), {**sides, "left": silent}) == pytest.approx(right)
    assert measures(sides["left"], "e4m3 block(128)") == measures(sides["left"], TENSOR)


# ---- the policy -----------------------------------------------------------------------------------------------------


def look(
    rows: list[Any], evidence: list[tuple[dict, dict]], budget: float = 0.02, policy: Policy | None = None,
    step: int = SPACING,
) -> Any:  # fmt: skip
    """What a policy with this budget makes of matmuls of which this was measured: the plan, the changes, the policy."""
    rows = [replace(row, milliseconds_by_casts=TIMES, milliseconds_fp8=1.0) for row in rows]
    if policy is None:
        policy = Policy(Adaptive(budget=budget))
        policy.start_from(Plan(matmuls=rows))
    seen = []
    for row, sides in zip(rows, evidence, strict=True):
        for side, kept in zip(("left", "right"), sides, strict=True):
            seen.append(measured(row, side, {**dict.fromkeys(ALTERNATIVES, POOR), **kept}))
    plan, changes = policy.look(Plan(matmuls=rows), seen, step)
    return plan, changes, policy


def casts(plan: Plan) -> list[str]:
    return [str(choice_of(row)) for row in plan.matmuls]


LAYERS = [matmul(f"layers.{i}.fc") for i in range(4)]
TAME = dict.fromkeys(ALTERNATIVES, FINE)


def test_nothing_changes_where_all_casts_are_alike():
    plan, changes, _ = look(LAYERS, [(TAME, TAME)] * 4)
    assert (casts(plan), changes) == ([f"{ROW} × {TENSOR}"] * 4, [])
    assert all(row.reason.endswith("; auto: both operands together keep 28.0 dB, no other casts 1 dB more")
               for row in plan.matmuls)  # fmt: skip
    again, _, _ = look(plan.matmuls, [(TAME, TAME)] * 4)
    assert [row.reason for row in again.matmuls] == [row.reason for row in plan.matmuls]  # said once


def test_rows_where_they_add_less_noise_as_far_as_the_budget_reaches():
    better = {ROW: BETTER, TENSOR: POOR}
    evidence = [({ROW: BETTER}, better), (TAME, TAME), (TAME, TAME), (TAME, TAME)]
    plan, changes, _ = look(LAYERS, evidence)
    assert casts(plan) == [f"{ROW} × {ROW}", *[f"{ROW} × {TENSOR}"] * 3]
    assert [(m.path, m.after) for m in changes] == [("layers.0.fc", f"{ROW} × {ROW}")]
    assert changes[0].evidence == "both operands together keep 24.5 → 31.0 dB, for +0.01 ms of 1"
    plan, changes, _ = look(LAYERS, evidence, budget=0.002)  # 0.008 of 4 ms
    assert (casts(plan)[0], changes) == (f"{ROW} × {TENSOR}", [])
    assert plan.matmuls[0].reason.endswith(f"{ROW} × {ROW} would keep 31.0 dB for +0.01 ms of 1")
    _, changes, _ = look(LAYERS, evidence, budget=0.0)
    assert not changes  # the automatic mode by itself changes what loses too much


def test_a_choice_stays_while_its_evidence_does():
    """Also where the recipe's casts would have kept enough: 25 dB of 20, and 3 more, in a layer between others."""
    better = {ROW: BETTER, TENSOR: POOR}
    evidence = [(TAME, TAME), ({ROW: BETTER}, better), (TAME, TAME), (TAME, TAME)]
    plan, changes, policy = look(LAYERS, evidence)
    assert [m.path for m in changes] == ["layers.1.fc"]
    for _ in range(2 * Adaptive().patience):
        plan, changes, _ = look(plan.matmuls, evidence, policy=policy)
        assert not changes
    assert casts(plan)[1] == f"{ROW} × {ROW}"


def test_less_noise_waits_for_a_later_step_each_time():
    """Compiling takes as long as many steps: casts change at 16, and not again before 256."""
    rows, tokens = {ROW: BETTER}, {ROW: BETTER, TENSOR: POOR}
    first = [(rows, tokens), *[(TAME, TAME)] * 3]
    plan, changes, policy = look(LAYERS, first, step=SPACING - 1)
    assert not changes
    assert "would keep 31.0 dB" in plan.matmuls[0].reason
    plan, changes, policy = look(plan.matmuls, first, policy=policy)
    assert [(m.path, m.is_for_noise) for m in changes] == [("layers.0.fc", True)]
    both = [*[(rows, tokens)] * 2, *[(TAME, TAME)] * 2]
    plan, changes, policy = look(plan.matmuls, both, policy=policy, step=SPACING**2 - 1)
    assert not changes
    plan, changes, policy = look(plan.matmuls, both, policy=policy, step=SPACING**2)
    assert [m.path for m in changes] == ["layers.1.fc"]
    assert policy.next_spending == SPACING**3
    lost = dict.fromkeys(ALTERNATIVES, (10.0, 10.0, 10.0))
    _, changes, _ = look(plan.matmuls, [*both[:3], (lost, TAME)], policy=policy, step=SPACING**2 + 1)
    assert [(m.path, m.is_for_noise) for m in changes] == [("layers.3.fc", False)]  # what loses too much does not wait


def test_what_loses_too_much_is_repaired_whatever_it_costs():
    lost = {ROW: (10.0, 10.0, 10.0), TENSOR: (10.0, 10.0, 10.0)}
    nothing = dict.fromkeys(ALTERNATIVES, (10.0, 10.0, 10.0))
    plan, changes, _ = look(LAYERS, [(TAME, TAME), ({**nothing, **lost}, TAME), (TAME, TAME), (TAME, TAME)])
    assert casts(plan)[1] == "bf16"
    assert "SQNR 10.0 dB of 20" in changes[0].evidence


def test_a_gradient_may_be_e5m2():
    rows = [matmul("layers.0.fc", "grad_input", TENSOR, TENSOR), *LAYERS[1:]]
    plan, changes, _ = look(rows, [({"e5m2 tensor": BETTER}, TAME), *[(TAME, TAME)] * 3])
    assert casts(plan)[0] == f"e5m2 tensor × {TENSOR}"
    assert len(changes) == 1
    assert not any("e5m2" in str(c) for c in all_choices(LAYERS[0], choice_of(LAYERS[0]), True))
    offered = {str(c) for c in all_choices(rows[0], choice_of(rows[0]), True)}
    assert {f"{TENSOR} × e5m2 row", "e5m2 row × e4m3 row", "e4m3 group(128) × e4m3 group(128)"} <= offered
    assert "e5m2 tensor × e5m2 tensor" not in offered


def test_an_operand_that_arrived_in_fp8_keeps_its_cast():
    gathered = Operand("e4m3", "tensor", gathered=True)
    row = replace(LAYERS[0], right=gathered)
    assert {c.right for c in all_choices(row, choice_of(row), True)} == {gathered}
    evidence = [({ROW: BETTER}, {ROW: BETTER, TENSOR: POOR}), (TAME, TAME), (TAME, TAME), (TAME, TAME)]
    assert casts(look([row, *LAYERS[1:]], evidence)[0])[0] == f"{ROW} × {TENSOR} gathered"


def test_grouped_matmuls_and_those_without_times_are_left_alone():
    evidence = [({ROW: BETTER}, {ROW: BETTER, TENSOR: POOR}), (TAME, TAME), (TAME, TAME), (TAME, TAME)]
    grouped = [replace(LAYERS[0], kind="grouped"), *LAYERS[1:]]
    assert not look(grouped, evidence)[1]
    policy = Policy(Adaptive(budget=0.02))
    policy.start_from(Plan(matmuls=LAYERS))
    seen = [measured(LAYERS[0], side, {**TAME, TENSOR: POOR}) for side in ("left", "right")]
    assert policy.look(Plan(matmuls=LAYERS), seen, 1)[1] == []


def test_layers_that_differ_in_what_was_measured_alone_are_shown_as_one():
    def shown(*reasons: str) -> list[str]:
        rows = [replace(matmul(f"layers.{i}.fc"), reason=reason) for i, reason in enumerate(reasons)]
        return [f"{group.path} {group.count}" for group in matmul_groups(Plan(matmuls=rows))]

    assert shown("faster; auto: 28.1 dB", "faster; auto: 28.3 dB") == ["layers.{0-1}.fc 2"]
    assert shown("faster; auto: 28.1 dB", "adaptive: 28.3 dB") == ["layers.0.fc 1", "layers.1.fc 1"]


ENOUGH = 2 * SPACING + 6  # steps: the look of step 27 has been read, the first after 16


# ---- as people use it -----------------------------------------------------------------------------------------------


class Rare(nn.Module):
    """Layers of which the second reads one token that is far larger than the others, and a matrix with a large row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        with torch.no_grad():
            self.layers[1].weight[5] *= 3e4

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        return self.layers[2](torch.tanh(self.layers[1](x)))


def trained(options: dict[str, Any], steps: int = 6) -> tuple[Rare, Any]:
    """A model that has been differentiated so often, and what it was compiled to."""
    torch.manual_seed(0)
    model = Rare()
    step = torch.compile(model, backend="fp8", options={**RUN, **options})
    for _ in range(steps):
        step(torch.randn(128, 64)).square().mean().backward()
        model.zero_grad()
    return model, step


def test_a_weight_with_a_large_row_gets_scales_of_rows():
    _alive = trained({"recipe": "auto"}, ENOUGH)
    graph = fp8compile.adaptive_graphs()[-1]
    found = [m for m in graph.changes if (m.path, m.role) == ("layers.1", "output")]
    assert [m.step for m in found] == [27], str(graph)  # looks are in steps 1, 2, 5, 12, 27, …
    assert (graph.recompiles, graph.looks) == (1, 5), str(graph)  # and do not begin anew
    rows = {(row.path, row.role): row for row in fp8compile.adaptive_plan().plans[-1].matmuls}
    assert str(rows["layers.1", "output"].right) == "e4m3 row"
    assert rows["layers.1", "output"].reason.startswith("adaptive: ")
    assert rows["layers.0", "output"].reason.startswith("every matmul that can run; auto: both operands together keep")
    assert rows["layers.0", "output"].milliseconds_by_casts["row × row"] > 0


def gradients(options: dict[str, Any] | None, seed: int) -> list[torch.Tensor]:
    model, compiled = trained(options or {}, steps=0)
    step = model if options is None else compiled
    torch.manual_seed(100 + seed)
    step(torch.randn(128, 64)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_gradients_are_as_near_as_those_of_the_better_recipe():
    def lost(options: dict[str, Any]) -> float:
        pairs = [zip(gradients(options, seed), gradients(None, seed), strict=True) for seed in range(2)]
        return sum(float((a - b).norm() ** 2 / b.norm() ** 2) for pair in pairs for a, b in pair)

    _alive = trained({"recipe": "auto"}, ENOUGH)
    plan = fp8compile.adaptive_plan().plans[-1]
    chosen, mixed, rowwise = (lost(x) for x in ({"plan": plan}, {"recipe": "mixed"}, {"recipe": "rowwise"}))
    assert chosen <= 1.1 * min(mixed, rowwise), (chosen, mixed, rowwise)


def test_options():
    parsed = Options.parse({"recipe": "auto"})
    assert (parsed.recipe, parsed.adaptive) == (RECIPES["auto"], Adaptive(budget=BUDGET))
    assert replace(RECIPES["auto"], name="mixed") == RECIPES["mixed"]
    given = Options.parse({"recipe": "auto", "adaptive": {"every": 7}}).adaptive
    assert given == Adaptive(every=7, budget=BUDGET)
    assert Options.parse({"recipe": "auto", "adaptive": {"budget": 0.1}}).adaptive == Adaptive(budget=0.1)
    assert Options.parse({"recipe": "auto", "adaptive": None}).adaptive is None  # as `explain` asks
    assert Options.parse({"recipe": "mixed"}).adaptive is None
    begun = Recipe.parse({"base": "auto", "grad_input": {"left": {"format": "e5m2"}}})
    assert begun.is_auto
    assert Options.parse({"recipe": begun}).adaptive == Adaptive(budget=BUDGET)
    with pytest.raises(OptionError, match="leave 'watch' out"):
        Options.parse({"recipe": "auto", "watch": "x"})
    with pytest.raises(OptionError, match="a budget is of recipe 'auto'"):
        Options.parse({"adaptive": {"budget": 0.1}, "recipe": "rowwise"})
    with pytest.raises(OptionError, match="budget is a number of at least 0"):
        Options.parse({"adaptive": {"budget": -1.0}})


def test_a_plan_of_it_can_be_written_and_read():
    _alive = trained({"recipe": "auto"}, ENOUGH)
    plan = fp8compile.adaptive_plan().plans[-1]
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert json.loads(text)["matmuls"][0]["milliseconds_by_casts"]
    trained({"plan": plan}, steps=1)
    assert [str(choice_of(row)) for row in fp8compile.last_compile().matmuls] == casts(plan)
    assert "recipe auto" in str(fp8compile.explain(Rare(), torch.randn(128, 64), options={**RUN, "recipe": "auto"}))
