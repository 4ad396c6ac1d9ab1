"""Steps that Dynamo takes in pieces: a break before, inside or after the loop over parameters, as people write them.

What runs between two graphs runs on 8-bit states operator by operator. Nothing of that may be compiled, no update may
be lost, and there are no more graphs than torch.compile makes of the same step on plain states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from optimizers import EAGER, compiled, formats, make_parameters, relative, set_gradients
from torch import Tensor, nn

import fp8compile
from fp8compile.optimizer.state_conversion import MADE_ANEW
from fp8compile.optimizer.states import FP8State
from fp8compile.torch_hooks.calls.compilations import translator

EXACT = "float32"  # states kept in FP32: what is left are the passes
LARGE, MIXED = ((64, 65), (64, 96)), ((64, 65), (7,))  # a parameter takes a second and more, so there are two
STEPS = 4


class Moments(torch.optim.Optimizer):
    """Adam without its corrections, over parameters one by one; what differs are `begin`, `update` and `end`."""

    def __init__(self, params: Any, lr: float = 0.01, foreach: bool | None = None) -> None:
        super().__init__(params, {"lr": lr, "foreach": foreach})

    def begin(self) -> None:
        """What comes before the loop."""

    def end(self) -> None:
        """What comes after it."""

    def update(self, p: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        """Of one parameter."""
        m.lerp_(p.grad, 0.1)
        v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
        p.addcdiv_(m, v.sqrt().add_(1e-3), value=-lr)

    def states_of(self, p: Tensor) -> dict[str, Any]:
        state = self.state[p]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.states_of(p)
                    self.update(p, state["m"], state["v"], group["lr"])
        self.end()
        return loss


class Before(Moments):
    def begin(self) -> None:
        torch._dynamo.graph_break()


class After(Moments):
    def end(self) -> None:
        torch._dynamo.graph_break()
        self.largest = max(float(state["m"].abs().max()) for state in self.state.values())


class Item(Moments):
    """Branches on data in the middle of an update, in a function of its own (as MARS does)."""

    def update(self, p: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        assert p.grad is not None
        gradient = p.grad + 0.5 * m
        norm = torch.norm(gradient)
        if norm > 1.0:
            gradient.div_(norm)
        m.lerp_(gradient, 0.1)
        v.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        p.addcdiv_(m, v.sqrt().add_(1e-3), value=-lr)


class Half(Moments):
    """Breaks when one state is written and the other is not; the caller writes to it once more."""

    def update(self, p: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        self.first(p, m)
        v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
        p.addcdiv_(m, v.sqrt().add_(1e-3), value=-lr)
        m.mul_(0.99)

    def first(self, p: Tensor, m: Tensor) -> None:
        m.lerp_(p.grad, 0.1)
        torch._dynamo.graph_break()
        m.add_(p.grad, alpha=0.01)


class Prints(Moments):
    def update(self, p: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        print("an update of", tuple(p.shape))
        super().update(p, m, v, lr)


class Inline(Moments):
    """All of it in one loop that breaks: nothing but functions of torch is called."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].lerp_(p.grad, 0.1)
                if state["m"].norm().item() > 1e-9:
                    state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(1e-3), value=-group["lr"])


class Reads(Moments):
    """Looks at its states between two graphs, in the ways in which people do."""

    def update(self, p: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        super().update(p, m, v, lr)
        self.look(m, v)

    @torch._dynamo.disable(recursive=False)  # what it calls would be compiled
    def look(self, m: Tensor, v: Tensor) -> None:
        self.seen = [repr(m), float(m.norm()), bool((v >= 0).all()), copy.deepcopy(v), m.clone(), m.abs()]
        if isinstance(m, FP8State):
            self.seen += [m.dequantize(), FP8State.of(m.dequantize(), format=m.format)]


class Replaces(Moments):
    """Makes its momentum anew at each step, and keeps numbers and lists among its states."""

    def update(self, p: Tensor, m: Tensor, v: Tensor, lr: float) -> None:
        state = self.state[p]
        state["flag"] = 1
        state["sizes"] = [*p.shape]
        state["total"] = state.get("total", torch.zeros(())) + 1
        assert p.grad is not None
        state["m"] = m * 0.9 + p.grad * 0.1
        torch._dynamo.graph_break()
        v.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
        p.addcdiv_(state["m"], v.sqrt().add_(1e-3), value=-lr)


class Foreach(Moments):
    """All parameters at once, in lists that the step has while a function breaks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            states = [self.states_of(p) for p in group["params"]]
            firsts, seconds = [s["m"] for s in states], [s["v"] for s in states]
            self.update_all(group["params"], firsts, seconds, group["lr"])

    def update_all(self, params: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], lr: float) -> None:
        gradients = [p.grad for p in params]
        torch._foreach_lerp_(firsts, gradients, 0.1)
        if torch._foreach_norm(gradients)[0].item() > 0:
            torch._foreach_mul_(seconds, 0.9)
            torch._foreach_addcmul_(seconds, gradients, gradients, 0.1)
        roots = torch._foreach_sqrt(seconds)
        torch._foreach_add_(roots, 1e-3)
        torch._foreach_addcdiv_(params, firsts, roots, -lr)


class OtherPath(Moments):
    """Takes `foreach` for whether to break, as some do that norm gradients one by one without it."""

    def begin(self) -> None:
        if self.param_groups[0]["foreach"] is False:
            torch._dynamo.graph_break()


class Derived(torch.optim.Adam):
    """An optimizer of torch's with a step of its own: it makes its states by `_init_group`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            self._init_group(group, *lists)
            for p, gradient, m, v in zip(*lists[:4], strict=True):
                if gradient.norm().item() > 0:
                    Moments.update(self, p, m, v, group["lr"])


ALL = [Before, After, Item, Half, Prints, Inline, Reads, Replaces, Foreach, OtherPath, Derived]


@pytest.fixture(autouse=True)
def limits_are_errors() -> Iterator[None]:
    """Beyond those that plain states would meet as well: each step has new gradients, each parameter its own code."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=16):
        yield


def train(opt: torch.optim.Optimizer, parameters: list[nn.Parameter], step: Callable[[], Any]) -> None:
    for i in range(STEPS):
        last = [p.grad for p in parameters]
        set_gradients(parameters, i)
        for p, gradient in zip(parameters, last, strict=True):
            if gradient is not None:  # a new one would be compiled for, where a graph guards the keys of `state`
                p.grad = gradient.copy_(p.grad)
        step()


def plainly_compiled(make: Callable[..., torch.optim.Optimizer], shapes: tuple[tuple[int, ...], ...]) -> list[str]:
    """Names of the functions of which torch.compile makes graphs on plain states."""
    seen: list[str] = []

    def backend(gm: Any, inputs: Any) -> Any:
        tx = translator()
        assert tx is not None
        seen.append((tx.output.root_tx or tx).f_code.co_name)
        return gm.forward

    parameters = make_parameters(shapes)
    opt = make(parameters, lr=0.01)
    train(opt, parameters, torch.compile(opt.step, backend=backend))
    return seen


def both(
    make: Callable[..., torch.optim.Optimizer], states: object, shapes: tuple[tuple[int, ...], ...]
) -> tuple[Any, Any, list[int]]:
    """An optimizer whose step is compiled, one that runs eagerly on plain states, and the graphs of the first."""
    mine, theirs = make_parameters(shapes), make_parameters(shapes)
    opt, reference = make(mine, lr=0.01), make(theirs, lr=0.01)
    step, graphs = compiled(opt, states=states)
    train(opt, mine, step)
    train(reference, theirs, reference.step)
    return opt, reference, graphs


def parameters_of(opt: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in opt.param_groups for p in group["params"]]


def assert_no_more_graphs(opt: Any, graphs: list[int], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Than plain states take, but for those that are found to be made anew."""
    large = sum(p.numel() > 4096 for p in parameters_of(opt))
    torch._dynamo.reset()
    plain = len(plainly_compiled(type(opt), shapes))
    assert len(graphs) <= plain + (MADE_ANEW - 1) * large * (type(opt) is Replaces)


@pytest.mark.parametrize("make", ALL)
def test_no_update_is_lost(make: type[Moments]) -> None:
    """With states in FP32 what is left are the exchange of states and the passes."""
    opt, reference, graphs = both(make, EXACT, LARGE)
    for p, q in zip(parameters_of(opt), parameters_of(reference), strict=True):
        assert relative(p, q) < 2e-6
        for name, x in reference.state[q].items():
            if isinstance(x, Tensor) and x.dim():
                assert relative(opt.state[p][name], x) < 2e-6, name
            elif name != "step":
                assert opt.state[p][name] == x, name
        if make is not Inline:  # of which Dynamo makes no graph at all
            assert formats(opt, p)
    if make not in COUNTED_BELOW:
        assert_no_more_graphs(opt, graphs, LARGE)


COUNTED_BELOW = [Half, Reads, Replaces, Foreach]


@pytest.mark.parametrize("make", COUNTED_BELOW)
def test_eight_bit_states_take_no_more_graphs_than_plain_ones(make: type[Moments]) -> None:
    opt, reference, graphs = both(make, None, MIXED)
    for p, q, start in zip(parameters_of(opt), parameters_of(reference), make_parameters(MIXED), strict=True):
        if make is not Inline:
            assert formats(opt, p) if p.numel() > 4096 else not formats(opt, p)
        assert relative(p - start, q - start) < 0.1
    assert_no_more_graphs(opt, graphs, MIXED)


def assert_alike(opt: torch.optim.Optimizer, reference: torch.optim.Optimizer) -> None:
    """Parameters are near, and states of large ones are 8-bit ones."""
    for p, q in zip(parameters_of(opt), parameters_of(reference), strict=True):
        assert relative(p, q) < 2e-6
        assert bool(formats(opt, p)) == (p.numel() > 4096)


@pytest.mark.parametrize("make", [Item])
def test_two_groups_with_a_closure(make: type[Moments]) -> None:
    pair = []
    for compiles in (True, False):
        parameters = make_parameters(MIXED)
        groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]
        opt = make(groups, lr=0.01)
        step = compiled(opt, states=EXACT)[0] if compiles else opt.step

        def loss(parameters: list[nn.Parameter] = parameters) -> Tensor:
            for p in parameters:
                p.grad = None
            value = torch.stack([(p * p).sum() for p in parameters]).sum()
            value.backward()
            return value

        pair.append((opt, [float(step(loss)) for _ in range(STEPS)]))
    (opt, mine), (reference, theirs) = pair
    assert mine == pytest.approx(theirs, rel=1e-6)
    assert_alike(opt, reference)


@pytest.mark.parametrize("make", [Half, Before])
def test_hooks_around_the_step(make: type[Moments]) -> None:
    """One of them reads a state: that of the last step before it, and of this step behind it."""
    pair = []
    for compiles in (True, False):
        parameters, norms = make_parameters(MIXED), []
        opt = make(parameters, lr=0.01)

        def look(opt: torch.optim.Optimizer, *_: Any, norms: list[float] = norms) -> None:
            norms += [float(state["m"].norm()) for state in opt.state.values()]

        opt.register_step_pre_hook(look)
        opt.register_step_post_hook(look)
        train(opt, parameters, compiled(opt, states=EXACT)[0] if compiles else opt.step)
        pair.append((opt, norms))
    (opt, mine), (reference, theirs) = pair
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert_alike(opt, reference)


@pytest.mark.parametrize("make", [Half, Foreach, Derived])
def test_a_compiled_training_step_that_breaks(make: type[Moments]) -> None:
    """Its gradients and its optimizer's step are taken in pieces of one function."""
    pair = []
    for compiles in (True, False):
        parameters = make_parameters(MIXED)
        opt = make(parameters, lr=0.01)

        def train_step(scale: float, parameters: list[nn.Parameter] = parameters, opt: Any = opt) -> None:
            for p in parameters:
                p.grad = (p.detach() * scale).cos()
            torch._dynamo.graph_break()
            opt.step()
            torch._dynamo.graph_break()

        options = {**EAGER, "states": EXACT}
        step = torch.compile(train_step, backend="fp8", options=options) if compiles else train_step
        for i in range(STEPS):
            step(1.0 + i / 8)
        pair.append(opt)
    assert_alike(*pair)


def test_a_state_that_others_have_a_view_of_stays_plain() -> None:
    """What they read would be what it was."""
    (p,) = make_parameters([(96, 64)])
    opt = Moments([p])
    set_gradients([p], 0)
    opt.step()
    row = opt.state[p]["m"][0]
    step, _ = compiled(opt)
    step()
    assert formats(opt, p) == {"v": "log"}
    assert torch.equal(row, opt.state[p]["m"][0])
    reasons = {row["name"]: row["reason"] for row in fp8compile.last_compile().rows("states")}
    assert "a view outside of the states" in reasons["m"]


def test_a_reference_to_a_state_is_one_to_the_eight_bit_state() -> None:
    (p,) = make_parameters([(96, 64)])
    opt = Moments([p])
    set_gradients([p], 0)
    opt.step()
    mine = opt.state[p]["m"]
    compiled(opt)[0]()
    assert mine is opt.state[p]["m"]
    assert isinstance(mine, FP8State)
    assert float(mine.norm()) == float(opt.state[p]["m"].norm())
