"""The fuzzer: some of its models on every run, and that it finds what is planted and makes it small."""

from __future__ import annotations

import copy
import json
import math
import random
import runpy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from torch import Tensor, nn

from fp8compile.kernels.codegen.spec.operations import OPERATIONS
from fp8compile.kernels.codegen.spec.region import Part
from fp8compile.kernels.reference import markers
from fp8compile.passes.lower import verify_kernels
from tests.fuzz import judge as judging
from tests.fuzz import run
from tests.fuzz.bounds import References, noise, wrong
from tests.fuzz.draw import draw
from tests.fuzz.judge import OK, SKIPPED, Settings, Verdict, judge
from tests.fuzz.rounded import rounding
from tests.fuzz.shrink import manner, script, shrink, simpler_ones
from tests.fuzz.source import source
from tests.fuzz.spec import Output, Spec, Step, from_json
from tests.fuzz.stepping import WAYS, Subject, imported
from tests.fuzz.writer import KINDS

# All kinds of steps that the first 14 have, each precision, recipe and option.
SEEDS, INTERPRETED = (2, 3, 4, 6, 7, 9, 12), (1, 14, 30, 34, 41)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models(seed: int) -> None:
    verdict = judge(draw(seed), Settings())
    assert verdict.status == OK, (seed, verdict.reasons)


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("seed", INTERPRETED)
def test_random_models_with_interpreted_kernels(seed: int) -> None:
    interpreter.prepare()
    verdict = judge(draw(seed), Settings(kernels="interpreter"))
    assert verdict.status == OK, (seed, verdict.reasons)
    assert verdict.kernels or not verdict.matmuls


# ---- what is drawn --------------------------------------------------------------------------------------------------


def test_a_seed_makes_the_same_model_again() -> None:
    assert draw(7) == draw(7)
    assert source(draw(7)) == source(draw(7))
    assert len({source(draw(seed)) for seed in range(50)}) == 50


def test_specs_survive_being_written() -> None:
    for seed in range(50):
        assert from_json(draw(seed).to_json()) == draw(seed)


def test_every_kind_size_and_option_is_drawn() -> None:
    specs = [draw(seed) for seed in range(1500)]
    assert {step.kind for spec in specs for step in spec.steps} == set(KINDS)
    assert {1, 2, 3, 7, 17} <= {spec.batch for spec in specs}
    assert {1, 2, 8, 17, 24, 100, 129, 136, 200} <= {spec.width for spec in specs}
    assert {"bf16", "autocast", "fp32"} == {spec.precision for spec in specs}
    assert {"all", "profitable"} == {spec.options["select"] for spec in specs}
    assert any(spec.rows >= 1000 for spec in specs)
    assert any("skip" in spec.options for spec in specs)
    assert any(step.checkpoint for spec in specs for step in spec.steps)
    assert any(step.frozen for spec in specs for step in spec.steps)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_takes_any_width(kind: str) -> None:
    """So that a spec stays valid whatever is taken away from it."""
    for width, length, batch in ((1, 3, 1), (17, 1, 2), (8, 4, 3)):
        base = Spec(width=width, length=length, batch=batch, precision="fp32")
        for seed in range(4):
            inputs = (0, 1)[: KINDS[kind].arity]
            first = Step("linear", (0,), {"out": 5, "bias": True})
            step = Step(kind, tuple(reversed(inputs)), KINDS[kind].draw(random.Random(seed), base))
            spec = replace(base, steps=(first, step), outputs=(replace(base.outputs[0], value=2),))
            with imported(source(spec)) as module, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = Subject(module, "cpu", 0).eager(0)
            assert found["loss"].isfinite(), (kind, width, length, step.params)


@pytest.mark.parametrize("seed", range(6))
def test_every_simpler_model_is_a_model(seed: int) -> None:
    specs = list(simpler_ones(draw(seed)))
    assert specs
    for spec in specs:
        with imported(source(spec)) as module, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = Subject(module, "cpu", 0).eager(0)
        assert found["loss"].isfinite(), spec


# ---- what is planted is found ---------------------------------------------------------------------------------------


def _no_padding(patch: pytest.MonkeyPatch) -> None:
    """Zeros behind the only row or column are not written."""
    patch.setattr(Part, "stored_extent", lambda self, store: self.extents[store.value])


def _no_padding_unverified(patch: pytest.MonkeyPatch) -> None:
    """The same, and nobody looks whether stores fill their buffers."""
    _no_padding(patch)
    patch.setattr(verify_kernels, "unwritten", lambda *_: "")


def _wrong_sum(patch: pytest.MonkeyPatch) -> None:
    """A region's sums count their second summand an eighth too much."""
    patch.setitem(OPERATIONS, "add", replace(OPERATIONS["add"], torch=lambda x, y: x + 1.125 * y))


def _half_of_rows(patch: pytest.MonkeyPatch) -> None:
    """Matmuls take half of the scales of rows, whoever made the payloads."""
    right = markers.scaled_mm

    def wrong(a: Any, scale_a: Any, granularity_a: str, *rest: Any) -> Any:
        return right(a, scale_a * (0.5 if granularity_a == "row" else 1), granularity_a, *rest)

    patch.setattr(markers, "scaled_mm", wrong)


ONE_FEATURE = Spec(
    batch=2,
    width=48,
    steps=(Step("linear", (0,), {"out": 1, "bias": True}),),
    outputs=(Output(1),),
    options={"select": "all", "recipe": "rowwise", "save_min_bytes": 0},
)
THREE_LINEARS = Spec(
    batch=32,
    width=48,
    steps=tuple(Step("linear", (i,), {"out": out, "bias": True}) for i, out in enumerate((32, 48, 64))),
    outputs=(Output(3),),
    options={"select": "all", "recipe": "rowwise"},
)

# How it shows, and a model that shows it, or the seed of one: of those before 70 one that takes little time.
PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, int | Spec]] = {
    "no padding": (_no_padding, "generated VerificationError", ONE_FEATURE),  # the verifier sees it first
    "no padding, unverified": (_no_padding_unverified, "generated not finite", ONE_FEATURE),
    "wrong sum": (_wrong_sum, "generated apart", 41),
    "half of rows": (_half_of_rows, "inductor off", THREE_LINEARS),
}


@pytest.mark.parametrize("name", list(PLANTED))
def test_what_is_planted_is_found_and_made_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, expected, shown_by = PLANTED[name]
    spec = shown_by if isinstance(shown_by, Spec) else draw(shown_by)
    with monkeypatch.context() as patch:
        plant(patch)
        small, verdict = shrink(spec, lambda s: judge(s, Settings()), most=3 if len(spec.steps) > 1 else 2)
        assert expected in manner(verdict), verdict.reasons
        assert len(small.steps) <= 2
    assert judge(small, Settings()).status == OK  # without what was planted


def test_a_shrunk_model_is_a_script_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = Step("linear", (0,), {"out": 1, "bias": True})
    spec = Spec(steps=(step,), outputs=(Output(1),), options={"select": "all"})
    text = script(spec, Verdict(0, reasons=["generated: an example"]), Settings(), WAYS["generated"])
    path = tmp_path / "seed0.py"
    path.write_text(text)
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "layer1.weight: " in printed
    assert "0 of 16 not finite" in printed


def test_what_torch_compile_has_wrong_is_not_ours() -> None:
    """Eager counts the rows of a checkpointed BatchNorm twice, compiled code once."""
    steps = (Step("linear", (0,), {"out": 8, "bias": True}), Step("norm", (1,), {"how": "batch", "groups": 1}, True))
    spec = Spec(batch=32, steps=steps, outputs=(Output(2),), options={"select": "all"})
    with imported(source(spec)) as module:
        subject = Subject(module, "cpu", 0)
        eager, traced = subject.eager(0), subject.traced(0)
        assert noise(eager["layer2.running_mean"], traced["layer2.running_mean"]) > 0.1
    assert judge(spec, Settings()).status == OK


def test_what_torch_compile_makes_is_found_where_a_view_is_none() -> None:
    """Attention's gradient lies otherwise than its fake, so that torch's own `aot_eager` raises at a view of it."""
    heads = {"heads": 3, "shared": 1, "dim": 16, "out": 100, "mask": "causal", "by_hand": False, "merged": True}
    steps = (
        Step("on_sequence", (0,), {"which": 0}),
        Step("attention", (1,), {**heads, "bias": True, "rotary": False}),
    )
    spec = Spec(
        batch=2,
        length=3,
        width=24,
        start="patches",
        precision="bf16",
        steps=steps,
        outputs=(Output(2, view="expanded", loss="mse", upcast=True),),
        options={"select": "all"},
    )
    with imported(source(spec)) as module:
        subject = Subject(module, "cpu", 93)
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            subject.traced(0, backend="aot_eager")
        eager, traced = subject.eager(0), subject.traced(0)
        assert noise(eager["loss"], traced["loss"]) < 1e-3


@dataclass
class _TracedAlone:
    """A subject of which torch.compile without this backend makes given steps."""

    by_aot: Tensor
    by_inductor: Tensor

    def traced(self, data: int, backend: Any = "aot_eager") -> dict[str, Tensor]:
        return {"w": self.by_inductor if backend == "inductor" else self.by_aot}


@pytest.mark.parametrize(
    ("alone", "ours", "is_ours"),
    [("off", "the same", False), ("off", "elsewhere", True), ("right", "off", True)],
)
def test_what_inductor_has_wrong_is_ours_unless_it_is_the_same(alone: str, ours: str, is_ours: bool) -> None:
    """Of a step through Inductor a mismatch is excused only where Inductor alone has it, and nearly the same one."""
    torch.manual_seed(0)
    exact = torch.randn(4096, dtype=torch.float64)
    rounded = exact.float().bfloat16()
    error = torch.randn(4096, dtype=torch.float64)
    in_fp8 = exact + 0.05 * torch.randn(4096, dtype=torch.float64)
    references = References({"w": exact}, {"w": rounded}, [{"w": in_fp8}], is_wide=False)
    by_inductor = (exact + 0.8 * error).bfloat16() if alone == "off" else rounded
    elsewhere, off = (exact - 0.8 * error).bfloat16(), (exact + 0.8 * error).bfloat16()
    by_us = {"the same": by_inductor, "elsewhere": elsewhere, "off": off}[ours]
    subject: Any = _TracedAlone(rounded, by_inductor)
    steps = {"inductor, compiled": {"w": by_us}}
    found = wrong(references, steps)
    assert list(found) == ["inductor, compiled w"]
    assert bool(judging._ours(subject, references, found, steps)) is is_ours


def test_a_mismatch_near_an_inductor_that_is_right_is_ours() -> None:
    """Apart from our other way by more than two ways may be, near enough to FP64 for FP8, and to Inductor alone."""
    torch.manual_seed(0)
    exact = torch.randn(4096, dtype=torch.float64)
    rounded = exact.float().bfloat16()
    in_fp8 = exact + 0.05 * torch.randn(4096, dtype=torch.float64)
    references = References({"w": exact}, {"w": rounded}, [{"w": in_fp8}], is_wide=False)
    share = 1.5 * references.between("w")
    assert share < references.against_exact("w")
    by_us = (exact + math.sqrt(share) * torch.randn(4096, dtype=torch.float64)).bfloat16()
    subject: Any = _TracedAlone(rounded, rounded)
    steps = {"inductor": {"w": rounded}, "generated, compiled": {"w": by_us}}
    found = wrong(references, steps)
    assert list(found) == ["generated, compiled w apart"]
    assert judging._ours(subject, references, found, steps) == found


SHIFTED = Spec(  # a model whose logits are all shifted by one parameter, and of which no matmul is in FP8
    seed=3990,
    batch=129,
    width=300,
    precision="fp32",
    steps=(
        Step("linear", (0,), {"out": 2, "bias": True}),
        Step("tied", (0,), {"which": 5}),
        Step("norm", (2,), {"how": "group", "groups": 8}),
        Step("scaled", (3,), {"of_row": False}),
    ),
    outputs=(Output(4, "plain", "smoothed", True), Output(2, "half", "square", True)),
    options={"recipe": "mixed", "select": "all", "save_min_bytes": 0, "save": "bf16", "skip": ["layer4*"]},
)


def test_the_exact_step_is_exact_where_a_model_asks_for_fp32() -> None:
    """A shift of all logits has no gradient: what FP32 leaves of it is rounding, and no reference."""
    text = source(SHIFTED)
    assert "out0.float()" in text
    with imported(text) as module:
        step = Subject(module, "cpu", 3990).eager(0, exact=True)
    assert step["layer4b"].dtype == torch.float64
    assert step["layer4b"].abs().item() < 1e-14


def test_other_data_comes_with_other_weights_for_all_ways_alike() -> None:
    """A weight between two codes, in every step the same, would come again with any data."""
    with imported(source(SHIFTED)) as module:
        subject = Subject(module, "cpu", 3990)  # no matmul of it is in FP8
        other = subject.eager(1)
        compiled = [subject.compiled(way, dict(module.OPTIONS))(1) for way in ("inductor", "generated")]
    for step in compiled:
        torch.testing.assert_close(step["output 0"], other["output 0"])
    model = copy.deepcopy(subject.model)
    subject._draw_weights(model, 1)
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), subject.model.parameters(), strict=True))
    subject._draw_weights(model, 0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), subject.model.parameters(), strict=True))


def test_weights_of_blocks_are_rounded_with_a_scale_for_all() -> None:
    """The gradient of an input through Linear(17, 1) contracts one number: rows of one would lose nothing."""
    weight, gradient = torch.linspace(0.1, 0.9, 17)[None], torch.ones(7, 1)
    with rounding(nn.Linear(1, 1), {"recipe": "blockwise", "save": "bf16"}, headroom=1.0):
        by_block = gradient @ weight
    with rounding(nn.Linear(1, 1), {"recipe": "rowwise", "save": "bf16"}, headroom=1.0):
        by_row = gradient @ weight
    assert not torch.equal(by_block, gradient @ weight)
    torch.testing.assert_close(by_row, gradient @ weight)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_resumes_and_replaces_a_process_that_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three models the first is known; the process of the second is killed, which is a failure."""
    ask = run.Worker.ask

    def and_kill(worker: run.Worker, spec: Spec, compiled: bool) -> None:
        ask(worker, spec, compiled)
        if spec.seed == 8:
            worker.process.kill()

    monkeypatch.setattr(run.Worker, "ask", and_kill)
    out = tmp_path / "models.jsonl"
    known = Verdict(7, seconds=1.0, kinds=["linear"])
    out.write_text(json.dumps(vars(known)) + "\n")
    assert run.main(["--models", "3", "--seed", "7", "--out", str(out), "--shrink", "0"]) == 1
    verdicts = [Verdict(**json.loads(line)) for line in out.read_text().splitlines()]
    assert [verdict.seed for verdict in verdicts] == [7, 8, 9]
    assert verdicts[1].is_failure
    assert verdicts[1].reasons == ["process: died with -9"]
    assert verdicts[2].status == OK
    printed = capsys.readouterr().out
    assert "2 models, 1 known" in printed
    assert "3 models: 2 ok" in printed


def test_a_summary_tells_what_was_skipped() -> None:
    verdicts: list[Any] = [Verdict(0, SKIPPED, ["eager: RuntimeError: no"]), Verdict(1, OK, seconds=2.0)]
    assert "1 skipped" in run.summary(verdicts, 3.0, 1)
    assert "skipped 1:  RuntimeError" in run.summary(verdicts, 3.0, 1)


def test_noise_is_infinite_where_numbers_are_not_finite() -> None:
    assert noise(torch.ones(2), torch.tensor([1.0, float("nan")])) == float("inf")
    assert noise(torch.zeros(2), torch.ones(2)) == float("inf")
    assert noise(torch.ones(4), torch.full((4,), 1.1)) == pytest.approx(0.01, rel=1e-5)
