"""The meaning of every FP8 operator, in plain torch.

These functions are the contract: the CPU runs them, tests compare with them, Inductor compiles them where no kernel of
ours exists yet, and a generated kernel must agree with them bit for bit on payloads given equal scales.

    amax   = max |x| over what shares a scale                        (FP32; nan and inf pass)
    scale  = amax / format max,  1 where amax is 0                   (FP32, never subnormal)
    data   = clamp(x / scale, ±format max), rounded to nearest even
    x      ≈ data * scale

A non-finite amax makes the scale non-finite, and with it everything that is dequantized: an overflow stays visible.
Every function is traceable, with symbolic sizes as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8compile.formats import FORMATS, Granularity, parse_granularity, round_up

FLOAT32_TINY = torch.finfo(torch.float32).tiny


def oriented(x: Tensor, transpose: bool, row_multiple: int, col_multiple: int) -> Tensor:
    """Return x [..., R, C], or its transpose, with zeros appended until R and C are multiples of these numbers."""
    if transpose:
        x = x.transpose(-1, -2)
    rows, cols = x.shape[-2], x.shape[-1]
    pad_rows = round_up(rows, row_multiple) - rows if row_multiple > 1 else 0  # a number also where rows is none
    pad_cols = round_up(cols, col_multiple) - cols if col_multiple > 1 else 0
    if all(isinstance(pad, int) and pad == 0 for pad in (pad_rows, pad_cols)):  # a symbolic pad may be anything
        return x
    return torch.constant_pad_nd(x, (0, pad_cols, 0, pad_rows))


def amax(x: Tensor, granularity: str, transpose: bool = False, row_multiple: int = 1, col_multiple: int = 1) -> Tensor:
    """Return the largest magnitude of all that share a scale; FP32, in the shape of `Granularity.scale_shape`."""
    how = parse_granularity(granularity)
    if how.kind == "tensor":
        return torch.zeros((), dtype=torch.float32, device=x.device) if _is_empty(x) else _largest(x.abs()).float()
    x = oriented(x, transpose, row_multiple, col_multiple)
    shape = how.scale_shape(x.shape)
    if _is_empty(x):
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    if how.kind == "row":
        return _largest_along(x.abs(), -1).unsqueeze(-1).float()
    *batch, rows, cols = shape
    if how.kind == "group":
        x = oriented(x, False, 1, how.size)
        return x.abs().reshape(*batch, rows, cols, how.size).amax(-1).float()
    x = oriented(x, False, how.size, how.size)
    return x.abs().reshape(*batch, rows, how.size, cols, how.size).amax((-1, -3)).float()


def _largest(x: Tensor) -> Tensor:
    """Return the maximum of x, which holds no negative values; 0 if it turns out to be empty."""
    if not any(map(_is_unbacked, x.shape)):
        return x.amax()
    while x.dim():
        x = _largest_along(x, -1)
    return x


def _largest_along(x: Tensor, dim: int) -> Tensor:
    """Return the maxima along `dim` of x, which has no negative values; 0 where a size known with the data is 0."""
    if _is_unbacked(x.shape[dim]):
        one = list(x.shape)
        one[dim] = 1
        x = torch.cat([x, x.new_zeros(one)], dim)
    return x.amax(dim)


def _is_unbacked(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.has_hint()


def _is_empty(x: Tensor) -> bool:
    """Return True if a size is known to be zero; a symbolic size counts as nonzero."""
    return any(isinstance(n, int) and n == 0 for n in x.shape)


def scale(amax: Tensor, format: str, power_of_two: bool = False) -> Tensor:
    """Return amax / format max in FP32; 1 where amax is 0; with `power_of_two` rounded up to a power of two."""
    # a tensor: CUDA multiplies by the inverse of a plain number
    limit = torch.full((), FORMATS[format].max, dtype=torch.float32, device=amax.device)
    s = torch.where(amax == 0, torch.ones_like(amax), (amax / limit).clamp_min(FLOAT32_TINY))
    if not power_of_two:
        return s
    rounded_up = ((s.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(torch.isfinite(s), rounded_up, s)


def predicted_scale(sample: Tensor, format: str) -> Tensor:
    """Return the scale that the amax of some of a tensor predicts: a power of two, 8 to 16 times the sample's own.

    The amax of a language model's gradients was seldom more than 8 times that of every 16th row, and four binades at
    the bottom of E4M3 cost them less than 1 dB.
    """
    return torch.where(sample == 0, torch.ones_like(sample), scale(sample, format, power_of_two=True) * 8.0)


def is_predicted(amax: Tensor, sample: Tensor, format: str) -> Tensor:
    """Return True where nothing saturates under `predicted_scale`, all is finite, and the sample is not zero."""
    return (sample > 0) & (amax < predicted_scale(sample, format) * FORMATS[format].max)


def expand_scale(scale: Tensor, granularity: Granularity, shape: torch.Size) -> Tensor:
    """Return the scale broadcast so that it multiplies data of `shape` [..., R, C] element by element."""
    if granularity.kind in ("tensor", "row"):
        return scale
    rows, cols, size = shape[-2], shape[-1], granularity.size
    if granularity.kind == "block":
        scale = _repeat(scale, -2, size, rows)
    return _repeat(scale, -1, size, cols)


def _repeat(scale: Tensor, dim: int, size: int, length: int) -> Tensor:
    """Return each entry along `dim` (-1 or -2) `size` times, cut to `length`."""
    if scale.device.type == "cpu" and type(scale) is not Tensor and size & (size - 1) == 0:
        # Traced, for Inductor. Its C++ drops what is left of a loop that it splits by a division of its index
        # (`CppScheduling.try_loop_split`), so no index is divided; nor checked, as none can be out of bounds.
        entries = torch.arange(length, device=scale.device, dtype=torch.int64) >> (size.bit_length() - 1)
        return scale.index_select(dim, entries.clamp(0, scale.shape[dim] - 1))
    dim += scale.dim()
    grown = list(scale.shape)
    grown[dim] *= size
    repeated = scale.unsqueeze(dim + 1)
    sizes = list(repeated.shape)
    sizes[dim + 1] = size
    return repeated.expand(sizes).reshape(grown).narrow(dim, 0, length)


def quantize(
    x: Tensor,
    scale: Tensor,
    format: str,
    granularity: str,
    transpose: bool = False,
    row_multiple: int = 1,
    col_multiple: int = 1,
) -> Tensor:
    """Return data of x, or of its transpose, padded with zeros: contiguous [..., R, C] in the dtype of `format`."""
    fmt = FORMATS[format]
    x = oriented(x, transpose, row_multiple, col_multiple)
    scaled = x.float() / expand_scale(scale, parse_granularity(granularity), x.shape)
    return scaled.clamp_min(-fmt.max).clamp_max(fmt.max).to(fmt.dtype).contiguous()


def dequantize(data: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype) -> Tensor:
    """Return data * scale in FP32, rounded to `dtype`; same shape as data."""
    return (data.float() * expand_scale(scale, parse_granularity(granularity), data.shape)).to(dtype)


def scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    granularity_a: str,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
    offs: Tensor | None = None,
) -> Tensor:
    """Return (a · scale_a) @ (b · scale_b)ᵀ + bias, accumulated in FP32.

    a [..., M, K] and b [..., N, K] hold FP8 data, both contiguous along the contracted K; bias [N].
    Returns [..., M, N] in `out_dtype`. `fast_accumulation` changes nothing here: it allows a GPU to accumulate in less.

    Grouped, with offs [E] (int32, ascending): a [M, K], b [E, N, K], both with row scales. Rows offs[e - 1] to offs[e]
    of a are multiplied with b[e]; rows behind the last group give zeros (a GPU leaves them as they are). Or b [N, K],
    with row scales of each group, [E, M, 1] and [E, N, 1]: columns offs[e - 1] to offs[e] of both give product e of
    [E, M, N] (`grouped_reference.grouped_cast` makes such operands).
    """
    if offs is not None and b.dim() == 2:
        products, start = [], 0
        for e, end in enumerate(offs.tolist()):
            left, right = a[:, start:end], b[:, start:end]
            products.append(
                scaled_mm(left, scale_a[e], granularity_a, right, scale_b[e], granularity_b, bias, out_dtype)
            )
            start = end
        return torch.stack(products)
    if offs is not None:
        out = a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
        start = 0
        for e, end in enumerate(offs.tolist()):
            rows = slice(start, end)
            out[rows] = scaled_mm(
                a[rows], scale_a[rows], granularity_a, b[e], scale_b[e], granularity_b, bias, out_dtype
            )
            start = end
        return out
    coarse = ("tensor", "row")
    if granularity_a in coarse and granularity_b in coarse:
        out = a.float() @ b.float().transpose(-1, -2)
        out = out * scale_a * (scale_b.transpose(-1, -2) if granularity_b == "row" else scale_b)
    else:
        left = dequantize(a, scale_a, granularity_a, torch.float32)
        right = dequantize(b, scale_b, granularity_b, torch.float32)
        out = left @ right.transpose(-1, -2)
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
