"""The matmuls of an output head in the dtype of its input, chunk by chunk, with sums in FP32."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8compile.formats import round_up
from fp8compile.kernels.loss.softmax_step import Codes


@dataclass
class PlainHead:
    """x [M, K] @ weight [N, K]ᵀ + bias [N], and its gradients. All chunks of logits lie in one buffer."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    buffer: Tensor | None = None

    def logits(self, part: slice) -> Tensor:
        """Return the logits of rows: of the first call the most."""
        rows, classes = part.stop - part.start, self.weight.shape[0]
        if self.buffer is None:
            self.buffer = self.x.new_empty([rows, width_of(classes)])
        logits = self.buffer[:rows, :classes]
        for piece in _pieces(self.weight):
            bias = None if self.bias is None else self.bias[piece]
            _multiply_with_bias(self.x[part], self.weight[piece], bias, logits[:, piece])
        return logits

    def codes(self, part: slice, wanted: Sequence[bool]) -> None:
        """Return nothing: nobody reads codes."""

    def reads_slopes(self, wanted: Sequence[bool]) -> bool:
        """Return True if a gradient is wanted."""
        return any(wanted)

    def waiting(self) -> list[Tensor]:
        """Return nothing: forward computes all gradients."""
        return []

    def add_gradients(
        self, part: slice, slopes: Tensor, codes: Codes | None, of_x: Tensor | None, of_weight: Tensor | None
    ) -> None:
        """Write the gradient of x; write or add to that of the weight."""
        if of_x is not None:
            for piece in _pieces(self.weight):
                _multiply(slopes[:, piece], self.weight[piece], of_x, adds=piece.start > 0)
        if of_weight is not None:
            add_grad_weight(of_weight, slopes, self.x[part], adds=part.start > 0)


def add_grad_weight(of_weight: Tensor, slopes: Tensor, x: Tensor, adds: bool) -> None:
    """Write slopes [M, N]ᵀ @ x [M, K] to the gradient of the weight, f32[N, K], or add it to that."""
    for piece in _pieces(of_weight, x.element_size()):
        _multiply(slopes[:, piece].t(), x, of_weight[piece], adds)


def _pieces(weight: Tensor, size: int = 0) -> list[slice]:
    """Return all classes of [N, K], or all but the last few and those: matmul units take multiples of 16 bytes.

    size: bytes of an element that is read; of the weight's, if 0. With 50257 classes cuBLAS takes kernels that read
    number by number, whatever the distance between rows. A chunk of 2048 rows of K = 1600 on an H200: 7.0 ms for the
    three matmuls; in two pieces 1.6.
    """
    classes = weight.shape[0]
    aligned = classes - classes % (16 // (size or weight.element_size()))
    return [slice(0, aligned), slice(aligned, classes)] if 0 < aligned < classes else [slice(0, classes)]


def width_of(classes: int) -> int:
    """Return the columns of the buffer: rows that begin at multiples of 128 bytes suit matmul units, however long."""
    return round_up(classes, 64)


def _multiply_with_bias(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _multiply(left: Tensor, right: Tensor, out: Tensor, adds: bool) -> None:
    """Write left @ right to `out`, or add it to that: FP32 of whatever they are."""
    if adds:
        _add_product(out, left, right)
    elif left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:  # a CPU has no kernel that widens
        torch.mm(left.float(), right.float(), out=out)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`: FP32 of whatever they are."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif not left.is_cuda:
        total.addmm_(left.float(), right.float())
    elif _adds_to_wider(left.dtype, left.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        for rows, part in zip(total.split(8192), left.split(8192), strict=True):
            rows += torch.mm(part, right, out_dtype=total.dtype)


@functools.cache
def _adds_to_wider(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if torch adds a product to a wider matrix: some versions want all three in one dtype."""
    one = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())
