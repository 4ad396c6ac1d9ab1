"""FP8 matmuls on a CUDA GPU, through torch's cuBLAS and CUTLASS kernels.

Both operands arrive contiguous along the contracted dimension (a [M, K], b [N, K]): the only form Hopper's FP8 units
take. What each kernel wants beyond that (layout of scales, output dtype) is settled here and nowhere else; where a
kernel has no output in the dtype asked for, its BF16 result is converted.

| granularity of a × b | kernel | output |
|---|---|---|
| tensor × tensor | cuBLAS, one scale each | BF16, FP16, FP32 |
| row × row, row × tensor, tensor × row | row-wise; tensor scales repeated | as above on Hopper, CUDA ≥ 12.9 |
| group(128) or block(128) × the same, not both block | cuBLAS block-wise (Hopper only) | BF16 |
| row × row in groups of rows (experts) | if accumulated fast, our own (`grouped_rows.py`); CUTLASS | BF16 |
| row × row in groups of what is contracted (their grad_weight) | CUTLASS, each a multiple of 16, none empty | BF16 |

Grouped ones run on Hopper only, and copy nothing to the host.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile.formats import round_up

BLOCKWISE = {"group(128)": "BlockWise1x128", "block(128)": "BlockWise128x128"}


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
    """Return what `markers.scaled_mm` does; batches run one after the other, groups in one launch."""
    if not a.shape[-1]:  # a sum of nothing, which no kernel takes
        out = a.new_zeros(*a.shape[:-1], b.shape[-2], dtype=out_dtype)
        return out if bias is None else out + bias
    if offs is not None:
        return _grouped(a, scale_a, b, scale_b, offs, out_dtype, fast_accumulation)
    if a.dim() == 2:
        return _scaled_mm_2d(a, scale_a, granularity_a, b, scale_b, granularity_b, bias, out_dtype, fast_accumulation)
    outs = [
        _scaled_mm_2d(
            a[i], _of_batch(scale_a, i), granularity_a, b[i], _of_batch(scale_b, i), granularity_b,
            bias, out_dtype, fast_accumulation,
        )
        for i in range(a.shape[0])
    ]  # fmt: skip
    return torch.stack(outs)


def multiply_into(
    out: Tensor,
    a: Tensor,
    scale_a: Tensor,
    granularity_a: str,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: str,
) -> None:
    """Write the product of two matrices to `out`, without a copy where a kernel has its dtype.

    At least one of them has a scale for each row.
    """
    if not (_rows_in_cublas() or out.dtype is torch.bfloat16):
        out.copy_(scaled_mm(a, scale_a, granularity_a, b, scale_b, granularity_b, None, out.dtype))
        return
    scales = _per_row(scale_a, a.shape[0]), _per_row(scale_b, b.shape[0]).t()
    torch._scaled_mm(a, b.t(), *scales, out_dtype=out.dtype, out=out)


def _grouped(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    """Return products of rows of a, in groups of any size, with matrices of b: scales are [M] and [E, N]. Or those of
    columns of a and b, in groups of multiples of 16: scales are [E · M] and [E · N]."""
    if a.shape[0] == 0:
        return a.new_empty(*(offs.shape if b.dim() == 2 else ()), 0, b.shape[-2], dtype=out_dtype)
    if b.dim() == 3 and fast and _is_hopper(a.device):
        from fp8compile.kernels.matmul import grouped_rows  # Triton is imported where there is a GPU

        if grouped_rows.fits(a, b):
            return grouped_rows.multiply_rows(a, scale_a, b, scale_b, offs).to(out_dtype)
    scale_a, scale_b = (s.reshape(-1) if b.dim() == 2 else s.squeeze(-1) for s in (scale_a, scale_b))
    out = torch._scaled_grouped_mm(
        a, b.transpose(-1, -2), scale_a, scale_b, offs, out_dtype=torch.bfloat16, use_fast_accum=fast
    )
    return out.to(out_dtype)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


def _of_batch(scale: Tensor, i: int) -> Tensor:
    return scale[i] if scale.dim() == 3 else scale


def _scaled_mm_2d(
    a: Tensor,
    scale_a: Tensor,
    granularity_a: str,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    tensorwise = granularity_a == granularity_b == "tensor"
    kernel_dtype = out_dtype if tensorwise or (granularity_a not in BLOCKWISE and _rows_in_cublas()) else torch.bfloat16
    is_fused = bias is not None and kernel_dtype == bias.dtype == torch.bfloat16 and bias.is_contiguous()
    fused_bias = bias if is_fused else None
    if granularity_a in BLOCKWISE:
        out = _blockwise(a, scale_a, granularity_a, b, scale_b, granularity_b, kernel_dtype)
        fused_bias = None
    else:
        if tensorwise:
            scale_a, scale_b = _aligned(scale_a), _aligned(scale_b)
        else:
            scale_a, scale_b = _per_row(scale_a, a.shape[0]), _per_row(scale_b, b.shape[0]).t()
        out = torch._scaled_mm(
            a, b.t(), scale_a, scale_b, bias=fused_bias, out_dtype=kernel_dtype, use_fast_accum=fast_accumulation
        )
    if bias is not None and fused_bias is None:
        out = out + bias
    return out.to(out_dtype)


@functools.cache
def _rows_in_cublas() -> bool:
    """Return True if cuBLAS runs row scales itself, with every output dtype; elsewhere CUTLASS does, with BF16 only."""
    cuda = tuple(int(v) for v in (torch.version.cuda or "0.0").split("."))
    return torch.cuda.get_device_capability()[0] == 9 and cuda >= (12, 9)


def _aligned(scale: Tensor) -> Tensor:
    """Return `scale` where it starts at a multiple of 16 bytes, as cuBLAS wants it, else a copy."""
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()


def _per_row(scale: Tensor, rows: int) -> Tensor:
    """Return one scale a row. Those of a matrix in a batch need not start at a multiple of 16 bytes."""
    return _aligned(scale.reshape(-1, 1).expand(rows, 1).contiguous())


def _blockwise(
    a: Tensor, scale_a: Tensor, granularity_a: str, b: Tensor, scale_b: Tensor, granularity_b: str, dtype: torch.dtype
) -> Tensor:
    scaling = torch.nn.functional.ScalingType
    return F.scaled_mm(
        a,
        b.t(),
        _blockwise_scale(scale_a, granularity_a),
        getattr(scaling, BLOCKWISE[granularity_a]),
        _blockwise_scale(scale_b, granularity_b),
        getattr(scaling, BLOCKWISE[granularity_b]),
        output_dtype=dtype,
    )


def _blockwise_scale(scale: Tensor, granularity: str) -> Tensor:
    """Return `scale` in cuBLAS's layout: 1×128 scales [R, C/128] with stride (1, R); 128×128 scales [C/128 rounded up
    to 4, R/128] with stride (1, C/128 rounded up to 4)."""
    if granularity == "group(128)":
        return scale.t().contiguous().t()
    blocks = scale.shape[1]
    return F.pad(scale, (0, round_up(blocks, 4) - blocks)).t()
