"""Many shards cast in one launch, bit for bit as the reference casts them as parts of their weights."""

from __future__ import annotations

import math

import interpreter
import pytest
import torch
from torch import Tensor

from fp8compile.formats import E4M3
from fp8compile.kernels.reference import markers

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not interpreter.INTERPRETED, reason="tests/gpu/test_shard_casts.py runs it compiled"
)


def weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Of magnitudes that differ from block to block, with zeros of both signs."""
    x = torch.randn(rows, columns) * torch.logspace(-2, 2, columns) * torch.logspace(0, -3, rows)[:, None]
    x[:, 3], x[0, 5] = -0.0, 0.0
    return x.to(dtype).to(DEVICE)


def expected(x: Tensor, scale: Tensor, granularity: str) -> Tensor:
    return markers.quantize(x, scale, "e4m3", granularity).view(torch.uint8)


def run(pieces: list[tuple[Tensor, str, slice]]) -> None:
    """Cast rows of weights, all in one launch, into one buffer between bytes that must stay."""
    from fp8compile.kernels.casts.cast_tiles import Launch, Part

    interpreter.prepare()
    starts = [0]
    for x, _, rows in pieces:
        starts.append(starts[-1] + math.ceil(x[rows].numel() / 16) * 16 + 16)
    buffer = torch.full((starts[-1],), 0x55, dtype=torch.uint8, device=DEVICE)
    parts = []
    for (x, granularity, rows), start in zip(pieces, starts, strict=False):
        scale = markers.scale(markers.amax(x, granularity), "e4m3")
        target = buffer[start : start + x[rows].numel()].view(E4M3.dtype).view(x[rows].shape)
        parts.append(Part(x[rows], target, scale, rows.start))
    launch = Launch()
    for _ in range(2):  # the second time with a table that is known
        launch.run(parts)
    for part, (x, granularity, rows), start in zip(parts, pieces, starts, strict=False):
        wanted = expected(x, part.scale, granularity)[rows]
        assert torch.equal(part.target.view(torch.uint8), wanted)
        after = start + part.target.numel()
        assert (buffer[after : after + 16] == 0x55).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("granularity", ["tensor", "block(128)"])
def test_rows_of_weights(granularity: str, dtype: torch.dtype) -> None:
    """Whole weights, and parts that cut blocks, of columns that fill no tile."""
    shapes = [(64, 528, 0, 64), (304, 272, 104, 208), (17, 1040, 0, 17), (272, 16, 130, 131), (16, 512, 0, 16)]
    torch.manual_seed(0)
    run([(weight(r, c, dtype), granularity, slice(first, last)) for r, c, first, last in shapes])


@pytest.mark.parametrize("granularity", ["tensor", "block(128)"])
def test_what_is_not_finite(granularity: str) -> None:
    """nan stays nan; under a scale of infinity, what is finite becomes zero and the rest nan; nothing else changes."""
    x = weight(32, 272, torch.bfloat16)
    x[3, 7], x[17, 200] = torch.nan, -torch.inf
    run([(x, granularity, slice(0, 32)), (weight(16, 32, torch.bfloat16), granularity, slice(0, 16))])


def test_saturation() -> None:
    """Scales that are too small (delayed, of another weight): at most the format's maximum, in both directions."""
    from fp8compile.kernels.casts.cast_tiles import Launch, Part

    interpreter.prepare()
    x = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e30, -1e30, 2.0**-10, -(2.0**-10)] * 2, device=DEVICE).view(1, 16)
    target = torch.empty(1, 16, dtype=E4M3.dtype, device=DEVICE)
    scale = torch.ones((), device=DEVICE)
    Launch().run([Part(x, target, scale, 0)])
    assert torch.equal(target.view(torch.uint8), expected(x, scale, "tensor"))
