"""What is scattered by the indices of a sort is gathered: equal numbers, and nothing is added in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from joint import Joint, joint
from torch import Tensor, nn

from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core.compilation import aten

TOKENS, TOP, WIDTH = 12, 3, 8
PAIRS = TOKENS * TOP
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


class Routed(nn.Module):
    """Tokens in the order of their experts, something done to each, and back by `how`."""

    def __init__(self, how: Form) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(whole(WIDTH))

    def forward(self, x: Tensor, shares: Tensor, experts: Tensor) -> Tensor:
        order = torch.sort(experts, stable=True)[1]
        return self.how(x, shares * self.weight[0], order) * self.weight


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers: their sums are exact, in any order."""
    return torch.randint(-4, 5, shape, dtype=dtype)


def sorted_back(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """As Transformers has it: by an inverse that is written."""
    tokens = x[order // TOP] * shares[order][:, None]
    inverse = order.new_empty(PAIRS).index_put((order,), torch.arange(PAIRS))
    return tokens[inverse].view(TOKENS, TOP, WIDTH).sum(1)


def sorted_twice(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    tokens = x[order // TOP] * shares[order][:, None]
    return tokens[order.argsort()].view(TOKENS, TOP, WIDTH).sum(1)


def written_back(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """As torchtitan has it."""
    back = x.new_zeros(PAIRS, WIDTH).index_put((order,), x[order // TOP])
    return (shares.view(TOKENS, 1, TOP) @ back.view(TOKENS, TOP, WIDTH)).squeeze(1)


def added_back(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """As torchtitan had it: rows are chosen, and added, element by element."""
    rows = (order // TOP)[:, None].expand(-1, WIDTH)
    tokens = x.gather(0, rows) * shares[order][:, None]
    return torch.zeros_like(x).scatter_add(0, rows, tokens)


def repeated(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """Each token k times, before they are sorted: what differentiation makes of a sum, too."""
    tokens = x[:, None].expand(-1, TOP, -1).reshape(PAIRS, WIDTH)[order] * shares[order][:, None]
    back = tokens.new_zeros(PAIRS, WIDTH).index_put((order.argsort(),), tokens, accumulate=True)
    return back.view(TOKENS, TOP, WIDTH).sum(1)


def divided_otherwise(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    tokens = x[order // TOP] * shares[order][:, None]
    return torch.zeros_like(x).index_put((torch.div(order, TOP, rounding_mode="trunc"),), tokens, accumulate=True)


def turned(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """Beside a permutation that looks like the inverse, and is not."""
    tokens = x[order // TOP] * shares[order][:, None]
    back = tokens.new_zeros(PAIRS, WIDTH).index_put((order,), tokens, accumulate=True)
    return (back + tokens[order.argsort(descending=True)])[:TOKENS]


def numbered(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """Beside other numbers that are written, or added, by the permutation, and the values that it sorts."""
    tokens = x[order // TOP] * shares[order][:, None]
    back = tokens.new_zeros(PAIRS, WIDTH).index_put((order,), tokens, accumulate=True)
    from_one = order.new_empty(PAIRS).index_put((order,), torch.arange(1, PAIRS + 1)) - 1
    added = order.new_ones(PAIRS).index_put((order,), torch.arange(PAIRS), accumulate=True) - 1
    steps = order.new_empty(PAIRS).index_put((order,), torch.arange(0, 2 * PAIRS, 2)) // 2
    return sum((tokens[i] for i in (from_one, added, steps, order.sort()[0])), back)[:TOKENS]


def overwritten(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """The inverse is written over what was scattered by the same permutation."""
    tokens = x[order // TOP] * shares[order][:, None]
    first = order.new_empty(PAIRS).index_put((order,), order * 2)
    inverse = first.index_put((order,), torch.arange(PAIRS))
    return tokens[inverse].view(TOKENS, TOP, WIDTH).sum(1) * first.view(TOKENS, TOP).sum(1, keepdim=True)


FORMS = [
    sorted_back, sorted_twice, written_back, added_back, repeated, divided_otherwise, turned, overwritten,
]  # fmt: skip


def traced(how: Form, dtype: torch.dtype = torch.float32) -> Joint:
    torch.manual_seed(0)
    model = Routed(how).to(dtype)
    x, shares = whole(TOKENS, WIDTH, dtype=dtype), whole(PAIRS, dtype=dtype)
    return joint(model, x.requires_grad_(), shares.requires_grad_(), torch.randint(4, (PAIRS,)))


def adds_in_memory(found: Joint) -> int:
    graph = found.compilation.graph
    puts = [n for n in graph.nodes if n.target is aten.index_put.default and n.args[3:] == (True,)]
    return len(puts) + len(graph.find_nodes(op="call_function", target=aten.scatter_add.default))


def compare(found: Joint, dtype: torch.dtype = torch.float32) -> None:
    """Rewrite the graph, and check that it computes the same."""
    gradient = whole(TOKENS, WIDTH, dtype=dtype)
    expected = found.results(gradient)
    canonicalize.run(found.compilation)
    found.compilation.graph.lint()
    for a, b in zip(found.results(gradient), expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", FORMS)
def test_routing_gathers_both_ways(how: Form, dtype: torch.dtype) -> None:
    found = traced(how, dtype)
    assert adds_in_memory(found) > 0
    compare(found, dtype)
    assert adds_in_memory(found) == 0


def test_other_numbers_are_no_inverse() -> None:
    compare(traced(numbered))


def test_rows_of_bf16_are_added_in_fp32() -> None:
    found = traced(added_back, torch.bfloat16)
    gradient = torch.randn(TOKENS, WIDTH).bfloat16()
    canonicalize.run(found.compilation)
    of_x = found.results(gradient)[2]
    weight, _, shares = found.given[:3]
    terms = (gradient * weight)[:, None] * (shares * weight[0]).view(TOKENS, TOP, 1)
    torch.testing.assert_close(of_x, terms.float().sum(1).bfloat16(), rtol=0, atol=0)


def test_what_is_repeated_is_not_made() -> None:
    """The gradient of a sum over k pairs is gathered from the T rows that there are."""
    found = traced(sorted_back)
    canonicalize.run(found.compilation)
    graph = found.compilation.graph
    gathered = [
        tuple(n.args[0].meta["val"].shape) for n in graph.find_nodes(op="call_function", target=aten.index.Tensor)
    ]
    assert gathered.count((TOKENS, WIDTH)) == 2  # tokens, and the gradient of their sums
    repeated = graph.find_nodes(op="call_function", target=aten.expand.default)
    assert (TOKENS, TOP, WIDTH) not in [tuple(n.meta["val"].shape) for n in repeated]


def test_rows_are_moved_before_they_are_made_wider() -> None:
    def widened(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
        return sorted_back(x, shares.float(), order).to(x.dtype)

    found = traced(widened, torch.bfloat16)
    compare(found, torch.bfloat16)
    gathers = found.compilation.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    of_rows = [n.meta["val"].dtype for n in gathers if n.args[0].meta["val"].shape == (TOKENS, WIDTH)]
    assert of_rows == [torch.bfloat16, torch.bfloat16]


def of_others(how: str) -> Form:
    """Something scattered whose rows are not each met once, or not as they are taken for."""

    def back(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
        tokens = x[order // TOP] * shares[order][:, None]
        zeros, columns = torch.zeros_like(x), torch.arange(WIDTH)
        rows = (order // TOP)[:, None]
        if how == "any indices":
            return zeros.index_put((order * 5 % 7,), tokens, accumulate=True)
        if how == "values of a sort":
            whole_rows = tokens.new_zeros(PAIRS, WIDTH)
            return whole_rows.index_put((torch.sort(order * 5 % 11)[0],), tokens, accumulate=True)[:TOKENS]
        if how == "quotients of others":
            return zeros.index_put(((order * 5 % 7) // TOP,), tokens, accumulate=True)
        if how == "rows and columns":
            return zeros.index_put((rows, columns[None]), tokens, accumulate=True)
        if how == "columns":
            return zeros.mT.scatter_add(1, rows.mT.expand(WIDTH, -1), tokens.mT).mT
        if how == "some columns":
            narrow = rows.expand(-1, WIDTH // 2)
            return zeros.scatter_add(0, narrow, tokens.detach()) + zeros.scatter_add(0, narrow, tokens[:, : WIDTH // 2])
        places = order[:, None].expand(PAIRS, PAIRS, WIDTH)  # a row's number varies along the second dimension
        return (
            tokens.new_zeros(PAIRS, PAIRS, WIDTH).scatter_add(0, places, tokens.expand(PAIRS, -1, -1)).sum(1)[:TOKENS]
        )

    return back


@pytest.mark.parametrize(
    "how",
    ["any indices", "values of a sort", "quotients of others", "rows and columns", "columns", "some columns",
     "three dimensions"],
)  # fmt: skip
def test_other_indices_stay(how: str) -> None:
    found = traced(of_others(how))
    compare(found)
    assert adds_in_memory(found) >= 1


def test_integers_keep_their_dtype() -> None:
    def counted(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
        ones = torch.ones(PAIRS, dtype=torch.int32)
        met = torch.zeros(TOKENS, dtype=torch.int32).index_put((order // TOP,), ones, accumulate=True)
        any_of = torch.zeros(TOKENS, dtype=torch.bool).index_put((order // TOP,), ones > 0, accumulate=True)
        return x * met[:, None] * any_of[:, None] * shares.sum()

    found = traced(counted)
    compare(found)


def among(x: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    """Added to something, more rows than there are pairs, and as many rows a token as there are not."""
    tokens = x[order // TOP] * shares[order][:, None]
    ones = torch.ones_like(x).index_put((order // TOP,), tokens, accumulate=True)
    more = tokens.new_zeros(PAIRS + 1, WIDTH).index_put((order,), tokens, accumulate=True)
    fewer = tokens.new_zeros(TOKENS, WIDTH).index_put((order // (2 * TOP),), tokens, accumulate=True)
    return ones + more[:TOKENS] + fewer


def test_what_is_not_made_of_these_rows_alone_stays() -> None:
    found = traced(among)
    compare(found)
    assert adds_in_memory(found) == 3


class Spread(nn.Module):
    """Tokens that meet TOP experts each, which are chosen by what they are: any number of tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        shares, experts = (x @ self.weight).topk(TOP)
        order = experts.view(-1).argsort(stable=True)
        tokens = x[order // TOP] * shares.view(-1)[order][:, None]
        if self.how == "added":
            return torch.zeros_like(x).index_add(0, order // TOP, tokens)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        return tokens[inverse].view(-1, TOP, WIDTH).sum(1)


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
@pytest.mark.parametrize("how", ["sorted", "added"])
def test_any_number_of_tokens(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Spread(how)
    options = {"executor": "eager", "strict": True, "skip": ["*"], "save": "bf16", "dump": str(tmp_path)}
    run = torch.compile(model, backend="fp8", dynamic=True, options=options)
    for tokens in (12, 7, 30):
        x = torch.randn(tokens, WIDTH, requires_grad=True)
        wanted, found = (torch.autograd.grad(f(x).square().sum(), [x, model.weight]) for f in (model, run))
        torch.testing.assert_close(found, wanted)
    (graph,) = tmp_path.glob("graph*/*_joint_canonicalize.py")
    assert "True)" not in "".join(line for line in graph.read_text().splitlines() if "index_put" in line)
    assert "scatter_add" not in graph.read_text()
