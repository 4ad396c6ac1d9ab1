"""Casts in one pass: what kernels make of a predicted scale, and of a prediction that is wrong."""

from __future__ import annotations

from dataclasses import replace

import interpreter
import one_pass_casts
import pytest
import torch
from one_pass_casts import CASES

from fp8compile.formats import FORMATS
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule, one_pass
from fp8compile.kernels.codegen.spec.region import Input, Part, Store, Value
from fp8compile.kernels.reference import markers
from fp8compile.kernels.reference.region_reference import Evaluation

interpreted = [
    pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_casts_in_one_pass.py runs it compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities and nan
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp()))
    interpreter.prepare()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", CASES)
class TestKernels:
    pytestmark = interpreted

    @pytest.mark.parametrize(("format", "sums"), [("e4m3", True), ("e5m2", False)])
    def test_they_agree_with_the_reference(self, case: str, format: str, sums: bool) -> None:
        actual, expected = one_pass_casts.run(*CASES[case], "interpreter", format, sums)
        assert all(map(one_pass_casts.equal, actual[:3], expected[:3]))
        if sums:
            torch.testing.assert_close(actual[3].sum(0), expected[3].sum(0), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("kernels")
class TestRepair:
    pytestmark = interpreted

    @pytest.mark.parametrize(("amax", "casts"), [(4.0, False), (0.0, False), (1e4, True), (float("nan"), True)])
    def test_it_casts_only_where_the_prediction_is_wrong(self, amax: float, casts: bool) -> None:
        a, b = CASES["as predicted"]
        region = one_pass_casts.casts_of(*a.shape, 1)
        schedule = one_pass_casts.walking(region)
        repair = one_pass.launches(region, schedule)[1]
        buffers = generated.empty_buffers(region, schedule, [], a)
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0x55)
        sample = torch.full((1,), 4.0 if amax else 0.0)
        pieces = torch.full((schedule.programs,), amax)
        read = [a, b, sample, pieces]
        kernel = generated.kernel_of(repair.region, repair.schedule, "interpreter")
        arguments = [*(read[t] for t in repair.tensors), *(buffers[n] for n in repair.buffers)]
        kernel[(repair.schedule.programs,)](*arguments, num_warps=repair.schedule.warps)
        assert [bool((x.view(torch.uint8) != 0x55).any()) for x in buffers] == [casts, casts, True]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("case", ["as predicted", "sudden growth", "zeros", "inf"])
class TestChecks:
    pytestmark = interpreted

    def test_what_checks_kernels_knows_them(self, case: str) -> None:
        """Of wrong codes, and of a wrong scale, it says so."""
        a, b = CASES[case]
        (pieces,) = generated.launch(
            sample := one_pass_casts.sample_of(*a.shape), choose_schedule.choose(sample), [a, b], [], "interpreter"
        )
        region = one_pass_casts.casts_of(*a.shape, len(pieces))
        schedule, given = one_pass_casts.walking(region), [a, b, pieces]
        buffers = generated.launch(region, schedule, given, [], "interpreter")
        assert check_kernel.compare(region, schedule, given, [], buffers) == []
        buffers[2] *= 2
        assert check_kernel.compare(region, schedule, given, [], buffers) != [] or case == "inf"


@pytest.mark.parametrize("case", CASES)
def test_the_scale_is_the_predicted_one_or_that_of_the_amax(case: str) -> None:
    x = CASES[case][0].float()
    amax, sample = x.abs().amax(), x[8::16].abs().amax()
    predicted, own = markers.predicted_scale(sample, "e4m3"), markers.scale(amax, "e4m3")
    holds = bool(markers.is_predicted(amax, sample, "e4m3"))
    assert holds == (case in ("as predicted", "growth in the sample", "collapse", "largest", "smallest"))
    if holds:
        assert own < predicted <= 16 * own  # nothing saturates, and four binades at most are lost
        assert torch.log2(predicted) % 1 == 0


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_saturates_whatever_was_sampled(format: str) -> None:
    sample = torch.logspace(-44, 38, 500)
    amax = torch.logspace(-44, 38, 501)[:, None]
    limit = FORMATS[format].max
    holds = markers.is_predicted(amax, sample, format)
    ratio = amax / markers.predicted_scale(sample, format)
    assert markers.predicted_scale(torch.zeros(()), format) == 1  # as a scale of zeros is: no repair follows
    assert (ratio[holds] <= limit).all()
    assert holds[(amax >= sample) & (amax <= 7.9 * sample) & (amax > 1e-30)].all()


def test_every_16th_row_is_the_sample() -> None:
    def part(*inputs: Input) -> Part:
        return Part(64, 8, inputs, (Value("load", (), (0,)), Value("all_amax", (0,))), (Store(0, 1),))

    def sampled(*inputs: Input) -> Part:
        found = one_pass.sampled(part(*inputs))
        assert found is not None
        return found

    assert sampled(Input(0, "float32", ((64, 8),), ((8, 1),))).rows == 4
    assert sampled(Input(0, "float32", ((64, 8),), ((8, 1),))).inputs == (
        Input(0, "float32", ((4, 128),), ((8, 1),), 64),
    )
    batched = Input(0, "float32", ((2, 1000), (32, 8)), ((8, 1),), 5)
    assert sampled(batched).inputs == (Input(0, "float32", ((2, 1000), (2, 128)), ((8, 1),), 69),)
    of_columns = Input(0, "float32", (), ((8, 1),))
    assert sampled(of_columns).inputs == (of_columns,)
    assert one_pass.sampled(part(Input(0, "float32", ((8, 1000), (8, 8)), ((8, 1),)))) is None
    x = torch.randn(64, 8)
    sample = sampled(Input(0, "float32", ((64, 8),), ((8, 1),)))
    assert Evaluation(sample, [x], {})[1] == x[8::16].abs().amax()


def test_a_sample_has_every_16th_row_of_each_run() -> None:
    """Rows of one input lie in runs of 37, those of others after each other, or are one for each run."""
    x, y, z = torch.randn(5, 37, 2, 4), torch.randn(185, 8), torch.randn(5, 1)
    inputs = (
        Input(0, "float32", ((5, 37 * 8), (37, 4)), ((2, 37 * 4), (4, 1))),
        Input(1, "float32", ((185, 8),), ((8, 1),)),
        Input(2, "float32", ((5, 1), (37, 0)), ()),
    )
    loads = tuple(Value("load", (), (n,)) for n in range(3))
    values = (*loads, Value("mul", (0, 1)), Value("mul", (3, 2)), Value("all_amax", (4,)))
    sample = one_pass.sampled(Part(185, 8, inputs, values, (Store(0, 5),)))
    assert sample is not None
    assert sample.rows == 5 * 2
    laid_out = x.reshape(5, 2, 37, 4).transpose(1, 2).reshape(5, 37, 8)
    whole = laid_out * y.view(5, 37, 8) * z.view(5, 1, 1)
    found = Evaluation(sample, [x.contiguous(), y, z], {})
    assert torch.equal(found[4].view(5, 2, 8), whole[:, [8, 24]])
    crossed = (Input(0, "float32", ((4, 48), (48, 1)), ()), Input(1, "float32", ((6, 32), (32, 1)), ()))
    values = (*loads[:2], Value("mul", (0, 1)), Value("all_amax", (2,)))
    assert one_pass.sampled(Part(192, 8, crossed, values, (Store(0, 3),))) is None
    assert found[5] == whole[:, [8, 24]].abs().amax()


def test_a_repair_walks_with_few_programs() -> None:
    region = one_pass_casts.casts_of(1 << 14, 4096, 1, sums=True)
    first, repair = one_pass.launches(region, choose_schedule.choose(region))
    assert (first.is_repair, repair.is_repair) == (False, True)
    assert repair.schedule.programs <= one_pass.REPAIRING < first.schedule.programs
    assert repair.buffers == (0, 1, 2)  # both payloads, and the scale
    assert first.buffers == (0, 1, 3, 4)  # both payloads, the sum, and pieces of the amax


@pytest.mark.usefixtures("kernels")
class TestZeros:
    pytestmark = interpreted

    def test_what_else_is_cast_by_the_scale_of_zeros_is_cast_by_the_scale_that_is_stored(self) -> None:
        """No repair casts it again."""
        a, b = CASES["zeros"][0], CASES["as predicted"][0]
        region = one_pass_casts.casts_of(*a.shape, 1)
        (part,) = region.parts
        values = (*part.values, Value("quantize", (1, 8), ("e4m3",)))
        stores = (*part.stores, Store(3, len(values) - 1, lead=part.cols))
        region = replace(
            region, parts=(replace(part, values=values, stores=stores),), buffers=(*region.buffers, region.buffers[0])
        )
        schedule = one_pass_casts.walking(region)
        *_, scale, other = generated.launch(region, schedule, [a, b, torch.zeros(1)], [], "interpreter")
        assert one_pass_casts.equal(other, markers.quantize(b, scale, "e4m3", "tensor"))  # was an eighth of it
