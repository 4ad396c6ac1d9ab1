"""Regions that cast in one pass, for tests: a product in both layouts, with a sum over its rows if that is wanted."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule, one_pass
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.kernels.reference import region_reference

ROWS, COLS = 256, 128
SAMPLED, NOT_SAMPLED = 8 + 16 * 5, 100  # rows
FP8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
PRODUCT = (Value("load", (), (0,)), Value("load", (), (1,)), Value("mul", (0, 1)))


def numbers(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return two factors, of which the second is 1."""
    torch.manual_seed(seed)
    return torch.randn(ROWS, COLS).bfloat16(), torch.ones(ROWS, COLS).bfloat16()


def changed(where: tuple[int, int], to: float) -> tuple[Tensor, Tensor]:
    """Return them with one other element."""
    a, b = numbers()
    a[where] = to
    return a, b


CASES = {
    "as predicted": numbers(),
    "sudden growth": changed((NOT_SAMPLED, 3), 1e4),
    "growth in the sample": changed((SAMPLED, 3), 1e4),
    "collapse": (numbers()[0] * 1e-30, numbers()[1]),
    "inf": changed((NOT_SAMPLED, 3), float("inf")),
    "inf in the sample": changed((SAMPLED, 3), -float("inf")),
    "nan": changed((NOT_SAMPLED, 3), float("nan")),
    "nan in the sample": changed((SAMPLED, 3), float("nan")),
    "zeros": (torch.zeros(ROWS, COLS).bfloat16(), numbers()[1]),
    "only one row": (numbers()[0] * (torch.arange(ROWS) == NOT_SAMPLED)[:, None], numbers()[1]),
    "largest": changed((SAMPLED, 3), 3e38),
    "smallest": (torch.full((ROWS, COLS), 1e-40).bfloat16(), numbers()[1]),
}


def inputs_of(rows: int, cols: int, dtype: str = "bfloat16") -> tuple[Input, ...]:
    """Return the loads of the two factors."""
    return tuple(Input(n, dtype, ((rows, cols),), ((cols, 1),)) for n in range(2))


def sample_of(rows: int, cols: int, dtype: str = "bfloat16") -> Region:
    """Return the region that finds the amax of every 16th row of the product, in pieces."""
    values = (*PRODUCT, Value("all_amax", (2,)))
    part = one_pass.sampled(Part(rows, cols, inputs_of(rows, cols, dtype), values, (Store(0, 3),)))
    assert part is not None
    return Region((part,), (Buffer(("programs0",), "float32"),))


def casts_of(rows: int, cols: int, pieces: int, format: str = "e4m3", sums: bool = False) -> Region:
    """Return the region that casts the product by a scale of its own, transposed and not; `pieces`: of the sample."""
    values = [
        *PRODUCT,
        Value("all_amax", (2,)),
        Value("load_max", (), (2,)),
        Value("scale", (3,), (format,)),
        Value("predicted_scale", (4,), (format,)),
        Value("is_predicted", (3, 4), (format,)),
        Value("where", (7, 6, 5)),
        Value("quantize", (2, 8), (format,)),
    ]
    stores = [Store(0, 9, lead=cols), Store(1, 9, lead=rows, transposed=True), Store(2, 8)]
    buffers = [Buffer((rows, cols), FP8[format]), Buffer((cols, rows), FP8[format]), Buffer((1,), "float32")]
    if sums:
        values.append(Value("col_sum", (2,)))
        stores.append(Store(3, 10))
        buffers.append(Buffer(("row_programs0", cols), "float32"))
    inputs = (*inputs_of(rows, cols), Input(2, "float32", (), ((pieces, 1),)))
    return Region((Part(rows, cols, inputs, tuple(values), tuple(stores)),), tuple(buffers))


def walking(region: Region) -> Schedule:
    """Return a schedule of the region in which programs walk over several tiles, small as it may be."""
    schedule = choose_schedule.choose(region)
    return replace(schedule, tilings=tuple(replace(t, row_programs=1) for t in schedule.tilings))


def run(
    a: Tensor, b: Tensor, target: str, format: str = "e4m3", sums: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the buffers of the casts of a · b (BF16 [rows, cols]) as kernels make them, and as the reference does."""
    rows, cols = a.shape
    sample = sample_of(rows, cols)
    (pieces,) = generated.launch(sample, choose_schedule.choose(sample), [a, b], [], target)
    region = casts_of(rows, cols, len(pieces), format, sums)
    schedule = walking(region)
    given = [a, b, pieces]
    return generated.launch(region, schedule, given, [], target), region_reference.run(region, schedule, given, [])


def equal(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two buffers have the same bits, any nan being as good as another."""
    if actual.element_size() == 1:
        a, b = actual.view(torch.uint8), expected.view(torch.uint8)
        return bool(((a == b) | (actual.float().isnan() & expected.float().isnan())).all())
    return torch.equal(actual.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))
