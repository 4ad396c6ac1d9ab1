"""Casts in front of gathers: the same values bit for bit, nothing of two bytes gathered, and what is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from experts import ends
from joint import Joint, joint
from pipelines import drop_pass
from torch import Tensor, nn

import fp8compile
from fp8compile import ops
from fp8compile.passes.core.marker_views import Amax, GroupedCast, Quantize

aten = torch.ops.aten
TOKENS, K, WIDTH, INNER, EXPERTS = 48, 2, 64, 32, 4
SIZES = [30, 0, 41, 13]  # and twelve rows that are nobody's


def order(seed: int = 0, rows: int = TOKENS * K) -> Tensor:
    """Tokens in the order of their experts, each for two of them."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)) // K


def gathered(x: Tensor, i: Tensor) -> Tensor:
    return x[i]


def masked(x: Tensor, i: Tensor) -> Tensor:
    """As Transformers masks tokens of other ranks' experts."""
    return x[i].masked_fill((torch.arange(len(i)) >= sum(SIZES))[:, None], 0.0)


def kept(x: Tensor, i: Tensor) -> Tensor:
    """The mask says what stays."""
    return torch.where((torch.arange(len(i)) < 70)[:, None], x[i], 0.0)


def masked_twice(x: Tensor, i: Tensor) -> Tensor:
    return kept(x, i).masked_fill((torch.arange(len(i)) % 5 == 0)[:, None], 0.0)


def from_the_end(x: Tensor, i: Tensor) -> Tensor:
    return x[i - TOKENS]


def of_int32(x: Tensor, i: Tensor) -> Tensor:
    return x[i.int()]


def converted(x: Tensor, i: Tensor) -> Tensor:
    """Rows of FP32 that become BF16 behind the gather."""
    return (x.float() * 1.0009765625)[i].bfloat16()


def computed(x: Tensor, i: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,))[i]


FORMS = [gathered, masked, kept, masked_twice, from_the_end, of_int32, converted, computed]


class Mixture(nn.Module):
    """Experts, or with `dense` one linear layer, on tokens that `form` gathers."""

    def __init__(self, form: Callable[[Tensor, Tensor], Tensor], dense: bool = False) -> None:
        super().__init__()
        self.form, self.dense = form, dense
        self.up = nn.Parameter((torch.randn(EXPERTS, INNER, WIDTH) / 8).bfloat16())

    def forward(self, x: Tensor, i: Tensor, offs: Tensor) -> Tensor:
        rows = self.form(x, i)
        return rows @ self.up[0].mT if self.dense else F.grouped_mm(rows, self.up.mT, offs=offs)


def traced(form: Callable[[Tensor, Tensor], Tensor], i: Tensor, dense: bool = False, recipe: str = "mixed") -> Joint:
    torch.manual_seed(0)
    x = (torch.randn(TOKENS, WIDTH) * torch.randn(TOKENS, 1).exp2()).bfloat16().requires_grad_()
    with torch.no_grad():
        x[7] = 0.0
    found = joint(Mixture(form, dense), x, i, ends(SIZES), select="all", recipe=recipe)
    found.run()
    return found


def results(found: Joint) -> list[Tensor]:
    """The output and the gradients: of what somebody writes."""
    out, *gradients = found.results(torch.randn(TOKENS * K, INNER).bfloat16())
    return [out[: sum(SIZES)], *gradients]


@pytest.mark.parametrize("recipe", ["mixed", "rowwise"])
@pytest.mark.parametrize("form", FORMS)
def test_values_are_the_same_bit_for_bit(
    form: Callable[[Tensor, Tensor], Tensor], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = traced(form, order(), recipe=recipe)
    torch.manual_seed(1)
    moved = results(found)
    graph = found.compilation.graph
    quantizes = graph.find_nodes(op="call_function", target=ops.quantize)
    assert any(q.meta["val"].shape == (TOKENS, WIDTH) for q in quantizes)
    assert not any(q.meta["val"].shape == (TOKENS * K, WIDTH) for q in quantizes)
    gathers = graph.find_nodes(op="call_function", target=aten.index.Tensor)
    assert not [n for n in gathers if n.meta["val"].dtype == torch.bfloat16 and n.meta["val"].shape[-1] == WIDTH]
    casts = [cast for node in graph.nodes if (cast := GroupedCast.of(node))]
    assert [cast.index is not None for cast in casts] == [False, True]
    drop_pass(monkeypatch, "cast_before_gather")
    plain = traced(form, order(), recipe=recipe)
    torch.manual_seed(1)
    for a, b in zip(moved, results(plain), strict=True):
        assert torch.equal(a, b)
        assert a.isfinite().all()


def columns(x: Tensor, i: Tensor) -> Tensor:
    return torch.cat([x, x])[:, i[:WIDTH] % WIDTH]


def filled_with_ones(x: Tensor, i: Tensor) -> Tensor:
    return x[i].masked_fill((torch.arange(len(i)) >= 70)[:, None], 1.0)


def each_element(x: Tensor, i: Tensor) -> Tensor:
    return x[i].masked_fill(torch.arange(len(i) * WIDTH).view(-1, WIDTH) % 7 == 0, 0.0)


def rounded_twice(x: Tensor, i: Tensor) -> Tensor:
    return (x.float() * 1.0009765625)[i].half().bfloat16()


def changed(x: Tensor, i: Tensor) -> Tensor:
    return x[i] * 2


@pytest.mark.parametrize("form", [columns, filled_with_ones, each_element, rounded_twice, changed])
def test_what_is_no_gather_of_whole_rows_is_left(form: Callable[[Tensor, Tensor], Tensor]) -> None:
    found = traced(form, order())
    quantizes = found.compilation.graph.find_nodes(op="call_function", target=ops.quantize)
    assert not any(q.meta["val"].shape == (TOKENS, WIDTH) for q in quantizes)
    assert not any(cast.index for node in found.compilation.graph.nodes if (cast := GroupedCast.of(node)))


@pytest.mark.parametrize(("rows", "is_moved"), [(TOKENS - 1, False), (TOKENS, True)])
def test_rows_of_which_fewer_are_read_are_cast_behind(rows: int, is_moved: bool) -> None:
    found = traced(lambda x, i: x[i[:rows]], order(), dense=True)
    row_casts = [q for node in found.compilation.graph.nodes if (q := Quantize.of(node)) and q.granularity == "row"]
    activations = [q for q in row_casts if q.node.meta["val"].shape[-1] == WIDTH and not q.transpose]
    assert {q.x.op == "placeholder" for q in activations} == {is_moved}


def test_a_linear_layer_on_gathered_rows_casts_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the edges of a graph. grad_weight has one scale a tensor, of the rows that were gathered."""
    found = traced(gathered, order() % 5, dense=True)
    moved = found.results()
    amaxes = [amax for node in found.compilation.graph.nodes if (amax := Amax.of(node)) and amax.granularity == "row"]
    assert [tuple(amax.node.meta["val"].shape) for amax in amaxes] == [(TOKENS, 1)]
    drop_pass(monkeypatch, "cast_before_gather")
    for a, b in zip(moved, traced(gathered, order() % 5, dense=True).results(), strict=True):
        assert torch.equal(a, b)


def gradients(run: Callable[..., Tensor], model: nn.Module, *given: Tensor) -> list[Tensor]:
    """Of the first input and all parameters."""
    x = given[0].detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    run(x, *given[1:]).float().square().sum().backward()
    return [g for g in (x.grad, *(p.grad for p in model.parameters())) if g is not None]


class Messages(nn.Module):
    """Along the edges of a graph, there and back; or of both ends, added."""

    def __init__(self, added: bool) -> None:
        super().__init__()
        self.added = added
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor, i: Tensor, offs: Tensor) -> Tensor:
        if self.added:
            return F.relu(self.a(x[i]) + self.b(x[i.flip(0)]))
        return self.b(F.silu(self.a(torch.cat([x[i], x[i.flip(0)], x[: TOKENS // 2]]))))


@pytest.mark.filterwarnings("ignore:fp8. the activation budget")
@pytest.mark.parametrize("budget", [None, 0.05, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("added", [False, True])
def test_payloads_and_scales_are_kept_or_made_again_as_a_budget_has_it(added: bool, budget: float | None) -> None:
    """A scale may be forward's where what it is read with is made of an amax that backward was given."""
    model, x = Messages(added), torch.randn(TOKENS, WIDTH).bfloat16()
    options = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 1, "activation_budget": budget}
    run = torch.compile(model, backend="fp8", options=options)
    for wanted, got in zip(*(gradients(f, model, x, order(), ends(SIZES)) for f in (model, run)), strict=True):
        assert F.cosine_similarity(wanted.double().flatten(), got.double().flatten(), 0) > 0.98


def test_few_rows_of_a_large_table_are_converted_behind_the_gather() -> None:
    def of_a_table(x: Tensor, i: Tensor) -> Tensor:
        return x.float().repeat(40, 1)[i].bfloat16()

    found = traced(of_a_table, order())
    nodes = found.compilation.graph.nodes
    assert not any(cast.index for node in nodes if (cast := GroupedCast.of(node)))
    assert not [n for n in nodes if "repeat" in n.name and n.meta["val"].dtype == torch.bfloat16]


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("form", [masked, computed])
def test_compiled_for_any_number_of_tokens(form: Callable[[Tensor, Tensor], Tensor], executor: str) -> None:
    """Numbers of tokens that no compilation has seen, of which each is a graph's own size."""
    model = Mixture(form)
    run = torch.compile(model, backend="fp8", options={"select": "all", "executor": executor}, dynamic=True)
    for tokens in (48, 64, 57):
        x = torch.randn(tokens, WIDTH).bfloat16().requires_grad_()
        i, offs = order(1, tokens * K), ends([tokens, 0, tokens - 20, 20])
        for call in (run, model):
            model.zero_grad(set_to_none=True)
            x.grad = None
            call(x, i, offs).float().square().sum().backward()
            assert model.up.grad is not None
            assert x.grad is not None
            found = [model.up.grad.double(), x.grad.double()] + ([] if call is run else found)  # noqa: F821
        for wanted, got in zip(found[:2], found[2:], strict=True):
            assert F.cosine_similarity(wanted.flatten(), got.flatten(), 0) > 0.99
    assert len(fp8compile.compiles()) == 1
