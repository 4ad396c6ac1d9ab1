"""Graph passes that a user gave to torch run as well, in front of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp8compile
from fp8compile import ops
from fp8compile.errors import Fp8Warning
from fp8compile.passes.core.compilation import aten
from fp8compile.torch_hooks import graph_passes

JOINT = "joint_custom_pre_pass"


class Swap(CustomGraphPass):
    """Another operator in place of ReLU; notes what each graph looked like."""

    def __init__(self, instead: Any = aten.relu.default, name: str | None = "swap"):
        self.instead, self.name, self.seen = instead, name, []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append({node.target for node in graph.nodes})
        for node in graph.find_nodes(op="call_function", target=aten.relu.default):
            node.target = self.instead

    def uuid(self) -> str | None:
        return self.name


def _model(between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), between, nn.Linear(64, 64)).bfloat16().requires_grad_(False)


def _run(model: nn.Module, **options: Any) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(32, 64).bfloat16()
    return torch.compile(model, backend="fp8", options={"select": "all", "strict": True, **options})(x)


@pytest.mark.parametrize("given", ["to every compilation", "as a setting", "as a function"])
def test_a_rewrite_of_the_joint_graph_comes_first(given: str) -> None:
    swap = Swap(aten.sigmoid.default)
    settings = {JOINT: swap.__call__ if given == "as a function" else swap}
    if given == "as a setting":
        actual = _run(_model(nn.ReLU()), executor="eager", inductor=settings)
    else:
        with inductor_config.patch(settings):
            actual = _run(_model(nn.ReLU()), executor="eager")
    assert len(fp8compile.last_compile().converted) == 2
    assert torch.equal(actual, _run(_model(nn.Sigmoid()), executor="eager"))
    (seen,) = swap.seen
    assert not seen & set(ops.MARKERS)


def test_passes_of_inductor_run_beside_ours() -> None:
    hooks = {hook: Swap() for hook in ("post_grad_custom_pre_pass", "post_grad_custom_post_pass")}
    with inductor_config.patch({**hooks, "force_disable_caches": True}):
        actual = _run(_model(nn.ReLU()))
    assert torch.equal(actual, _run(_model(nn.ReLU())))
    for swap in hooks.values():
        (seen,) = swap.seen
        assert torch.ops.fp8.quantize.default in seen, "theirs sees the casts, and not yet what becomes of them"


def test_what_was_cached_with_other_passes_is_not_taken() -> None:
    def key(theirs: Any) -> list[Any]:
        """What torch's cache knows a hook's passes by."""
        passes = graph_passes.shared({JOINT: theirs}, {JOINT: Swap(name="ours")})[JOINT]
        every = passes if isinstance(passes, tuple) else (passes,)
        return [p.uuid() if isinstance(p, CustomGraphPass) else None for p in every]

    a, b = Swap(name="a"), Swap(name="b")
    assert key(a) == key(a) != key(b) != key(None)
    assert None in key(a.__call__), "a plain function has no name in a cache"
    assert graph_passes.theirs_uuid({JOINT: a}, JOINT) != graph_passes.theirs_uuid({JOINT: b}, JOINT)
    assert graph_passes.theirs_uuid({JOINT: None}, JOINT) == graph_passes.theirs_uuid({}, JOINT) == ""


def test_another_cut_is_refused_aloud() -> None:
    model = _model(nn.ReLU()).requires_grad_(True)
    with (
        inductor_config.patch({graph_passes.CUT: lambda *args, **kwargs: pytest.fail("not to be called")}),
        pytest.warns(Fp8Warning, match="custom_partitioner_fn is not used.*'activation_budget'"),
    ):
        _run(model, executor="eager").sum().backward()
    assert model[0].weight.grad is not None
