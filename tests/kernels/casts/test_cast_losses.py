"""What is measured of casts: samples against a computation by hand, and the Triton kernels against plain torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator, as a launch does

from fp8compile.formats import parse_granularity
from fp8compile.kernels.casts import cast_losses, measure_casts
from fp8compile.kernels.casts.cast_losses import PLAIN, Kernels, measure
from fp8compile.kernels.casts.loss_sums import LINE, ROW, SUMS
from fp8compile.kernels.reference import markers

interpreted = pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_watching.py runs it compiled")
CASTS = ["e4m3 tensor", "e5m2 tensor", "e4m3 row", "e4m3 group(16)", "e4m3 group(128)", "e4m3 block(128)"]


def uneven(*shape: int) -> Tensor:
    """Normal numbers, with rows, columns and matrices of very different sizes."""
    x = torch.randn(shape)
    for dim in range(len(shape)):
        x = x * torch.randn([n if d == dim else 1 for d, n in enumerate(shape)]).exp()
    return x


def scale_of(x: Tensor, cast: str, transpose: bool = False) -> Tensor:
    format, granularity = cast.split(" ")
    return markers.scale(markers.amax(x, granularity, transpose), format)


def named(sums: Tensor) -> dict[str, float]:
    return dict(zip(SUMS, sums.tolist(), strict=False))


def all_kernels() -> Kernels:
    interpreter.prepare()
    return Kernels(measure_casts.extremes, measure_casts.line_sums)


# ---- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_sample_is_measured_as_if_there_were_no_more(monkeypatch, batch: tuple[int, ...], cast: str, transpose: bool):
    """Rows at the first odd distance that leaves no more than asked for (of blocks: rows of blocks)."""
    shape = (256, 1408) if transpose else (1408, 256)
    x = uneven(*batch, *shape).bfloat16()
    scale = scale_of(x, cast, transpose)
    height = 128 if "block" in cast else 1
    rows = x.mT if transpose else x
    kept = rows.unflatten(-2, (-1, height))[..., 2::5, :, :].flatten(-3, -2).contiguous()
    of_kept = scale if "tensor" in cast else scale[..., 2::5, :]
    monkeypatch.setattr(cast_losses, "SAMPLE", x.numel() // 4)
    got = measure(scale, [x], cast, transpose)
    monkeypatch.setattr(cast_losses, "SAMPLE", x.numel())
    largest = x.abs().max()
    extremes = lambda *_: (largest.float(), torch.tensor(0))  # noqa: E731
    wanted = measure(of_kept, [kept], cast, False, Kernels(extremes, PLAIN.line_sums))
    assert named(got)["amax"] == largest
    assert named(got)["elements"] == (x.numel() if "tensor" in cast else kept.numel())
    rest = [i for i in range(len(got)) if i != SUMS.index("elements")]
    torch.testing.assert_close(got[rest], wanted[rest], rtol=1e-12, atol=0)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_a_sample_says_what_all_elements_say(monkeypatch, cast: str, transpose: bool):
    """2^16 of 2^20 normal numbers. The noise of a cast, relative to its mean, has a variance below 4 (a number of
    normal size is off by anything up to half a step, a large one by more): 5 · √(4 / 2^16) = 4 %, with the signal's
    2 % less than 0.3 dB."""
    x = torch.randn(1024, 1024)
    scale = scale_of(x, cast, transpose)
    whole = named(measure(scale, [x], cast, transpose))
    monkeypatch.setattr(cast_losses, "SAMPLE", 1 << 16)
    some = named(measure(scale, [x], cast, transpose))
    assert some["amax"] == whole["amax"]
    assert some["nonzero"] < whole["nonzero"] / 4
    for noise in LINE[:-1]:
        ratios = [s["signal"] / s[noise] for s in (some, whole)]
        assert 10 * torch.tensor(ratios).log10().diff().abs().item() < 0.3, noise


@pytest.mark.parametrize("transpose", [False, True])
def test_amax_and_saturation_are_exact(monkeypatch, transpose: bool):
    """Elements above a delayed scale, one of which is in no row that is sampled."""
    monkeypatch.setattr(cast_losses, "SAMPLE", 64)
    x = torch.ones(100, 90)
    x[0, 0], x[99, 89], x[40, 40] = -1000.0, 465.0, 463.0
    sums = named(measure(torch.ones(()), [x, -x], "e4m3 tensor", transpose))
    assert (sums["amax"], sums["saturated"], sums["elements"]) == (1000.0, 4.0, 2 * 9000.0)
    assert sums["above"] == 0  # of what was sampled
    assert sums["nonzero"] <= 64 + 2 * 100


def test_tokens_that_come_again_and_again_are_not_all_of_the_sample():
    """The first token of each sequence, a thousand times the others: no more of the sample than of the whole."""
    x = torch.ones(4 * 4096, 128)
    x[::4096] = 1000.0
    for every in (2, 16, 64, 128):
        kept, _ = cast_losses.sample(x, torch.ones(()), parse_granularity("tensor"), every)
        assert kept.shape[1] >= 0.9 * len(x) / (every + 1)
        assert (kept[0, :, 0] == 1000.0).sum() <= 4


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("shape", [(1, 5000), (5000, 1), (4000, 3, 7), (3, 2, 130, 129), (2, 300, 1)])
def test_samples_are_bounded(monkeypatch, shape: tuple[int, ...], cast: str):
    """Few rows, many matrices: never more than asked for, or one row where it is more than that (of blocks: with the
    rows that are left over below it)."""
    monkeypatch.setattr(cast_losses, "SAMPLE", 1024)
    x = uneven(*shape)
    sums = named(measure(scale_of(x, cast), [x], cast, False))
    one = shape[-1] * (min(255, shape[-2]) if "block" in cast else 1)
    assert 0 < sums["nonzero"] <= max(1024, one)
    assert sums["amax"] == x.abs().max()


def test_repeated_and_strided_elements(monkeypatch):
    monkeypatch.setattr(cast_losses, "SAMPLE", 512)
    wide = uneven(64, 200)
    for x in (wide[:, ::2], wide.t(), wide[::3, 1:], wide[:1].expand(64, 200), wide[:, :1].expand(64, 200)):
        for cast in CASTS:
            ours, plain = (measure(scale_of(t, cast), [t], cast, False) for t in (x, x.contiguous()))
            assert torch.equal(ours, plain), cast


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 3, 4)])
def test_nothing_has_no_error(shape: tuple[int, ...]):
    for cast in CASTS:
        x = torch.empty(shape)
        sums = measure(scale_of(x, cast), [x], cast, False)
        assert sums.tolist() == [1.0] + [0.0] * (len(sums) - 1)
        assert torch.equal(measure(scale_of(x, cast), [x, torch.empty(shape)], cast, True), sums)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_is_skipped_even_if_it_is_not_sampled(monkeypatch, bad: float):
    monkeypatch.setattr(cast_losses, "SAMPLE", 64)
    x = torch.ones(100, 90)
    x[0, 0] = bad
    for cast in CASTS:
        sums = measure(scale_of(x, cast), [x], cast, False)
        assert sums.tolist() == [0.0, 1.0] + [0.0] * (len(sums) - 2)


def test_without_a_scale_it_is_the_current_one():
    x = [uneven(20, 30), uneven(20, 30)]
    scale = markers.scale(torch.stack(x).abs().amax(), "e4m3")
    assert torch.equal(measure(None, x, "e4m3 tensor", True), measure(scale, x, "e4m3 tensor", True))


# ---- kernels --------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.parametrize("cast", [*CASTS, "e5m2 row", "e5m2 group(32)"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 70, 300), torch.bfloat16), ((2, 5, 129), torch.float16), ((3, 1, 16), torch.float32)],
)
def test_sums_of_lines_are_those_of_plain_torch(shape: tuple[int, int, int], dtype: torch.dtype, cast: str):
    """Each value is the same; sums of at most 128 positive FP32 numbers are 7 · 2^-24 off, in a tree, and of 64 in
    a tree of blocks less than 128 · 2^-24."""
    x = (uneven(*shape) * torch.randn(shape).mul(3).exp()).clamp(-6e4, 6e4).to(dtype)
    x[0, 0, -1] = 0
    x = x.permute(1, 2, 0).contiguous().permute(2, 0, 1)  # as a sample of a transposed tensor may lie
    scale = 0.7 * scale_of(x, cast)  # some saturate
    scale = scale.reshape(-1, *(scale.shape[-2:] or (1, 1)))
    largest = 2 * x.abs().amax().float()
    ours, plain = (kernels.line_sums(x, scale, cast, largest) for kernels in (all_kernels(), PLAIN))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2.0**-17, atol=0)
    assert torch.equal(ours[0][len(LINE) :], plain[0][len(LINE) :])  # counts
    assert plain[0][ROW.index("above")].sum() > 0


@triton.jit
def cast_all(x, scale, y, count, E5M2: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < count, other=0.0)
    tl.store(y + place, measure_casts.cast(value, tl.load(scale), E5M2), mask=place < count)


@interpreted
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_all_numbers_are_rounded_as_torch_does(scale: float, format: str):
    """Every BF16 number, and those in FP32 that are next to where two FP8 numbers are as near."""
    interpreter.prepare()
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    halves = torch.cat([torch.arange(-4096, 4096) * 2.0**-10, torch.arange(-4096, 4096) * 2.0**-17])
    x = torch.cat(
        [numbers[numbers.isfinite()].float(), halves, halves.nextafter(halves + 1), halves.nextafter(-halves)]
    )
    y, of = torch.empty_like(x), torch.tensor(scale)
    kernel: Any = cast_all
    kernel[(1,)](x, of, y, len(x), E5M2=format == "e5m2", BLOCK=1 << 17)
    assert torch.equal(y, markers.quantize(x[None], of, format, "tensor")[0].float())


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extremes_are_those_of_plain_torch(dtype: torch.dtype):
    wide = (1e3 * uneven(70, 300)).to(dtype)
    tensors = [wide, wide[:, ::2], wide.t(), wide[:1].expand(64, 300), torch.zeros(1, 1, dtype=dtype)]
    for bad in (0.0, torch.inf, torch.nan):
        tensors[-1].fill_(bad)
        for scale in (None, torch.tensor(0.25)):
            ours, plain = (kernels.extremes(tensors, scale, "e4m3") for kernels in (all_kernels(), PLAIN))
            torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=0, equal_nan=True)
            assert ours[1] == plain[1]
            assert (ours[1] > 0) == (scale is not None)


@interpreted
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("cast", CASTS)
def test_measured_with_kernels_or_in_plain_torch(monkeypatch, cast: str, transpose: bool):
    monkeypatch.setattr(cast_losses, "SAMPLE", 8192)
    x = [uneven(2, 260, 140), uneven(2, 260, 140)]
    scale = torch.maximum(*(scale_of(t, cast, transpose) for t in x))
    ours, plain = (measure(scale, x, cast, transpose, kernels) for kernels in (all_kernels(), PLAIN))
    torch.testing.assert_close(ours, plain, rtol=2.0**-17, atol=0)


class Launches(TorchDispatchMode):
    """Counts operators that launch something: all but views and empty tensors."""

    FREE = ("view", "transpose", "select", "slice", "permute", "empty", "unflatten", "unsqueeze", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0].strip("_")
        if name not in self.FREE:
            self.counts[name] += 1
        return func(*args, **kwargs or {})


class Launched:
    """Stands for a kernel: counts its launches."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return lambda *args, **options: None


@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_takes_few_launches(monkeypatch, cast: str):
    """Two kernels and 21 small ones, 22 with blocks, which are copied; ten times as many would be the whole cost."""
    kernel = Launched()
    monkeypatch.setattr(measure_casts, "find_extremes", kernel)
    monkeypatch.setattr(measure_casts, "add_lines", kernel)
    monkeypatch.setattr(cast_losses, "SAMPLE", 1 << 14)
    x = torch.randn(512, 512)
    scale = scale_of(x, cast)
    with Launches() as small:
        measure(scale, [x], cast, False, Kernels(measure_casts.extremes, measure_casts.line_sums))
    assert kernel.count == 2
    assert small.counts.total() <= 21 + ("block" in cast), small.counts
