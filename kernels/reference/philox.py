"""Random numbers of generated kernels, in plain torch: Philox 4×32-10, as Triton's `tl.rand` draws them.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def uniform(seed: int, position: Tensor) -> Tensor:
    """Return FP32 in [0, 1) for each 32-bit `position` (int64), a function of it and the 64-bit `seed` alone."""
    counter = [position & MASK, *(torch.zeros_like(position) for _ in range(3))]
    key = [seed & MASK, seed >> 32 & MASK]
    for _ in range(ROUNDS):
        high = [_high(counter[0], MULTIPLIERS[0]), _high(counter[2], MULTIPLIERS[1])]
        low = [counter[0] * MULTIPLIERS[0] & MASK, counter[2] * MULTIPLIERS[1] & MASK]
        counter = [high[1] ^ counter[1] ^ key[0], low[1], high[0] ^ counter[3] ^ key[1], low[0]]
        key = [(k + w) & MASK for k, w in zip(key, WEYL, strict=True)]
    signed = torch.where(counter[0] > 0x7FFFFFFF, MASK - counter[0], counter[0])
    return signed.float() * 4.6566127342e-10


def _high(x: Tensor, by: int) -> Tensor:
    """Return the upper 32 bits of a product of 32-bit numbers; in halves, as the whole may pass 63 bits."""
    low, high = x & 0xFFFF, x >> 16
    return (high * by + (low * by >> 16)) >> 16
