"""Matmuls of few rows become launches, one after the other, whose values are those of the matmuls."""

from __future__ import annotations

from typing import Any

import interpreter
import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import reinplace
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import ops
from fp8compile.passes.core.compilation import remove_dead
from fp8compile.passes.lower import few_row_matmuls
from fp8compile.passes.lower.few_row_matmuls import launch_few_rows
from fp8compile.passes.lower.lower_markers import lower_markers
from fp8compile.passes.lower.verify_kernels import outputs_of, verify_kernels
from fp8compile.torch_hooks.inductor.launches_in_place import write_in_place

ROW, TENSOR = "row", "tensor"


def codes(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)).to(torch.float8_e4m3fn)


def scales(rows: int, granularity: str = ROW) -> Tensor:
    return torch.rand((rows, 1) if granularity == ROW else (), generator=torch.Generator().manual_seed(rows)) + 0.5


def two_layers(a: Tensor, s: Tensor, up: Tensor, t: Tensor, down: Tensor, r: Tensor, bias: Tensor) -> Any:
    """Two matmuls, of which the second reads a cast of the first; the second K is split."""
    y = ops.scaled_mm(a, s, ROW, up, t, ROW, bias, torch.bfloat16)
    scale = ops.scale(ops.amax(y, ROW), "e4m3")
    code = ops.quantize(y, scale, "e4m3", ROW)
    return ops.scaled_mm(code, scale, ROW, down, r, TENSOR, None, torch.bfloat16), y


def given(rows: int = 3) -> tuple[Tensor, ...]:
    up, down = codes(768, 64), codes(96, 768)
    bias = torch.randn(768, generator=torch.Generator().manual_seed(1)).bfloat16()
    return codes(rows, 64), scales(rows), up, scales(768), down, scales(96, TENSOR), bias


def traced(run: Any, *inputs: Tensor, mode: Any = "fake") -> fx.GraphModule:
    return make_fx(run, tracing_mode=mode)(*inputs)


def launches(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional))


class Interpreted(fx.Interpreter):
    """Runs launches by Triton's interpreter, on copies of what they write, with NaN in new buffers."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.empty.memory_format:
            return torch.full(args[0], torch.nan, dtype=kwargs["dtype"])
        if target is not triton_kernel_wrapper_functional:
            return super().call_function(target, args, kwargs)
        kernel = kernel_side_table.get_kernel(kwargs["kernel_idx"])
        constants = kernel_side_table.get_constant_args(kwargs["constant_args_idx"])
        tensors = {n: x.clone() if n in kwargs["tensors_to_clone"] else x for n, x in kwargs["kwargs"].items()}
        kernel.fn[kwargs["grid"][0]](**tensors, **constants)
        return {name: tensors[name] for name in kwargs["tensors_to_clone"]}


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs TRITON_INTERPRET=1, set before Triton's import")
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_values_are_those_of_the_matmuls(rows: int) -> None:
    interpreter.prepare()
    gm = traced(two_layers, *given(rows))
    outputs = outputs_of(gm.graph)
    lower_markers(gm.graph)
    launch_few_rows(gm.graph)
    verify_kernels(gm.graph, "few_row_matmuls", outputs)
    assert len(launches(gm)) == 2
    found, right = Interpreted(gm).run(*given(rows)), two_layers(*given(rows))
    for mine, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7 * float(theirs.float().std()))


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="needs TRITON_INTERPRET=1, set before Triton's import")
@pytest.mark.parametrize("lie", [lambda b: b[::2], lambda b: b[:1].expand(96), lambda b: b[:96]])
def test_a_bias_that_lies_otherwise(lie: Any) -> None:
    interpreter.prepare()

    def run(a: Tensor, s: Tensor, b: Tensor, t: Tensor, bias: Tensor) -> Tensor:
        return ops.scaled_mm(a, s, ROW, b, t, ROW, lie(bias), torch.bfloat16)

    inputs = codes(3, 64), scales(3), codes(96, 64), scales(96), 4 * torch.arange(192).bfloat16()
    gm = traced(run, *inputs)
    launch_few_rows(gm.graph)
    assert launches(gm)
    found, right = Interpreted(gm).run(*inputs), run(*inputs)
    torch.testing.assert_close(found, right, rtol=2**-7, atol=2**-7 * float(right.float().std()))


def test_launches_share_their_counts_and_clone_nothing() -> None:
    gm = traced(two_layers, *given())
    launch_few_rows(gm.graph)
    remove_dead(gm.graph)
    first, second = launches(gm)
    assert first.kwargs["kwargs"]["arrived"].target is torch.ops.aten.full.default
    assert second.kwargs["kwargs"]["arrived"].args == (first, "arrived")
    reinplace.reinplace_inplaceable_ops_core(gm.graph)
    assert [node.kwargs["tensors_to_clone"] for node in launches(gm)] == [[], []]
    write_in_place(gm.graph)
    gm.graph.lint()
    assert not launches(gm)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)) == 1


def matmul(a: Tensor, s: Tensor, b: Tensor, t: Tensor, of: tuple[str, str] = (ROW, ROW), **more: Any) -> Tensor:
    how = {"bias": None, "out_dtype": torch.bfloat16, **more}
    return ops.scaled_mm(a, s, of[0], b, t, of[1], how["bias"], how["out_dtype"])


OTHERS = {
    "many rows": (lambda *x: matmul(*x), codes(65, 64), scales(65), codes(32, 64), scales(32)),
    "no rows": (lambda *x: matmul(*x), codes(1, 64)[:0], scales(1)[:0], codes(32, 64), scales(32)),
    "scales of tensors": (
        lambda *x: matmul(*x, of=(TENSOR, TENSOR)), codes(1, 64), scales(1, TENSOR), codes(32, 64), scales(2, TENSOR),
    ),
    "FP32": (lambda *x: matmul(*x, out_dtype=torch.float32), codes(1, 64), scales(1), codes(32, 64), scales(32)),
    "parts of rows": (lambda a, *x: matmul(a[:, :64], *x), codes(2, 128), scales(2), codes(32, 64), scales(32)),
    "a batch": (
        lambda *x: matmul(*x), codes(4, 64)[None], scales(4)[None], codes(32, 64)[None], scales(32)[None],
    ),
    "blocks": (
        lambda *x: matmul(*x, of=("group(128)", "block(128)")), codes(1, 128), scales(1), codes(128, 128),
        scales(1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(OTHERS))
def test_other_matmuls_stay(what: str) -> None:
    run, *inputs = OTHERS[what]
    gm = traced(run, *inputs)
    launch_few_rows(gm.graph)
    assert not launches(gm)
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.aten.full.default)


def test_symbolic_rows_may_be_many() -> None:
    gm = traced(lambda *x: matmul(*x), codes(7, 64), scales(7), codes(32, 64), scales(32), mode="symbolic")
    launch_few_rows(gm.graph)
    assert not launches(gm)


class Half:
    def __init__(self, graph: fx.Graph, half: str):
        self.graph, self.half = graph, half


@pytest.mark.parametrize(("half", "tuned"), [("inference", False), ("inference", True), ("forward", False)])
def test_inference_alone_and_nothing_that_is_tuned(half: str, tuned: bool) -> None:
    gm = traced(two_layers, *given())
    with inductor_config.patch(max_autotune=tuned):
        few_row_matmuls.run(Half(gm.graph, half))  # type: ignore[arg-type]
    assert bool(launches(gm)) == (half == "inference" and not tuned)
