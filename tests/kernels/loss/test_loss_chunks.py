"""Chunks of a loss: the operator against autograd, its Triton kernel (interpreted) against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8compile import ops
from fp8compile.kernels.loss import chunked_loss
from fp8compile.kernels.loss.chunked_loss import chunks
from fp8compile.kernels.loss.softmax_step import Curve, plain_step

interpreted = pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_chunked_loss.py runs it compiled")
CURVES = {"as it is": Curve(), "scaled": Curve(-0.5), "soft-capped": Curve(0.25, 8.0)}
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def data(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g).to(dtype) for shape in ((m, k), (n, k), (n,)))
    return x, weight, bias, torch.randint(0, n, (m,), generator=g), torch.rand(m, generator=g)


# ---- the operator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [3, 8, 9, 67])  # fewer than matmul units take at once, as they take them, and more
@pytest.mark.parametrize("rows", [1, 7, 20, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_the_operator_is_a_weighted_cross_entropy_with_its_gradients(curve: str, rows: int, classes: int):
    x, weight, bias, index, weights = data(20, 6, classes)
    how = CURVES[curve]
    chosen, *got = ops.chunked_loss(x, weight, bias, index, weights, rows, how.inner, how.outer, [True, True, True])
    given = [t.double().requires_grad_() for t in (x, weight, bias)]
    z = how.inner * F.linear(*given)
    z = z if how.outer is None else how.outer * torch.tanh(z)
    losses = F.cross_entropy(z, index, reduction="none")
    torch.testing.assert_close(chosen.double(), -losses, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, torch.autograd.grad((losses * weights).sum(), given), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_everything_returned_is_fp32_and_rounding_is_that_of_chunks_logits(dtype: torch.dtype):
    x, weight, bias, index, weights = data(20, 6, 9, dtype)
    whole = ops.chunked_loss(x, weight, bias, index, weights, 20, 1.0, None, [True, True, True])
    parts = ops.chunked_loss(x, weight, bias, index, weights, 3, 1.0, None, [True, True, True])
    for a, b in zip(whole, parts, strict=True):
        assert a.dtype is torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # FP32 sums in another order


def terms_of(z: Tensor, index: Tensor) -> Tensor:
    """The definition of the terms, in plain torch."""
    log_probabilities, normaliser = z.log_softmax(-1), z.logsumexp(-1)
    chosen = log_probabilities.gather(1, index.unsqueeze(1)).squeeze(1)
    return torch.stack([chosen, log_probabilities.sum(-1), normaliser, normaliser**2])


@pytest.mark.parametrize("rows", [7, 64])
@pytest.mark.parametrize("curve", CURVES)
def test_the_operator_with_every_term_and_its_gradients(curve: str, rows: int):
    x, weight, bias, index, _ = data(20, 6, 9)
    how, weights = CURVES[curve], torch.randn(4, 20, generator=torch.Generator().manual_seed(3))
    args = (x, weight, bias, index, weights, rows, how.inner, how.outer, [True, True, True], True)
    terms, *got = ops.chunked_loss(*args)
    given = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted = terms_of(how.scores(F.linear(*given)), index)
    torch.testing.assert_close(terms.double(), wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(got, torch.autograd.grad(-(wanted * weights).sum(), given), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    torch.library.opcheck(ops.chunked_loss, args, test_utils=("test_schema", "test_faketensor"))


def test_only_what_is_wanted_is_computed():
    x, weight, _, index, _ = data(20, 6, 9)
    assert [list(r.shape) for r in ops.chunked_loss(x, weight, None, index, None, 8, 1.0, None, [False] * 3)] == [[20]]
    some = ops.chunked_loss(x, weight, None, index, None, 8, 1.0, None, [False, True, False])
    assert [list(r.shape) for r in some] == [[20], [9, 6]]


def test_the_operator_obeys_the_rules_of_operators():
    x, weight, bias, index, weights = data(20, 6, 9)
    args = (x, weight, bias, index, weights, 8, 1.0, None, [True, True, True])
    torch.library.opcheck(ops.chunked_loss, args, test_utils=("test_schema", "test_faketensor"))


def test_no_rows_have_no_gradients():
    x, weight, bias, index, weights = data(0, 6, 9)
    chosen, *got = ops.chunked_loss(x, weight, bias, index, weights, 8, 1.0, None, [True, True, True])
    assert chosen.numel() == 0
    assert not any(g.any() for g in got)


@pytest.mark.parametrize(("m", "rows", "sizes"), [
    (0, 8, []), (8, 8, [8]), (9, 8, [8, 1]), (10, 3, [3, 3, 3, 1]),
    (4096, 2048, [2048, 2048]), (4097, 2048, [1408, 1408, 1281]), (2048, 4096, [2048]), (300, 256, [256, 44]),
])  # fmt: skip
def test_chunks_cover_all_rows_once_in_equal_parts(m: int, rows: int, sizes: list[int]):
    assert [part.stop - part.start for part in chunks(m, rows)] == sizes
    assert [row for part in chunks(m, rows) for row in range(m)[part]] == list(range(m))


# ---- the kernel -----------------------------------------------------------------------------------------------------


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """The interpreted kernel, with blocks so small that a row has several."""
    interpreter.prepare()
    from fp8compile.kernels.loss import softmax_gradient

    monkeypatch.setattr(softmax_gradient, "BLOCK", 32)
    return softmax_gradient.step


def compare(
    step: Any, logits: Tensor, index: Tensor, weights: Tensor | None, curve: Curve = CURVES["as it is"]
) -> Tensor:
    """Both ways on copies of `logits`: terms to FP32 rounding, gradients to one rounding of their dtype (of the largest
    weight where there are several, whose gradients may cancel)."""
    mine, theirs, every_term = logits.clone(), logits.clone(), weights is not None and weights.dim() == 2
    a, b = (run(x, index, weights, curve, True, every_term) for run, x in ((step, mine), (plain_step, theirs)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
    ulp = torch.finfo(logits.dtype).eps
    atol = 1e-5 * logits.shape[1] if every_term else 1e-6
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=max(ulp, 1e-5), atol=atol, equal_nan=True)
    return mine


@interpreted
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("n", [1, 31, 32, 100])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_is_the_reference(step: Any, dtype: torch.dtype, curve: str, n: int, weighted: bool):
    g = torch.Generator().manual_seed(n)
    logits = (8 * torch.randn(6, n, generator=g)).to(dtype)
    index = torch.randint(0, n, (6,), generator=g)
    compare(step, logits, index, torch.rand(6, generator=g) if weighted else None, CURVES[curve])


@interpreted
@pytest.mark.parametrize("n", [1, 31, 32, 100])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_with_every_term_is_the_reference(step: Any, dtype: torch.dtype, curve: str, n: int):
    g = torch.Generator().manual_seed(n)
    logits = torch.randn(6, n, generator=g).to(dtype)
    compare(step, logits, torch.randint(0, n, (6,), generator=g), torch.randn(4, 6, generator=g), CURVES[curve])


@interpreted
def test_rows_that_do_not_count_have_no_gradient(step: Any):
    logits = torch.randn(4, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradient = compare(step, logits, torch.tensor([0, 0, 69, 3]), torch.tensor([0.0, 1.0, 0.0, 0.5]))
    assert [bool(row.any()) for row in gradient] == [False, True, False, True]


@interpreted
def test_infinities_and_nan_are_those_of_torch(step: Any):
    logits = torch.randn(7, 70, generator=torch.Generator().manual_seed(0))
    logits[0, :40] = -torch.inf  # a whole block and more
    logits[1, 40:] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, 5] = torch.nan
    logits[5, 50] = -torch.inf  # its own label
    index = torch.tensor([50, 3, 3, 3, 3, 50, 1])
    compare(step, logits, index, None)
    compare(step, logits, index, torch.ones(4, 7))
    chosen = step(logits.clone(), index, None, Curve(), False)
    want = logits.log_softmax(-1).gather(1, index[:, None]).squeeze(1)
    torch.testing.assert_close(chosen, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert chosen[5] == -torch.inf


@interpreted
def test_large_logits_do_not_overflow(step: Any):
    compare(step, torch.tensor([[1e4, 9.99e3, -1e4], [-3e4, -3e4, -3e4]]), torch.tensor([1, 2]), None)


@interpreted
def test_a_label_out_of_range_is_nan_and_reads_nothing(step: Any):
    chosen = step(torch.randn(3, 40), torch.tensor([-1, 40, 39]), None, Curve(), False)
    assert chosen.isnan().tolist() == [True, True, False]


@interpreted
def test_rows_with_gaps_between_them(step: Any):
    wide = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    before = wide.clone()
    index = torch.arange(5)
    chosen = step(wide[:, :60], index, None, Curve(), True)
    torch.testing.assert_close(chosen, plain_step(before[:, :60].clone(), index, None, Curve(), True))
    assert torch.equal(wide[:, 64:], before[:, 64:])  # up to the next multiple of 16 is a kernel's


@interpreted
def test_the_operator_with_the_kernel_is_the_operator(step: Any):
    args = (*data(20, 6, 70), 8, 1.0, None, [True, True, True])
    for a, b in zip(chunked_loss.run(*args, step=step), chunked_loss.run(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
