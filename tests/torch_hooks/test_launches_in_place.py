"""Launches of generated kernels are decomposed as torch does it, without being traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from formed import formed, of_any_rows
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation
from torch._inductor import pattern_matcher
from torch._inductor.fx_passes import post_grad, reinplace

from fp8compile import ops
from fp8compile.passes.core.compilation import remove_dead
from fp8compile.passes.lower.launch_nodes import LAUNCH
from fp8compile.passes.lower.lower_regions import lower_regions
from fp8compile.torch_hooks.inductor.launches_in_place import write_in_place

ROWS, COLUMNS = 256, 128


def cast_twice(x: Tensor) -> Any:
    scale = ops.scale(ops.amax(x, "row"), "e4m3")
    again = x.float().relu().bfloat16()
    of_it = ops.scale(ops.amax(again, "tensor"), "e4m3")
    return ops.quantize(x, scale, "e4m3", "row"), scale, ops.quantize(again, of_it, "e4m3", "tensor"), of_it


def lowered(any_rows: bool = False) -> fx.GraphModule:
    """A graph whose regions are launches, none of which has to clone its buffers; any_rows: of any number of rows."""
    x = torch.randn(ROWS, COLUMNS, dtype=torch.bfloat16)
    module = of_any_rows(cast_twice, x)[1] if any_rows else formed(cast_twice, x)
    lower_regions(module.graph)
    remove_dead(module.graph)
    reinplace.reinplace_inplaceable_ops_core(module.graph)
    return module


def launches(module: fx.GraphModule, target: Any) -> list[fx.Node]:
    return module.graph.find_nodes(op="call_function", target=target)


def plain(values: Any) -> Any:
    """Arguments without what differs between two graphs that are alike."""

    def told(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return x.name
        return (x.dtype, x.shape, x.stride(), x.device) if isinstance(x, Tensor) else x

    return torch.utils._pytree.tree_map(told, values)


def eager_tensors(node: fx.Node) -> list[Tensor]:
    """Return the tensors among the values by which Inductor keeps strides; torch 2.11 loses the numbers."""
    return [x for x in torch.utils._pytree.tree_leaves(node.meta.get("eager_input_vals")) if isinstance(x, Tensor)]


def shown(module: fx.GraphModule) -> list[Any]:
    parts = ((n.op, n.target, n.args, n.kwargs, eager_tensors(n)) for n in module.graph.nodes)
    return [tuple(map(plain, each)) for each in parts]


def test_the_graph_is_the_one_that_torch_traces() -> None:
    module = lowered()
    count = len(launches(module, triton_kernel_wrapper_functional))
    assert count > 1
    traced = copy.deepcopy(module)
    for node in traced.graph.nodes:
        node.meta.pop(LAUNCH, None)  # so that they are taken for a user's
    mode = detect_fake_mode([n.meta.get("val") for n in traced.graph.nodes])
    assert mode is not None
    with mode:  # as Inductor has it
        post_grad.decompose_triton_kernel_wrapper_functional(traced.graph)
    write_in_place(module.graph)
    module.graph.lint()
    assert len(launches(module, triton_kernel_wrapper_mutation)) == count
    assert shown(module) == shown(traced)


def test_inductor_s_pass_traces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lowered()

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(pattern_matcher.Match, "replace_by_example", refused)
    post_grad.decompose_triton_kernel_wrapper_functional(module.graph)
    assert launches(module, triton_kernel_wrapper_mutation)


@pytest.mark.parametrize("what", ["a user's", "cloned", "read", "without eager values"])
def test_what_torch_has_to_see_is_left(what: str) -> None:
    module = lowered()
    node = launches(module, triton_kernel_wrapper_functional)[0]
    if what == "a user's":
        del node.meta[LAUNCH]
    elif what == "without eager values":  # as a pass of the user's may leave it
        del node.meta["eager_input_vals"]
    elif what == "cloned":
        node.kwargs = {**node.kwargs, "tensors_to_clone": ["y0"]}
    else:
        with module.graph.inserting_after(node):
            module.graph.call_function(torch.sum, (node,))
    write_in_place(module.graph)
    assert launches(module, triton_kernel_wrapper_functional) == [node]


def test_sizes_that_change_are_kept() -> None:
    """Sizes are arguments of a launch."""
    module = lowered(any_rows=True)
    before = [dict(node.kwargs) for node in launches(module, triton_kernel_wrapper_functional)]
    assert any(name.startswith("n") for kwargs in before for name in kwargs["kwargs"])
    write_in_place(module.graph)
    after = [dict(node.kwargs) for node in launches(module, triton_kernel_wrapper_mutation)]
    assert before == [{**kwargs, "tensors_to_clone": []} for kwargs in after]
