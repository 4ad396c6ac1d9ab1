"""Generated kernels on the GPU against the reference on the GPU: random regions, casts in two layouts, special values.

Kernels take up to a second to compile, so a draw is tried with all its sizes and several sets of data, and chunks are
tests of their own, to be spread over processes (`pytest -n 6`). A failure names its seed: `regions.failures(seed, …)`.
"""

from __future__ import annotations

import casts
import pytest
import regions
import torch
from casts import GRANULARITIES, INF, NAN, Cast

from fp8compile.formats import FORMATS
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.reference import region_reference
from fp8compile.passes.regions.sum_pieces import sum_of

pytestmark = pytest.mark.gpu

CHUNKS, SEEDS, DATA = 64, 8, 8  # 512 kernels, each with 1 to 3 shapes and 8 sets of data: over 6,000 trials
LARGE_CHUNKS, LARGE_SEEDS = 16, 4
TILES = [(16, 64), (16, 256), (32, 32), (32, 128), (64, 16), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128),
         (8, 256), (8, 512)]  # fmt: skip
LAUNCHES = 20


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_agrees_with_reference(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        wrong = regions.failures(seed, "cuda", "cuda", data_seeds=DATA)
        assert not wrong, wrong


@pytest.mark.parametrize("chunk", range(LARGE_CHUNKS))
def test_agrees_with_reference_on_larger_shapes(chunk: int) -> None:
    for seed in range(10_000 + chunk * LARGE_SEEDS, 10_000 + (chunk + 1) * LARGE_SEEDS):
        wrong = regions.failures(seed, "cuda", "cuda", data_seeds=2, large=True, walkers=132)
        assert not wrong, wrong


@pytest.mark.parametrize("chunk", range(LARGE_CHUNKS))
@pytest.mark.parametrize("how", ["images", "partials_twice", "side_by_side"])
def test_agrees_with_reference_where_rows_share_values_buffers_sums_or_columns_are_apart(how: str, chunk: int) -> None:
    for seed in range(20_000 + chunk * LARGE_SEEDS, 20_000 + (chunk + 1) * LARGE_SEEDS):
        wrong = regions.failures(seed, "cuda", "cuda", data_seeds=DATA, **{how: True})
        assert not wrong, wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(264, 4096), (132, 1280), (2, 257), (1024, 96), (64, 4, 768), (3, 33, 100)])
def test_sums_of_pieces(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    region = sum_of(shape, dtype)
    schedule = choose_schedule.choose(region)
    kernel = generated.kernel_of(region, schedule, "cuda")
    for seed in range(DATA):
        assert (
            check_kernel.check(kernel, region, schedule, check_kernel.random_inputs(region, [], seed, "cuda"), []) == []
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("rows", [4096, 4095])
def test_large_casts(format: str, granularity: str, rows: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 4096, device="cuda", generator=generator).bfloat16()
    codes, transposed, _ = casts.run(Cast(format, granularity, rows, 4096, "bfloat16", 16), x)
    assert torch.equal(codes, transposed)


# ---- the two layouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", ["tensor", "row", "group(16)", "col_group(32)", "block(16)"])
def test_both_layouts_hold_the_bytes_of_the_reference(tile: tuple[int, int], format: str, granularity: str) -> None:
    """Every tile shape, whole and in quarters, 20 launches with other data each: payload, transposed payload and scale,
    byte for byte. (ptxas 12.8 miscompiled Triton's own cast where it is stored twice: triton-lang/triton#11111.)"""
    cast = Cast(format, granularity, 250, 520, "bfloat16", 16)
    region = cast.region()
    generator = torch.Generator("cuda").manual_seed(0)
    for warps, in_quarters in ((4, False), (8, False), (4, True), (8, True)):
        schedule = casts.tiled(cast, *tile, warps, in_quarters)
        for launch in range(LAUNCHES // 2):
            x = torch.randn(250, 520, device="cuda", generator=generator).mul(2.0 ** (launch - 5)).bfloat16()
            inputs = cast.inputs(x)
            buffers = generated.launch(region, schedule, inputs, [])
            expected = region_reference.run(region, schedule, inputs, [])
            for actual, wanted in zip(buffers, expected, strict=True):
                assert torch.equal(actual.view(torch.uint8), wanted.view(torch.uint8)), (warps, in_quarters, launch)


# ---- special values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", [*GRANULARITIES, "given"])
def test_codes(format: str, granularity: str) -> None:
    numbers, expected = casts.table(format)
    codes, transposed, scale = casts.run(Cast(format, granularity), casts.diagonals(numbers).cuda())
    assert (scale == 1).all()
    assert torch.equal(codes, casts.diagonals(expected).to(torch.uint8))
    assert torch.equal(transposed, codes)


@pytest.mark.parametrize("format", FORMATS)
def test_beyond_the_maximum_saturates(format: str) -> None:
    known = casts.BEYOND[format]
    codes, transposed, _ = casts.run(Cast(format, "given"), casts.diagonals(list(known)).cuda())
    expected = casts.diagonals(list(known.values())).to(torch.uint8)
    assert casts.same_codes(codes, expected, format)
    assert casts.same_codes(transposed, expected, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_non_finite_spoils_what_shares_its_scale_and_nothing_else(format: str, granularity: str, bad: float) -> None:
    cast = Cast(format, granularity)
    x = casts.diagonals(casts.table(format)[0])
    x[5, 7] = bad
    codes, transposed, scale = casts.run(cast, x.cuda())
    expected = casts.spoiled(cast, x, 5, 7)
    assert casts.same_codes(codes, expected, format)
    assert casts.same_codes(transposed, expected, format)
    assert int((~scale.isfinite()).sum()) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_every_16_bit_number(dtype: torch.dtype, format: str, granularity: str) -> None:
    every = torch.arange(2**16).to(torch.uint16).view(dtype)
    x = every[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))].reshape(256, 256).cuda()
    name = str(dtype).removeprefix("torch.")
    casts.run(Cast(format, granularity, 256, 256, name), x)  # compares with the reference
    casts.run(Cast(format, granularity, 256, 256, name), x.nan_to_num(0.0, 0.0, 0.0))


def test_main_checks_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    region = Cast("e4m3", "row").region()
    schedule = casts.tiled(Cast("e4m3", "row"), 16, 256)
    with pytest.raises(SystemExit) as end:
        check_kernel.main(generated.kernel_of(region, schedule), region.to_json(), schedule.to_json())
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    assert printed.startswith("ok\n")
    assert "GB/s" in printed
