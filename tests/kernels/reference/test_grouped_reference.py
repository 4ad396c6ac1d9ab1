"""The grouped matmuls of the CPU against loops over experts that dequantize in FP64; their fakes; what they refuse."""

from __future__ import annotations

import pytest
import torch
from experts import GROUPS, ends
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile import ops
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import grouped_reference, markers

K, N = 80, 48


def operands(sizes: list[int], rows: int = 96):
    """(a, scale_a, b, scale_b): rows and columns of very different size, so that a scale in a wrong place is seen."""
    a = torch.randn(rows, K) * torch.rand(rows, 1).mul(8).exp2()
    b = torch.randn(len(sizes), N, K) * torch.rand(len(sizes), N, 1).mul(8).exp2()
    made = []
    for x in (a, b):
        scale = ops.scale(ops.amax(x, "row"), "e4m3")
        made += [ops.quantize(x, scale, "e4m3", "row"), scale]
    return made


def grouped(a, scale_a, b, scale_b, offs, dtype=torch.bfloat16):
    return ops.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, dtype, False, offs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", GROUPS)
def test_each_row_is_multiplied_by_the_matrix_of_its_group(name, dtype):
    sizes = GROUPS[name]
    a, scale_a, b, scale_b = operands(sizes)
    out = grouped(a, scale_a, b, scale_b, ends(sizes), dtype)
    assert out.shape == (96, N)
    assert out.dtype == dtype
    expert = [e for e, size in enumerate(sizes) for _ in range(size)]
    for t, e in enumerate(expert):
        row, matrix = a[t].double() * scale_a[t].double(), b[e].double() * scale_b[e].double()
        wanted, magnitude = matrix @ row, matrix.abs() @ row.abs()
        # sums of K FP32 products: K·2^-24 of the sum of magnitudes at worst, and one rounding to the dtype
        bound = (K + 8) * 2.0**-24 * magnitude + torch.finfo(dtype).eps / 2 * wanted.abs()
        assert ((out[t].double() - wanted).abs() <= bound).all()
    assert (out[len(expert) :] == 0).all()


def test_a_row_that_is_not_finite_spoils_itself_alone():
    a, scale_a, b, scale_b = operands(GROUPS["uneven"])
    before = grouped(a, scale_a, b, scale_b, ends(GROUPS["uneven"]))
    scale_a[7] = float("nan")
    after = grouped(a, scale_a, b, scale_b, ends(GROUPS["uneven"]))
    assert after[7].isnan().all()
    others = torch.arange(96) != 7
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize("rows", [0, 1, 96])
def test_the_fake_promises_what_the_real_one_gives(rows):
    sizes = [rows, 0]
    args = operands(sizes, rows)
    torch.library.opcheck(
        ops.scaled_mm,
        (args[0], args[1], "row", args[2], args[3], "row", None, torch.bfloat16, True, ends(sizes)),
        test_utils=["test_faketensor"],
    )


def test_a_gpu_would_get_its_operands_in_its_own_layout():
    """torch's checks of the GPU's operator, which it makes of fake tensors too."""
    args = (*operands(GROUPS["empty"]), ends(GROUPS["empty"]))
    with FakeTensorMode():
        a, scale_a, b, scale_b, offs = (
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in args
        )
        out = scaled_mm.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, torch.float32, True, offs)
    assert (out.shape, out.dtype, out.device.type) == ((96, N), torch.float32, "cuda")


def test_fast_accumulation_changes_nothing_here():
    args = operands(GROUPS["eight"])
    offs = ends(GROUPS["eight"])
    slow, fast = (
        markers.scaled_mm(args[0], args[1], "row", args[2], args[3], "row", None, torch.float32, how, offs)
        for how in (False, True)
    )
    assert torch.equal(slow, fast)


def test_data_that_a_gpu_could_not_read_is_refused():
    a, scale_a, b, scale_b = operands(GROUPS["even"])
    with pytest.raises(RuntimeError, match="needs contiguous data, got strides"):
        grouped(a, scale_a, b.mT.contiguous().mT, scale_b, ends(GROUPS["even"]))


# --- groups that are contracted


def tokens(sizes, columns, rows=96):
    """x [rows, columns] of very different columns, NaN where it is nobody's, and where its groups end."""
    x = torch.randn(rows, columns) * torch.rand(columns).mul(8).exp2()
    x[sum(sizes) :] = torch.nan
    return x.bfloat16(), ends(sizes)


def contracted(sizes, dtype=torch.bfloat16):
    """(the product, (data, scale, ends) of both operands): left [96, N]ᵀ @ right [96, K]."""
    (left, offs), (right, _) = tokens(sizes, N), tokens(sizes, K)
    a, b = ops.grouped_cast(left, offs, "e4m3"), ops.grouped_cast(right, offs, "e4m3")
    out = ops.scaled_mm(a[0], a[1], "row", b[0], b[1], "row", None, dtype, False, a[2])
    return out, (a, b)


@pytest.mark.parametrize("name", GROUPS)
def test_a_groups_columns_are_cast_each_by_its_own_scale(name):
    sizes = GROUPS[name]
    x, offs = tokens(sizes, K)
    data, scale, places = ops.grouped_cast(x, offs, "e4m3")
    assert (data.shape, scale.shape, places.dtype) == ((K, 96 + 16 * len(sizes)), (len(sizes), K, 1), torch.int32)
    start = place = 0
    for e, size in enumerate(sizes):
        part, end = x[start : start + size].double(), max(-(-size // 16) * 16, 16) + place
        assert places[e] == end
        amax = part.abs().amax(0) if size else torch.zeros(K)
        wanted = torch.where(amax > 0, amax / 448, 1.0)
        assert ((scale[e, :, 0].double() - wanted).abs() <= 2.0**-24 * wanted).all()
        # half a step of E4M3: 2^-4 of a number, 2^-10 of the scale below the normal ones; and the quotient's rounding
        found = data[:, place : place + size].double().t() * scale[e, :, 0].double()
        assert ((found - part).abs() <= part.abs() * (2.0**-4 + 2.0**-23) + scale[e, :, 0].double() * 2.0**-10).all()
        assert (data[:, place + size : end].view(torch.uint8) == 0).all()
        start, place = start + size, end


@pytest.mark.parametrize("name", GROUPS)
def test_with_amaxes_of_tokens_a_group_has_one_scale(name):
    """Of its own tokens alone; columns that fill up have it too, and codes of zero."""
    sizes = GROUPS[name]
    x, offs = tokens(sizes, 40)
    amax = x.abs().amax(1, keepdim=True).float()
    data, scale, places = ops.grouped_cast(x, offs, "e4m3", False, 16, amax)
    by_columns = ops.grouped_cast(x, offs, "e4m3", False, 16)
    assert torch.equal(places, by_columns[2])
    assert (data.shape, scale.shape) == (by_columns[0].shape, by_columns[1].shape)
    start = place = 0
    for e, size in enumerate(sizes):
        part = x[start : start + size].double()
        largest = part.abs().max() if size else torch.tensor(0.0)
        wanted = largest / 448 if largest > 0 else torch.tensor(1.0)
        assert ((scale[e].double() - wanted).abs() <= 2.0**-24 * wanted).all()
        found = data[:40, place : place + size].double().t() * scale[e, 0].double()
        assert ((found - part).abs() <= part.abs() * (2.0**-4 + 2.0**-23) + wanted * 2.0**-10).all()
        assert (data[40:, place : int(places[e])].view(torch.uint8) == 0).all()
        start, place = start + size, int(places[e])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", GROUPS)
def test_each_group_is_contracted_by_itself(name, dtype):
    out, ((a, scale_a, places), (b, scale_b, _)) = contracted(GROUPS[name], dtype)
    assert (out.shape, out.dtype) == ((len(GROUPS[name]), N, K), dtype)
    start = 0
    for e, end in enumerate(places.tolist()):
        x, y = a[:, start:end].double() * scale_a[e].double(), b[:, start:end].double() * scale_b[e].double()
        wanted, magnitude = x @ y.t(), x.abs() @ y.abs().t()
        # sums of FP32 products, and one rounding to the dtype
        bound = (end - start + 8) * 2.0**-24 * magnitude + torch.finfo(dtype).eps / 2 * wanted.abs()
        assert ((out[e].double() - wanted).abs() <= bound).all()
        start = end


@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 1, 0], [0, 0, 96]], ids=str)
def test_groups_without_tokens_give_zeros(sizes):
    out, _ = contracted(sizes)
    assert [bool((out[e] == 0).all()) for e in range(3)] == [size == 0 for size in sizes]


@pytest.mark.parametrize("seed", range(20))
def test_the_buffer_suffices_whatever_the_groups(seed):
    """A group takes a piece of 16 more than it fills, at most; also where all of them are as bad as can be."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 40, (seed + 1,), generator=draw)
    sizes = torch.where(torch.rand(seed + 1, generator=draw) < 0.5, sizes // 16 * 16 + 1, sizes)
    offs = sizes.cumsum(0).int()
    places = grouped_reference.padded_ends(offs)
    widths = torch.diff(places, prepend=places.new_zeros(1))
    assert (widths % 16 == 0).all()
    assert (widths >= sizes.clamp_min(1)).all()
    assert (widths - sizes <= 16).all()
    assert places[-1] <= grouped_reference.padded_tokens(int(sizes.sum()), len(sizes))


@pytest.mark.parametrize("rows", [0, 1, 96])
def test_the_fake_cast_promises_what_the_real_one_gives(rows):
    x, offs = tokens([rows, 0], 40, rows)
    for amax in (None, torch.rand(rows, 1)):
        given = (x, offs, "e4m3", True, 16, amax)
        torch.library.opcheck(ops.grouped_cast, given, test_utils=["test_faketensor", "test_schema"])
    if rows:
        given = (x, offs * 3, "e4m3", True, 16, None, torch.arange(3 * rows) % rows)
        torch.library.opcheck(ops.grouped_cast, given, test_utils=["test_faketensor", "test_schema"])
    (a, scale_a, places), (b, scale_b, _) = (ops.grouped_cast(x, offs, "e4m3", False, 16) for _ in range(2))
    torch.library.opcheck(
        ops.scaled_mm,
        (a, scale_a, "row", b, scale_b, "row", None, torch.float32, False, places),
        test_utils=["test_faketensor"],
    )


def test_a_gpu_would_get_groups_to_contract_in_its_own_layout():
    """torch's checks of the GPU's operator, which it makes of fake tensors too."""
    _, ((a, scale_a, places), (b, scale_b, _)) = contracted(GROUPS["empty"])
    with FakeTensorMode():
        given = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in (a, scale_a, b, scale_b)
        ]
        offs = torch.empty(places.shape, dtype=torch.int32, device="cuda")
        out = scaled_mm.scaled_mm(given[0], given[1], "row", given[2], given[3], "row", None, torch.float32, True, offs)
    assert (out.shape, out.dtype, out.device.type) == ((4, N, K), torch.float32, "cuda")
