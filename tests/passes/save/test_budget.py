"""The activation budget: kept within it, by running more again or less, with the same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import SIZES, ZOO, Case
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile.errors import Fp8Warning, OptionError

NAMES = ["llama", "shared_module", "cnn"]


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "num_hidden_layers", 1)


def gradients(case: Case, **options: Any) -> dict[str, Tensor]:
    """Gradients of one step, compiled."""
    given = {"executor": "eager", "strict": True, "select": "all", "kernels": "inductor", **options}
    torch.compiler.reset()
    case.model.zero_grad()
    case.loss(torch.compile(case.model, backend="fp8", options=given)(**case.inputs)).backward()
    return {n: p.grad.clone() for n, p in case.model.named_parameters() if p.grad is not None}


class Attending(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(64), nn.RMSNorm(64)
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).view(4, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def attending() -> Case:
    torch.manual_seed(0)
    return Case(
        Attending().bfloat16(), {"x": torch.randn(4, 16, 64).bfloat16()}, lambda y: y.float().square().mean(), 0
    )


def saved() -> int:
    return fp8compile.last_compile().saved_bytes


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
@pytest.mark.parametrize("name", NAMES)
def test_less_is_kept_the_lower_the_budget_and_the_gradients_stay(name: str) -> None:
    """Without FP8 anything that runs again computes the same bits."""
    case = ZOO[name]()
    plain = {"save": "bf16", "skip": "*"}
    expected, kept = gradients(case, activation_budget=1.0, **plain), []
    # of one model what no matmul has to run again for, of the others that some do; of each, that all do
    for budget in (0.75, 0.0) if name == "llama" else (0.25, 0.0):
        got = gradients(case, activation_budget=budget, **plain)
        kept.append(saved())
        assert all(torch.equal(got[n], expected[n]) for n in expected)
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]


def test_matmuls_run_again_only_where_the_budget_asks_for_it() -> None:
    case = attending()
    plain = {"save": "fp8", "save_min_bytes": 0}
    gradients(case, **plain)
    usual = saved()
    assert "fp8.scaled_mm.default" not in fp8compile.last_compile().recomputed
    gradients(case, activation_budget=usual, **plain)
    assert saved() == usual
    gradients(case, activation_budget=usual * 3 // 4, **plain)
    assert saved() <= usual * 3 // 4
    again = fp8compile.last_compile().recomputed
    assert again.get("fp8.scaled_mm.default", 0) + sum(n for op, n in again.items() if "attention" in op) > 0


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_of_equal_layers_as_many_run_again_as_are_needed() -> None:
    """Eight equal layers of 64 × 64: each budget between all and none keeps about what it may."""
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.Tanh()))).bfloat16()
    case = Case(model, {"input": torch.randn(32, 64, dtype=torch.bfloat16)}, lambda y: y.float().square().mean(), 0)
    plain = {"save": "bf16", "skip": "*"}
    gradients(case, **plain)
    usual = saved()
    assert usual == 9 * 32 * 64 * 2  # the input, and what each layer returns: all that could be kept
    everything = usual + 8 * 32 * 64 * 4 - 32 * 64 * 2  # where nothing runs again, 1 - y² of each layer beside y
    for share, budget in ((0.8, 0.8 * usual / everything), (0.4, int(0.4 * usual))):
        gradients(case, activation_budget=budget, **plain)
        assert (share - 0.2) * usual <= saved() <= share * usual  # a layer is an eighth of it


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_higher_budget_rounds_less() -> None:
    """From all that can be FP8 to none of it."""
    case = attending()
    plain = {"skip": "*", "save": "fp8", "save_min_bytes": 0}
    gradients(case, **plain)
    least = saved()
    gradients(case, **plain | {"save": "bf16"})
    most = saved()
    rounded = []
    for bytes_ in (least, least + (most - least) // 3, most):
        gradients(case, activation_budget=bytes_, **plain)
        assert saved() <= bytes_
        rows = fp8compile.last_compile().saved
        rounded.append([r.node for r in rows if r.form.startswith("e4m3")])
        assert any(r.reason == "the budget allows it" for r in rows) or bytes_ == least
    assert len(rounded[0]) > len(rounded[1]) > 0 == len(rounded[2])


def test_queries_that_share_keys_are_counted() -> None:
    """Attention of 8 heads to 2: two matmuls for each of the 8."""
    from fp8compile.passes.core import library_seconds

    q, k, v = torch.empty(3, 8, 100, 32), torch.empty(3, 2, 60, 32), torch.empty(3, 2, 60, 16)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "qkv"]
    for node, x in zip(nodes, (q, k, v), strict=True):
        node.meta["val"] = x.to("meta")
    call = graph.call_function(torch.ops.aten._scaled_dot_product_cudnn_attention.default, (*nodes, None, True))
    assert library_seconds._operations(call) == 2 * 3 * 8 * 100 * 60 * (32 + 16)


def test_a_budget_that_cannot_be_met_is_said() -> None:
    case = ZOO["mlp"]()
    with pytest.warns(Fp8Warning, match=r"activation budget of 2 bytes is below the \d+ that cannot be computed again"):
        gradients(case, activation_budget=2)


def test_dropout_in_attention_does_not_run_again() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 16, 3, 4, 16).permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
            return self.out(y.transpose(1, 2).flatten(2))

    case = Case(Attention().bfloat16(), {"x": torch.randn(2, 16, 64).bfloat16()}, lambda y: y.float().mean(), 0)
    with pytest.warns(Fp8Warning):  # nothing else is left to drop
        gradients(case, activation_budget=2, save="bf16")
    assert not any("dropout" in op or "rand" in op or "bernoulli" in op for op in fp8compile.last_compile().recomputed)


@pytest.mark.parametrize("budget", [1.5, -0.1, True, "half", 1, -5, float("nan")])
def test_what_is_no_budget_is_refused(budget: Any) -> None:
    with pytest.raises(OptionError, match="activation_budget"):
        fp8compile.Options.parse({"activation_budget": budget})


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_recurrent_cell_from_zeros_within_a_small_budget() -> None:
    """Its first state is a constant, whose cast reads no tensor; a scale that a payload has is also kept for itself."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.GRUCell(48, 80), nn.Linear(80, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros(6, 80, dtype=x.dtype)
            for t in range(3):
                h = self.cell(x[:, t], h)
            return self.out(h)

    torch.manual_seed(0)
    case = Case(Recurrent().bfloat16(), {"x": torch.randn(6, 3, 48).bfloat16()}, lambda y: y.float().square().mean(), 0)
    expected = gradients(case, skip="*", save="bf16")
    for budget in (0.1, 0.5):
        got = gradients(case, activation_budget=budget, save_min_bytes=0, kernels="generated")
        assert fp8compile.last_compile().converted
        for name, a in expected.items():
            assert (a - got[name]).float().norm() < 0.2 * a.float().norm()


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
@pytest.mark.parametrize(("width", "budget"), [(4, 0.0), (48, 0.3), (4, 0.7)])
def test_what_a_checkpoint_runs_again_is_not_kept_for_a_budget(width: int, budget: float) -> None:
    """All that later values are computed from lies within the checkpoint, where nothing can be kept."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
            self.down = nn.Linear(width // 4, width // 2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return self.down(nn.functional.gelu(self.gate(x)) * self.up(x))

            return checkpoint(inner, x, use_reentrant=False)

    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, width).bfloat16()}
    case = Case(Checkpointed().bfloat16(), inputs, lambda y: y.float().square().mean(), 0)
    plain = {"save": "bf16", "skip": "*", "save_min_bytes": 0}
    expected = gradients(case, **plain)
    got = gradients(case, activation_budget=budget, **plain)
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    got = gradients(case, activation_budget=budget, recipe="tensorwise", save_min_bytes=0)
    assert all(a.isfinite().all() for a in got.values())
    assert fp8compile.last_compile().converted


class OfAnyRows(nn.Module):
    """A layer with a convolution, attention and linear layers, for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.qkv = nn.Conv1d(64, 64, 3, padding=1), nn.Linear(64, 192)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x.mT).mT.sin()
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
@pytest.mark.parametrize("skip", [["*"], ["up"], []], ids=["no matmul", "some matmuls", "all matmuls"])
def test_a_budget_holds_for_sizes_that_are_symbols(skip: list[str]) -> None:
    """What is kept grows with the batch, and no size is compiled for by itself."""
    torch.manual_seed(0)
    model, counted = OfAnyRows(), list[int]()

    def noted(x: Tensor) -> Tensor:
        counted[-1] += 0 if isinstance(x, nn.Parameter) else x.numel() * x.element_size()
        return x

    def kept(**compiled: Any) -> list[int]:
        torch.compiler.reset()
        counters.clear()
        run = torch.compile(model, dynamic=True, **compiled)
        for batch in (8, 16, 24):
            counted.append(0)
            with torch.autograd.graph.saved_tensors_hooks(noted, lambda x: x):
                y = run(torch.randn(batch, 32, 64))
            y.square().mean().backward()
        return counted[-3:]

    def kept_within(budget: float) -> list[int]:
        options = {"executor": "eager", "strict": True, "select": "all", "skip": skip, "save": "bf16"}
        return kept(backend="fp8", options={**options, "activation_budget": budget})

    kept(backend="aot_eager")
    graphs = counters["stats"]["unique_graphs"]
    for few, _, many in (most := kept_within(1.0), least := kept_within(0.2)):
        assert counters["stats"]["unique_graphs"] == graphs
        assert many == pytest.approx(3 * few, rel=0.01)
    assert least[0] < 0.5 * most[0]
