"""Check torch's grouped FP8 matmul on this GPU, once, before any graph is made to need it.

It has no public form in every version of torch, and its limits are known from its source alone. A GPU where it raises,
or where one group's product is another's, keeps experts in BF16, and the plan says why.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily  # passes run under the fake mode of the graph

from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import markers

ENDS = (5, 5, 48, 128)  # of groups: small, empty, and of no multiple of 16
K, N = 256, 128
NEAR = 2.0**-7  # of a group's norm: a rounding to BF16 is a quarter of it


@cache
def why_it_fails(device: torch.device) -> str:
    """Return how grouped FP8 matmuls fail on `device`; "" if they are right."""
    with unset_fake_temporarily(), torch.no_grad():
        a, scale_a = _operand(ENDS[-1], K)
        b, scale_b = _operand(len(ENDS), N, K)
        offs = torch.tensor(ENDS, dtype=torch.int32)
        wanted = markers.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, torch.float32, offs=offs)
        there = [x.to(device) for x in (a, scale_a, b, scale_b, offs)]
        try:
            found = scaled_mm.scaled_mm(
                there[0], there[1], "row", there[2], there[3], "row", None, torch.bfloat16, offs=there[4]
            ).cpu()
        except RuntimeError as error:
            return f"torch's grouped FP8 matmul does not run here ({str(error).splitlines()[0][:100]})"
        groups = zip((0, *ENDS[:-1]), ENDS, strict=True)
        right = all(_is_near(found[start:end], wanted[start:end]) for start, end in groups)
    return "" if right else f"torch's grouped FP8 matmul is wrong here, tried on groups that end at {ENDS}"


def _operand(*shape: int) -> tuple[Tensor, Tensor]:
    """Return random data and scales of its rows, which differ by up to 256."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator).mul(8).exp2()
    scale = markers.scale(markers.amax(x, "row"), "e4m3")
    return markers.quantize(x, scale, "e4m3", "row"), scale


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.float() - wanted).norm() <= NEAR * wanted.norm())
