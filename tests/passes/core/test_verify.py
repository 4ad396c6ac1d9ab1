"""The verifier: a valid graph passes, and each rule, broken once, is named with the pass and the node."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import ops
from fp8compile.errors import VerificationError
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.core.verify import signature, verify

BF16 = torch.bfloat16


def fp8_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] @ b [N, K]ᵀ, row × tensor."""
    sa = ops.scale(ops.amax(a, "row"), "e4m3")
    sb = ops.scale(ops.amax(b, "tensor"), "e4m3")
    qa, qb = ops.quantize(a, sa, "e4m3", "row"), ops.quantize(b, sb, "e4m3", "tensor")
    return ops.scaled_mm(qa, sa, "row", qb, sb, "tensor", None, BF16)


def graph_of(call, *shapes: tuple[int, ...], symbolic: bool = False) -> fx.Graph:
    inputs = [torch.randn(s) for s in shapes]
    return make_fx(call, tracing_mode="symbolic" if symbolic else "fake")(*inputs).graph


def matmul_graph() -> fx.Graph:
    return graph_of(fp8_matmul, (32, 64), (48, 64))


def find(graph: fx.Graph, target, index: int = 0) -> fx.Node:
    return graph.find_nodes(op="call_function", target=target)[index]


def insert(graph: fx.Graph, before: fx.Node, target, *args) -> fx.Node:
    """A new node with its own value."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    mode = next(n.meta["val"].fake_mode for n in node.all_input_nodes)
    with mode:
        node.meta["val"] = target(*values)
    return node


def refused(graph: fx.Graph, message: str, outputs=None) -> None:
    with pytest.raises(VerificationError, match=re.escape(message)):
        verify(graph, "some_pass", outputs)


# --- what is valid


def test_a_valid_graph_passes():
    graph = matmul_graph()
    verify(graph, "some_pass", signature(graph))


def test_a_valid_symbolic_graph_passes():
    def call(a, b):
        s = ops.scale(ops.amax(a, "row", False, 1, 16), "e4m3")
        sb = ops.scale(ops.amax(b, "row", False, 16, 16), "e4m3")
        qa = ops.quantize(a, s, "e4m3", "row", False, 1, 16)
        return ops.scaled_mm(qa, s, "row", ops.quantize(b, sb, "e4m3", "row", False, 16, 16), sb, "row", None, BF16)

    graph = graph_of(call, (21, 70), (50, 70), symbolic=True)
    verify(graph, "some_pass", signature(graph))


def test_concatenated_data_with_concatenated_scales_passes():
    def call(a, b, c):
        scales = [ops.scale(ops.amax(x, "row"), "e4m3") for x in (a, b)]
        data = torch.cat([ops.quantize(x, s, "e4m3", "row") for x, s in zip((a, b), scales, strict=True)])
        sc = ops.scale(ops.amax(c, "row"), "e4m3")
        q = ops.quantize(c, sc, "e4m3", "row")
        return ops.scaled_mm(q, sc, "row", data, torch.cat(scales), "row", None, BF16)

    graph = graph_of(call, (16, 64), (32, 64), (8, 64))
    verify(graph, "some_pass")


def test_fp8_data_may_be_a_graph_output():
    def call(x):
        s = ops.scale(ops.amax(x, "row"), "e4m3")
        return ops.quantize(x, s, "e4m3", "row"), s

    verify(graph_of(call, (16, 64)), "some_pass")


def test_the_users_own_fp8_tensors_are_their_business():
    verify(graph_of(lambda x: x.to(torch.float8_e4m3fn).float() + 1, (16, 64)), "some_pass")


# --- each rule broken


def test_a_malformed_graph():
    graph = matmul_graph()
    matmul, first = find(graph, ops.scaled_mm), next(iter(graph.nodes))
    first.prepend(matmul)
    refused(graph, "after some_pass: malformed graph: ")


def test_a_node_without_a_value():
    graph = matmul_graph()
    del find(graph, ops.amax).meta["val"]
    refused(graph, "after some_pass: %amax: carries no value")


def test_the_error_shows_the_lines_around_the_node():
    graph = matmul_graph()
    del find(graph, ops.quantize).meta["val"]
    with pytest.raises(VerificationError) as caught:
        verify(graph, "some_pass")
    lines = str(caught.value).splitlines()
    assert lines[0] == "after some_pass: %quantize: carries no value"
    assert lines[3] == "   %amax_1: f32[] = fp8.amax(%b_1, tensor)"
    assert lines[5] == "-> %quantize: ? = fp8.quantize(%a_1, %scale, e4m3, row)"


def test_a_marker_whose_value_is_not_what_its_arguments_give():
    graph = matmul_graph()
    quantize = find(graph, ops.quantize)
    quantize.args = (*quantize.args[:4], True)
    refused(
        graph,
        "%quantize: has value torch.float8_e4m3fn[32, 64], its arguments give torch.float8_e4m3fn[64, 32]",
    )


def test_a_marker_whose_dtype_is_not_what_its_arguments_give():
    graph = matmul_graph()
    quantize = find(graph, ops.quantize)
    quantize.args = (*quantize.args[:2], "e5m2", "row")
    refused(graph, "has value torch.float8_e4m3fn[32, 64], its arguments give torch.float8_e5m2[32, 64]")


def test_a_scale_of_the_wrong_shape():
    graph = matmul_graph()
    quantize = find(graph, ops.quantize)
    quantize.args = (quantize.args[0], find(graph, ops.scale, 1), *quantize.args[2:])
    graph.lint()
    graph = reordered(graph)
    refused(graph, "%quantize: its scale has shape [], row needs [32, 1]")


def reordered(graph: fx.Graph) -> fx.Graph:
    """The same graph with all amaxes and scales first."""
    anchor = find(graph, ops.quantize)
    for target in (ops.amax, ops.scale):
        for node in graph.find_nodes(op="call_function", target=target):
            anchor.prepend(node)
    return graph


def test_a_scale_that_is_not_fp32():
    graph = matmul_graph()
    quantize, scale = find(graph, ops.quantize), find(graph, ops.scale)
    half = insert(graph, quantize, torch.ops.prims.convert_element_type.default, scale, torch.float16)
    quantize.args = (quantize.args[0], half, *quantize.args[2:])
    refused(graph, "%quantize: its scale is not FP32")


def test_fp8_data_read_without_its_scale():
    graph = matmul_graph()
    quantize, matmul = find(graph, ops.quantize), find(graph, ops.scaled_mm)
    reader = insert(graph, matmul, torch.ops.prims.convert_element_type.default, quantize, torch.float32)
    refused(
        graph,
        f"%quantize: FP8 data is read without its scale by %{reader.name} (prims.convert_element_type.default)",
    )


def test_a_view_of_fp8_data_read_without_its_scale():
    graph = matmul_graph()
    quantize, matmul = find(graph, ops.quantize), find(graph, ops.scaled_mm)
    view = insert(graph, matmul, aten.view.default, quantize, [64, 32])
    insert(graph, matmul, aten.neg.default, insert(graph, matmul, aten.view.dtype, view, torch.int8))
    refused(graph, f"%{view.name}: FP8 data is read without its scale by %view_dtype (aten.view.dtype)")


def test_an_operand_that_is_not_fp8():
    graph = matmul_graph()
    matmul = find(graph, ops.scaled_mm)
    a = next(iter(graph.nodes))
    matmul.args = (a, *matmul.args[1:])
    refused(graph, "%scaled_mm: %a_1 is torch.float32, not FP8")


@pytest.mark.parametrize("side", [0, 3], ids=["left", "right"])
def test_an_operand_that_is_not_contiguous(side):
    graph = graph_of(fp8_matmul, (64, 64), (64, 64))
    matmul = find(graph, ops.scaled_mm)
    turned = insert(graph, matmul, aten.permute.default, matmul.args[side], [1, 0])
    matmul.update_arg(side, turned)
    refused(graph, f"%scaled_mm: %{turned.name} is not contiguous along its contracted dimension")


def test_an_operand_read_in_another_granularity():
    graph = matmul_graph()
    matmul = find(graph, ops.scaled_mm)
    matmul.update_arg(2, "tensor")
    refused(graph, "%scaled_mm: %quantize was cast by row and is read as tensor")


def test_an_operand_read_with_another_scale():
    def call(a, b):
        out = fp8_matmul(a, b)
        return out, ops.scale(ops.amax(a * 2, "row"), "e4m3")

    graph = graph_of(call, (32, 64), (48, 64))
    matmul, other = find(graph, ops.scaled_mm), find(graph, ops.scale, 2)
    other.append(matmul)
    matmul.update_arg(1, other)
    refused(graph, "%scaled_mm: %quantize was made with %scale and is read with %scale_2")


def test_a_dequantize_with_another_scale():
    def call(x):
        s, t = (ops.scale(ops.amax(y, "tensor"), "e4m3") for y in (x, x * 2))
        return ops.dequantize(ops.quantize(x, s, "e4m3", "tensor"), s, "tensor", BF16), t

    graph = graph_of(call, (16, 64))
    find(graph, ops.dequantize).update_arg(1, find(graph, ops.scale, 1))
    refused(graph, "%dequantize: %quantize was made with %scale and is read with %scale_1")


def test_one_part_of_a_concatenation_with_another_scale():
    def call(a, b, c):
        sa, sb, sc = (ops.scale(ops.amax(x, "row"), "e4m3") for x in (a, b, c))
        data = torch.cat([ops.quantize(a, sa, "e4m3", "row"), ops.quantize(b, sb, "e4m3", "row")])
        return ops.dequantize(data, torch.cat([sa, sb]), "row", BF16), sc

    graph = graph_of(call, (16, 64), (16, 64), (16, 64))
    scales = graph.find_nodes(op="call_function", target=aten.cat.default)[-1]
    scales.args = ([find(graph, ops.scale), find(graph, ops.scale, 2)],)
    refused(graph, "was made with %scale_1 and is read with %cat_1")


def test_a_scale_that_does_not_cover_its_data():
    def call(a):
        s = ops.scale(ops.amax(a, "row"), "e4m3")
        data = ops.quantize(a, s, "e4m3", "row")
        return ops.dequantize(data, s, "row", BF16)

    graph = graph_of(call, (32, 64))
    dequantize, scale = find(graph, ops.dequantize), find(graph, ops.scale)
    half = insert(graph, dequantize, aten.slice.Tensor, scale, 0, 0, 16)
    dequantize.update_arg(1, half)
    refused(graph, f"%dequantize: %{half.name} has shape [16, 1], row of [32, 64] needs [32, 1]")


def test_operands_that_contract_different_sizes():
    graph = matmul_graph()
    matmul = find(graph, ops.scaled_mm)
    part = insert(graph, matmul, aten.slice.Tensor, matmul.args[3], 1, 0, 32)
    part = insert(graph, matmul, aten.clone.default, part)
    matmul.update_arg(3, part)
    with part.meta["val"].fake_mode:
        part.meta["val"] = part.meta["val"].new_empty([48, 32])  # contiguous
    refused(graph, "%scaled_mm: contracts 64 with 32 elements")


@pytest.mark.parametrize(("n", "k"), [(48, 72), (40, 64)])
def test_sizes_that_fp8_units_cannot_read(n, k):
    refused(graph_of(fp8_matmul, (32, k), (n, k)), f"%scaled_mm: K {k} or N {n} is not a multiple of 16")


def test_outputs_that_changed_dtype_or_shape():
    graph = matmul_graph()
    outputs = signature(graph)
    matmul, output = find(graph, ops.scaled_mm), graph.output_node()
    part = insert(graph, output, aten.slice.Tensor, matmul, 0, 0, 16)
    output.replace_input_with(matmul, part)
    refused(
        graph,
        "outputs changed from [('torch.bfloat16', ['32', '48'])] to [('torch.bfloat16', ['16', '48'])]",
        outputs,
    )


def test_outputs_that_changed_places():
    graph = graph_of(lambda x: (x.neg(), x.sum(), x.neg()), (4, 8))
    outputs = signature(graph)
    first, second, third = graph.output_node().args[0]
    graph.output_node().args = ([second, first, third],)
    refused(graph, "after some_pass: outputs changed from", outputs)


def test_an_output_that_was_dropped():
    graph = graph_of(lambda x: (x.neg(), x.neg() + 1), (4, 8))
    outputs = signature(graph)
    graph.output_node().args = ([graph.output_node().args[0][0], None],)
    refused(graph, "after some_pass: outputs changed from", outputs)


def test_two_outputs_may_become_one_node():
    graph = graph_of(lambda x: (x.view(8, 4), x.view(8, 4)), (4, 8))
    outputs = signature(graph)
    first, second = graph.output_node().args[0]
    second.replace_all_uses_with(first)
    graph.erase_node(second)
    verify(graph, "some_pass", outputs)


# --- in the pipeline


class TwoSums(nn.Module):
    """Its two biases have one gradient: a view of the output's."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.a, self.b = nn.Parameter(torch.zeros(4, 4, 32)), nn.Parameter(torch.zeros(4, 4, 32))

    def forward(self, x):
        return self.fc(x) + self.a.view(16, 32) + self.b.view(16, 32)


def test_parameters_with_one_gradient_pass_the_verifier():
    model = TwoSums()
    options = {"select": "all", "executor": "eager", "strict": True}
    torch.compile(model, backend="fp8", options=options)(torch.randn(16, 32)).square().sum().backward()
    assert torch.equal(model.a.grad, model.b.grad)


def break_a_scale(c) -> None:
    quantize = find(c.graph, ops.quantize)
    quantize.update_arg(2, "e5m2")


@pytest.mark.parametrize("checked", [True, False])
def test_the_pipeline_verifies_after_every_pass_unless_told_not_to(monkeypatch, checked):
    bad = pipeline.Pass("a_bad_pass", break_a_scale, "")
    monkeypatch.setattr(pipeline, "PIPELINE", (*pipeline.PIPELINE, bad))
    options = {"select": "all", "executor": "eager", "strict": True, "verify": checked}
    compiled = torch.compile(nn.Linear(32, 32), backend="fp8", options=options)
    if not checked:
        compiled(torch.randn(16, 32))
        return
    with pytest.raises(Exception, match=r"after a_bad_pass: %\w+: has value torch.float8_e4m3fn"):
        compiled(torch.randn(16, 32))


class Part:
    """The descriptor of an input that is a part of another one, as AOTAutograd describes those."""

    def __init__(self, base: object):
        self.base = base


def test_a_weight_that_arrived_meets_the_scale_it_arrived_with():
    def call(x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        sx = ops.scale(ops.amax(x, "row"), "e4m3")
        turned = data.permute([1, 0]).clone(memory_format=torch.contiguous_format)
        return ops.scaled_mm(ops.quantize(x, sx, "e4m3", "row"), sx, "row", turned, scale, "tensor", None, BF16)

    inputs = torch.randn(32, 64), torch.randn(64, 48).to(torch.float8_e4m3fn), torch.tensor(0.5), torch.tensor(2.0)
    graph = make_fx(call, tracing_mode="fake")(*inputs).graph
    _, data, scale, other = graph.find_nodes(op="placeholder")
    data.meta["desc"], scale.meta["desc"], other.meta["desc"] = Part("w"), Part("w"), Part("v")
    verify(graph, "some_pass")
    find(graph, ops.scaled_mm).update_arg(4, other)
    refused(graph, "did not arrive with")
