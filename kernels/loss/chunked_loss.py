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

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fp8compile.formats import LINE, round_up
from fp8compile.kernels.loss import fp8_head
from fp8compile.kernels.loss.fp8_head import Casts, Fp8Head
from fp8compile.kernels.loss.plain_head import PlainHead, width_of
from fp8compile.kernels.loss.softmax_step import DROPPED, TERMS, Codes, Curve, Step, plain_step
from fp8compile.kernels.matmul.scaled_mm import multiply_into, scaled_mm


class Head(Protocol):
    """The matmuls of a head, chunk by chunk."""

    def logits(self, part: slice) -> Tensor:
        """Return the logits of rows, in the dtype of x; good until the next call."""
        ...

    def codes(self, part: slice, wanted: Sequence[bool]) -> Codes | None:
        """Return what takes the gradient of the logits of `part` in FP8; None if nobody reads it."""
        ...

    def reads_slopes(self, wanted: Sequence[bool]) -> bool:
        """Return True if somebody reads it in the dtype of the logits."""
        ...

    def waiting(self) -> list[Tensor]:
        """Return what backward computes the weight's gradient of, where forward does not."""
        ...

    def add_gradients(
        self, part: slice, slopes: Tensor, codes: Codes | None, of_x: Tensor | None, of_weight: Tensor | None
    ) -> None:
        """Write the gradient of x, and write or add to that of the weight: of all rows, once the last have been given.

        slopes, codes: the gradient of the logits of `part`, in the forms that are read.
        """
        ...


# Fewer, and reading and writing the sum takes longer than the matmul that adds to it; and matmul units are not full.
LEAST_ROWS = 2048


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


def empty_results(x: Tensor, classes: Any, wanted: Sequence[bool], every_term: bool) -> list[Tensor]:
    """Return uninitialised results: log-probabilities or all terms, then gradients wanted of x, weight and bias."""
    rows, features = x.shape
    shapes = [[rows, features], [classes, features], [classes]]
    terms = [len(TERMS), rows] if every_term else [rows]
    shapes = [terms, *(shape for shape, want in zip(shapes, wanted, strict=True) if want)]
    return [x.new_empty(shape, dtype=torch.float32) for shape in shapes]


def computed_now(wanted: Sequence[bool], waits: bool) -> list[bool]:
    """Return which gradients forward computes of those that are wanted: not the weight's where that waits."""
    return [wanted[0], wanted[1] and not waits, wanted[2]]


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
    head = PlainHead(x, weight, bias)
    return in_chunks(head, x, weight.shape[0], index, weights, rows, Curve(inner, outer), wanted, every_term, step)


def in_chunks(
    head: Head,
    x: Tensor,
    classes: int,
    index: Tensor,
    weights: Tensor | None,
    rows: int,
    curve: Curve,
    wanted: Sequence[bool],
    every_term: bool,
    step: Step,
    waits: bool = False,
) -> list[Tensor]:
    """Return the results of `run`, with the matmuls of `head`. `waits`: instead of the weight's gradient, behind all
    others, what backward computes it of."""
    _check_labels(index, classes)
    now = computed_now(wanted, waits)
    terms, *gradients = empty_results(x, classes, now, every_term)
    following = iter(gradients)
    of_x, of_weight, of_bias = (next(following) if want else None for want in now)
    if of_bias is not None:
        of_bias.zero_()
    if of_weight is not None and not x.shape[0]:
        of_weight.zero_()  # there is no chunk that writes it
    for part in chunks(x.shape[0], rows):
        logits = head.logits(part)
        given = None if weights is None else weights[..., part]
        codes, reads_slopes = head.codes(part, wanted), head.reads_slopes(wanted)
        terms[..., part] = step(logits, index[part], given, curve, reads_slopes, every_term, codes)
        head.add_gradients(part, logits, codes, None if of_x is None else of_x[part], of_weight)
        if of_bias is not None:
            of_bias += logits.sum(0, dtype=torch.float32)
        del logits, codes  # before the next chunk's are made
    return [terms, *gradients, *(head.waiting() if waits else [])]


def _check_labels(index: Tensor, classes: int) -> None:
    """Raise for a label that is no class, as torch's own losses do: on a GPU by an assertion of the device."""
    bad = (index >= classes) | ((index < 0) & (index != DROPPED))
    torch._assert_async(~bad.any(), f"a label is out of bounds: it is none of 0 … {classes - 1}, and is not ignored")


def run_on_cuda(*given: Any) -> list[Tensor]:
    """Return the results of `run`, with the softmax part of each chunk as one Triton kernel."""
    from fp8compile.kernels.loss.softmax_gradient import step  # Triton is imported where there is a GPU

    return run(*given, step=step)


def run_in_fp8(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    weight_data: Tensor,
    weight_scale: Tensor,
    turned_data: Tensor | None,
    turned_scale: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    weights: Tensor | None,
    classes: int,
    rows: int,
    inner: float,
    outer: float | None,
    wanted: Sequence[bool],
    every_term: bool = False,
    exact_grad_weight: bool = False,
    waits: bool = False,
    fast_accumulation: bool = False,
    step: Step = plain_step,
    **on_gpu: Any,
) -> list[Tensor]:
    """Return the results of `run`, of matmuls in FP8: all, or but for grad_weight. `fast_accumulation`: of the logits.

    waits: instead of the weight's gradient, behind all others, three results that backward computes it of
    (`fp8_head.empty_waiting`).
    data, scale, weight_data, weight_scale, turned_data, turned_scale: see `fp8_head.Casts`.
    """
    turned = None if turned_data is None or turned_scale is None else (turned_data, turned_scale)
    casts = Casts((data, scale), (weight_data, weight_scale), turned)
    head = Fp8Head(x, casts, bias, classes, exact_grad_weight, waits, fast_accumulation, **on_gpu)
    rows = fp8_head.rows_of_chunk(rows)
    return in_chunks(head, x, classes, index, weights, rows, Curve(inner, outer), wanted, every_term, step, waits)


def run_in_fp8_on_cuda(*given: Any) -> list[Tensor]:
    """Return the results of `run_in_fp8`, by kernels of a GPU."""
    from fp8compile.kernels.casts.grouped_cast import cast_columns  # Triton is imported where there is a GPU
    from fp8compile.kernels.loss.softmax_gradient import step
    from fp8compile.kernels.loss.turned_codes import turn

    how = {"scaled_mm": scaled_mm, "multiply_into": multiply_into}
    return run_in_fp8(*given, step=step, cast_columns=cast_columns, turn=turn, **how)


def workspace(
    rows: int, classes: int, m: int, k: int, dtype: torch.dtype, in_fp8: bool = False, waits: bool = False
) -> int:
    """Return the bytes that are alive only while it runs, of `m` rows in all: a chunk of logits; in FP8 its codes too,
    those of a block, transposed, and x as it is scaled and cast for the block. Codes that wait are results."""
    size = dtype.itemsize + in_fp8
    width = round_up(classes, LINE) if in_fp8 else width_of(classes)
    chunk = max((part.stop - part.start for part in chunks(m, rows)), default=0) * width * size
    if waits:
        return chunk + dtype.itemsize * m * k
    block = min(m, fp8_head.rows_at_once(k)) if in_fp8 else 0
    return chunk + block * (width + size * k)
