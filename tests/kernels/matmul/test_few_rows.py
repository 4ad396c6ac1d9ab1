"""Matmuls of few rows by the Triton kernel, beside the reference, with junk in what it does not write first."""

from __future__ import annotations

import interpreter
import pytest
import torch
from torch import Tensor

from fp8compile.kernels.reference import markers

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreter.INTERPRETED, reason="tests/gpu/test_few_rows.py runs it compiled"
)
SIZES = [  # M, N, K
    (1, 64, 256),
    (1, 192, 1024),  # in parts
    (3, 100, 272),  # a tile that is not full, and a rest of K
    (16, 64, 4096),  # as many parts as there are
    (17, 72, 528),  # more lanes; a rest of K in one part
    (64, 32, 16),  # less than a tile
]


def operand(rows: int, k: int, granularity: str, seed: int) -> tuple[Tensor, Tensor]:
    """Codes [rows, k] and scales, all different where they are of rows."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, k, generator=g).to(torch.float8_e4m3fn)
    scale = torch.rand((rows, 1) if granularity == "row" else (), generator=g) + 0.5
    return codes.to(DEVICE), scale.to(DEVICE)


def product(
    m: int, n: int, k: int, granularities: tuple[str, str] = ("row", "row"), biased: bool = False, times: int = 1
) -> tuple[Tensor, Tensor]:
    """What the kernel gives, and the reference in FP32."""
    from fp8compile.kernels.matmul.few_rows import STAGES, WARPS, few_rows, launch_of

    interpreter.prepare()
    (a, scale_a), (b, scale_b) = operand(m, k, granularities[0], 1), operand(n, k, granularities[1], 2)
    bias = torch.linspace(-9, 9, n).bfloat16().to(DEVICE) if biased else None
    launch = launch_of(m, n, k, *granularities, biased, False)
    partial = torch.full((launch.partial,), torch.nan, device=DEVICE)
    arrived = torch.zeros(launch.tiles, dtype=torch.int32, device=DEVICE)
    outs = []
    for _ in range(times):
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        given = (a, b, scale_a, scale_b, scale_b if bias is None else bias, out, partial, arrived)
        few_rows[launch.grid](*given, **launch.constants, num_warps=WARPS, num_stages=STAGES)
        assert not arrived.any()
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)
    right = markers.scaled_mm(a.cpu(), scale_a.cpu(), granularities[0], b.cpu(), scale_b.cpu(), granularities[1],
                              None if bias is None else bias.cpu(), torch.float32)  # fmt: skip
    return outs[0].float().cpu(), right


def assert_near(found: Tensor, right: Tensor, k: int) -> None:
    """BF16 of what FP32 sums give in another order; on a GPU sums of 128 have the matmul unit's own precision."""
    slack = 2**-11 if DEVICE == "cuda" else 2**-20
    torch.testing.assert_close(found, right, rtol=2**-8, atol=slack * k**0.5 * float(right.std()))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes: tuple[int, int, int]) -> None:
    assert_near(*product(*sizes), sizes[2])


@pytest.mark.parametrize("granularities", [("row", "tensor"), ("tensor", "row"), ("tensor", "tensor")])
def test_scales_of_tensors(granularities: tuple[str, str]) -> None:
    assert_near(*product(3, 64, 512, granularities), 512)


@pytest.mark.parametrize("k", [256, 2048])
def test_a_bias(k: int) -> None:
    """Added once, whether K is split or not."""
    assert_near(*product(2, 80, k, biased=True), k)


def test_counts_serve_the_next_launch() -> None:
    assert_near(*product(5, 64, 2048, times=3), 2048)


def test_inf_and_nan() -> None:
    """A scale that is not finite, as of a row with inf, is in its own row of the product alone."""
    from fp8compile.kernels.matmul.few_rows import STAGES, WARPS, few_rows, launch_of

    interpreter.prepare()
    (a, scale_a), (b, scale_b) = operand(4, 1024, "row", 1), operand(64, 1024, "row", 2)
    scale_a[1], scale_a[2] = torch.inf, torch.nan
    launch = launch_of(4, 64, 1024, "row", "row", False, False)
    out = torch.zeros(4, 64, dtype=torch.bfloat16, device=DEVICE)
    partial = torch.full((launch.partial,), torch.nan, device=DEVICE)
    arrived = torch.zeros(launch.tiles, dtype=torch.int32, device=DEVICE)
    given = (a, b, scale_a, scale_b, scale_b, out, partial, arrived)
    few_rows[launch.grid](*given, **launch.constants, num_warps=WARPS, num_stages=STAGES)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isinf().all()
    assert out[2].isnan().all()


def test_parts() -> None:
    """K is split where the weight has few tiles, and never into parts with nothing to do."""
    from fp8compile.kernels.matmul.few_rows import PROGRAMS, launch_of

    for n, k in ((2048, 2048), (2048, 8192), (16384, 2048), (64, 256), (64, 1 << 20), (128256, 4096)):
        launch = launch_of(1, n, k, "row", "row", False, False)
        assert max(k, launch.DEPTH) >= launch.PARTS * launch.DEPTH
        assert launch.PARTS <= 16
        assert launch.PARTS == 1 or launch.tiles * launch.PARTS < 2 * PROGRAMS
    assert launch_of(1, 2048, 8192, "row", "row", False, False).PARTS == 4
    assert launch_of(1, 16384, 2048, "row", "row", False, False).PARTS == 1
