"""States stored and read back outside of an update: in pieces on a CPU, by a generated kernel on a GPU.

    payload, side = encode(x, format, counter)        x ≈ decode(payload, side, format, dtype)

The reference takes 38 to 63 bytes an element while it runs: of a whole embedding, tens of GiB. A piece is some groups,
so it is encoded as it would be within the whole. The kernel is that of an update which only copies, and needs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # such a number has no value

from fp8compile.cuda_capture import is_capturing
from fp8compile.formats import ceil_div
from fp8compile.kernels.codegen.spec.region import Value
from fp8compile.kernels.optimizer import update_launch
from fp8compile.kernels.optimizer.emit_update import POINTERS
from fp8compile.kernels.optimizer.update_spec import PLAIN, STATE, Slot, Update
from fp8compile.kernels.reference import state_reference
from fp8compile.state_formats import GROUP, StateFormat, parse_state_format

PIECE = 2048 * GROUP  # elements: 16 MiB at 63 bytes each


def encode(x: Tensor, format: str, counter: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return codes of a contiguous `x` and side data, as `state_reference.encode` does, piece by piece."""
    how = parse_state_format(format)
    if x.numel() <= PIECE or how.is_exact:
        return state_reference.encode(x, how, counter)
    payload, side = _empty(x, how)
    for part, groups in _pieces(x.numel()):
        codes, ends = state_reference.encode(x.view(-1)[part], how, counter, part.start)
        payload.view(-1)[part] = codes
        side[groups] = ends
    return payload, side


def decode(payload: Tensor, side: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Return the state in `dtype`, as `state_reference.decode` does, piece by piece."""
    how = parse_state_format(format)
    if payload.numel() <= PIECE or how.is_exact or not payload.is_contiguous():
        return state_reference.decode(payload, side, how).to(dtype)
    x = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    for part, groups in _pieces(payload.numel()):
        x.view(-1)[part] = state_reference.decode(payload.view(-1)[part], side[groups], how)
    return x


def encode_on_gpu(x: Tensor, format: str, counter: Tensor | None, target: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return the same, by one launch."""
    how = parse_state_format(format)
    if how.is_exact or not x.numel() or not x.is_contiguous() or _name(x.dtype) not in POINTERS:
        return encode(x.float().contiguous(), format, counter)
    payload, side = _empty(x, how)
    stored = [payload, side] if counter is None or not how.stochastic else [payload, side, counter]
    update_launch.launch(_encoding(format, _name(x.dtype)), stored, [x], [], target)
    return payload, side


def decode_on_gpu(payload: Tensor, side: Tensor, format: str, dtype: torch.dtype, target: str = "cuda") -> Tensor:
    """Return the same, by one launch."""
    how = parse_state_format(format)
    if how.is_exact or not payload.numel() or not payload.is_contiguous() or _name(dtype) not in POINTERS:
        return decode(payload, side, format, dtype)
    x = torch.empty(payload.shape, dtype=dtype, device=payload.device)
    update_launch.launch(_decoding(format, _name(dtype)), [x], [payload, side], [], target)
    return x


def constant(shape: torch.Size, x: Tensor, format: str, counter: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what `encode` makes of a tensor of this shape whose elements all are the number `x`, without making it.

    Constant groups are exact, so all groups are equal and no random bit matters. The number is waited for, and encoded
    on the CPU once: on a GPU that would be a launch an operation, for each new state.
    """
    how, count = parse_state_format(format), shape.numel()
    payload = torch.empty(shape, dtype=how.payload_dtype, device=x.device)
    if is_capturing() or x.is_meta or isinstance(x, FakeTensor):  # there is no number to wait for
        codes, ends = state_reference.encode(x.reshape(1).expand(GROUP), how, counter)
        payload.fill_(codes[0])
    else:
        code, of_group = _encoded(str(float(x)), x.dtype, format)
        payload.fill_(code)
        ends = of_group.to(x.device)
    return payload, torch.empty(how.side_shape(count), dtype=torch.float32, device=x.device).copy_(ends)


@functools.lru_cache(maxsize=64)
def _encoded(number: str, dtype: torch.dtype, format: str) -> tuple[float, Tensor]:
    """Return the code of the elements of a group of one number, and its side data. The number is text: 0 is not -0."""
    how = parse_state_format(format)
    with torch.device("cpu"):  # whatever the user's default device is
        group = torch.full((GROUP,), float(number), dtype=dtype)
        codes, ends = state_reference.encode(group, how, torch.zeros(1, dtype=torch.int32) if how.stochastic else None)
    return codes[0].item(), ends


def _empty(x: Tensor, how: StateFormat) -> tuple[Tensor, Tensor]:
    payload = torch.empty(x.shape, dtype=how.payload_dtype, device=x.device)
    return payload, torch.empty(how.side_shape(x.numel()), dtype=torch.float32, device=x.device)


def _pieces(elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield the elements and the groups of each piece."""
    for start in range(0, elements, PIECE):
        stop = min(start + PIECE, elements)
        yield slice(start, stop), slice(start // GROUP, ceil_div(stop, GROUP))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _encoding(format: str, dtype: str) -> str:
    """Return the spec of an update that stores what it reads."""
    draws = parse_state_format(format).stochastic
    slots = Slot(STATE, format, stored=0, counter=draws), Slot(PLAIN, dtype)
    return Update(slots, (Value("load", (), (1,)),)).to_json()


@functools.cache
def _decoding(format: str, dtype: str) -> str:
    """Return the spec of an update that writes a state as a plain tensor."""
    return Update((Slot(PLAIN, dtype, stored=0), Slot(STATE, format)), (Value("load", (), (1,)),)).to_json()
