"""Statistics are those of the tensors: against a direct computation, in training, without changing a number."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ZOO
from torch import Tensor, nn

import fp8compile
from fp8compile.errors import Fp8Error, Fp8Warning, OptionError
from fp8compile.insight.tables.statistics_text import statistics_text
from fp8compile.kernels.casts import cast_losses
from fp8compile.kernels.casts.cast_losses import measure
from fp8compile.kernels.casts.loss_sums import ALTERNATIVES, SUMS
from fp8compile.plan.cast_rows import Row, row_of

ALL = {"select": "all", "executor": "eager", "strict": True}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rounded(x: Tensor, cast: str) -> Tensor:
    """x (2-D, FP32) after a cast with current scales and back, by hand; rows lie along the last dimension."""
    format, granularity = cast.split(" ")
    limit = LARGEST[format]
    if granularity == "tensor":
        amax = x.abs().max()
    elif granularity == "row":
        amax = x.abs().max(1, keepdim=True).values
    else:
        g = int(granularity[6:-1])
        padded = F.pad(x, (0, -x.shape[1] % g))
        amax = padded.abs().unflatten(1, (-1, g)).max(2).values.repeat_interleave(g, 1)[:, : x.shape[1]]
    scale = torch.where(amax == 0, torch.ones_like(amax), amax / limit)
    return (x / scale).clamp(-limit, limit).to(DTYPES[format]).float() * scale


def decibels(x: Tensor, cast: str) -> float:
    x = x.double().float()
    noise = (x - rounded(x, cast)).double().square().sum()
    return 10 * math.log10(x.double().square().sum() / noise)


def evenly(x: Tensor, cast: str) -> tuple[float, float]:
    """By rows and by columns, by hand."""
    x = x.double().float()
    noise, signal = (x - rounded(x, cast)).double().square(), x.double().square()
    shares = [(noise.sum(d) / signal.sum(d))[signal.sum(d) != 0].mean() for d in (1, 0)]
    return tuple(-10 * math.log10(share) for share in shares)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(48, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def trained(steps: int = 1, first: bool = False, **options: Any) -> tuple[Any, dict[tuple[str, str], Tensor]]:
    """A watched layer after one step, and its operands as the matmuls read them: contracted dimension last.

    first: no gradient is asked of the input.
    """
    torch.manual_seed(3)
    model = Layer().bfloat16()
    x = (torch.randn(64, 48) * torch.randn(64, 1).exp()).bfloat16().requires_grad_(not first)
    seed = (torch.randn(64, 32) * torch.randn(1, 32).exp()).bfloat16()
    watched = fp8compile.watch(model, steps=steps, options={**ALL, **options})
    watched(x).backward(seed)
    w = model.fc.weight.detach()
    operands = {
        ("output", "left"): x.detach(), ("output", "right"): w, ("grad_input", "left"): seed,
        ("grad_input", "right"): w.t(), ("grad_weight", "left"): seed.t(), ("grad_weight", "right"): x.detach().t(),
    }  # fmt: skip
    return watched, {key: value.float() for key, value in operands.items() if not first or key[0] != "grad_input"}


@pytest.mark.parametrize("recipe", ["mixed", "tensorwise", "rowwise"])
def test_rows_are_those_of_a_direct_computation(recipe: str):
    watched, operands = trained(recipe=recipe)
    rows = {(row.role, row.side): row for row in watched.statistics.rows()}
    assert set(rows) == set(operands)
    for key, x in operands.items():
        row = rows[key]
        assert (row.path, row.occurrence, row.steps, row.skipped) == ("fc", 0, 1, 0)
        assert row.amax == x.abs().max().item()
        assert row.sqnr == pytest.approx(decibels(x, row.cast), abs=1e-3)
        assert set(row.what_if) == set(ALTERNATIVES)
        for cast in ALTERNATIVES:
            assert row.what_if[cast] == pytest.approx(decibels(x, cast), abs=1e-3), (key, cast)
            assert row.evenly[cast] == pytest.approx(evenly(x, cast), abs=1e-3), (key, cast)
        assert (row.by_rows, row.by_columns) == pytest.approx(evenly(x, row.cast), abs=1e-3)
        lost = ((x != 0) & (rounded(x, row.cast) == 0)).sum() / (x != 0).sum()
        assert row.underflown == pytest.approx(lost.item())
        assert row.saturated == 0  # scales are current
    casts = {key: row.cast for key, row in rows.items()}
    plan = watched.statistics.plans[0]
    assert casts == {(m.role, side): str(getattr(m, side)) for m in plan.matmuls for side in ("left", "right")}


def test_nothing_changes_but_what_is_known():
    watched, _ = trained(kernels="inductor")
    measured = watched._compiled._orig_mod.fc.weight.grad
    torch.manual_seed(3)
    model = Layer().bfloat16()
    x = (torch.randn(64, 48) * torch.randn(64, 1).exp()).bfloat16().requires_grad_()
    seed = (torch.randn(64, 32) * torch.randn(1, 32).exp()).bfloat16()
    torch.compile(model, backend="fp8", options={**ALL, "kernels": "inductor"})(x).backward(seed)
    assert torch.equal(model.fc.weight.grad, measured)
    generated, _ = trained()
    assert torch.equal(generated._compiled._orig_mod.fc.weight.grad, measured)


def test_steps_add_up_and_then_end():
    x = torch.randn(16, 32)
    model = nn.Linear(32, 16)
    watched = fp8compile.watch(model, steps=2, options=ALL)
    batches = [x, 3 * x, 100 * x]
    for batch in batches:
        watched(batch).sum().backward()
    row = next(r for r in watched.statistics.rows() if (r.role, r.side) == ("output", "left"))
    assert (row.steps, row.amax) == (2, (3 * x).abs().max().item())  # the third is not measured
    signal = sum(b.double().square().sum() for b in batches[:2])
    noise = sum((b - rounded(b, "e4m3 row")).double().square().sum() for b in batches[:2])
    assert row.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


def test_saturation_and_underflow_are_counted():
    x = torch.tensor([[1000.0, -500.0, 448.0, 460.0, 0.0, 2**-11, 2**-8, 1.0]])
    sums = measure(torch.ones(()), [x], "e4m3 tensor", False).tolist()
    counted = dict(zip(SUMS, sums, strict=False))
    assert (counted["elements"], counted["nonzero"]) == (8, 7)
    assert counted["saturated"] == 2  # 460 rounds to 448 by itself
    assert counted["underflown"] == 1  # half of the smallest subnormal number, 2^-9, is 2^-10
    assert counted["noise"] == (1000 - 448) ** 2 + (500 - 448) ** 2 + (460 - 448) ** 2 + 2**-22


def test_what_a_few_columns_or_rows_hide_from_the_sqnr_is_seen():
    """A column 10^6 times the others: they are lost, and it makes up all of the signal."""
    x = torch.randn(64, 48)
    x[:, 3] *= 1e6
    x[5] = 0.0  # a row of zeros counts for nothing
    for tensor, worse, better in ((x, "by_columns", "by_rows"), (x.t().contiguous(), "by_rows", "by_columns")):
        scale = tensor.abs().amax() / 448
        sums = measure(scale, [tensor], "e4m3 tensor", False).tolist()
        row = row_of(("fc", "output", 0, "left"), "e4m3 tensor", sums)
        assert row.sqnr is not None
        assert row.sqnr > 25
        # 47 of 48 columns become zero: a share of noise of 47/48 on average
        assert getattr(row, worse) == pytest.approx(-10 * math.log10(47 / 48), abs=0.2)
        assert getattr(row, better) > 25


def test_what_is_not_finite_is_left_out_and_counted():
    model = nn.Linear(32, 16, bias=False)
    watched = fp8compile.watch(model, steps=3, options=ALL)
    good, bad = torch.randn(16, 32), torch.randn(16, 32)
    bad[3, 4] = float("inf")
    for batch in (good, bad, good):
        watched(batch)
    row = next(r for r in watched.statistics.rows() if r.side == "left" and r.role == "output")
    assert (row.steps, row.skipped) == (2, 1)
    assert row.sqnr == pytest.approx(decibels(good, "e4m3 row"), abs=1e-3)
    assert "1 of 3 executions were not finite" in str(watched.statistics)


def test_casts_take_turns():
    """One in three executions of each is measured, until all have been measured twice; the figures are the same."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)), torch.randn(16, 32)
    at_once = fp8compile.watch(model, steps=1, options=ALL)
    at_once(x).sum().backward()
    watched = fp8compile.watch(model, steps=2, every=3, options=ALL)
    measured = []
    for _ in range(9):
        watched(x).sum().backward()
        measured.append(sum(row.steps for row in watched.statistics.rows()))
    rows = watched.statistics.rows()
    assert {row.steps for row in rows} == {2}
    assert 0 < measured[0] < measured[1] < measured[2] == len(rows)
    assert measured[5] == measured[8] == 2 * len(rows)
    key = lambda row: (row.path, row.role, row.side)  # noqa: E731
    for a, b in zip(sorted(rows, key=key), sorted(at_once.statistics.rows(), key=key), strict=True):
        assert (key(a), a.amax) == (key(b), b.amax)
        assert a.sqnr == pytest.approx(b.sqnr, abs=1e-3)


@pytest.mark.parametrize(("steps", "every"), [(0, 1), (1, 0), (1.5, 1), (1, 2.0), (True, 1), ("3", 1)])
def test_what_is_no_count_is_refused(steps: Any, every: Any):
    with pytest.raises(fp8compile.errors.OptionError, match="counts from 1"):
        fp8compile.watch(torch.nn.Linear(2, 2), steps=steps, every=every)


@pytest.mark.parametrize("name", ["llama", "checkpoint", "shared_module"])
def test_every_operand_is_measured_once_a_step(name: str):
    case = ZOO[name]()
    watched = fp8compile.watch(case.model, steps=5, options=ALL)
    for _ in range(2):
        case.loss(watched(**case.inputs)).backward()
    rows = watched.statistics.rows()
    (plan,) = watched.statistics.plans
    assert {row.steps for row in rows} == {2}
    assert len(rows) == 2 * len(plan.converted) == len({(r.path, r.role, r.occurrence, r.side) for r in rows})
    assert all(row.sqnr is not None and 20 < row.sqnr < 45 for row in rows)
    assert max(map(len, str(watched.statistics).splitlines())) <= 120


def test_a_matmul_that_is_left_is_not_measured_as_another():
    """Its node is no FP8 matmul; one that it reads the result of must not be taken for it."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))
    watched = fp8compile.watch(model, options={**ALL, "skip": ["1"]})
    watched(torch.randn(16, 32)).sum().backward()
    assert {row.path for row in watched.statistics.rows()} == {"0"}


@pytest.mark.slow
def test_through_inductor():
    watched, operands = trained(executor="inductor", first=True)
    rows = {(row.role, row.side): row for row in watched.statistics.rows()}
    assert set(rows) == set(operands)
    for key, x in operands.items():
        assert rows[key].sqnr == pytest.approx(decibels(x, rows[key].cast), abs=0.01), key


def test_a_plan_from_statistics(tmp_path: Path):
    watched, operands = trained()
    found = {(row.role, row.side): row for row in watched.statistics.rows()}
    # dy has columns of very different sizes; by rows, each of dyᵀ is by itself
    worst = found["grad_weight", "left"]
    assert worst.sqnr is not None
    threshold = 31.4
    watched.statistics.save(tmp_path / "statistics.json")
    again = fp8compile.Statistics.load(tmp_path / "statistics.json")
    assert again.rows() == watched.statistics.rows()
    (plan,) = again.plan(threshold)
    for row in plan.matmuls:
        expected = []
        for side in ("left", "right"):
            measured = decibels(operands[row.role, side], found[row.role, side].cast)
            better = [c for c in ("e4m3 tensor", "e4m3 row") if decibels(operands[row.role, side], c) >= threshold]
            expected.append(found[row.role, side].cast if measured >= threshold else (better or [None])[0])
        if None in expected:
            assert (row.decision, row.left) == ("bf16", None)
            assert "dB" in row.reason
        else:
            assert [str(row.left), str(row.right)] == expected
    options = {**ALL, "plan": again.plan(99.0)}
    x = torch.randn(64, 48).bfloat16().requires_grad_()
    assert fp8compile.explain(Layer().bfloat16(), x, options=options).totals.left == {"the plan says so": 3}


def test_files_that_hold_no_statistics(tmp_path: Path):
    file = tmp_path / "other.json"
    for text, message in (
        ("{}", "there is no 'name' and no 'steps'"),
        ("{bad", "this is no JSON"),
        ('{"name": "", "steps": 1, "plans": [], "rows": [{"path": "a"}]}', r"rows\[0\]: there is no 'role'"),
        ('{"name": "", "steps": 1, "plans": [], "rows": [3]}', ""),
        ('{"name": "", "steps": 1, "plans": [[]], "rows": []}', "the plan is a JSON object"),
    ):
        file.write_text(text)
        with pytest.raises(Fp8Error, match=f"holds no statistics: .*{message}"):
            fp8compile.Statistics.load(file)
    for path, message in ((tmp_path, "it is a folder"), (tmp_path / "none.json", "it is not there")):
        with pytest.raises(Fp8Error, match=message):
            fp8compile.Statistics.load(path)


def test_without_a_measurement_it_says_what_to_do():
    model, x = nn.Linear(32, 16), torch.randn(16, 32)
    watched = fp8compile.watch(model, options=ALL)
    assert str(watched.statistics) == "nothing measured yet: call what is watched, then backward()\n"
    watched(x).sum().backward()
    assert "output left" in str(watched.statistics)
    left = fp8compile.watch(model, options={**ALL, "skip": ["*"]})
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        left(x).sum().backward()
    assert str(left.statistics) == "nothing measured: no matmul runs in FP8, so no operand is cast\n"


def test_a_watched_model_has_the_attributes_of_the_model():
    model = nn.Sequential(nn.Linear(32, 16), nn.Dropout())
    watched = fp8compile.watch(model, options=ALL)
    watched.eval()
    assert not model.training
    watched.train()
    assert model[1].training
    assert list(watched.parameters()) == list(model.parameters())
    assert watched.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = watched.nothing


def test_the_compiled_model_gives_its_options_and_stays():
    model, x = nn.Linear(32, 16), torch.randn(16, 32)
    compiled = torch.compile(model, backend="fp8", options={**ALL, "recipe": "tensorwise"})
    compiled(x).sum().backward()
    (last,) = fp8compile.last_compile().plans
    watched = fp8compile.watch(compiled)
    watched(x).sum().backward()
    assert {row.cast for row in watched.statistics.rows()} == {"e4m3 tensor", "e5m2 tensor"}
    assert fp8compile.last_compile().plans[0] is last
    with pytest.raises(OptionError, match="'watch' is a name"):
        fp8compile.Options.parse({"watch": True})


def test_the_table():
    what_if = dict.fromkeys(ALTERNATIVES, 30.0) | {"e4m3 group(16)": None}
    short = Row("", "output", 0, "left", "e4m3 row", 3, 0, 1.0, 0.0, 0.0, None, what_if)
    long = dataclasses.replace(
        short, path="model.layers.10.self_attn.(q_proj+k_proj+v_proj)", role="grad_weight", side="right",
        cast="e4m3 group(128)", amax=12345.0, saturated=0.5, underflown=0.25, sqnr=12.34,
    )  # fmt: skip
    lines = statistics_text([short, long]).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[3].startswith("…j+k_proj+v_proj) grad_weight right e4m3 group(128)")
    assert lines[3].split()[-9:] == ["1.2e+04", "25.0%", "50.0%", "30.0", "30.0", "30.0", "-", "30.0", "30.0"]
    assert lines[4].startswith("(the model itself) output left")


def test_delayed_scales_are_told(tmp_path: Path):
    recipe = {"base": "mixed", "output": {"left": {"granularity": "tensor", "delayed": True}}}
    watched = fp8compile.watch(nn.Linear(32, 16), options={**ALL, "recipe": recipe})
    watched(torch.randn(16, 32)).sum().backward()
    casts = {(row.role, row.side): (row.cast, row.delayed) for row in watched.statistics.rows()}
    assert casts == {
        ("output", "left"): ("e4m3 tensor", 16),
        ("output", "right"): ("e4m3 tensor", 0),
        ("grad_weight", "left"): ("e4m3 tensor", 0),
        ("grad_weight", "right"): ("e4m3 tensor", 0),
    }
    lines = str(watched.statistics).splitlines()
    (told,) = [line for line in lines if "e4m3 tensor delayed(16)" in line]
    assert "output left" in told
    assert max(map(len, lines)) <= 120
    watched.statistics.save(tmp_path / "s.json")
    assert fp8compile.Statistics.load(tmp_path / "s.json").rows() == watched.statistics.rows()


@pytest.mark.parametrize("recipe", ["mixed", "rowwise", "blockwise"])
def test_sizes_that_are_padded_and_change(recipe: str):
    """20, 12 and 7 features, 5 to 19 rows: casts are padded to multiples of 16, of which nothing is seen here."""
    model = nn.Sequential(nn.Linear(20, 12), nn.Linear(12, 7))
    watched = fp8compile.watch(model, options={**ALL, "recipe": recipe})
    batches = [torch.randn(n, 20) * 2.0**n for n in (5, 19, 7)]
    for batch in batches:
        watched(batch).sum().backward()
    rows = watched.statistics.rows()
    assert {(row.steps, row.skipped, row.saturated) for row in rows} == {(3, 0, 0.0)}
    first = next(row for row in rows if (row.path, row.role, row.side) == ("0", "output", "left"))
    assert first.amax == max(batch.abs().max() for batch in batches)
    signal = sum(batch.double().square().sum() for batch in batches)
    noise = sum((batch - rounded(batch, "e4m3 row")).double().square().sum() for batch in batches)
    assert first.what_if["e4m3 row"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


def test_a_sample_in_training(monkeypatch):
    """A quarter of the rows: amax is that of all elements, the rest that of the sample."""
    monkeypatch.setattr(cast_losses, "SAMPLE", 64 * 48 // 4)
    watched, operands = trained(recipe="tensorwise")
    rows = {(row.role, row.side): row for row in watched.statistics.rows()}
    x = operands["output", "left"]
    noise, signal = ((x - rounded(x, "e4m3 tensor"))[2::5].double().square().sum(), x[2::5].double().square().sum())
    assert rows["output", "left"].sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)
    for key, operand in operands.items():
        assert rows[key].amax == operand.abs().max().item()
