"""Numbers in tensors of their own: read and counted by Triton's interpreter, beside torch.stack and additions."""

from __future__ import annotations

import interpreter
import pytest
import torch

if not interpreter.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1, set before Triton's import", allow_module_level=True)

from fp8compile.kernels.optimizer.scattered_numbers import BLOCK, ScatteredNumbers, are_scattered

DTYPES = (torch.float32, torch.int64, torch.int32)
COUNTS = (1, 3, BLOCK, BLOCK + 5)


@pytest.fixture(autouse=True)
def prepared():
    interpreter.prepare()


def numbers(count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers that lie apart, in places of 0 or 1 dimension, each the only one of its memory that is used."""
    shapes = [(), (1,)]
    return [torch.full((64,), -77, dtype=dtype)[5 + i % 8].add_(78 + i).view(shapes[i % 2]) for i in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_vector_of_them(count, dtype):
    given = numbers(count, dtype)
    found = ScatteredNumbers(given).vector(count + 7)
    flat = torch.cat([x.view(1) for x in given])
    assert found.dtype == dtype
    assert torch.equal(found[:count], flat)
    assert torch.equal(found[count:], flat[:1].expand(7))


@pytest.mark.parametrize("overflow", [None, 0.0, 1.0, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_they_are_counted(count, dtype, overflow):
    given = numbers(count, dtype)
    expected = [x + (0 if overflow else 1) for x in given]
    ScatteredNumbers(given).add(1, None if overflow is None else torch.tensor(overflow))
    assert all(map(torch.equal, given, expected))


def test_nothing_beside_them_is_written():
    memory = torch.arange(40, dtype=torch.float32)
    ScatteredNumbers([memory[3], memory[17], memory[18]]).add(1)
    expected = torch.arange(40, dtype=torch.float32)
    expected[[3, 17, 18]] += 1
    assert torch.equal(memory, expected)


def test_which_can_be():
    """On a CPU none: there nothing is launched."""
    assert not are_scattered([torch.zeros(()), torch.zeros(())])
