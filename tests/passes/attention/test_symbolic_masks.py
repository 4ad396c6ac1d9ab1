"""Attention masks of any length: proven to be causal or to let everything through, or read."""

from __future__ import annotations

import pytest
import torch
from test_attention_masks import CAUSAL, EVERYTHING, KEPT, LENGTH, Attention, Make, packed
from torch import Tensor

import fp8compile
from fp8compile.plan.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")  # masks are all that these tests are for
WIDTH = 32


def positions(n: int, x: Tensor) -> tuple[Tensor, Tensor]:
    i = torch.arange(n, device=x.device)
    return i[:, None], i[None, :]


def shifted(n: int, x: Tensor) -> Tensor:
    """Both counted from 7."""
    i = torch.arange(7, n + 7, device=x.device)
    return i[None, None, :, None] >= i[None, :]


def a_window(size: int, n: int, x: Tensor) -> Tensor:
    """As wide as any length that is tried here, and not as any."""
    i, j = positions(n, x)
    return (j <= i) & (i - j < size)


def filled_twice(n: int, x: Tensor) -> Tensor:
    i, j = positions(n, x)
    bias = torch.zeros(n, n, dtype=x.dtype, device=x.device).masked_fill(j > i, -torch.inf)
    return bias.masked_fill(i < j, torch.finfo(x.dtype).min)[None, None]


def combined_often(n: int, x: Tensor) -> Tensor:
    """Each of 40 masks reads the last one twice."""
    i, j = positions(n, x)
    mask = j <= i
    for step in range(40):
        mask = (mask & (j <= i + step)) | (mask & (j <= n))
    return mask


def another_packed(n: int, x: Tensor) -> Tensor:
    """Two sequences: positions begin anew at the tenth."""
    i = torch.arange(n, device=x.device)
    steps = torch.diff(torch.where(i < 10, i, i - 10), prepend=i[:1] - 1, dim=-1)
    sequence = (steps != 1).cumsum(-1)
    return (sequence[:, None] == sequence[None, :]) & (i[None, :] <= i[:, None])


PROVEN_CAUSAL: dict[str, Make] = {
    **{name: CAUSAL[name] for name in ("positions", "tril", "bias", "least number", "cuDNN's", "large", "packed")},
    "each head": CAUSAL["each head"],
    "shifted": shifted,
    "not later": lambda n, x: ~(positions(n, x)[1] > positions(n, x)[0]),
    "less than one more": lambda n, x: positions(n, x)[1] < positions(n, x)[0] + 1,
    "difference": lambda n, x: positions(n, x)[0] - positions(n, x)[1] >= 0,
    "filled twice": filled_twice,
    "batches": lambda n, x: packed(n, x).expand(len(x), 2, n, n),
}
READ: dict[str, Make] = {
    **{name: KEPT[name] for name in ("window", "later", "positions added", "half", "not never", "heads apart",
                                     "of the batch", "random")},
    "chunks": KEPT["chunks"],
    "window of 1000": lambda n, x: a_window(1000, n, x),
    "another packed": another_packed,
    "combined often": combined_often,
    "strictly": lambda n, x: (positions(n, x)[1] < positions(n, x)[0]) | (positions(n, x)[1] < 1),
    "mirrored": lambda n, x: positions(n, x)[0] <= positions(n, x)[1],
    "halves": lambda n, x: (torch.arange(n).to(x.dtype)[None, :] <= torch.arange(n).to(x.dtype)[:, None]),
    "from the end": lambda n, x: positions(n, x)[1] <= torch.arange(n)[torch.arange(n) - 1][:, None] + 1,
    "first sees more": lambda n, x: (
        positions(n, x)[1] <= torch.cat([torch.arange(1) + 7, torch.arange(n - 1) + 1])[:, None]
    ),
}  # fmt: skip


def kinds(make: Make, keys: int | None = None) -> list[str]:
    """Return what attention is told; results of three lengths, each alone, are those of eager."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Attention(make, keys)
    options = {"executor": "eager", "skip": ["*"], "strict": True}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for length in (LENGTH, 9, 2 * LENGTH):
        x = torch.randn(3, length, WIDTH, requires_grad=True)
        results = []
        for f in (run, model):
            y = f(x)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert len(fp8compile.last_compile().plans) == 1, "one graph for all lengths"
    return [m.kind for m in fp8compile.last_compile().masks]


@pytest.mark.parametrize("name", PROVEN_CAUSAL)
def test_causal_for_every_length(name):
    assert kinds(PROVEN_CAUSAL[name]) == ["causal"]


def test_of_as_many_queries_as_keys():
    """With fewer keys, torch and masks disagree on what causal means."""
    assert kinds(PROVEN_CAUSAL["tril"], keys=5) == []


def test_the_plan_as_json():
    kinds(PROVEN_CAUSAL["tril"])
    plan = fp8compile.last_compile().plans[-1]
    (mask,) = plan.masks
    assert isinstance(mask.shape[-1], str)
    assert Plan.from_json(plan.to_json()).masks == plan.masks


@pytest.mark.parametrize("name", EVERYTHING)
def test_masks_that_hide_nothing(name):
    assert kinds(EVERYTHING[name]) == ["everything"]


@pytest.mark.parametrize("name", READ)
def test_what_is_not_proven_is_read(name):
    assert kinds(READ[name]) == []
