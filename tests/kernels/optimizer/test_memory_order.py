"""Dense tensors that are not contiguous, as batches of transposed matrices: by the definition, element by element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fp8compile.kernels.optimizer.memory_order import LARGEST, lies_as, transposed_matrices

SHAPES = ((5,), (3, 4), (2, 3, 4), (2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 1, 5), (2, 1, 4, 1), (6, 2, 3, 2, 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_order(shape):
    """Each order of dimensions: where it is found to be one of matrices, each element lies where these have it."""
    found = 0
    for order in itertools.permutations(range(len(shape))):
        base = torch.arange(math.prod(shape)).view([shape[d] for d in order])
        x = base.permute(*(order.index(d) for d in range(len(shape))))  # its values are places in memory
        matrices = transposed_matrices(x)
        if matrices is None:
            assert not x.is_contiguous()
            continue
        rows, columns = matrices
        assert torch.equal(x.flatten(), torch.arange(x.numel()).view(-1, columns, rows).mT.flatten()), order
        assert (matrices == (1, 1)) == x.is_contiguous()
        found += 1
    assert found >= len(shape)


@pytest.mark.parametrize("make", ["channels_last", "channels_last_3d"])
def test_channels_last_is_one(make):
    x = torch.randn(4, 6, *((3, 3) if make == "channels_last" else (2, 3, 3)))
    turned = x.to(memory_format=getattr(torch, make))
    assert transposed_matrices(turned) == (6, x[0, 0].numel())


def test_which_are_none():
    assert transposed_matrices(torch.zeros(4, 6)[:, :5]) is None  # with gaps
    assert transposed_matrices(torch.zeros(1).expand(4)) is None
    assert transposed_matrices(torch.zeros(0, 4)) is None
    assert transposed_matrices(torch.zeros(2, 3, 4).permute(2, 1, 0)) is None
    assert transposed_matrices(torch.empty(1, LARGEST, device="meta").t()) is None


def test_lying_alike():
    x = torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last)
    same = torch.empty_strided(x.shape, (7, *x.stride()[1:]))  # the stride of one element says nothing
    assert lies_as(same, x)
    assert not lies_as(torch.zeros(1, 3, 4, 4), x)
