"""What must hold of a state that comes from a file: parts that fit together, and the checksum that was stored with it.

    checksum = Σ word · odd number of its position     (mod 2⁶⁴, over all parts, and their shapes and formats)

A word is 8 bytes. Odd numbers have inverses, so no single word can change without the sum; that words change places, or
blocks are never written, and it stays as it was, is as good as impossible. Integers add up to the same on every device,
in any order, in pieces of bounded size: nothing is copied from a GPU to know it.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from fp8compile.errors import StateError
from fp8compile.optimizer.state_parts import StateParts
from fp8compile.state_formats import parse_state_format

PIECE = 1 << 23  # bytes that are summed at once; temporary memory is three times as much
WORD = 8
ODD = 0x1E3779B97F4A7C15  # its multiples by odd numbers look random: 2⁶⁴ / golden ratio, made to fit


def checksum(state: StateParts) -> int | None:
    """Return the checksum of `state`; None where it has no values (fake and meta tensors)."""
    parts = [x.detach() for x in state.parts()]
    if any(type(x) is not Tensor or x.is_meta for x in parts):
        return None
    facts = [(x.dtype, list(x.shape)) for x in parts], state.format, state.parameter, state.dtype
    total = torch.tensor(zlib.crc32(repr(facts).encode()), device=state.payload.device, dtype=torch.int64)
    for part in parts:
        total = total * ODD + _weighted_sum(part)
    return int(total)


def _weighted_sum(x: Tensor) -> Tensor:
    """Return the sum of all words of `x` times odd numbers, as an int64."""
    data = x.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first in range(0, data.numel(), PIECE):
        words = _words(data[first : first + PIECE])
        position = torch.arange(first // WORD, first // WORD + words.numel(), device=x.device, dtype=torch.int64)
        words = (words ^ (words >> 32)).mul_(position.mul_(2).add_(1).mul_(ODD))
        total += words.sum()
    return total


def _words(data: Tensor) -> Tensor:
    """Return bytes as int64, the last one filled up with zeros."""
    if missing := -data.numel() % WORD:
        data = torch.cat([data, data.new_zeros(missing)])
    return (data if data.storage_offset() % WORD == 0 else data.clone()).view(torch.int64)


def check(state: StateParts) -> None:
    """Raise `StateError` if `state` cannot be what was stored."""
    _check_shapes(state)
    if state.stored_checksum is not None:
        found = checksum(state)
        if found not in (None, state.stored_checksum):
            raise StateError(
                f"an optimizer state in {state.format} of shape {list(state.shape)} is not what was saved (checksum "
                f"{found:x}, saved {state.stored_checksum:x}): its file is damaged or half written, load another "
                "checkpoint"
            )
    _check_groups(state)


def _check_shapes(state: StateParts) -> None:
    how, payload, side = parse_state_format(state.format), state.payload, state.side
    if payload.dtype != how.payload_dtype or list(side.shape) != how.side_shape(payload.numel()):
        raise StateError(
            f"an optimizer state in {how} has a payload of {payload.dtype}{list(payload.shape)} and side data of "
            f"{list(side.shape)}; expected {how.payload_dtype} and {how.side_shape(payload.numel())}"
        )
    if (how.stochastic or state.parameter == "stochastic") and state.counter is None:
        raise StateError(f"an optimizer state in {how} lacks its counter of random bits")
    if state.low is not None and (state.low.shape != payload.shape or state.low.dtype != torch.int16):
        raise StateError("the missing bits of a split parameter have not its shape, or are no int16")


def _check_groups(state: StateParts) -> None:
    least, greatest = state.side[:, 0].abs(), state.side[:, 1]
    wrong = (greatest.isfinite() & ~(least <= greatest)) | torch.signbit(greatest)
    if not state.side.is_meta and bool(wrong.any()):
        raise StateError(
            f"{int(wrong.sum())} of {wrong.numel()} groups of an optimizer state have a least magnitude above their "
            "greatest: the state is corrupted, load another checkpoint"
        )
