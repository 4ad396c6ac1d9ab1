"""Sizes of 0 and 1: batches of few rows, layers of one input or output, gates of one number.

What is contracted is filled up to a multiple of 16. Where the only row or column is all there is, the value that is
stored does not vary along that loop, and the zeros behind it are easily forgotten: then a matmul sums up whatever lay
in memory. Regions start from NaN here, and each also runs as the generated kernel, in poisoned buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_regions_hostile import Model, Watch, both, linear, noise, watch
from torch import Tensor, nn

__all__ = ["watch"]  # the fixture

BY_TENSORS, BY_ROWS = ("mixed", "tensorwise"), ("rowwise", "blockwise")
D = 32


def last(m: Any, x: Tensor) -> Tensor:
    """A layer with one output, behind one with many."""
    return m.single(F.gelu(m.up(x)))


def gated(m: Any, x: Tensor) -> Tensor:
    """A sigmoid of one number for each token, times a tensor: the gate of a shared expert."""
    return torch.sigmoid(m.single(x)) * m.up(x)


def lifted(m: Any, x: Tensor) -> Tensor:
    """A layer with one input."""
    return m.down(F.silu(m.lift(x.mean(-1, keepdim=True))))


def narrow(m: Any, x: Tensor) -> Tensor:
    """Through a single number and back."""
    return x + m.lift(m.single(x).tanh())[..., :D]


def mlp(m: Any, x: Tensor) -> Tensor:
    return x + m.down(F.gelu(m.up(m.norm(x))))


def swiglu(m: Any, x: Tensor) -> Tensor:
    return m.down(F.silu(m.up(x)) * m.gate(x))


def in_place(m: Any, x: Tensor) -> Tensor:
    return m.down(m.up(x).mul_(2).relu_())


def build(run: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Model(
        run,
        norm=nn.LayerNorm(D),
        up=linear(D, 2 * D),
        gate=linear(D, 2 * D),
        down=linear(2 * D, D),
        single=linear(2 * D if run is last else D, 1),
        lift=linear(1, 2 * D),
    )


def pairs(*runs: Callable[..., Any]) -> list[tuple[Callable[..., Any], str]]:
    """Each of `runs` with half of the recipes, in turn."""
    return [(run, recipe) for i, run in enumerate(runs) for recipe in (BY_ROWS if i % 2 else BY_TENSORS)]


@pytest.mark.parametrize(("run", "recipe"), pairs(last, gated, lifted, narrow))
def test_layers_of_one_input_or_output(run: Callable[..., Any], recipe: str, watch: Watch) -> None:
    both(build(run), [noise(3, 7, D)], recipe)


@pytest.mark.parametrize(("run", "recipe"), pairs(mlp, swiglu, in_place, gated))
def test_a_batch_of_one_row(run: Callable[..., Any], recipe: str, watch: Watch) -> None:
    both(build(run), [noise(1, D)], recipe)


@pytest.mark.parametrize(("run", "rows"), [(mlp, 2), (mlp, 17), (gated, 3), (gated, 7)])
def test_batches_of_few_rows(run: Callable[..., Any], rows: int, watch: Watch) -> None:
    both(build(run), [noise(rows, D)])


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
@pytest.mark.parametrize("run", [mlp, gated])
def test_an_empty_batch(run: Callable[..., Any], watch: Watch) -> None:
    """Gradients are zeros, not what lay in memory."""
    both(build(run), [noise(0, D)])


@pytest.mark.parametrize("run", [mlp, gated, lifted])
def test_everything_is_one_number(run: Callable[..., Any], watch: Watch) -> None:
    """One row of one feature, through layers of one input and one output."""
    names = ("up", "gate", "down", "single", "lift")
    both(lambda: Model(run, norm=nn.LayerNorm(1), **{n: linear(1, 1) for n in names}), [noise(1, 1)])


def one(m: Any, x: Tensor) -> Tensor:
    return m.single(F.gelu(m.up(x.unsqueeze(0)))).squeeze()


def test_an_input_of_one_dimension(watch: Watch) -> None:
    both(lambda: Model(one, up=linear(D, D), single=linear(D, 1)), [noise(D)])
