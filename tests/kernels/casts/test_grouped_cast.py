"""Groups of tokens cast and transposed by the Triton kernels, bit for bit as the reference, into buffers of junk."""

from __future__ import annotations

import interpreter
import pytest
import torch
from torch import Tensor

from fp8compile.kernels.reference import grouped_reference

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreter.INTERPRETED, reason="tests/gpu/test_grouped.py runs it compiled"
)
NOBODYS = 21  # tokens behind the last group, which hold NaN
SIZES = {
    "even": [64, 64],
    "ragged": [1, 50, 17, 188],
    "empty": [0, 40, 0, 56, 0],
    "no tokens": [0, 0, 0],
    "one token": [0, 0, 1, 0],
    "all to the last": [0, 0, 600],
    "one group": [77],
    "at borders": [15, 16, 17, 511, 512, 513],  # of what is contracted, of tiles, of pieces
    "more than lanes": [3, 0, 16] * 6,
}


def tokens(sizes: list[int], columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """(x, offs): columns of magnitudes that differ by 2^20, with zeros of both signs; NaN behind the last group."""
    x = torch.randn(sum(sizes) + NOBODYS, columns) * torch.linspace(-10, 10, columns).exp2()
    x[:, 3], x[1::2, 5] = 0.0, -0.0
    x[sum(sizes) :] = torch.nan
    return x.to(dtype).to(DEVICE), torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def run(
    x: Tensor,
    offs: Tensor,
    power_of_two: bool = False,
    multiple: int = 1,
    junk: int = 0xFF,
    amax: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Cast into buffers full of `junk`; all that means something is as the reference has it, and the rest untouched."""
    from fp8compile.kernels.casts import grouped_cast

    interpreter.prepare()
    wanted = grouped_reference.grouped_cast(x, offs, "e4m3", power_of_two, multiple, amax, index)
    given = [torch.full_like(t.view(torch.uint8), junk).view(t.dtype) for t in wanted]
    grouped_cast.launch(x, offs, *given, power_of_two, amax, index)
    (data, scale, ends), (codes, scales, places) = given, wanted
    last = int(places[-1])
    assert torch.equal(ends, places)
    torch.testing.assert_close(scale, scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(one_nan(data[:, :last]), one_nan(codes[:, :last]))
    assert (data[:, last:].view(torch.uint8) == junk).all()


def one_nan(codes: Tensor) -> Tensor:
    """Codes as bytes; nan has two of them."""
    codes = codes.view(torch.uint8)
    return torch.where(codes == 0xFF, 0x7F, codes)


@pytest.mark.parametrize("junk", [0xFF, 0x7E])
@pytest.mark.parametrize("name", SIZES)
def test_groups_of_any_size(name: str, junk: int) -> None:
    run(*tokens(SIZES[name], 80), junk=junk)


@pytest.mark.parametrize("name", SIZES)
def test_groups_with_one_scale_each(name: str) -> None:
    """NaN behind the last group is in no scale."""
    x, offs = tokens(SIZES[name], 80)
    run(x, offs, len(name) % 2 == 0, amax=amaxes(x))


def amaxes(x: Tensor) -> Tensor:
    """The largest magnitude of each token."""
    return x.abs().amax(1, keepdim=True).float()


def test_one_scale_of_other_tokens_than_were_cast() -> None:
    """Whatever the amaxes are, of what was rounded since or of nothing: larger values saturate."""
    x, offs = tokens(SIZES["ragged"], 48)
    run(x, offs, amax=amaxes(x) * 0.7)
    run(x, offs, amax=torch.zeros(len(x), 1, device=DEVICE))
    run(x, offs, multiple=32, amax=amaxes(x).expand(-1, 2)[:, :1])
    spoiled = amaxes(x)
    spoiled[3], spoiled[60] = torch.nan, torch.inf
    run(x, offs, amax=spoiled)


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_rows_in_any_order(name: str, one_scale: bool) -> None:
    """Rows several times, and never, and zeros in place of some; what lies behind the last group is not looked up."""
    x, offs = tokens(SIZES[name], 80)
    rows = len(x) - NOBODYS
    draw = torch.Generator().manual_seed(len(name))
    index = torch.randint(-1 - rows // 9, max(1, rows // 2), (len(x),), generator=draw).to(DEVICE)
    index[rows:] = len(x) - 1  # NaN
    picked = torch.where(index[:, None] < 0, 0, x[index.clamp(0, len(x) - 1)])
    run(x, offs, amax=amaxes(picked) if one_scale else None, index=index.to(torch.int64))
    gathered, plain = (
        grouped_reference.grouped_cast(x, offs, "e4m3", False, 1, None, index.clamp_max(0)),
        grouped_reference.grouped_cast(torch.where(index[:, None] < 0, 0, x[:1]), offs, "e4m3"),
    )
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(gathered, plain, strict=True))


def test_an_index_of_32_bits() -> None:
    x, offs = tokens(SIZES["ragged"], 48)
    run(
        x,
        offs,
        index=torch.arange(len(x) - 1, -1, -1, device=DEVICE, dtype=torch.int32).clamp_max(len(x) - NOBODYS - 1),
    )


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_powers_of_two(dtype: torch.dtype, power_of_two: bool) -> None:
    run(*tokens(SIZES["ragged"], 144, dtype), power_of_two)


@pytest.mark.parametrize("columns", [8, 16, 72, 120])
def test_columns_are_filled_up_with_zeros(columns: int) -> None:
    run(*tokens(SIZES["empty"], columns), multiple=16)


def test_what_is_not_finite_spoils_the_scale_of_its_column_and_group_alone() -> None:
    """Padding stays zero there, too: a product of nan is nan by the scale."""
    x, offs = tokens(SIZES["ragged"], 48)
    x[3, 7], x[60, 9], x[61, 9] = torch.nan, torch.inf, -torch.inf
    run(x, offs)


def test_what_lies_in_other_strides_is_read_all_the_same() -> None:
    from fp8compile.kernels.casts.grouped_cast import grouped_cast

    interpreter.prepare()
    x, offs = tokens(SIZES["ragged"], 48)
    found = grouped_cast(x.t().contiguous().t(), offs, "e4m3")
    wanted = grouped_reference.grouped_cast(x, offs, "e4m3")
    last = int(wanted[2][-1])
    assert torch.equal(one_nan(found[0][:, :last]), one_nan(wanted[0][:, :last]))
    assert all(torch.equal(a, b) for a, b in zip(found[1:], wanted[1:], strict=True))


def test_another_format_is_refused() -> None:
    from fp8compile.kernels.casts.grouped_cast import grouped_cast

    with pytest.raises(ValueError, match="take e4m3, not e5m2"):
        grouped_cast(*tokens([5], 16), "e5m2")
