"""The grouped matmul of the CPU against a loop over experts that dequantizes in FP64; its fake; what it refuses."""

from __future__ import annotations

import pytest
import torch
from experts import GROUPS, ends
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8compile import ops
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers

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
