"""Iteration spaces against brute force: an access names the element that PyTorch's own indexing names.

A tensor whose elements are their own numbers goes through random layouts. Walking back from the result, as a region
does, must lead to the numbers that stand in it; where the algebra cannot, it must say so (`NoAccessError`) and never be
wrong.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.passes.core import iteration
from fp8compile.passes.core.iteration import Access, NoAccessError

SEEDS = range(400)
DIMENSIONS = (1, 2, 3, 4, 5, 6, 8, 12)
Step = tuple[str, list[int], list[int], list[int]]  # a layout: its name, the shapes before and after, and a permutation


def number(size: object) -> int:
    """A size, or the value that a symbolic one was made with."""
    return size.node.hint if isinstance(size, torch.SymInt) else size  # type: ignore[return-value]


def elements(access: Access) -> Tensor:
    """The element for each iteration, by the definition of an access."""
    found = torch.zeros(1, dtype=torch.int64)
    for size, stride in access:
        found = (found[:, None] + torch.arange(number(size)) * number(stride)).flatten()
    return found


def draw(seed: int) -> tuple[random.Random, list[int]]:
    generator = random.Random(seed)
    return generator, [generator.choice(DIMENSIONS) for _ in range(generator.randint(1, 4))]


def regrouped(shape: list[int], generator: random.Random) -> list[int]:
    """Another shape for equally many elements: neighbours joined, a size taken apart, ones put in."""
    shape = list(shape)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(shape))
        kind = generator.choice(("join", "part", "one"))
        if kind == "join" and at + 1 < len(shape):
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        elif kind == "part":
            n = generator.choice([d for d in range(1, shape[at] + 1) if shape[at] % d == 0])
            shape[at : at + 1] = [n, shape[at] // n]
        else:
            shape.insert(at, 1)
    return shape


def layouts(x: Tensor, generator: random.Random) -> Iterator[tuple[Step, Tensor]]:
    """Random layouts of `x`, one after the other."""
    for _ in range(generator.randint(1, 4)):
        before, kind = list(x.shape), generator.choice(("view", "permute", "expand"))
        dims: list[int] = []
        if kind == "view":
            x = x.reshape(regrouped(before, generator))
        elif kind == "permute":
            dims = generator.sample(range(x.dim()), x.dim())
            x = x.permute(dims)
        else:
            lead = [generator.choice((2, 3))] if x.dim() < 5 and generator.random() < 0.4 else []
            x = x.expand(*lead, *(generator.choice((1, 2, 4)) if n == 1 else n for n in before))
        yield (kind, before, list(x.shape), dims), x


def walked_back(access: Access, steps: list[Step]) -> Access:
    for kind, before, after, dims in reversed(steps):
        if kind == "permute":
            access = iteration.permuted(access, after, dims)
        elif kind == "expand":
            access = iteration.broadcast(access, after, before)
    return access


def case(seed: int) -> tuple[Access, Tensor]:
    """(the access that walking back finds, the numbers that PyTorch finds); raises NoAccessError."""
    generator, shape = draw(seed)
    x = torch.arange(math.prod(shape)).reshape(shape)
    steps = []
    for step, out in layouts(x, generator):
        steps.append(step)
        x = out
    cols = x.shape[-1]
    return walked_back(iteration.whole(x.numel() // cols, cols), steps), x.flatten()


def test_walking_back_through_layouts_finds_the_elements() -> None:
    refused = 0
    for seed in SEEDS:
        try:
            access, expected = case(seed)
        except NoAccessError:
            refused += 1
            continue
        assert torch.equal(elements(access), expected), f"seed {seed}"
    assert refused < len(SEEDS) / 4  # a view across a permutation may have no digits


def test_no_permutation_or_expansion_of_a_shape_is_refused() -> None:
    for seed in SEEDS:
        generator, shape = draw(seed)
        x = torch.arange(math.prod(shape)).reshape(shape)
        dims = generator.sample(range(x.dim()), x.dim())
        whole = iteration.whole(x.numel(), 1)
        expected = x.permute(dims).flatten()
        assert torch.equal(elements(iteration.permuted(whole, [shape[d] for d in dims], dims)), expected)
        wide = [2, *(3 if n == 1 else n for n in shape)]
        access = iteration.broadcast(iteration.whole(math.prod(wide), 1), wide, shape)
        assert torch.equal(elements(access), x.expand(wide).flatten()), f"seed {seed}"


def test_strides_in_memory_are_those_of_the_tensor() -> None:
    for seed in SEEDS:
        generator, shape = draw(seed)
        memory = torch.arange(3 * math.prod(shape) * 4 ** len(shape))
        room = [n + generator.choice((0, 1, 3)) for n in shape]
        order = generator.sample(range(len(room)), len(room))
        x = memory[: math.prod(room)].reshape(room).permute(order)
        for dim, n in enumerate(shape[d] for d in order):
            x = x.narrow(dim, 0, n)  # gaps between rows, and dimensions in any order
        access = iteration.in_memory(iteration.whole(x.numel(), 1), x.shape, x.stride())
        assert torch.equal(elements(access), x.flatten()), f"seed {seed}"


def test_rows_and_columns_together_are_the_whole() -> None:
    refused = 0
    for seed in SEEDS:
        try:
            access, expected = case(seed)
        except NoAccessError:
            continue
        for cols in {d for d in range(1, len(expected) + 1) if len(expected) % d == 0}:
            try:
                rows, columns = iteration.split(access, cols)
            except NoAccessError:
                refused += 1
                continue
            found = elements(rows)[:, None] + elements(columns)
            assert found.shape in ((len(expected) // cols, cols), (1, cols), (len(expected) // cols, 1), (1, 1))
            assert torch.equal(found.expand(len(expected) // cols, cols).flatten(), expected), f"seed {seed}"
    assert refused > 0, "some digits must straddle a row, or nothing is shown"


def test_tidy_changes_no_element_and_leaves_no_needless_digit() -> None:
    for seed in SEEDS:
        generator, sizes = draw(seed)
        access = tuple((n, generator.choice((0, 1, n, 6, 12))) for n in sizes)
        tidy = iteration.tidy(access)
        assert torch.equal(elements(tidy), elements(access))
        assert all(size != 1 for size, _ in tidy)
        assert not any(outer == inner * size for (_, outer), (size, inner) in pairwise(tidy))


def test_equal_accesses_name_equal_elements() -> None:
    assert iteration.equal(iteration.of_rows(4, 1), iteration.whole(4, 1))
    assert not iteration.equal(iteration.of_rows(4, 2), iteration.whole(4, 2))
    assert elements(iteration.of_rows(3, 2)).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("find", "why"),
    [
        (lambda: iteration.split(((2, 1), (3, 2)), 2), "do not end where a row of 2 does"),
        (lambda: iteration.by_dimension(((4, 4),), [2, 6]), "4 steps of 4 through"),
        (lambda: iteration.by_dimension(((3, 3),), [2, 6]), "3 steps of 3 through"),
        (lambda: iteration.by_dimension(((2, 9),), [2, 6]), "a step of 9"),
    ],
    ids=["a digit across two rows", "steps that divide no dimension", "steps that end amid one", "a step along none"],
)
def test_what_has_no_digits_is_refused(find: Callable[[], object], why: str) -> None:
    with pytest.raises(NoAccessError, match=why):
        find()


# ---- symbolic sizes -------------------------------------------------------------------------------------------------


def symbolic(*shape: int) -> list[torch.SymInt]:
    """Sizes of which the algebra knows only that they are sizes; their values serve for comparison."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC] * len(shape))
    fake = mode.from_tensor(torch.empty(shape), symbolic_context=dynamic, source=ConstantSource("x"))
    return list(fake.shape)  # type: ignore[arg-type]


def test_symbolic_batch_and_length() -> None:
    b, t = symbolic(3, 5)
    h, c = 2, 4
    cols = h * c
    x = torch.arange(3 * 5 * cols)
    whole = iteration.whole(b * t, cols)
    cases = {
        "a head's row": (
            iteration.broadcast(iteration.whole(b * t * h, c), [b, t, h, c], [b, t, h, 1]),
            torch.arange(3 * 5 * h).repeat_interleave(c),
        ),
        "heads before tokens": (
            iteration.permuted(whole, [b, t, h, c], [0, 2, 1, 3]),
            x.reshape(3, h, 5, c).permute(0, 2, 1, 3).flatten(),
        ),
        "one row for a batch": (
            iteration.broadcast(whole, [b, t, cols], [b, 1, cols]),
            torch.arange(3 * cols).reshape(3, 1, cols).expand(3, 5, cols).flatten(),
        ),
        "a weight": (
            iteration.broadcast(whole, [b, t, cols], [cols]),
            torch.arange(cols).expand(15, cols).flatten(),
        ),
        "tokens in memory before batches": (
            iteration.in_memory(whole, [b, t, cols], [cols, b * cols, 1]),
            x.reshape(5, 3, cols).permute(1, 0, 2).flatten(),
        ),
    }
    for name, (access, expected) in cases.items():
        assert torch.equal(elements(access), expected), name
        rows, columns = iteration.split(access, cols)
        found = (elements(rows)[:, None] + elements(columns)).expand(15, cols)
        assert torch.equal(found.flatten(), expected), name


def test_what_cannot_be_proven_of_symbols_is_refused() -> None:
    b, t = symbolic(3, 6)
    with pytest.raises(NoAccessError):
        iteration.split(iteration.permuted(iteration.whole(b, t), [b, t], [1, 0]), 4)
    assert not iteration.divides(2, t)
    assert not iteration.same(b, t)
