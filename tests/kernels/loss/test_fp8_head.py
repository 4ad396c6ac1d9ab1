"""A head in FP8, in chunks: the operator against sums written down by hand, its kernels (interpreted) against torch."""

from __future__ import annotations

import weakref
from typing import Any

import interpreter
import pytest
import torch
from torch import Tensor

from fp8compile import ops
from fp8compile.formats import LINE
from fp8compile.kernels.casts import grouped_cast
from fp8compile.kernels.loss import fp8_head
from fp8compile.kernels.loss.chunked_loss import chunks, run_in_fp8
from fp8compile.kernels.loss.softmax_step import DROPPED, Codes, Curve, plain_step

interpreted = pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu/test_chunked_loss.py runs it compiled")
M, K, N, ROWS = 60, 32, 70, 20  # chunks of 16 rows and a part of one; classes that are filled up
AT_ONCE = 40  # rows whose weight gradient is computed at once: two chunks, and what is left
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_head, "rows_at_once", lambda k: AT_ONCE)


def in_rows(x: Tensor, largest: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of x, in FP64 but for the codes' own rounding and the scales' FP32."""
    amax = x.float().abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax / largest)
    return (x.float() / scale).clamp(-largest, largest).to(dtype), scale


def cast(x: Tensor) -> tuple[Tensor, Tensor]:
    return in_rows(x, 448.0, torch.float8_e4m3fn)


def padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % 128, x.shape[1])])


def data(dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((M, K), (N, K), (N,)))
    x, weight, bias = x.to(dtype), (weight / K**0.5).to(dtype), bias.to(dtype)
    index, weights = torch.randint(0, N, (M,), generator=g), torch.rand(M, generator=g)
    index[5], index[15:40] = DROPPED, DROPPED  # a whole chunk, parts of others, and one row
    wide = padded(weight)
    operands = [x, *cast(x), *cast(wide), *cast(wide.t().contiguous())]
    return {"operands": operands, "bias": bias / 4, "index": index, "weights": weights, "weight": weight}


def arguments(given: dict[str, Any], wanted: list[bool], **more: Any) -> tuple[Any, ...]:
    """Arguments of the operator. more: others in place of those given; `exact` and `waits` are of grad_weight."""
    given = given | more
    curve = given.get("curve", Curve())
    return (
        *given["operands"], given["bias"], given["index"], given["weights"], N, ROWS, curve.inner, curve.outer, wanted,
        given.get("every_term", False), given.get("exact", False), given.get("waits", False),
    )  # fmt: skip


def by_hand(given: dict[str, Any]) -> list[Tensor]:
    """What the operator is to compute of the same operands, chunk by chunk, with sums in FP64."""
    x, codes, scales, weight_codes, weight_scales, turned_codes, turned_scales = given["operands"]
    weight = (weight_codes.double() * weight_scales)[:N]
    turned = (turned_codes.double() * turned_scales)[:, :N]
    terms, of_x, of_weight = x.new_zeros(M, dtype=torch.double), torch.zeros(M, K).double(), torch.zeros(N, K).double()
    of_bias = torch.zeros(N).double()
    everything, row_scales = torch.zeros(M, N).double(), torch.zeros(M, 1)
    for part in chunks(M, 16):
        logits = ((codes[part].double() * scales[part]) @ weight.t()).to(x.dtype) + given["bias"]
        index, counts = given["index"][part], given["index"][part] != DROPPED
        at = index.clamp_min(0).unsqueeze(1)
        terms[part] = logits.double().log_softmax(-1).gather(1, at).squeeze(1)
        slopes = logits.float().softmax(-1).scatter_add(1, at, torch.full_like(at, -1.0, dtype=torch.float32))
        slopes = slopes * (given["weights"][part] * counts).unsqueeze(1)
        q, s = in_rows(slopes, 57344.0, torch.float8_e5m2)
        of_x[part] = (q.double() * s) @ turned.t()
        everything[part], row_scales[part] = q.double(), torch.where(counts, s.squeeze(1), 0.0).unsqueeze(1)
        of_bias += slopes.to(x.dtype).double().sum(0)
    wide = torch.float32 if x.dtype is torch.float32 else torch.bfloat16
    for part in (slice(0, 32), slice(32, M)):
        scaled = (x[part].float() * row_scales[part]).to(wide)
        columns, of_columns = cast(scaled.t().contiguous())
        of_weight += everything[part].t() @ (columns.double() * of_columns).t()
    return [terms, of_x, of_weight, of_bias]


def weight_gradient(waiting: list[Tensor]) -> Tensor:
    """What backward makes of what waits for it, in FP64."""
    codes, columns, of_columns = waiting
    return codes[:N].double() @ (columns.double() * of_columns).t()


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_computes_what_is_written_down_by_hand(dtype: torch.dtype) -> None:
    given = data(dtype)
    got = ops.chunked_loss_in_fp8(*arguments(given, [True, True, True]))
    counts = given["index"] != DROPPED
    for i, (a, b) in enumerate(zip(got, by_hand(given), strict=True)):
        assert a.dtype is torch.float32
        # logits in FP32 sums may round to the next BF16, or a slope to the next code: single elements
        assert error(a[counts], b[counts]) < 5e-3 if i == 0 else error(a, b) < 5e-3
    assert not got[1][~counts].any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_it_is_near_exact_gradients(dtype: torch.dtype) -> None:
    """A grad_weight of the same slopes in BF16 is nearer; rows of other magnitudes disturb nobody."""
    given = data(dtype)
    given["weights"] = torch.logspace(-6, 0, M)  # gradients of rows from one to a million
    logits = given["operands"][0].double() @ given["weight"].double().t() + given["bias"].double()
    logits.requires_grad_()
    losses = torch.nn.functional.cross_entropy(logits, given["index"].clamp_min(0), reduction="none")
    counts = (given["index"] != DROPPED) * given["weights"].double()
    (slopes,) = torch.autograd.grad((losses * counts).sum(), logits)
    exact = slopes @ given["weight"].double(), slopes.t() @ given["operands"][0].double()
    errors = []
    for grad_weight in (False, True):
        _, of_x, of_weight = ops.chunked_loss_in_fp8(*arguments(given, [True, True, False], exact=grad_weight))
        rows = ((of_x.double() - exact[0]).norm(dim=1) / exact[0].norm(dim=1))[counts > 0]
        assert rows.max() < 0.15  # each row by itself: E5M2 of few large slopes, E4M3 of the weight, rounded logits
        errors.append(error(of_weight, exact[1]))
    assert 0.002 < errors[1] < errors[0] / 2 < 0.03, errors


def test_only_what_is_wanted_is_computed() -> None:
    given = data()
    (terms,) = ops.chunked_loss_in_fp8(*arguments(given, [False] * 3, weights=None))
    assert list(terms.shape) == [M]
    *operands, _, _ = given["operands"]
    some = ops.chunked_loss_in_fp8(*arguments(given | {"operands": [*operands, None, None]}, [False, True, False]))
    assert [list(r.shape) for r in some] == [[M], [N, K]]
    whole = ops.chunked_loss_in_fp8(*arguments(given, [True, True, True]))
    assert torch.equal(some[1], whole[2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_grad_weight_that_waits_is_that_of_all_rows_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = data(dtype)
    *others, codes, columns, of_columns = ops.chunked_loss_in_fp8(*arguments(given, [True] * 3, waits=True))
    assert [list(x.shape) for x in (codes, columns, of_columns)] == [[128, 128], [K, 128], [K, 1]]
    assert [x.dtype for x in (codes, columns, of_columns)] == [torch.float8_e5m2, torch.float8_e4m3fn, torch.float32]
    for behind in (codes[:, M:], codes[N:], columns[:, M:]):
        assert not behind.float().any()
    monkeypatch.setattr(fp8_head, "rows_at_once", lambda k: 2 * M)
    terms, of_x, of_weight, of_bias = ops.chunked_loss_in_fp8(*arguments(given, [True] * 3))
    torch.testing.assert_close(others, [terms, of_x, of_bias], rtol=0.0, atol=0.0, equal_nan=True)
    assert error(weight_gradient([codes, columns, of_columns]), of_weight) < 1e-6  # sums in FP32, and in FP64


def test_logits_of_one_chunk_are_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Any]] = []
    plain = fp8_head.Fp8Head.logits

    def logits(self: fp8_head.Fp8Head, part: slice) -> Tensor:
        assert not any(ref() is not None for ref in made)
        found = plain(self, part)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(fp8_head.Fp8Head, "logits", logits)
    ops.chunked_loss_in_fp8(*arguments(data(), [True] * 3))
    assert len(made) == 4


def test_no_rows_have_no_gradients() -> None:
    given = data()
    x, codes, scales, *weights = given["operands"]
    none = {"operands": [x[:0], codes[:0], scales[:0], *weights], "index": given["index"][:0]}
    terms, *got = ops.chunked_loss_in_fp8(*arguments(given | none, [True] * 3, weights=given["weights"][:0]))
    assert terms.numel() == 0
    assert not any(g.any() for g in got)
    given |= none
    *_, codes, columns, of_columns = ops.chunked_loss_in_fp8(
        *arguments(given, [True] * 3, weights=given["weights"][:0], waits=True)
    )
    assert not weight_gradient([codes, columns, of_columns]).any()


def test_a_label_that_is_no_class_raises() -> None:
    given = data()
    given["index"][3] = N  # there is a code for it, of zeros
    with pytest.raises(RuntimeError, match="a label is out of bounds"):
        ops.chunked_loss_in_fp8(*arguments(given, [True] * 3))


def test_what_is_not_finite_stays_so() -> None:
    given = data()
    x = given["operands"][0].clone()
    x[2, 3] = torch.nan
    operands = [x, *cast(x), *given["operands"][3:]]
    terms, of_x, of_weight, of_bias = ops.chunked_loss_in_fp8(*arguments(given | {"operands": operands}, [True] * 3))
    assert terms[2].isnan()
    assert of_x[2].isnan().all()
    assert of_x[0].isfinite().all()
    assert of_weight.isnan().all()
    assert of_bias.isnan().all()


def test_the_operator_obeys_the_rules_of_operators() -> None:
    tests = ("test_faketensor",)  # that of schemas multiplies its inputs, codes too
    for waits in (False, True):
        torch.library.opcheck(ops.chunked_loss_in_fp8, arguments(data(), [True] * 3, waits=waits), test_utils=tests)


# ---- kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The interpreted kernels, with tiles so small that there are several."""
    interpreter.prepare()
    from fp8compile.kernels.loss import softmax_gradient, turned_codes

    monkeypatch.setattr(softmax_gradient, "BLOCK", 32)
    monkeypatch.setattr(turned_codes, "ROWS", 16)
    monkeypatch.setattr(turned_codes, "COLUMNS", 32)
    return {
        "step": softmax_gradient.step,
        "turn": turned_codes.turn,
        "cast_columns": grouped_cast.cast_columns,
    }


@interpreted
@pytest.mark.parametrize(("rows", "width"), [(1, 80), (17, 64), (32, 48)])
def test_codes_are_turned_as_plain_torch_turns_them(kernels: dict[str, Any], rows: int, width: int) -> None:
    codes = torch.randint(0, 256, (rows, width), dtype=torch.uint8).view(torch.float8_e5m2)
    found = []
    for turn in (kernels["turn"], fp8_head.turn):
        block = torch.full([width, 96], 7, dtype=torch.uint8)
        turn(codes, block[:, 32:80].view(torch.float8_e5m2))
        assert (block[:, :32] == 7).all()  # that of other rows
        assert (block[:, 80:] == 7).all()
        assert not block[:, 32 + rows : 80].any()
        found.append(block)
    assert torch.equal(*found)


CURVES = [Curve(), Curve(-0.5), Curve(0.5, 8.0)]


@interpreted
@pytest.mark.parametrize("every_term", [False, True])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_are_those_of_the_gradient(
    kernels: dict[str, Any], dtype: torch.dtype, curve: Curve, every_term: bool
) -> None:
    """Down to where E5M2 has no numbers; a row whose label is likely, of which the likeliest other class is the largest
    but for it, and one that nearly nothing is left of; a row that is dropped, and two that are not finite."""
    g = torch.Generator().manual_seed(0)
    wide = (3 * torch.randn(9, 112, generator=g)).to(dtype)
    wide[:, 100:] = 7.0  # between rows lies something
    logits, index = wide[:, :100], torch.tensor([0, 99, 40, DROPPED, 7, 8, 30, 31, 32])
    logits[1, 99], logits[2, 40] = 12.0, 60.0
    logits[6, 3], logits[7, 4] = torch.nan, torch.inf
    weights = torch.randn(4, 9, generator=g) if every_term else torch.rand(9, generator=g)
    exact = logits.float().clone()  # in which small gradients are not rounded to zero, as in FP16
    plain_step(exact, index, weights, curve, True, every_term)
    found = []
    for step in (kernels["step"], plain_step):
        codes = Codes(torch.empty(9, 128, dtype=torch.uint8).view(torch.float8_e5m2), torch.empty(9, 1))
        mine = wide.clone()[:, :100]
        step(mine, index, weights, curve, True, every_term, codes)
        alone = Codes(torch.empty_like(codes.data), torch.empty(9, 1))
        untouched = wide.clone()[:, :100]
        step(untouched, index, weights, curve, False, every_term, alone)
        assert torch.equal(untouched.nan_to_num(), logits.nan_to_num())
        assert torch.equal(alone.data.view(torch.uint8), codes.data.view(torch.uint8))
        found.append((codes.data.float(), codes.scales))
    for codes, scales in found:
        assert not codes[:, 100:].nan_to_num().any()
        assert not codes[3].any()
        assert scales[3] == 0
        assert codes[6, :100].isnan().all()
        assert codes[7, :100].isnan().all() == (curve == Curve())  # elsewhere infinity has a finite score, or none
        finite = [i for i in range(9) if i not in (3, 6, 7)]
        amax = exact[finite].abs().amax(1, keepdim=True)
        torch.testing.assert_close(scales[finite] * 57344, amax, rtol=1e-4, atol=0.0)
        error = (codes[finite, :100] * scales[finite] - exact[finite]).abs()
        assert (error <= exact[finite].abs() * 0.126 + amax * 2**-32).all()  # half of 2⁻², and of the smallest number
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=0.0, equal_nan=True)


@interpreted
def test_the_gradient_of_a_label_that_is_nearly_certain_is_not_lost(kernels: dict[str, Any]) -> None:
    """Of 69 other classes with e⁻⁶⁰ of its probability."""
    for step in (kernels["step"], plain_step):
        logits = torch.zeros(1, 70)
        logits[0, 40] = 60.0
        step(logits, torch.tensor([40]), None, Curve(), True)
        wanted = torch.full([1, 70], -60.0).double().exp().index_fill(1, torch.tensor([40]), 0)
        wanted[0, 40] = -wanted.sum()
        torch.testing.assert_close(logits.double(), wanted, rtol=1e-4, atol=0.0)


@interpreted
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_with_the_kernels_is_the_operator(
    kernels: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8compile.kernels.loss.softmax_gradient.BLOCK", LINE)  # codes fill up rows of blocks
    args = arguments(data(dtype), [True, True, True])
    waiting = arguments(data(dtype), [False, True, False], waits=True)
    found, plain = ([*run_in_fp8(*args, **how), run_in_fp8(*waiting, **how)] for how in (kernels, {}))
    found[-1], plain[-1] = (weight_gradient(x[-1][1:]) for x in (found, plain))
    for a, b in zip(found, plain, strict=True):
        # exponentials differ in last bits: of 70 · 44 slopes some fall to the next code, each off by an eighth
        assert error(a.nan_to_num(), b.nan_to_num()) < 5e-3
