"""Paths of modules, as named_modules() spells them, however the model is called."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8compile


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As Transformers does it with the forwards of its models."""

    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.args = nn.ModuleList([nn.Linear(32, 32, bias=False)])
        self.inner = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.args[0](x))


class Decorated(Plain):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.args[0](x))


class Checkpointed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.inner = checkpoint_wrapper(self.inner)


def called_with(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x)


@pytest.mark.parametrize(
    "form", [Plain, Decorated, Checkpointed, lambda: called_with(Plain()), lambda: called_with(Decorated())]
)
def test_paths_are_names_of_modules(form: Callable[[], Any]) -> None:
    run = torch.compile(form(), backend="fp8", options={"select": "all", "executor": "eager"})
    run(torch.randn(16, 32)).sum().backward()
    assert {m.path for m in fp8compile.last_compile().matmuls} == {"args.0", "inner.0"}
