"""Masks of rows move to the pieces of what is concatenated or split: equal bits, and nothing whole is masked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from joint import joint
from torch import Tensor, nn

from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core.compilation import aten

ROWS, WIDTH = 6, 8


class Masked(nn.Module):
    """`how` on two weighted halves of x, and a mask."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(2 * WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return FORMS[self.how](x * self.weight, mask)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp()[..., :WIDTH], x.sin()[..., WIDTH:]


def rows(mask: Tensor) -> Tensor:
    return mask[:, None]


def gated(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0].relu() * parts[1]


FORMS = {
    "a concatenation": lambda x, m: torch.where(rows(m), 0.0, torch.cat(halves(x), 1)),
    "a concatenation that is kept where": lambda x, m: torch.where(rows(m), torch.cat(halves(x), -1), 1.0),
    "by a vector for rows": lambda x, m: torch.where(rows(m), x[:, :1], torch.cat(halves(x), 1)),
    "rows behind each other": lambda x, m: torch.where(x[:1] > 0, 0.0, torch.cat([x.exp(), x.sin()], 0)),
    "a split": lambda x, m: gated(torch.where(rows(m), 0.0, x.exp()).split(WIDTH, 1)),
    "unequal parts": lambda x, m: torch.where(rows(m), 0.0, x.exp()).split([2, 2 * WIDTH - 2], 1)[1].neg(),
    "slices": lambda x, m: gated((lambda y: (y[:, :WIDTH], y[:, WIDTH:]))(torch.where(rows(m), 0.0, x.exp()))),
    "every other": lambda x, m: gated((lambda y: (y[:, ::2], y[:, 1::2]))(torch.where(rows(m), 0.0, x.exp()))),
    "a split concatenation": lambda x, m: gated(torch.where(rows(m), 0.0, torch.cat(halves(x), 1)).chunk(2, 1)),
}  # fmt: skip
OTHERS = {
    "a mask of elements": lambda x, m: torch.where(x > 0, 0.0, torch.cat(halves(x), 1)),
    "a mask of columns": lambda x, m: torch.where(x[0] > 0, 0.0, torch.cat(halves(x), 1)),
    "another branch of elements": lambda x, m: torch.where(rows(m), x, torch.cat(halves(x), 1)),
    "a split of rows": lambda x, m: gated(torch.where(rows(m), 0.0, x.exp()).split(ROWS // 2, 0)),
    "a whole that is read beside": lambda x, m: (lambda y: gated(y.split(WIDTH, 1)).sum() + y)(
        torch.where(rows(m), 0.0, x.exp())),
    "rows that are repeated": lambda x, m: torch.where(rows(m), 0.0, torch.cat([x[:1].exp(), x[:1].sin()], 1)),
}  # fmt: skip
FORMS |= OTHERS


def whole_masks(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """Masks of a concatenation, and those that are split."""
    masks = graph.find_nodes(op="call_function", target=aten.where.self)
    parts = {aten.split.Tensor, aten.split_with_sizes.default, aten.slice.Tensor}
    of_cat = [n for n in masks if any(i.target is aten.cat.default for i in n.all_input_nodes)]
    return of_cat + [n for n in masks if any(user.target in parts for user in n.users)]


@pytest.mark.parametrize("how", FORMS)
def test_pieces_are_masked_where_that_is_the_same(how: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, 2 * WIDTH).requires_grad_()
    found = joint(Masked(how), x, torch.arange(ROWS) % 3 == 0)
    gradient = torch.randn(found.results()[0].shape)
    expected = found.results(gradient)
    before = whole_masks(found.compilation.graph)
    assert before
    canonicalize.run(found.compilation)
    found.compilation.graph.lint()
    assert bool(whole_masks(found.compilation.graph)) == (how in OTHERS)
    for a, b in zip(found.results(gradient), expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_piece_of_another_dtype_is_not_masked_alone() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.where(rows(mask), 0.0, torch.cat([(x * self.weight).bfloat16(), x.sin()], 1))

    found = joint(Mixed(), torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 2 == 0)
    expected = found.results()
    canonicalize.run(found.compilation)
    torch.testing.assert_close(found.results(), expected, rtol=0, atol=0)
    assert whole_masks(found.compilation.graph)


def shared(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    left, right = torch.where(rows(mask), 0.0, x).chunk(2, 1)
    return left, right, left[:4]


def overlapping(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    y = torch.where(rows(mask), 0.0, x)
    return y[:, :10], y[:, 4:], y[:, ::2].detach()


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
@pytest.mark.parametrize("how", [shared, overlapping])
@pytest.mark.parametrize("gradients", [False, True])
def test_parts_that_are_returned_share_memory(how: Callable[..., tuple[Tensor, ...]], gradients: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 2 * WIDTH)

    def run(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return how(layer(x), mask)

    options = {"executor": "eager", "strict": True, "skip": ["*"], "save": "bf16"}
    given = torch.randn(ROWS, 8), torch.arange(ROWS) % 3 == 0
    with torch.set_grad_enabled(gradients):
        wanted, found = run(*given), torch.compile(run, backend="fp8", options=options)(*given)
        for a, b in zip(wanted, found, strict=True):
            assert (a.shape, a.stride()) == (b.shape, b.stride())
            torch.testing.assert_close(a, b)
    assert len({x.untyped_storage().data_ptr() for x in found}) == len({x.untyped_storage().data_ptr() for x in wanted})
