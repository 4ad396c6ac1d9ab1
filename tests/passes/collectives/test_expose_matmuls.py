"""Matmuls beside collectives, as Inductor's pass for asynchronous tensor parallelism wants them."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelines import look_after, look_after_stage, look_before_stage, replace_pass, run_half
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.exc import InductorError
from torch._inductor.fx_passes import micro_pipeline_tp
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.inductor_prims import force_stride_order
from torch.distributed import _symmetric_memory
from torch.nn import functional

import fp8compile
from fp8compile import ops
from fp8compile.passes.collectives.expose_matmuls import REDUCE_SCATTER, expose_matmuls
from fp8compile.passes.core.collectives import ALL_GATHER as GATHER
from fp8compile.passes.core.collectives import WAIT
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.passes.core.stages import Stage
from fp8compile.passes.lower.call_matmuls import call_matmuls

pytestmark = pytest.mark.usefixtures("group_of_one")
EAGER = {"select": "all", "executor": "eager", "strict": True}


def group() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def gathered(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, S, K], of which each rank has a part of S."""
    whole = WAIT(GATHER(x, 1, group()))
    return torch.cat(torch.chunk(whole, 2), 1) @ weight.t()


def scattered(x: Tensor, weight: Tensor) -> Tensor:
    y = x @ weight.t()
    return WAIT(REDUCE_SCATTER(y, "sum", 1, group()))


def alone(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class OfOne(fx.Interpreter):
    """Runs a graph whose collectives are those of one rank, as gloo gathers no FP8; and FP8 matmuls in FP32, as not
    every CPU multiplies rows that have scales."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (GATHER, REDUCE_SCATTER, WAIT):
            return args[0]
        if target is aten._scaled_mm.default:
            a, b, scale_a, scale_b, bias, _, dtype, _ = args
            assert bias is None
            assert b.stride(0) == 1, "FP8 units want columns"
            return ((a.float() * scale_a) @ (b.float() * scale_b)).to(dtype)
        return super().call_function(target, args, kwargs)


@functools.cache
def compiled(function: Any, recipe: str) -> fx.Graph:
    """The graph of `function` as it leaves the pipeline."""
    graphs: list[fx.Graph] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        look_after_stage(patch, Stage.JOINT, lambda c: graphs.append(copy_graph(c.graph)))
        torch.compile(function, backend="fp8", options={**EAGER, "recipe": recipe})(*given())
    (graph,) = graphs
    return graph


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 32, 64).bfloat16(), nn.Parameter(torch.randn(48, 64).bfloat16())


def exposed(function: Any, recipe: str) -> tuple[fx.Graph, Any, Any]:
    """The graph of `function` after the pass, and what it computes before and after."""
    graph, (x, weight) = copy_graph(compiled(function, recipe)), given()
    inputs = [x if n.meta["val"].dim() == 3 else weight for n in graph.find_nodes(op="placeholder")]
    before = OfOne(fx.GraphModule({}, copy_graph(graph))).run(*inputs)
    expose_matmuls(graph)
    graph.lint()
    return graph, before, OfOne(fx.GraphModule({}, graph)).run(*inputs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mixed"])
@pytest.mark.parametrize("function", [gathered, scattered])
def test_the_same_values_in_one_call(function, recipe):
    graph, before, after = exposed(function, recipe)
    assert not list(graph.find_nodes(op="call_function", target=ops.scaled_mm))
    assert len(list(graph.find_nodes(op="call_function", target=aten._scaled_mm.default))) == 1
    for a, b in zip(after, before, strict=True):
        assert (a.float() - b.float()).norm() < 0.001 * b.float().norm()


def test_inductor_would_pipeline_the_gather():
    """Its own functions find the payload on the wire, as what it is, and the matmul that reads it."""
    graph, _, _ = exposed(gathered, "tensorwise")
    module = fx.GraphModule({}, graph)
    view_to_reshape(module)
    found = {m.shard_node.meta["val"].dtype: m for m in micro_pipeline_tp.find_all_gather_patterns(module.graph)}
    assert set(found) == {torch.float8_e4m3fn, torch.float32}, "the payload, and its amax"
    payload = found[torch.float8_e4m3fn]
    assert payload.gather_dim == 1
    (matmul,) = micro_pipeline_tp._find_consumer_matmuls(payload.res_node)
    assert isinstance(matmul, micro_pipeline_tp._ScaledMatmul)
    assert payload.res_node not in matmul.arg_ancestor_nodes


def test_inductor_would_pipeline_the_scatter():
    graph, _, _ = exposed(scattered, "tensorwise")
    module = fx.GraphModule({}, graph)
    view_to_reshape(module)
    (match,) = micro_pipeline_tp.find_reduce_scatter_patterns(module.graph)
    producer = match.input_node
    while producer.target is aten.reshape.default:
        producer = producer.args[0]
    assert producer.target is aten._scaled_mm.default


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mixed"])
def test_others_become_calls_in_the_end(recipe):
    graph, before, _ = exposed(alone, recipe)
    assert len(list(graph.find_nodes(op="call_function", target=ops.scaled_mm))) == 1, "until then"
    call_matmuls(graph)
    graph.lint()
    assert not list(graph.find_nodes(op="call_function", target=ops.scaled_mm))
    inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
    x, weight = given()
    after = OfOne(fx.GraphModule({}, graph)).run(*(x if n.dim() == 3 else weight for n in inputs))
    for a, b in zip(after, before, strict=True):
        assert (a.float() - b.float()).norm() < 0.001 * b.float().norm()


@pytest.mark.parametrize(
    ("recipe", "setting"), [("blockwise", None), ("mixed", "max_autotune"), ("mixed", "max_autotune_gemm")]
)
def test_what_is_no_call_or_is_to_be_tuned_stays(recipe, setting):
    graph, _, _ = exposed(alone, recipe)
    with inductor_config.patch({setting: True} if setting else {}):
        call_matmuls(graph)
    assert len(list(graph.find_nodes(op="call_function", target=ops.scaled_mm))) == 1


def test_a_number_of_rows_that_only_the_data_knows_is_not_asked_for(monkeypatch):
    """Inductor works out again what a call returns, and cannot where that depends on how rows lie in memory."""
    halves = []

    def look(c):
        halves.append(copy_graph(c.graph))
        run_half(halves[-1], "triton", c.half)

    def chosen(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = x @ first.t()
        return functional.gelu(hidden[hidden[:, 0] > 0]) @ second.t()

    look_before_stage(monkeypatch, Stage.HALF, look)
    weights = (nn.Parameter(torch.randn(n, k).bfloat16()) for n, k in ((128, 64), (64, 128)))
    options = {"select": "all", "recipe": "rowwise", "strict": True, "executor": "eager"}
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(chosen, backend="fp8", options=options)(torch.randn(48, 64).bfloat16(), *weights).sum().backward()
    found = {target: [] for target in (aten._scaled_mm.default, ops.scaled_mm)}
    for graph in halves:
        for target, nodes in found.items():
            nodes += graph.find_nodes(op="call_function", target=target)
    assert [len(nodes) for nodes in found.values()] == [2, 3], "the first layer's; the second's"
    for node in found[aten._scaled_mm.default]:
        args = fx.map_arg(node.args, lambda n: n.meta["val"])
        with args[0].fake_mode:
            assert node.target(*args).shape == node.meta["val"].shape


def test_a_scale_that_is_one_of_several_is_copied():
    """cuBLAS refuses one that does not begin at a multiple of 16 bytes; in backward it is an input."""
    graph, _, _ = exposed(alone, "tensorwise")
    (matmul,) = graph.find_nodes(op="call_function", target=ops.scaled_mm)
    with graph.inserting_before(next(iter(graph.nodes))):
        saved = graph.placeholder("saved")
    with matmul.args[1].meta["val"].fake_mode:
        saved.meta["val"] = torch.empty(4)[1]
    matmul.update_arg(1, saved)
    call_matmuls(graph)
    (called,) = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    assert called.args[2].target is aten.clone.default
    assert called.args[2].args == (saved,)
    assert called.args[3].target is not aten.clone.default


def test_groups_along_k_stay():
    graph, _, _ = exposed(scattered, "blockwise")
    assert not list(graph.find_nodes(op="call_function", target=aten._scaled_mm.default))


def between(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A feed-forward of which each rank has some columns, then rows, on a part of the tokens."""
    whole = WAIT(GATHER(functional.silu(x), 1, group()))
    return WAIT(REDUCE_SCATTER(functional.gelu(whole @ first.t()) @ second.t(), "sum", 1, group()))


class SeenError(Exception):
    """The graph has been seen: compiling its kernels of C++, each a second, would show nothing more."""


@pytest.mark.parametrize("wanted", [False, True])
def test_inductor_pipelines_both_ends(monkeypatch, wanted):
    """In its own order of passes, in a graph that our kernels are then made of. (A CPU cannot run what comes of it.)"""
    halves = []

    def look(c):
        copy = copy_graph(c.graph)
        run_half(copy, "triton", c.half)
        assert all("val" in node.meta for node in copy.nodes if node.op == "call_function")
        halves.append([node.target for node in copy.nodes])
        if not wanted:
            raise SeenError

    look_before_stage(monkeypatch, Stage.HALF, look)
    # Inductor writes all of its code, and calls the kernels of C++; compiling them takes seconds and shows nothing more
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    x, first, second = (torch.randn(n, k).bfloat16() for n, k in ((64, 128), (256, 128), (128, 256)))
    compiled = torch.compile(between, backend="fp8", options={"select": "all", "recipe": "tensorwise", "strict": True})
    settings = inductor_config.patch(_micro_pipeline_tp=wanted, force_disable_caches=True)
    stops = (
        pytest.raises(NotImplementedError, match="symm_mem")
        if wanted
        else pytest.raises(InductorError, match="SeenError")
    )
    with _symmetric_memory._test_mode(), settings, torch.no_grad(), stops:
        compiled(x, nn.Parameter(first), nn.Parameter(second))
    (targets,) = halves
    symm_mem = torch.ops.symm_mem
    assert (symm_mem.fused_all_gather_scaled_matmul.default in targets) == wanted
    assert (symm_mem.fused_scaled_matmul_reduce_scatter.default in targets) == wanted
    assert triton_kernel_wrapper_functional in targets


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_not_pipelined_reads_rows_and_columns(monkeypatch, recipe):
    """In Inductor's code, whatever it would have laid out: x reaches the matmul transposed."""
    lowered = []
    look_after(monkeypatch, "keep_strides", lambda c: lowered.append(c.graph))

    def scattered_of_columns(x: Tensor, weight: Tensor) -> Tensor:
        return WAIT(REDUCE_SCATTER(x.t().exp() @ weight.t(), "sum", 1, group()))

    x, weight = torch.randn(64, 32).bfloat16() / 4, nn.Parameter(torch.randn(48, 64).bfloat16())
    options: dict[str, Any] = {"select": "all", "recipe": recipe, "strict": True}
    options["inductor"] = {"_micro_pipeline_tp": True}
    compiled = torch.compile(scattered_of_columns, backend="fp8", options=options)
    runs = recipe == "tensorwise" or torch.__version__ >= "2.12"  # before, no CPU multiplied rows that have scales
    stops = contextlib.nullcontext() if runs else pytest.raises(RuntimeError, match="per-tensor")
    with inductor_config.patch(force_disable_caches=True), torch.no_grad(), stops:
        y = compiled(x, weight)
    (graph,) = lowered
    (matmul,) = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    strides = [(64, 1), (1, 64), *([(1, 1)] * 2 if recipe == "rowwise" else [])]
    kept = [n.args[1] for n in matmul.args[:4] if n.target is force_stride_order]
    assert kept == strides
    if not runs:
        return
    exact = x.double().t().exp() @ weight.double().t()
    assert (y - exact).norm() < 0.08 * exact.norm()


def test_a_matmul_that_cannot_be_exposed_is_not_pipelined(monkeypatch):
    def fails(c):
        c.graph.erase_node(c.graph.output_node())
        raise RuntimeError("half way")

    replace_pass(monkeypatch, "expose_matmuls", fails)
    x, weight = torch.randn(2, 32, 64).bfloat16(), nn.Parameter(torch.randn(48, 64).bfloat16())
    compiled = torch.compile(alone, backend="fp8", options={"select": "all"})
    settings = inductor_config.patch(_micro_pipeline_tp=True, force_disable_caches=True)
    with settings, torch.no_grad(), pytest.warns(fp8compile.Fp8Warning, match="not pipelined"):
        y = compiled(x, weight)
    exact = x.double() @ weight.double().t()
    assert (y - exact).norm() < 0.08 * exact.norm()
