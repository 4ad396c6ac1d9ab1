"""What becomes of ±0, ties, subnormals, infinities and nan in a generated cast: codes known by hand, every granularity,
both layouts."""

from __future__ import annotations

import casts
import interpreter
import pytest
import torch
from casts import COLS, GRANULARITIES, INF, NAN, ROWS, Cast

from fp8compile.formats import FORMATS
from fp8compile.kernels.reference import markers

pytestmark = [
    pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_generated.py runs it compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities and nan
]


@pytest.fixture(autouse=True)
def _casts(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp()))
    interpreter.prepare()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", [*GRANULARITIES, "given"])
def test_codes(format: str, granularity: str) -> None:
    numbers, expected = casts.table(format)
    codes, transposed, scale = casts.run(Cast(format, granularity), casts.diagonals(numbers))
    assert (scale == 1).all()
    assert torch.equal(codes, casts.diagonals(expected).to(torch.uint8))
    assert torch.equal(transposed, codes)


@pytest.mark.parametrize("format", FORMATS)
def test_beyond_the_maximum_saturates(format: str) -> None:
    known = casts.BEYOND[format]
    codes, transposed, _ = casts.run(Cast(format, "given"), casts.diagonals(list(known)))
    expected = casts.diagonals(list(known.values())).to(torch.uint8)
    assert casts.same_codes(codes, expected, format)
    assert casts.same_codes(transposed, expected, format)


@pytest.mark.parametrize(
    ("format", "granularity", "bad"),
    [
        (format, granularity, (INF, -INF, NAN)[(i + j) % 3])
        for i, format in enumerate(FORMATS)
        for j, granularity in enumerate(GRANULARITIES)
    ],
)
def test_non_finite_spoils_what_shares_its_scale_and_nothing_else(format: str, granularity: str, bad: float) -> None:
    cast = Cast(format, granularity)
    x = casts.diagonals(casts.table(format)[0])
    x[5, 7] = bad
    expected = casts.spoiled(cast, x, 5, 7)
    codes, transposed, scale = casts.run(cast, x)
    assert casts.same_codes(codes, expected, format)
    assert casts.same_codes(transposed, expected, format)
    bad_scale = scale[~scale.isfinite()]
    assert len(bad_scale) == 1
    assert bool(bad_scale.isnan()) == (bad != bad)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_zeros_have_scale_one(format: str, granularity: str) -> None:
    x = torch.zeros(ROWS, COLS)
    x[3, 1::2] = -0.0
    codes, transposed, scale = casts.run(Cast(format, granularity), x)
    assert (scale == 1).all()
    assert torch.equal(codes, torch.where(x.signbit(), 0x80, 0x00).to(torch.uint8))
    assert torch.equal(transposed, codes)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scale_is_never_subnormal(format: str, granularity: str) -> None:
    tiny = torch.finfo(torch.float32).tiny
    codes, _, scale = casts.run(Cast(format, granularity), torch.full((ROWS, COLS), 4 * tiny))
    assert (scale == tiny).all()
    assert (codes == (0x48 if format == "e4m3" else 0x44)).all()  # 4.0


@pytest.mark.parametrize(
    ("dtype", "granularity", "multiple"),
    [((torch.bfloat16, torch.float16)[i % 2], name, (1, 16)[i // 2 % 2]) for i, name in enumerate(GRANULARITIES)],
)
def test_every_16_bit_number(dtype: torch.dtype, granularity: str, multiple: int) -> None:
    """All of BF16 and FP16 through one cast, in a shape that divides nothing, against the contract in plain torch."""
    every = torch.arange(2**16).to(torch.uint16).view(dtype)
    every = every[every.isfinite()]
    high, wide = (51, 1182) if granularity == "row" else (201, 300)  # a program of the former is a row
    x = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(1))][: high * wide]
    x = x.reshape(high, wide)
    name = str(dtype).removeprefix("torch.")
    cast = Cast("e4m3", granularity, high, wide, name, multiple)
    codes, transposed, scale = casts.run(cast, x)
    rows, cols = cast.shared
    spread = scale.repeat_interleave(rows, 0)[:high].repeat_interleave(cols, 1)[:, :wide]
    expected = markers.quantize(x, spread, "e4m3", "tensor").view(torch.uint8)
    appended = [-n % multiple for n in x.shape]
    assert torch.equal(codes, torch.nn.functional.pad(expected, (0, appended[1], 0, appended[0])))
    assert torch.equal(transposed, codes)
