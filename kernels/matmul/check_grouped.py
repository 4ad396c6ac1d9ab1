"""Check grouped FP8 matmuls on this GPU, once, before any graph is made to need them.

torch's kernel has no public form in every version, and its limits are known from its source alone. A GPU where one
raises, or where one group's product is another's, keeps experts in BF16, and the plan says why. Both forms are tried,
each by itself: groups of rows (output, grad_input), and groups that are contracted (grad_weight).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily  # passes run under the fake mode of the graph

from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import grouped_reference, markers

ENDS = (5, 5, 48, 128)  # of groups: small, empty, and of no multiple of 16
K, N = 256, 128
NEAR = 2.0**-7  # of a group's norm: a rounding to BF16 is a quarter of it


@cache
def why_it_fails(device: torch.device) -> str:
    """Return how grouped FP8 matmuls fail on `device`; "" if they are right."""
    with unset_fake_temporarily(), torch.no_grad():
        offs = torch.tensor(ENDS, dtype=torch.int32, device="cpu")
        operands = _operand(ENDS[-1], K), _operand(len(ENDS), N, K)
        groups = [slice(*group) for group in pairwise((0, *ENDS))]
        return _why(device, operands, offs, groups, True) or _why(device, operands, offs, groups, False)


@cache
def why_contractions_fail(device: torch.device) -> str:
    """Return how grouped FP8 matmuls fail on `device` that contract the tokens of each group; "" if they are right."""
    with unset_fake_temporarily(), torch.no_grad():
        offs = torch.tensor(ENDS, dtype=torch.int32, device="cpu")
        left, right = (
            grouped_reference.grouped_cast(_random(columns, ENDS[-1]).t(), offs, "e4m3") for columns in (N, K)
        )
        return _why(device, (left[:2], right[:2]), left[2], range(len(ENDS)), False)


def _why(
    device: torch.device,
    operands: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
    offs: Tensor,
    groups: Sequence[slice | int],
    fast: bool,
) -> str:
    """Return how the product of two operands, each (data, scale), fails. groups: where each has its part of it; fast:
    with fast accumulation, which has a kernel of its own."""
    (a, scale_a), (b, scale_b) = operands
    wanted = markers.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, torch.float32, offs=offs)
    (a, scale_a), (b, scale_b) = ((data.to(device), scale.to(device)) for data, scale in operands)
    try:
        found = scaled_mm.scaled_mm(
            a, scale_a, "row", b, scale_b, "row", None, torch.bfloat16, fast, offs.to(device)
        ).cpu()
    except Exception as error:  # torch's, or one of several of Triton's
        return f"the grouped FP8 matmul does not run here ({(str(error) or repr(error)).splitlines()[0][:100]})"
    if all(_is_near(found[group], wanted[group]) for group in groups):
        return ""
    return f"the grouped FP8 matmul is wrong here, tried on groups that end at {ENDS}"


def _operand(*shape: int) -> tuple[Tensor, Tensor]:
    """Return random data and scales of its rows, which differ by up to 256."""
    x = _random(*shape)
    scale = markers.scale(markers.amax(x, "row"), "e4m3")
    return markers.quantize(x, scale, "e4m3", "row"), scale


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    scales = torch.rand(*shape[:-1], 1, dtype=torch.float32, generator=generator, device="cpu").mul(8).exp2()
    return torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu") * scales


def _is_near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.float() - wanted).norm() <= NEAR * wanted.norm())
