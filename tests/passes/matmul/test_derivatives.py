"""Derivatives that a model takes of itself: what they are made of keeps its precision, whichever way they are taken.

Expected: a compiled step is as near to eager in FP32 as BF16 eager is. FP8 would be 24 dB farther off.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from saving import step
from torch import Tensor, func, nn
from torch.autograd import forward_ad

import fp8compile
from fp8compile.passes.core.derivatives import is_differentiated, mark
from fp8compile.plan.reasons import Reason

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
ROWS, INTO, WIDTH, OUT = 48, 32, 64, 16
OPTIONS = {"select": "all", "save": "fp8", "save_min_bytes": 0, "executor": "eager", "strict": True}
Net = Callable[[Tensor], Tensor]


def energy(net: Net) -> Net:
    return lambda x: net(x).square().sum()


def along(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def dual(net: Net, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, along(x)))).tangent


def second(net: Net, x: Tensor) -> Tensor:
    return func.jvp(lambda x: func.jvp(net, (x,), (along(x),))[1], (x,), (along(x),))[1]


def inner_step(net: nn.Module, x: Tensor) -> Tensor:
    """A step of descent within the model, and what the net says then."""
    weights = dict(net.named_parameters())
    slopes = func.grad(lambda w: func.functional_call(net, w, (x,)).square().mean())(weights)
    return func.functional_call(net, {name: w - 0.1 * slopes[name] for name, w in weights.items()}, (x,))


TAKEN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "jvp": lambda net, x: func.jvp(net, (x,), (along(x),))[1],
    "jvp of jvp": second,
    "dual level": dual,
    "grad": lambda net, x: func.grad(energy(net))(x),
    "vjp": lambda net, x: func.vjp(net, x)[1](along(x)[:, :OUT])[0],
    "hvp, forward over reverse": lambda net, x: func.jvp(func.grad(energy(net)), (x,), (along(x),))[1],
    "hvp, reverse over reverse": lambda net, x: func.grad(lambda x: func.grad(energy(net))(x).sum())(x),
    "grad of vmap": lambda net, x: func.grad(energy(func.vmap(net)))(x),
    "jacrev": lambda net, x: func.vmap(func.jacrev(net))(x),
}


class Net2(nn.Sequential):
    """Smooth layers, whose second derivatives are not zero."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(INTO, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUT))


class Taken(nn.Module):
    """A derivative of a net behind a layer, which is not differentiated within."""

    def __init__(self, take: Callable[[Any, Tensor], Tensor], says_too: bool = False) -> None:
        super().__init__()
        self.before, self.net, self.take, self.says_too = nn.Linear(INTO, INTO), Net2(), take, says_too

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.before(x))
        taken = self.take(self.net, x)
        return torch.cat([taken.flatten(), self.net(x).flatten()]) if self.says_too else taken


class Step:
    """A step in FP8, and the same in eager BF16 and FP32."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        torch.manual_seed(0)
        x = torch.randn(ROWS, INTO).bfloat16()
        model = model.bfloat16()
        exact = copy.deepcopy(model).float()
        self.exact, self.bf16 = step(exact, exact, [x.float()]), step(model, model, [x])
        run = torch.compile(model, backend="fp8", options={**OPTIONS, **options})
        self.got = step(model, run, [x])
        (self.plan,) = fp8compile.last_compile().plans  # the derivative is in the graph of the rest


def assert_without_fp8(plan: fp8compile.Plan) -> None:
    """Nothing of a derivative of `net` is in FP8, neither matmuls nor what they save."""
    within = [m for m in plan.matmuls if m.role != "other" and m.path != "before"]
    assert within
    assert {(m.code, m.decision) for m in within} == {(Reason.DIFFERENTIATED, "bf16")}
    assert not [s for s in plan.saved if s.form.startswith("e4m3") and s.path.startswith("net")]


# Every transform is in one of them.
EXACT = ["dual level", "jvp of jvp", "hvp, reverse over reverse", "grad of vmap", "jacrev"]


@pytest.mark.parametrize("name", [name for name in TAKEN if name not in EXACT])
def test_a_derivative_is_taken_without_fp8(name: str) -> None:
    found = Step(Taken(TAKEN[name]))
    assert {m.path for m in found.plan.converted} == {"before"}
    assert_without_fp8(found.plan)


@pytest.mark.parametrize("taken", EXACT)
def test_a_derivative_is_as_exact_as_in_bf16(taken: str) -> None:
    """With the layer in front of it left alone too, but for what that saves."""
    found = Step(Taken(TAKEN[taken]), skip=["before"])
    assert not found.plan.converted
    assert_without_fp8(found.plan)
    for name, exact in found.exact.items():
        if name.startswith(("output", "net")):
            assert sqnr(exact, found.got[name]) > sqnr(exact, found.bf16[name]) - 6, name


def test_what_a_net_says_besides_its_derivative_is_of_the_same_weights() -> None:
    """A residual has both: a value of rounded weights would not be the one whose derivative is taken."""
    found = Step(Taken(TAKEN["jvp"], says_too=True))
    assert {m.path for m in found.plan.converted} == {"before"}


def test_a_step_of_descent_within_a_model() -> None:
    assert {m.path for m in Step(Taken(inner_step)).plan.converted} == {"before"}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_derivative_by_autograd_within_a_model(by_name: bool) -> None:
    known = hasattr(torch._dynamo.config, "trace_autograd_ops")
    traced: Any = torch._dynamo.config.patch(trace_autograd_ops=True) if known else contextlib.nullcontext()

    def by_autograd(net: Net, x: Tensor) -> Tensor:
        said = net(x).square().sum()
        if by_name:
            return torch.autograd.grad(inputs=x, outputs=said, create_graph=True)[0]
        return torch.autograd.grad(said, x, create_graph=True)[0]

    with traced:
        found = Step(Taken(by_autograd))
    assert {m.path for m in found.plan.converted} == {"before"}


@pytest.mark.parametrize("apply", [lambda net, x: func.vmap(net)(x), lambda net, x: net(x)], ids=["vmap", "plain"])
def test_what_is_not_differentiated_becomes_fp8(apply: Any) -> None:
    found = Step(Taken(apply))
    assert {m.path for m in found.plan.converted} == {"before", "net.0", "net.2"}


def test_layers_after_a_derivative_become_fp8() -> None:
    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = Taken(TAKEN["jvp"]), nn.Linear(OUT, OUT)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.inner(x))

    found = Step(After())
    assert {m.path for m in found.plan.converted} == {"inner.before", "after"}


def test_a_derivative_within_a_checkpoint() -> None:
    def checkpointed(net: Any, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(TAKEN["jvp"], net, x, use_reentrant=False)

    found = Step(Taken(checkpointed))
    assert {m.path for m in found.plan.converted} == {"before"}


def test_a_plan_may_ask_for_fp8_all_the_same() -> None:
    model = Taken(TAKEN["jvp"])
    asked = {"matmuls": [{"path": "net.2", "role": "output", "decision": "fp8"}]}
    found = Step(model, plan=fp8compile.Plan.from_json(json.dumps(asked)))
    assert "net.2" in {m.path for m in found.plan.converted}


def test_only_what_is_between_the_ends_of_a_derivative_is_marked() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")

    def called(name: str) -> torch.fx.Node:
        def target(x: Any) -> Any:
            return x

        target.__name__ = name
        return graph.call_function(target, (x,))

    names = ["a", "_jvp_increment_nesting", "b", "_grad_increment_nesting", "c", "_grad_decrement_nesting", "d",
             "_jvp_decrement_nesting", "e"]  # fmt: skip
    nodes = {name: called(name) for name in names}
    graph.output(x)
    mark(torch.fx.GraphModule({}, graph))
    assert [name for name, node in nodes.items() if len(name) == 1 and is_differentiated(node)] == ["b", "c", "d"]
