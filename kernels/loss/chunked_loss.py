"""The cross-entropy of an output head, in chunks of rows: all logits never exist at once.

    fp8::chunked_loss(x [M, K], weight [N, K], bias [N], index [M], weights [M], …)
        z[m]              = f(x[m] @ weightᵀ + bias)            f: see `Curve`
        log_probability   = z[m, index[m]] − log Σ exp z[m]     [M]
        and of  loss = −Σ weights[m] · log_probability[m]  the gradients of x, weight and bias

    with every_term, and weights [4, M]: of each row the four `TERMS` [4, M]
        and of  loss = −Σ weights[t, m] · term[t, m]  the gradients

Everything that is returned is FP32. Chunks run one after the other through one buffer: logits in the dtype of x, as
the user's model rounds them; then, in their place, their gradient, rounded likewise; and two matmuls read it.

**Why forward computes gradients.** A loss is a number, so its gradients are linear in the one number that backward is
given: forward can compute them with 1 in its place. That takes the three matmuls that a head has anyway, and keeps
the gradients of x and weight where logits and x would have been kept. The alternative, which keeps Σ exp alone and
computes every chunk of logits again in backward, takes a fourth matmul: a third more time for the head. Where each row
is given a number of its own (a loss that is returned for every row), nothing else would do; that is left as it is.

**Why FP32.** The number that backward is given multiplies before anything is rounded, whatever it is: a loss scale, or
one over a count. The gradient of weight is a sum over chunks; in BF16 it would be rounded once a chunk. Relative error
beside FP32 logits and sums, 2048 rows, 8192 classes, K = 256, labels as frequent as words:

    torch's own BF16, one matmul   2.7e-3     summed in BF16, 2 · 4 · 8 · 16 chunks   2.9 · 3.4 · 4.1 · 5.0e-3
                                              summed in FP32, rounded once            2.7e-3

An FP32 sum takes as many bytes more than a BF16 one as K rows of BF16 logits. So chunks of K rows cost nothing on top:
the most that is alive is 4NK + 2NK bytes, at the end of forward (sum, logits) and again when backward begins (sum, its
BF16 form), where logits and their gradient would have taken 4MN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.formats import round_up
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS, Curve, Step, plain_step

LEAST_ROWS = 2048  # fewer, and reading and writing the sum takes longer than the matmul that adds to it


def rows_of_chunk(k: Any) -> int:
    """Return how many rows a chunk has by default, of a head with `k` features."""
    return max(LEAST_ROWS, k) if isinstance(k, int) else LEAST_ROWS


def chunks(m: int, rows: int) -> list[slice]:
    """Return `m` rows in as few chunks of at most `rows` as there can be, all but the last of equal size."""
    if not m:
        return []
    count = -(-m // rows)
    size = min(rows, -(-m // count // 128) * 128) if rows >= 128 else rows  # sizes that suit matmul units
    return [slice(start, min(start + size, m)) for start in range(0, m, size)]


def empty_results(x: Tensor, weight: Tensor, wanted: Sequence[bool], every_term: bool) -> list[Tensor]:
    """Return uninitialised results: log-probabilities or all terms, then gradients wanted of x, weight and bias."""
    shapes = [list(x.shape), list(weight.shape), [weight.shape[0]]]
    terms = [len(TERMS), x.shape[0]] if every_term else [x.shape[0]]
    shapes = [terms, *(shape for shape, want in zip(shapes, wanted, strict=True) if want)]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    weights: Tensor | None,
    rows: int,
    inner: float,
    outer: float | None,
    wanted: Sequence[bool],
    every_term: bool = False,
    step: Step = plain_step,
) -> list[Tensor]:
    """Return log-probabilities or all terms, and gradients (`empty_results`), made in chunks of at most `rows` rows.

    Raises for a label that is no class.
    """
    _check_labels(index, weight.shape[0])
    terms, *gradients = empty_results(x, weight, wanted, every_term)
    waiting = iter(gradients)
    of_x, of_weight, of_bias = (next(waiting) if want else None for want in wanted)
    parts = chunks(x.shape[0], rows)
    for total in (of_weight, of_bias):
        if total is not None:
            total.zero_()
    buffer = x.new_empty([parts[0].stop if parts else 0, _width(weight.shape[0])])[:, : weight.shape[0]]
    pieces = _pieces(weight)
    for part in parts:
        logits = buffer[: part.stop - part.start]
        for piece in pieces:
            _logits(x[part], weight[piece], None if bias is None else bias[piece], logits[:, piece])
        given = None if weights is None else weights[..., part]
        terms[..., part] = step(logits, index[part], given, Curve(inner, outer), any(wanted), every_term)
        for piece in pieces:
            if of_x is not None:
                _multiply(logits[:, piece], weight[piece], of_x[part], adds=piece.start > 0)
            if of_weight is not None:
                _add_product(of_weight[piece], logits[:, piece].t(), x[part])
        if of_bias is not None:
            of_bias += logits.sum(0, dtype=torch.float32)
    return [terms, *gradients]


def _check_labels(index: Tensor, classes: int) -> None:
    """Raise for a label that is no class, as torch's own losses do: on a GPU by an assertion of the device."""
    bad = (index >= classes) | ((index < 0) & (index != DROPPED))
    torch._assert_async(~bad.any(), f"a label is out of bounds: it is none of 0 … {classes - 1}, and is not ignored")


def _pieces(weight: Tensor) -> list[slice]:
    """Return all classes, or all but the last few and those: matmul units take sizes that are multiples of 16 bytes.

    With 50257 classes cuBLAS takes kernels that read number by number, whatever the distance between rows. A chunk of
    2048 rows of K = 1600 on an H200: 7.0 ms for the three matmuls; in two pieces 1.6.
    """
    classes = weight.shape[0]
    aligned = classes - classes % (16 // weight.element_size())
    return [slice(0, aligned), slice(aligned, classes)] if 0 < aligned < classes else [slice(0, classes)]


def _width(classes: int) -> int:
    """Return the columns of the buffer: rows that begin at multiples of 128 bytes suit matmul units, however long."""
    return round_up(classes, 64)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
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
        for part in chunks(total.shape[0], 8192):
            total[part] += torch.mm(left[part], right, out_dtype=total.dtype)


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


def run_on_cuda(*given: Any) -> list[Tensor]:
    """Return the results of `run`, with the softmax part of each chunk as one Triton kernel."""
    from fp8compile.kernels.loss.softmax_gradient import step  # Triton is imported where there is a GPU

    return run(*given, step=step)


def workspace(rows: int, classes: int, m: int, dtype: torch.dtype) -> int:
    """Return the bytes that are alive only while it runs: a chunk of logits, of `m` rows in all."""
    return max((part.stop - part.start for part in chunks(m, rows)), default=0) * _width(classes) * dtype.itemsize
