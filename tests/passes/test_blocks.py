"""Which kernels the blocks of known models become: how many, and what each of them does.

A kernel is listed as what it reads in full, and what it writes. Counts are those of regions: beside them Inductor makes
the rotary embedding (two kernels a half) and the last residual addition.
`llama_kernels.expected` holds the sources of the Llama block's kernels; renew with FP8COMPILE_ACCEPT=1.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from pipelines import look_after_stage, look_before_stage, run_half
from torch import Tensor, fx, nn
from torch._inductor.fx_passes.post_grad import view_to_reshape

from fp8compile import ops, option_values
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.spec.region import Region
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.passes.core.stages import Stage
from fp8compile.passes.regions.region_graph import regions_of, spec_of

HERE = Path(__file__).parent
MADE_WITH = (2, 13)

from llama import Block, LlamaConfig, Rotary  # noqa: E402


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(LlamaConfig(dim=128, n_layers=1, n_heads=4, n_kv_heads=2, hidden=256))
        self.rotary = Rotary(32, 64, 10_000.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.rotary)


class DiTBlock(nn.Module):
    """Peebles and Xie, arXiv 2212.09748: norms without weights, scaled and shifted by a conditioning vector."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(nn.functional.silu(c)).chunk(6, 1)
        h = self.norm1(x) * (1 + scale1[:, None]) + shift1[:, None]
        batch, length, width = h.shape
        q, k, v = self.qkv(h).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + gate1[:, None] * self.proj(a)
        h = self.norm2(x) * (1 + scale2[:, None]) + shift2[:, None]
        return x + gate2[:, None] * self.fc2(nn.functional.gelu(self.fc1(h), approximate="tanh"))


def gpt2_block() -> nn.Module:
    config = transformers.GPT2Config(n_embd=128, n_head=4, n_layer=1, resid_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    return _First(transformers.models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0))


def vit_block() -> nn.Module:
    config = transformers.ViTConfig(hidden_size=128, num_attention_heads=4, intermediate_size=512)
    config._attn_implementation = "sdpa"
    return _First(transformers.models.vit.modeling_vit.ViTLayer(config))


class _First(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


# (model, its further inputs, kernels of the forward half without those of weights, kernels of the backward half)
# forward: norm → row · attention output → row · add + norm → row · activation → row · amaxes put together
# backward: amax of the gradient (with the bias gradient where there is a bias) · its casts · amaxes of the activation's
# gradient · its casts and the activation again · norm · its casts, attention output and norm output again · amaxes of
# q, k, v · their casts and norm output again · norm · all column sums put together
BLOCKS: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]], int, int]] = {
    "llama": (LlamaBlock, [], 5, 10),
    "gpt2": (gpt2_block, [], 5, 10),
    "vit": (vit_block, [], 5, 10),
    "dit": (DiTBlock, [(2, 128)], 5, 11),
}


@functools.cache
def compiled(name: str, **more_options: object) -> tuple[list[fx.Graph], list[fx.Graph], Tensor]:
    """The graphs of forward and backward, as they were cut and with their regions; and what the block returned."""
    with pytest.MonkeyPatch.context() as patch:
        plain: list[fx.Graph] = []
        graphs: list[fx.Graph] = []
        look_before_stage(patch, Stage.HALF, lambda c: plain.append(copy_graph(c.graph)))
        look_after_stage(patch, Stage.HALF, lambda c: graphs.append(copy_graph(c.graph)))
        torch.manual_seed(0)
        build, more, *_ = BLOCKS[name]
        model = build().bfloat16()
        x = torch.randn(2, 64, 128, dtype=torch.bfloat16, requires_grad=True)
        options = {"executor": "eager", "select": "all", "strict": True, **more_options}
        inputs = [torch.randn(*shape, dtype=torch.bfloat16) for shape in more]
        y = torch.compile(model, backend="fp8", options=options)(x, *inputs)
        y.sum().backward()
    assert len(plain) == len(graphs) == 2
    return plain, graphs, y.detach().float()


def halves(name: str, reshapes: bool = False, **more_options: object) -> list[fx.Graph]:
    """The graphs of forward and backward with their regions; `reshapes`: of views as Inductor hands them over."""
    plain, graphs, _ = compiled(name, **more_options)
    if not reshapes:
        return graphs
    again = [copy_graph(graph) for graph in plain]
    for graph, half in zip(again, ("forward", "backward"), strict=True):
        view_to_reshape(SimpleNamespace(graph=graph))
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)
        run_half(graph, "operators", half)
    return again


def reads_weights_only(node: fx.Node) -> bool:
    """Whether a region casts parameters, or finds their amax."""
    return all(
        (i.op == "placeholder" and len(i.meta["val"].shape) == 2) or i.meta["val"].dtype == torch.float32
        for i in node.args[0]  # type: ignore[union-attr]
    ) and any(i.op == "placeholder" for i in node.args[0])  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "reshapes"), [*((name, False) for name in BLOCKS), ("llama", True), ("dit", True)])
def test_number_of_kernels(name: str, reshapes: bool) -> None:
    forward, backward = halves(name, reshapes)
    expected = BLOCKS[name][2:]
    activations = [n for n in regions_of(forward) if not reads_weights_only(n)]
    listing = "\n".join(describe(n) for n in (*activations, *regions_of(backward)))
    assert (len(activations), len(regions_of(backward))) == expected, listing


# With everything saved in FP8: payloads come from the kernels that have the values, so that forward has one more, for
# q, k and v; DiT's also for x and for what modulates. Backward loads payloads in the kernels that it has anyway.
SAVING = {"llama": (6, 10), "gpt2": (6, 10), "vit": (6, 10), "dit": (8, 11)}


@pytest.mark.parametrize("name", BLOCKS)
def test_number_of_kernels_with_activations_saved_in_fp8(name: str) -> None:
    forward, backward = halves(name, save="fp8_with_qk", save_min_bytes=0)
    activations = [n for n in regions_of(forward) if not reads_weights_only(n)]
    listing = "\n".join(describe(n) for n in (*activations, *regions_of(backward)))
    assert (len(activations), len(regions_of(backward))) == SAVING[name], listing
    assert [n.name for g in (forward, backward) for n in g.nodes if n.target in (ops.quantize, ops.amax)] == []


@pytest.mark.parametrize("name", BLOCKS)
def test_no_cast_is_left_to_inductor(name: str) -> None:
    for graph in halves(name, False):
        assert [n.name for n in graph.nodes if n.target in (ops.quantize, ops.amax)] == []


def describe(node: fx.Node) -> str:
    """What a region reads and writes, on one line."""
    region, _ = spec_of(node)
    reads = ", ".join(str(i) for i in node.args[0])  # type: ignore[union-attr]
    writes = ", ".join(f"{b.dtype}{list(b.shape)}" for b in region.buffers)
    return f"%{node.name}: {reads} -> {writes}"


def test_no_tensor_is_read_for_its_amax_that_a_kernel_made() -> None:
    """A region that only finds amaxes reads incoming gradients, results of matmuls and attention: not our results."""
    for graph in halves("llama", False):
        for node in regions_of(graph):
            region, _ = spec_of(node)
            only_amax = all(p.values[s.value].op == "all_amax" for p in region.parts for s in p.stores)
            made_by_us = [i for i in node.args[0] if _is_region_result(i)]  # type: ignore[union-attr]
            assert not (only_amax and made_by_us), describe(node)


def _is_region_result(node: fx.Node) -> bool:
    while node.op == "call_function" and node.target in (torch.ops.aten.view.default,):
        node = node.args[0]  # type: ignore[assignment]
    return node.op == "call_function" and "getitem" in node.name and node.args[0].target is ops.region  # type: ignore[union-attr]


@pytest.mark.skipif(torch.__version__.split("+")[0].split(".")[:2] != [*map(str, MADE_WITH)], reason="other graphs")
def test_sources_of_the_llama_block() -> None:
    text = ""
    for half, graph in zip(("forward", "backward"), halves("llama", False), strict=True):
        for node in regions_of(graph):
            region, schedule = spec_of(node)
            text += f"# ==== {half} {'=' * 100}\n\n{_kernel(region, generated.file_source(region, schedule))}\n\n"
    golden = HERE / "llama_kernels.expected"
    if os.environ.get("FP8COMPILE_ACCEPT"):
        golden.write_text(text)
    assert golden.read_text() == text


def _kernel(region: Region, source: str) -> str:
    """A file without its helpers, its spec and its main; and without the numbers of the user's lines."""
    header, rest = source.split('"""\n', 1)
    functions = re.split(r"(?=@triton\.jit\n)", rest.split("__main__")[0])[1:]
    ours = [f.split("\n\n\nif")[0].strip() for f in functions if re.match(r"@triton\.jit\ndef (part|rows|tiles)", f)]
    return re.sub(r"\.py:\d+", ".py", header) + '"""\n\n' + "\n\n".join(ours)


def test_models_compile_with_the_same_loss_by_either_kernels() -> None:
    assert option_values.KERNELS == ("generated", "inductor")
    *_, generated = compiled("llama")
    torch.manual_seed(0)
    model, x = LlamaBlock().bfloat16(), torch.randn(2, 64, 128, dtype=torch.bfloat16)
    options = {"executor": "eager", "select": "all", "strict": True, "kernels": "inductor"}
    with torch.no_grad():
        by_inductor = torch.compile(model, backend="fp8", options=options)(x).float()
    assert (generated - by_inductor).norm() < 0.02 * generated.norm()
