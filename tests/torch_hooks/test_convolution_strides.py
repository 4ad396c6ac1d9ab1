"""What a convolution's backward reads, in batches of one and along dimensions of one element, compiled by Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from convolutions import CASES, OfTokens
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import ir

OPERATOR = torch.ops.aten.convolution_backward.default


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Size and strides of the gradient and the input of each convolution's backward, compiled without caches."""
    found: list[tuple[list[int], list[int]]] = []
    create = ir.FallbackKernel.create

    def noted(kernel: Any, *args: Any, **settings: Any) -> Any:
        if kernel is OPERATOR:
            found.extend(([*map(int, x.get_size())], [*map(int, x.get_stride())]) for x in args[:2])
        return create(kernel, *args, **settings)

    monkeypatch.setattr(ir.FallbackKernel, "create", noted)
    with inductor_config.patch(force_disable_caches=True):
        yield found


def train(model: OfTokens, x: Tensor, **compiled: Any) -> list[Tensor]:
    """Return the gradients of a training step, of `x` and the parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    run = torch.compile(model, **compiled) if compiled else model
    run(x).backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]  # type: ignore[list-item, union-attr]


def is_dense(size: list[int], strides: list[int]) -> bool:
    first, last = torch.empty(size), torch.empty([size[0], *size[2:], size[1]]).movedim(-1, 1)
    return tuple(strides) in (first.stride(), last.stride())


@pytest.mark.parametrize(("space", "batch", "checkpointed"), CASES[:3], ids=str)
def test_gradients(space: tuple[int, ...], batch: int, checkpointed: bool, read: list[Any]) -> None:
    model = OfTokens(space, checkpointed)
    x = torch.randn(batch, model.tokens, model.channels)
    for mine, theirs in zip(train(model, x, backend="fp8"), train(model, x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert len(read) == 2
    assert all(is_dense(*each) for each in read), read


def test_other_backends_keep_their_strides(read: list[Any]) -> None:
    model = OfTokens((3, 4), checkpointed=True)
    train(model, torch.randn(1, 12, 19), backend="inductor")
    assert not all(is_dense(*each) for each in read), read
