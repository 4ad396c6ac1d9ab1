"""Shards of a model cast in one launch, as plain torch casts them on the same GPU."""

from __future__ import annotations

import random

import pytest
import torch

from fp8compile.formats import E4M3
from fp8compile.kernels.reference import markers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("granularity", ["tensor", "block(128)"])
def test_a_models_shards(granularity: str, dtype: torch.dtype) -> None:
    """A hundred weights of random sizes and the rows that one of several ranks has of them; written to twice."""
    from fp8compile.kernels.casts.cast_tiles import Launch, Part

    torch.manual_seed(0)
    rng = random.Random(0)
    sizes = [(rng.randint(1, 3000), 16 * rng.randint(1, 200)) for _ in range(99)] + [(14336, 4096)]
    weights = [(torch.randn(s, device="cuda") * 10 ** rng.uniform(-4, 3)).to(dtype) for s in sizes]
    launch = Launch()
    for turn in range(2):
        parts, expected = [], []
        for x in weights:
            first = rng.randrange(x.shape[0])
            rows = slice(first, rng.randint(first + 1, x.shape[0])) if turn else slice(0, x.shape[0])
            scale = markers.scale(markers.amax(x, granularity), "e4m3")
            target = torch.empty(x[rows].shape, dtype=E4M3.dtype, device="cuda")
            parts.append(Part(x[rows], target, scale, rows.start))
            expected.append(markers.quantize(x, scale, "e4m3", granularity)[rows])
        launch.run(parts)
        for part, wanted in zip(parts, expected, strict=True):
            assert torch.equal(part.target.view(torch.uint8), wanted.view(torch.uint8))
