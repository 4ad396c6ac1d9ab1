"""The policy: which choice a matmul gets, on evidence written by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fp8compile.adaptive.looks import Looks
from fp8compile.adaptive.policy import Choice, Policy, outermost
from fp8compile.adaptive.settings import Adaptive
from fp8compile.distributed.ranks import Ranks
from fp8compile.kernels.casts.loss_sums import ALTERNATIVES
from fp8compile.plan.cast_rows import Row
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Matmul, Operand, Saved

FINE, LOST = (31.0, 31.0, 31.0), (31.0, 31.0, 1.0)  # SQNR, by rows, by columns
TENSOR, ROW, GROUP = "e4m3 tensor", "e4m3 row", "e4m3 group(128)"


def matmul(
    path: str = "layers.1.fc", role: str = "output", left: str = ROW, right: str = TENSOR, **more: Any
) -> Matmul:
    casts = [Operand(*cast.split(" ")) for cast in (left, right)]
    return Matmul("mm", path, "", "mm", role, 64, 64, 64, decision="fp8", left=casts[0], right=casts[1], **more)


def measured(row: Matmul, side: str, kept: dict[str, tuple[float, float, float]], trait: str = "", **more: Any) -> Row:
    """Evidence of one operand: `kept` by cast, everything else is lost."""
    operand = row.left if side == "left" else row.right
    cast = f"{operand.format} {operand.granularity}" if operand is not None else TENSOR
    all_casts = {c: kept.get(c, LOST) for c in {*ALTERNATIVES, cast}}
    sqnr, rows, columns = all_casts[cast]
    what_if = {c: all_casts[c][0] for c in ALTERNATIVES}
    evenly = {c: all_casts[c][1:] for c in ALTERNATIVES}
    values = (row.path, row.role, 0, side, cast, 1, 0, 1.0, 0.0, 0.0, sqnr, what_if, rows, columns, evenly, trait)
    return replace(Row(*values), **more)


EVERYTHING = dict.fromkeys(ALTERNATIVES, FINE)
AROUND = [matmul("layers.0.fc"), matmul("layers.2.fc")]  # so that layers.1 is neither first nor last


def look(
    row: Matmul, left: dict, right: dict, trait: str = "", grouped: bool = True, baseline: Matmul | None = None
) -> Any:
    """The choice that `row` gets, as text, and its changes."""
    policy = Policy(Adaptive(), grouped)
    policy.start_from(Plan(matmuls=[row, *AROUND]))
    rows = [measured(row, "left", left, trait), measured(row, "right", right)]
    plan, changes = policy.look(Plan(matmuls=[row, *AROUND]), rows, 7)
    after = plan.matmuls[0]
    return (f"{after.left} × {after.right}" if after.decision == "fp8" else "bf16"), changes


@pytest.mark.parametrize(
    ("row", "left", "right", "wanted"),
    [
        (matmul(left=TENSOR), [TENSOR, ROW], [TENSOR], f"{TENSOR} × {TENSOR}"),  # nothing is lost
        (matmul(left=TENSOR), [ROW, GROUP], [TENSOR, ROW, GROUP], f"{ROW} × {TENSOR}"),
        (matmul(left=TENSOR), [TENSOR, ROW], [ROW], f"{TENSOR} × {ROW}"),
        (matmul(left=TENSOR), [ROW], [ROW], f"{ROW} × {ROW}"),
        (matmul(), [GROUP], [GROUP, TENSOR], f"{GROUP} × {GROUP}"),
        (matmul(), [GROUP], [TENSOR], "bf16"),  # groups go with groups only
        (matmul(), [], [TENSOR], "bf16"),
        (matmul(role="grad_input", left="e5m2 tensor"), ["e5m2 row", ROW], [TENSOR], f"{ROW} × {TENSOR}"),
    ],
)
def test_the_first_choice_that_keeps_enough(row, left, right, wanted):
    after, changes = look(row, dict.fromkeys(left, FINE), dict.fromkeys(right, FINE))
    assert after == wanted
    assert bool(changes) == (wanted != f"{row.left} × {row.right}")
    assert all(m.step == 7 and m.after == wanted for m in changes)


@pytest.mark.parametrize("kept", [GROUP, TENSOR])
def test_a_grouped_matmul_has_rows_or_bf16(kept):
    row = replace(matmul(right=ROW), kind="grouped")
    assert look(row, {kept: FINE}, EVERYTHING)[0] == "bf16"
    assert look(row, {ROW: FINE}, EVERYTHING)[0] == f"{ROW} × {ROW}"
    changed = replace(row, decision="bf16", left=None, right=None)
    policy = Policy(Adaptive(patience=2), grouped=True)
    policy.start_from(Plan(matmuls=[row, *AROUND]))
    for _ in range(2):
        measurements = [measured(changed, side, EVERYTHING) for side in ("left", "right")]
        plan, _ = policy.look(Plan(matmuls=[changed, *AROUND]), measurements, 7)
    assert (str(plan.matmuls[0].left), str(plan.matmuls[0].right)) == (ROW, ROW)  # and back


def test_without_matmuls_of_groups_the_next_choice_is_bf16():
    assert look(matmul(), {GROUP: FINE}, EVERYTHING, grouped=False)[0] == "bf16"


def test_a_product_never_stops_at_rows():
    row = matmul(left=TENSOR)
    kept = {ROW: FINE, GROUP: FINE}
    assert look(row, kept, EVERYTHING)[0] == f"{ROW} × {TENSOR}"
    assert look(row, kept, EVERYTHING, "product")[0] == f"{GROUP} × {GROUP}"
    # of a gradient's own products nothing is said: they are no activations
    gradient = matmul(role="grad_weight", left=TENSOR)
    assert look(gradient, kept, EVERYTHING, "product")[0] == f"{ROW} × {TENSOR}"


@pytest.mark.parametrize(("path", "changes"), [("layers.1.fc", 0), ("layers.0.fc", 1)])
def test_the_first_layer_must_keep_more(path, changes):
    policy = Policy(Adaptive(minimum=20.0, edges=3.0))
    row = matmul(path)
    plan = Plan(matmuls=[row, matmul("layers.0.x"), matmul("layers.3.x")])
    policy.start_from(plan)
    kept = {**EVERYTHING, ROW: (21.5, 31.0, 31.0)}
    found = policy.look(plan, [measured(row, "left", kept), measured(row, "right", EVERYTHING)], 0)[1]
    assert len(found) == changes
    assert all("SQNR 21.5 dB of 23" in m.evidence and "first or last layer" in m.evidence for m in found)


def test_it_returns_to_the_cheapest_choice_that_would_have_served_and_not_below_its_baseline():
    baseline = matmul()
    bf16 = replace(baseline, decision="bf16", left=None, right=None)
    policy = Policy(Adaptive(patience=2))
    policy.start_from(Plan(matmuls=[baseline, *AROUND]))
    rows = [measured(bf16, side, EVERYTHING) for side in ("left", "right")]
    before = Plan(matmuls=[bf16, *AROUND])
    assert policy.look(before, rows, 1)[1] == []
    plan, (change,) = policy.look(before, rows, 2)
    assert (change.before, change.after) == ("bf16", f"{ROW} × {TENSOR}")
    assert plan.matmuls[0].reason.startswith("adaptive: 2 looks in a row")


def test_a_look_that_would_not_have_served_begins_the_count_anew():
    baseline = matmul()
    bf16 = replace(baseline, decision="bf16", left=None, right=None)
    policy = Policy(Adaptive(patience=2))
    policy.start_from(Plan(matmuls=[baseline, *AROUND]))
    good = [measured(bf16, side, EVERYTHING) for side in ("left", "right")]
    bad = [measured(bf16, "left", {}), measured(bf16, "right", EVERYTHING)]
    for rows in (good, bad, good):
        assert policy.look(Plan(matmuls=[bf16, *AROUND]), rows, 1)[1] == []


def test_without_evidence_of_both_operands_nothing_changes():
    row = matmul()
    policy = Policy(Adaptive())
    policy.start_from(Plan(matmuls=[row, *AROUND]))
    assert policy.look(Plan(matmuls=[row, *AROUND]), [measured(row, "left", {})], 1)[1] == []


def test_what_the_recipe_left_is_left():
    row = replace(matmul(), decision="bf16", left=None, right=None)
    assert look(row, EVERYTHING, EVERYTHING) == ("bf16", [])


def test_merged_matmuls_change_together_and_know_their_baseline_apart():
    merged = matmul("layers.1.(q+k)", merged=("layers.1.q", "layers.1.k"))
    apart = [replace(matmul(f"layers.1.{name}"), decision="bf16", left=None, right=None) for name in "qk"]
    policy = Policy(Adaptive(patience=1))
    policy.start_from(Plan(matmuls=[merged, *AROUND]))
    rows = [measured(r, side, EVERYTHING) for r in apart for side in ("left", "right")]
    plan, changes = policy.look(Plan(matmuls=[*apart, *AROUND]), rows, 1)
    assert [m.path for m in changes] == ["layers.1.q", "layers.1.k"]
    assert {str(Choice(m.left, m.right)) for m in plan.matmuls[:2]} == {f"{ROW} × {TENSOR}"}


def test_saved_tensors_are_told_apart_by_occurrence():
    saved = [Saved(f"x{i}", "fc", "line", (4, 128), "bfloat16", GROUP, 1, "") for i in range(2)]
    side = '["line", "bfloat16", 128]'
    bad = Row("fc", "saved", 1, side, GROUP, 1, 0, 1.0, 0.0, 0.0, 31.0, {}, 31.0, 2.0, {})
    plan, (change,) = Policy(Adaptive()).look(Plan(saved=saved), [replace(bad, occurrence=0, by_columns=31.0), bad], 3)
    assert [row.form for row in plan.saved] == [GROUP, "bfloat16"]
    assert (change.role, change.after) == ("saved", "bfloat16")


def test_outermost_layers():
    paths = ["h.0.q", "h.1.q", "h.10.q", "h.10.experts.3.up", "head"]
    assert outermost(paths) == {"h.0.q", "h.10.q", "h.10.experts.3.up"}
    assert outermost(["0.fc", "1.fc", "2.fc"]) == {"0.fc", "2.fc"}
    assert outermost(["a", "b", "c"]) == {"a", "c"}


def test_what_failed_again_is_not_returned_to() -> None:
    """A matmul that went back to its recipe's casts and lost too much once more stays with what keeps enough."""
    policy, row = Policy(Adaptive(patience=2)), matmul()
    policy.start_from(Plan(matmuls=[row, *AROUND]))

    def after(row: Matmul, kept: dict[str, tuple[float, float, float]], **settings: bool) -> Matmul:
        found = [measured(row, side, kept) for side in ("left", "right")]
        return policy.look(Plan(matmuls=[row, *AROUND]), found, 7, **settings)[0].matmuls[0]

    def casts(row: Matmul) -> str:
        return f"{row.left} × {row.right}"

    only_groups = {GROUP: FINE}
    for turn in range(2):
        row = after(row, only_groups)
        assert casts(row) == f"{GROUP} × {GROUP}"
        assert casts(after(row, EVERYTHING)) == casts(row)  # one look is not enough
        assert casts(after(row, EVERYTHING, losses_alone=True)) == casts(row)
        row = after(row, EVERYTHING)
        assert casts(row) == (f"{ROW} × {TENSOR}" if turn == 0 else f"{TENSOR} × {ROW}")  # others are still there


def test_a_return_waits_while_changes_are_for_losses_alone() -> None:
    policy, row = Policy(Adaptive(patience=1)), matmul()
    policy.start_from(Plan(matmuls=[row, *AROUND]))
    exact = replace(row, decision="bf16", left=None, right=None)
    found = [measured(exact, side, EVERYTHING) for side in ("left", "right")]
    for alone, decision in ((True, "bf16"), (False, "fp8")):
        plan, changes = policy.look(Plan(matmuls=[exact, *AROUND]), found, 7, losses_alone=alone)
        assert (plan.matmuls[0].decision, len(changes)) == (decision, int(not alone))


@pytest.mark.parametrize("every", [1, 2, 3, 5, 7, 8, 10, 16, 20, 32, 50, 64, 100, 128])
def test_looks_fall_on_all_executions_of_a_step(every: int) -> None:
    """Of up to eight, also when they have become rare."""
    looks, seen = Looks("here", every, Ranks()), list[int]()
    for step in range(50 * every + 200):
        if looks.is_due(step):
            looks.begin(step)
            seen.append(step)
            looks._close()
            looks.done += 1
            looks.become_rarer()
    for cycle in range(1, 9):
        assert {step % cycle for step in seen[:10]} == {*range(cycle)} or cycle > 3
        assert {step % cycle for step in seen[10:]} == {*range(cycle)}
    assert max(b - a for a, b in pairwise(seen)) <= every
