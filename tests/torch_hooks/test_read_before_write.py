"""What reads a buffer before an operator in place overwrites it, compiled by Inductor: it gets what was there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from in_place import one, ops
from optimizers import OPTIMIZERS, set_gradients
from torch import Tensor, nn

from fp8compile.backend import fp8


def some_of_which_one_is_read_for_a_third(x: Tensor, z: Tensor) -> Any:
    y = x * z
    result = ops.add_all(z, xs=[x])
    z.copy_(y)
    return result


def all_of_them(x: Tensor, z: Tensor) -> Any:
    y = (x - z).sin()
    return ops.add_all(y, xs=[z, x]), y


def a_part(x: Tensor, z: Tensor) -> Any:
    y = x[:1] * 2 + x[1:]
    ops.add_(x[1:])
    return y, x + z


def computed(x: Tensor, z: Tensor) -> Any:
    inner = x + z
    y = inner * 3
    ops.add_(inner)
    return y, inner


def leaves(result: Any) -> Sequence[Tensor]:
    return result if isinstance(result, tuple) else (result,)


def assert_as_in_eager(step: Callable[[Tensor, Tensor], Any], x: Tensor, z: Tensor) -> None:
    mine, theirs = ([x.clone(), z.clone()] for _ in range(2))
    compiled = torch.compile(step, backend="fp8")
    for expected, got in zip([*leaves(step(*theirs)), *theirs], [*leaves(compiled(*mine)), *mine], strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("step", "shape"),
    [(one, ()), (some_of_which_one_is_read_for_a_third, (4,)), (all_of_them, (4,)), (computed, ())],
    ids=lambda x: getattr(x, "__name__", "vector" if x else "number"),
)
def test_custom_operators(step: Callable[[Tensor, Tensor], Any], shape: tuple[int, ...]) -> None:
    assert_as_in_eager(step, torch.arange(1.0, 1.0 + math.prod(shape)).reshape(shape), torch.full(shape, 3.0))


def test_a_view() -> None:
    assert_as_in_eager(a_part, torch.arange(8.0).reshape(2, 4), torch.ones(2, 4))


def test_step_counts_that_other_states_are_computed_from() -> None:
    """NAdam's products of momenta: of two groups, in one graph, where all counts are raised at once."""

    def optimizer() -> torch.optim.Optimizer:
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((96, 64), (7,))]
        kind, arguments = OPTIMIZERS["nadam"]
        return kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.003}], lr=0.01, **arguments)

    mine, theirs = optimizer(), optimizer()
    step = torch.compile(mine.step, backend=lambda gm, inputs: fp8(gm, inputs))  # a graph of all parameters
    for i in range(2):
        for opt, call in ((mine, step), (theirs, theirs.step)):
            set_gradients([p for group in opt.param_groups for p in group["params"]], i)
            call()
    products = [[state["mu_product"] for state in opt.state.values()] for opt in (mine, theirs)]
    assert len(products[0]) == 2
    torch.testing.assert_close(*products)


def test_other_backends_are_left_alone() -> None:
    """What torch does wrong, it does as before (`test_patches.py` asks whether it still does)."""
    before = torch.compile(one)(torch.ones(()), torch.ones(()))
    assert torch.compile(one, backend="fp8")(torch.ones(()), torch.ones(())) == 3
    torch.compiler.reset()
    assert torch.equal(torch.compile(one)(torch.ones(()), torch.ones(())), before)
