"""Modules under torch.compiler.nested_compile_region: one graph for several layers, compiled in FP8 like any other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import replace_pass, run_half
from torch import Tensor, nn
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile
from fp8compile import ops
from fp8compile.errors import Fp8Warning, OptionError

aten = torch.ops.aten
SIZE, ROWS = 64, 48
LOOSE = {"select": "all", "strict": True, "save_min_bytes": 0}


class Plain(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(SIZE), nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Nested(Plain):
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(F.silu(x))


class SmallNested(Small):
    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Mixer(nn.Module):
    """Multiplies with a weight, or with what is given: a region cannot tell them apart by their types."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.gelu(x) @ weight


def stack(block: type[nn.Module], layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [block() for _ in range(layers)]
    return nn.Sequential(nn.Linear(SIZE, SIZE), *blocks, nn.Linear(SIZE, SIZE)).bfloat16()


def batch(rows: int = ROWS) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(rows)).bfloat16()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="fp8", options={**LOOSE, "executor": "eager", **options})


def gradients(call: Any, model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    call(*(inputs or (batch(),))).float().square().mean().backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def decibels(actual: Tensor, expected: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (actual - expected).norm()))


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], least: float = 18.0) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient) or decibels(actual[name], gradient) > least, name


@pytest.mark.parametrize("recipe", ["mixed", "blockwise"])
def test_a_step_is_that_of_layers_without_regions(recipe: str) -> None:
    model, plain = stack(Nested), stack(Plain)
    actual = gradients(compiled(model, recipe=recipe), model)
    plans = fp8compile.last_compile().plans
    assert_close(actual, gradients(plain, plain))
    assert [len(plan.converted) for plan in plans] == [6, 5], "a region's two linears; the first layer and the last"
    assert not [m for plan in plans for m in plan.matmuls if m.decision != "fp8"]
    (region, _) = plans
    assert all(row.dtype.startswith(("float8", "float32")) or "group" in row.form for row in region.saved), str(region)


@pytest.mark.slow
def test_through_inductor() -> None:
    """One layer, and behind it two in a region."""
    model, plain = (stack(block)[:-1] for block in (SmallNested, Small))
    assert_close(gradients(compiled(model, executor="inductor"), model), gradients(plain, plain))
    assert [len(plan.converted) for plan in fp8compile.last_compile().plans] == [3, 2]


def test_weights_are_told_from_what_comes_with_a_batch() -> None:
    """A region that once gets a weight and once an activation gets a weight in neither."""
    torch.manual_seed(0)
    mixer, weight = Mixer(), nn.Parameter(torch.randn(SIZE, SIZE).bfloat16() / 8)
    first = nn.Linear(SIZE, SIZE).bfloat16()

    def model(x: Tensor, given: Tensor) -> Tensor:
        x = mixer(first(x), weight)
        return mixer(x, given) + mixer(x, weight)

    given = (torch.randn(SIZE, SIZE).bfloat16() / 8).requires_grad_()
    compiled(model)(batch(), given).float().sum().backward()
    region = fp8compile.last_compile().plans[0]
    assert {m.reason for m in region.matmuls} == {"neither operand comes from an nn.Parameter"}


def test_inference() -> None:
    model, plain = stack(Nested), stack(Plain)
    with torch.no_grad():
        assert decibels(compiled(model)(batch()).float(), plain(batch()).float()) > 20
    assert sum(len(plan.converted) for plan in fp8compile.last_compile().plans) == 4


def test_any_number_of_rows() -> None:
    model, plain = stack(Nested), stack(Plain)
    call = torch.compile(model, backend="fp8", options={**LOOSE, "executor": "eager"}, dynamic=True)
    for rows in (48, 3):
        assert_close(gradients(call, model, batch(rows)), gradients(plain, plain, batch(rows)), 15.0)


def test_autocast() -> None:
    model, plain = stack(Nested).float(), stack(Plain).float()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = (
            gradients(call, m, batch().float()) for call, m in ((compiled(model), model), (plain, plain))
        )
    assert_close(actual, expected)


def test_saving_in_bf16() -> None:
    model, plain = stack(Nested), stack(Plain)
    assert_close(gradients(compiled(model, save="bf16"), model), gradients(plain, plain))
    assert all("group" not in row.form for plan in fp8compile.last_compile().plans for row in plan.saved)


def test_casts_of_all_layers_are_measured() -> None:
    model, plain = stack(Nested), stack(Plain)
    watched = fp8compile.watch(model, steps=2, options={**LOOSE, "executor": "eager"})
    for _ in range(2):
        assert_close(gradients(watched, model), gradients(plain, plain))
    rows = watched.statistics.rows()
    assert {row.path for row in rows} >= {"0", "3"}
    assert any(row.path.endswith("up") for row in rows)


def test_a_dump_and_an_explanation(tmp_path: Path) -> None:
    model = stack(Nested)
    gradients(compiled(model, dump=str(tmp_path)), model)
    assert (tmp_path / "index.md").exists() or list(tmp_path.rglob("*.py"))
    assert "up" in fp8compile.explain(model, batch(), options=LOOSE).table("matmuls")


def test_delayed_scales_are_refused() -> None:
    delayed = {"base": "mixed", "grad_weight": {"left": {"delayed": {"history": 4}}}}
    with pytest.raises(OptionError, match="share a nested_compile_region"):
        gradients(compiled(model := stack(Nested), recipe=delayed), model)


def test_a_failing_pass_leaves_the_region_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(c: Any) -> None:
        raise NotImplementedError("no such operator")

    replace_pass(monkeypatch, "exchange_as_fp8", fail)
    model, plain = stack(Nested), stack(Plain)
    with pytest.warns(Fp8Warning, match="compiled without FP8"):
        actual = gradients(compiled(model, strict=False, save="bf16"), model)
    assert_close(actual, gradients(plain, plain), 40.0)


@pytest.mark.parametrize("executor", ["operators", "triton", "inductor"])
def test_kernels_that_write_into_what_a_region_returns_stay(executor: str) -> None:
    """Inductor has been through a region's graph, where launches have become writes, before passes see its caller's."""
    region, caller = torch.fx.Graph(), torch.fx.Graph()
    with FakeTensorMode():
        x, y = torch.empty(4, 4), torch.empty(4, 4)
    given, written = add(region, "placeholder", "x", x), add(region, "call_function", aten.empty_like.default, y)
    written.args = (given,)
    launch = region.call_function(triton_kernel_wrapper_mutation, (), {"kwargs": {"x": given, "y": written}})
    region.output((written,))
    body = torch.fx.GraphModule({}, region)
    called = add(caller, "placeholder", "x", x)
    name = add(caller, "get_attr", "body", body)
    call = add(caller, "call_function", invoke_subgraph, (y,))
    call.args = (name, "body", called)
    unused = add(caller, "call_function", ops.amax, x)
    unused.args = (called, "row", False)
    caller.output((call,))
    gm = torch.fx.GraphModule({"body": body}, caller)
    run_half(gm.graph, executor)
    assert launch in gm.body.graph.nodes
    assert not gm.graph.find_nodes(op="call_function", target=ops.amax)


def add(graph: torch.fx.Graph, op: str, target: Any, value: Any) -> torch.fx.Node:
    node = graph.create_node(op, target)
    node.meta["val"] = value
    return node


def branches(flag: Tensor, x: Tensor, one: nn.Module, other: nn.Module) -> Tensor:
    return torch.cond(flag, lambda x: F.silu(one(x)), lambda x: F.silu(other(x)), (x,))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_branches_are_left_and_what_is_around_them_is_not(sign: float) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.one, self.other, self.last = (nn.Linear(SIZE, SIZE) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(branches(x.sum() * sign > 0, self.first(x), self.one, self.other))

    torch.manual_seed(0)
    model = Model().bfloat16()
    plain = copy.deepcopy(model)
    actual = gradients(compiled(model), model)
    assert_close(actual, gradients(plain, plain))
    *bodies, around = fp8compile.last_compile().plans
    assert len(around.converted) == len(around.matmuls) == 5
    assert not any(plan.converted for plan in bodies)
