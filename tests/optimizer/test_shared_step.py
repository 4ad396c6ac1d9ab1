"""One rule for all parameters of a kind: bit for bit what a graph of all of them does, and left where it is not so."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from optimizers import EAGER, OPTIMIZERS, Lion, set_gradients
from torch import Tensor, nn
from torch._inductor.fx_passes import joint_graph

import fp8compile
from fp8compile.backend import fp8
from fp8compile.optimizer.shared_step import alike, shared_step, template, together, tracing
from fp8compile.optimizer.state_parts import INNER
from fp8compile.options import Options

SHAPES = ((64, 65), (7,), (30, 4, 50))  # two in 8 bits, of which one ends inside a group; and a small one
LEFT_OUT = (
    "lion", "plain_sgd", "sgd", "nesterov",  # without states in 8 bits, or not before the second step
    "adam", "adamw", "asgd",  # in other tests below, with rates that change, with settings, and in groups
)  # fmt: skip
TORCHS = [name for name in OPTIMIZERS if name not in LEFT_OUT]
MIXED = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def forget() -> None:
    torch.compiler.reset()


def make_parameters(dtypes: Sequence[torch.dtype] = (torch.float32,)) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if len(dtypes) == 1:
        return [nn.Parameter(x.to(dtypes[0])) for x in values]
    first, second = dtypes  # two of a kind in the first, a large and a small one in the second
    return [nn.Parameter(x.to(first)) for x in values[::2]] + [nn.Parameter(x.to(second)) for x in values[:2]]


def compiled_as_a_whole(opt: torch.optim.Optimizer, **options: Any) -> Callable[..., Any]:
    """The step in one graph of all parameters, as Dynamo makes it: a backend of the user's own has no contexts."""
    return torch.compile(opt.step, backend=lambda gm, inputs: fp8(gm, inputs, options={**EAGER, **options}))


def compiled(opt: torch.optim.Optimizer, **options: Any) -> Callable[..., Any]:
    return torch.compile(opt.step, backend="fp8", options={**EAGER, **options})


def tensors(opt: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Parameters and states, 8-bit ones in their parts, with names."""
    found: list[tuple[str, Tensor]] = []
    for i, p in enumerate(p for group in opt.param_groups for p in group["params"]):
        found.append((f"{i}", p.detach()))
        for name, x in opt.state.get(p, {}).items():
            parts = {part: getattr(x, part) for part in INNER} if isinstance(x, fp8compile.FP8State) else {"": x}
            found += [(f"{i} {name} {part}", y) for part, y in parts.items() if isinstance(y, Tensor)]
    return found


def assert_same(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    for (name, x), (other, y) in zip(tensors(mine), tensors(theirs), strict=True):
        assert name == other
        assert x.dtype == y.dtype
        assert torch.equal(x.float().nan_to_num(7), y.float().nan_to_num(7)), name


def assert_shared(opt: torch.optim.Optimizer) -> None:
    known = shared_step._shared[opt]
    assert not known.refusal
    assert known.groups
    assert not known.is_torchs


def pair(
    make: Callable[[list[Any]], torch.optim.Optimizer], dtypes: Sequence[torch.dtype] = (torch.float32,), **options: Any
) -> tuple[torch.optim.Optimizer, Callable[..., Any], torch.optim.Optimizer, Callable[..., Any]]:
    mine, theirs = make(make_parameters(dtypes)), make(make_parameters(dtypes))
    return mine, compiled(mine, **options), theirs, compiled_as_a_whole(theirs, **options)


def run(
    mine: torch.optim.Optimizer,
    step: Callable[..., Any],
    theirs: torch.optim.Optimizer,
    other: Callable[..., Any],
    steps: int = 4,
    change: Callable[[torch.optim.Optimizer, int], Any] = lambda opt, i: None,
    only: Callable[[int], Sequence[int] | None] = lambda i: None,
) -> None:
    for i in range(steps):
        for opt, call in ((mine, step), (theirs, other)):
            set_gradients([p for group in opt.param_groups for p in group["params"]], i, only(i))
            change(opt, i)
            call()
        assert_same(mine, theirs)


def rates(opt: torch.optim.Optimizer, i: int) -> None:
    for n, group in enumerate(opt.param_groups):
        group["lr"] = 0.01 / (i + 1 + n)
        if group.get("weight_decay"):
            group["weight_decay"] *= 0.9


def two_groups(make: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[list[Any]], torch.optim.Optimizer]:
    def made(parameters: list[Any]) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.003, "weight_decay": 0.0}]
        return make(groups, lr=0.01, **arguments)

    return made


def of_large_ones(make: Callable[..., Any], arguments: dict[str, Any]) -> Callable[[list[Any]], torch.optim.Optimizer]:
    """Of two parameters with one rule, which is traced once."""
    return lambda parameters: make(parameters[::2], **arguments)


@pytest.mark.parametrize(("name", "dtype"), [*zip(TORCHS, itertools.cycle(MIXED), strict=False)], ids=str)
def test_as_one_graph_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    """Every rule with parameters of one dtype: of two dtypes, and of groups, are tests below."""
    make, arguments = OPTIMIZERS[name]
    run(*(made := pair(of_large_ones(make, {"lr": 0.01, **arguments}), [dtype])), steps=3, change=rates)
    assert_shared(made[0])


def test_no_patterns_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Inductor's joint passes, of attention, take long to be made in the first graph of a process."""
    made: list[Any] = []
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *args: made.append(args))
    opt = torch.optim.AdamW(make_parameters()[:1])
    step = torch.compile(opt.step, backend="fp8", options={"strict": True})
    set_gradients(opt.param_groups[0]["params"], 0)
    step()
    assert_shared(opt)
    assert not made
    torch.compile(lambda x: x + 1, backend="fp8")(torch.ones(3))
    assert made  # Inductor still asks by this name


def test_groups_of_two_dtypes() -> None:
    """FP32 parameters in one group, BF16 ones in the other."""
    run(*(made := pair(two_groups(*OPTIMIZERS["asgd"]), MIXED)), steps=3, change=rates)
    assert_shared(made[0])


def test_no_state_in_8_bits() -> None:
    """ASGD's of FP32 parameters are one of weights, which stays, and numbers."""
    run(*(made := pair(two_groups(*OPTIMIZERS["asgd"]))), steps=2, change=rates)
    assert_shared(made[0])
    assert not any(isinstance(x, fp8compile.FP8State) for state in made[0].state.values() for x in state.values())


def test_no_states() -> None:
    run(*(made := pair(two_groups(torch.optim.SGD, {}))), steps=2, change=rates)
    assert_shared(made[0])


def _step_in_backward(opt: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Step an optimizer of one parameter as soon as its gradient is there, and free the gradient."""

    def hook(parameter: Tensor) -> None:
        step()
        opt.zero_grad()

    opt.param_groups[0]["params"][0].register_post_accumulate_grad_hook(hook)


def test_steps_of_one_parameter_each_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """More optimizers than Dynamo compiles one function for: most have no state in 8 bits."""
    traced: list[Any] = []
    trace = tracing.trace
    monkeypatch.setattr(shared_step, "trace", lambda *given: traced.append(given) or trace(*given))
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    in_backward, behind = ([torch.optim.AdamW([p], lr=0.01) for p in model.parameters()] for model in models)
    steps = [[compiled(opt) for opt in opts] for opts in (in_backward, behind)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opt, step in zip(in_backward, steps[0], strict=True):
            _step_in_backward(opt, step)
        for i in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(i))
            for model in models:
                model(x).square().sum().backward()
            assert all(p.grad is None for p in models[0].parameters())
            for opt, step in zip(behind, steps[1], strict=True):
                step()
                opt.zero_grad()
    for mine, theirs in zip(in_backward, behind, strict=True):
        assert_same(mine, theirs)
        assert_shared(mine)
    assert len(traced) == 2  # weights and biases


@pytest.mark.parametrize("name", ["sgd", "nesterov"])
def test_states_made_while_stepping(name: str) -> None:
    """The first step is torch's own, uncompiled; then momentum is there, and becomes 8-bit states."""
    make, arguments = OPTIMIZERS[name]
    opt, reference = (make(make_parameters(), lr=0.01, **arguments) for _ in range(2))
    step = compiled(opt)
    for own, call in ((opt, step), (reference, reference.step)):
        set_gradients(own.param_groups[0]["params"], 0)
        call()
    assert_same(opt, reference)  # torch's own, to the bit
    set_gradients(opt.param_groups[0]["params"], 1)
    step()
    assert_shared(opt)
    assert any(isinstance(x, fp8compile.FP8State) for state in opt.state.values() for x in state.values())


RECIPES = [
    {"first": "e5m2/stochastic", "second": "float32", "parameters": "split"},
    {"first": "e4m3", "second": "e4m3", "parameters": "stochastic", "smallest": 0},
]


@pytest.mark.parametrize("states", RECIPES, ids=str)
def test_recipes(states: Any) -> None:
    make = lambda parameters: torch.optim.AdamW(parameters, amsgrad=True)  # noqa: E731
    run(*(made := pair(make, MIXED, states=states)), steps=3)
    assert_shared(made[0])


@pytest.mark.parametrize("arguments", [{"capturable": True, "maximize": True}, {"foreach": True}, {"lr": "tensor"}])
def test_settings(arguments: dict[str, Any]) -> None:
    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        given = {"foreach": True, "capturable": True, "lr": torch.tensor(0.01)} if "lr" in arguments else arguments
        return torch.optim.AdamW(parameters[::2], **given)

    def change(opt: torch.optim.Optimizer, i: int) -> None:
        if "lr" in arguments:
            opt.param_groups[0]["lr"].fill_(0.01 / (i + 1))

    run(*(made := pair(make)), steps=3, change=change)
    assert_shared(made[0])


def test_parameters_without_gradients() -> None:
    """Experts that no token has reached: in some steps, in the first ones, always."""
    some = [(0, 1), (0, 2), (1, 2), (0, 1)]
    run(*(made := pair(torch.optim.AdamW)), steps=4, only=lambda i: some[i])
    assert_shared(made[0])


def test_kinds_of_a_group_are_stepped_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones in FP32, a large and a small one in BF16: their numbers by one call, those of each group."""
    calls: list[int] = []
    step = together.Together.step
    monkeypatch.setattr(together.Together, "step", lambda x, group: calls.append(len(x.alike)) or step(x, group))
    run(*(made := pair(torch.optim.AdamW, MIXED)), steps=3, change=rates)
    assert calls == [3] * 3
    (group,) = shared_step._shared[made[0]].groups.values()
    (x,) = group.together
    assert [x.places[i] for i in range(4)] == [0, 1, 2, 3]
    calls.clear()
    run(*pair(two_groups(torch.optim.AdamW, {}), MIXED), steps=1)
    assert calls == [1, 2]  # one group decays its parameters, the other one does not


def test_each_has_its_own_numbers() -> None:
    """Kinds whose parameters have been updated in fewer steps: their counts differ, in rows of one matrix."""
    some = [None, (0, 2), (0, 2), None, (1, 2), None]
    run(*(made := pair(torch.optim.AdamW)), steps=6, only=lambda i: some[i])
    (group,) = shared_step._shared[made[0]].groups.values()
    assert [len(x.alike) for x in group.together] == [2]


def test_counts_of_two_dtypes_are_not_put_together() -> None:
    """As a checkpoint of somebody else's may have them."""
    made = pair(torch.optim.AdamW, MIXED)
    run(*made, steps=1)
    for opt in made[::2]:
        state = opt.state[opt.param_groups[0]["params"][3]]  # type: ignore[attr-defined]
        state["step"] = state["step"].double()
    run(*made, steps=3)
    (group,) = shared_step._shared[made[0]].groups.values()
    assert [len(x.alike) for x in group.together] == [2, 1]


def test_numbers_that_change_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = tracing.trace
    monkeypatch.setattr(shared_step, "trace", lambda *given: traced.append(given) or trace(*given))
    graphs: list[Any] = []
    compile_fx = tracing.compile_fx
    monkeypatch.setattr(tracing, "compile_fx", lambda *given, **more: graphs.append(1) or compile_fx(*given, **more))
    made = pair(two_groups(torch.optim.Adam, {"weight_decay": 0.1}))
    run(*made, steps=2)
    kinds = len(traced)
    assert kinds == 3  # large ones with decay and without, and a small one
    assert len(graphs) == kinds  # a decay of 0 behind another one is no number that turns out to be unread
    run(*made, steps=3, change=rates)
    other, step, *_ = pair(two_groups(torch.optim.Adam, {"weight_decay": 0.3}))
    set_gradients([p for group in other.param_groups for p in group["params"]], 0)
    step()
    assert len(traced) == kinds  # another optimizer has the same kinds


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_rate_becomes_a_tensor_and_a_number_again(executor: str) -> None:
    """Code that reads a number in 64 bits must not be given a tensor in 32."""

    def change(opt: torch.optim.Optimizer, i: int) -> None:
        opt.param_groups[0]["lr"] = torch.tensor(0.02 / i) if i in (2, 3) else 0.01 * (i + 1)

    opt, eager = (torch.optim.AdamW([nn.Parameter(torch.ones(16, 16))]) for _ in range(2))
    step = torch.compile(opt.step, backend="fp8", options={"executor": executor, "states": {"smallest": 0}})
    for i in range(6):
        for x in (opt, eager):
            change(x, i)
            x.param_groups[0]["params"][0].grad = torch.ones(16, 16)  # states in 8 bits are exact of such gradients
        step()
        eager.step()
        torch.testing.assert_close(*(x.param_groups[0]["params"][0] for x in (opt, eager)), rtol=1e-6, atol=1e-6)
    assert not shared_step._shared[opt].refusal


def test_a_new_tensor_as_rate_or_other_memory_in_every_step_leaves_no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    bind = shared_step.SharedStep._bind
    monkeypatch.setattr(shared_step.SharedStep, "_bind", lambda *given: bound.append(1) or bind(*given))
    opt = torch.optim.AdamW([nn.Parameter(torch.ones(64, 64))])
    step, parameter = compiled(opt), opt.param_groups[0]["params"][0]
    moved = []
    for i in range(8):
        opt.param_groups[0]["lr"] = torch.tensor(0.01 * (i + 1))
        parameter.grad = torch.ones(64, 64)
        moved.append(parameter.data)
        if i >= 4:
            parameter.data = parameter.data.clone()
        before = parameter.detach().clone()
        step()
        assert (before - parameter).mean().item() == pytest.approx(0.01 * (i + 1), rel=0.02)  # of gradients of 1
    assert len(bound) == 5
    assert len(fp8compile.compiles()) == 1


def test_many_parameters_are_traced_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    trace = tracing.trace
    monkeypatch.setattr(shared_step, "trace", lambda *given: traced.append(given) or trace(*given))
    parameters = [nn.Parameter(torch.randn(64, 64 + i % 5)) for i in range(12)]
    opt = torch.optim.AdamW(parameters)
    step = compiled(opt)
    set_gradients(parameters, 0)
    step()
    assert len(traced) == 1
    assert len(fp8compile.compiles()[-1].updates) == 1
    assert fp8compile.compiles()[-1].updates[0].parameters == 12


@pytest.mark.parametrize(
    ("name", "values"),
    [("lr", [1, 2]), ("lr", [0.5, 1, 0, 2]), ("weight_decay", [1, 2, 0, 0.5])],
)
def test_settings_that_are_integers(name: str, values: list[Any]) -> None:
    """As people write them, and as a schedule that doubles a rate makes them: they are what the same floats are."""
    opts = [torch.optim.AdamW(make_parameters(), **{"lr": 0.1, name: values[0]}) for _ in range(2)]
    steps = [compiled(opt) for opt in opts]
    for i in range(6):
        whole = values[i % len(values)]
        given = whole, float(whole)
        for opt, value, step in zip(opts, given, steps, strict=True):
            opt.param_groups[0][name] = value
            set_gradients(opt.param_groups[0]["params"], i)
            step()
        assert_same(*opts)
    assert_shared(opts[0])


def test_a_later_step_that_cannot_be_traced_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whatever reason: it is said once, and nothing is lost."""
    opt = torch.optim.AdamW(make_parameters())
    step = compiled(opt, strict=False)
    set_gradients(opt.param_groups[0]["params"], 0)
    step()

    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("no attribute 'dim'")

    monkeypatch.setattr(shared_step, "trace", fail)
    opt.param_groups[0]["eps"] = 1e-3  # another rule
    set_gradients(opt.param_groups[0]["params"], 1)
    before = [p.detach().clone() for p in opt.param_groups[0]["params"]]
    with pytest.warns(fp8compile.Fp8Warning, match=r"this step of AdamW runs uncompiled.*AttributeError: no attribute"):
        step()
    for p, x in zip(opt.param_groups[0]["params"], before, strict=True):
        # Adam's second step: at most a rate, times a decay of a hundredth of one
        assert 0 < (p - x).abs().max() < 1.1e-3
    assert {float(state["step"]) for state in opt.state.values()} == {2.0}


def test_betas_that_a_schedule_moves() -> None:
    """A constant, then another one: from then on they are numbers, and nothing is traced any more."""

    def change(opt: torch.optim.Optimizer, i: int) -> None:
        opt.param_groups[0]["betas"] = (0.9 - 0.02 * i, 0.999)

    run(*(made := pair(of_large_ones(torch.optim.AdamW, {}))), steps=3, change=change)
    assert_shared(made[0])


def test_loss_scales() -> None:
    """With a step that overflowed: no parameter, state, count or counter changes."""
    made = pair(lambda parameters: fp8compile.prepare_optimizer(torch.optim.AdamW(parameters), unscale=True))
    mine, step, theirs, other = made
    for opt, call in ((mine, step), (theirs, other)):
        opt.step = call  # type: ignore[method-assign]
    for i in range(5):
        before = [x.clone() for _, x in tensors(mine)]
        for opt in (mine, theirs):
            set_gradients(opt.param_groups[0]["params"], i)
            if i:  # as GradScaler, which does so when the step has been compiled
                opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(float(i == 3))  # type: ignore
            opt.step()
        assert_same(mine, theirs)
        same = all(torch.equal(x, y) for x, (_, y) in zip(before, tensors(mine), strict=False))
        assert same == (i == 3)
    assert_shared(mine)


@pytest.mark.parametrize("beta", [0.7, 0.85, 0.9, 0.95])
def test_a_new_group_under_foreach_steps(beta: float) -> None:
    """torch then fills a tensor of each parameter's shape with a number: that makes no other rule."""
    mine = torch.optim.AdamW(make_parameters([torch.float32]), betas=(beta, 0.999), foreach=True, amsgrad=True)
    step = compiled(mine)
    for i in range(4):
        if i == 2:
            mine.add_param_group({"params": [nn.Parameter(torch.ones(64, 70)), nn.Parameter(torch.ones(70))]})
        set_gradients([p for group in mine.param_groups for p in group["params"]], i, None)
        step()
    assert_shared(mine)


def test_a_loaded_checkpoint_and_a_new_group() -> None:
    made = pair(torch.optim.AdamW)
    run(*made, steps=2)
    saved = copy.deepcopy(made[0].state_dict())
    run(*made, steps=2)
    for opt in made[::2]:
        opt.load_state_dict(copy.deepcopy(saved))  # type: ignore[attr-defined]
    run(*made, steps=1)
    for opt in made[::2]:
        extra = nn.Parameter(torch.ones(64, 70))
        opt.add_param_group({"params": [extra], "lr": 0.1})  # type: ignore[attr-defined]
    run(*made, steps=2)
    assert_shared(made[0])


def test_states_and_parameters_that_become_other_tensors() -> None:
    made = pair(torch.optim.AdamW)
    run(*made, steps=2)
    for opt in made[::2]:
        parameters = opt.param_groups[0]["params"]  # type: ignore[attr-defined]
        parameters[0].data = parameters[0].data + 1
        opt.state[parameters[1]]["exp_avg"] = torch.full((7,), 0.5)  # type: ignore[attr-defined]
    run(*made, steps=2)
    for opt in made[::2]:
        parameter = opt.param_groups[0]["params"][1]  # type: ignore[attr-defined]
        opt.state[parameter] = {**opt.state[parameter], "exp_avg": torch.full((7,), 0.25)}  # type: ignore[attr-defined]
    run(*made, steps=2)
    assert_shared(made[0])


def takes_over(state: dict[str, Any]) -> None:
    """The same tensors, with the memory of others that have other values."""
    state["exp_avg"].data = fp8compile.FP8State.of(state["exp_avg"].dequantize() * -2, format="log")
    state["exp_avg_sq"].data = state["exp_avg_sq"].like(torch.clone)
    state["step"].data = state["step"].data + 3


def has_another_side(state: dict[str, Any]) -> None:
    """As after a way to the host and back, from which the payload came to where it was."""
    state["exp_avg"].data = state["exp_avg"].like(torch.clone)
    payload = state["exp_avg"].payload
    x = state["exp_avg"].like(lambda part: part if part is payload else part.mul(2))
    state["exp_avg"].data = x


def lies_elsewhere(state: dict[str, Any]) -> None:
    x = state["exp_avg"]
    x.data = x.like(lambda part: part.clone().flip(0) if part is x.payload else part.clone())


def test_states_that_get_other_memory() -> None:
    made = pair(of_large_ones(torch.optim.AdamW, {}))
    run(*made, steps=2)
    for change in (takes_over, has_another_side, lies_elsewhere):
        for opt in made[::2]:
            change(opt.state[opt.param_groups[0]["params"][0]])  # type: ignore[attr-defined]
        run(*made, steps=2)
    assert_shared(made[0])


@pytest.mark.parametrize("part", [*INNER, "parameter", "step"])
def test_every_part_that_moves_is_seen(part: str) -> None:
    """What a launch reads and writes lies where it lay: asked of each part by itself."""
    opt = torch.optim.AdamW(make_parameters((torch.bfloat16,)))
    step = compiled(opt, states={"parameters": "split"})
    for i in range(2):
        set_gradients(opt.param_groups[0]["params"], i)
        step()
    known = shared_step._shared[opt].groups[0]
    assert known.is_current(opt.state, opt.param_groups[0])
    parameter = opt.param_groups[0]["params"][0]
    state = opt.state[parameter]
    if part in INNER:
        owner = next(x for x in (state["exp_avg"], state["exp_avg_sq"]) if getattr(x, part) is not None)
        moved = getattr(owner, part)
        owner.data = owner.like(lambda x: x.clone() if x is moved else x)
    else:
        moved = {"parameter": parameter, "step": state["step"]}[part]
        moved.data = moved.data.clone()
    assert not known.is_current(opt.state, opt.param_groups[0])


@pytest.mark.parametrize("change", [lambda x: x.t(), lambda x: x[:16]])
def test_a_parameter_that_lies_otherwise_is_seen(change: Any) -> None:
    """At the same address: a launch would go by the order and the size that it had."""
    parameter = nn.Parameter(torch.randn(64, 64))
    opt = torch.optim.AdamW([parameter, nn.Parameter(torch.randn(64, 64))])
    step = compiled(opt)
    for i in range(2):
        set_gradients(opt.param_groups[0]["params"], i)
        step()
    known = shared_step._shared[opt].groups[0]
    assert known.is_current(opt.state, opt.param_groups[0])
    parameter.data = change(parameter.data)
    assert not known.is_current(opt.state, opt.param_groups[0])


def test_sparse_gradients_leave_states_as_they_are() -> None:
    """Nothing of such a step is compiled: the warning says so, and it is torch's."""
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        embedding, linear = nn.Embedding(128, 64, sparse=True), nn.Linear(64, 64)
        opt = torch.optim.SGD([*embedding.parameters(), *linear.parameters()], lr=1e-4, momentum=0.9)
        step = compiled(opt) if compile_it else opt.step
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                opt.zero_grad()
                linear(embedding(torch.arange(64))).square().sum().backward()
                step()
        said = [str(w.message) for w in found if issubclass(w.category, fp8compile.Fp8Warning)]
        assert len(said) == compile_it
        assert all("its states stay as they are" in message for message in said)
        buffers = [state["momentum_buffer"] for state in opt.state.values()]
        assert [type(x) for x in buffers] == [Tensor] * 3
        results.append([p.detach().clone() for p in opt.param_groups[0]["params"]])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_sparse_gradients_of_a_closure_leave_steps_to_torch() -> None:
    """They are seen when the optimizer is prepared already: Dynamo is not asked, which raises of such a step."""
    embedding = nn.Embedding(128, 64, sparse=True)
    opt = torch.optim.SGD(embedding.parameters(), lr=1e-4, momentum=0.9)
    plain = torch.optim.SGD((twin := copy.deepcopy(embedding)).parameters(), lr=1e-4, momentum=0.9)
    step = compiled(opt)

    def closure_of(module: nn.Embedding) -> Tensor:
        module.zero_grad()
        (loss := module(torch.arange(64)).square().sum()).backward()
        return loss

    with pytest.warns(fp8compile.Fp8Warning, match="later ones too: a gradient is sparse"):
        step(lambda: closure_of(embedding))
    for _ in range(2):
        step(lambda: closure_of(embedding))
    for _ in range(3):
        plain.step(lambda: closure_of(twin))  # type: ignore[arg-type]
    assert torch.equal(embedding.weight, twin.weight)


@pytest.mark.parametrize("wanted", [None, True])
def test_numbers_are_not_timed_on_a_gpu(wanted: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user says so: Inductor takes as much memory as an L2 cache has to time a kernel."""
    module, seen = torch.fx.symbolic_trace(nn.Identity()), list[Any]()
    monkeypatch.setattr(template, "compile_fx", lambda gm, x, config_patches: seen.append(config_patches) or gm)
    given = {} if wanted is None else {"inductor": {"triton.autotune_pointwise": wanted}}
    template.compiled(module, [torch.ones(3)], Options.parse(given))
    assert seen[0]["triton.autotune_pointwise"] is bool(wanted)


def test_a_state_that_moves_elsewhere_binds_nothing_anew() -> None:
    opt = torch.optim.AdamW(make_parameters((torch.bfloat16,)))
    step = compiled(opt)
    for i in range(2):
        set_gradients(opt.param_groups[0]["params"], i)
        step()
    known = shared_step._shared[opt].groups[0]
    other = fp8compile.FP8State.of(torch.randn(256), format="log")
    other.data = other.like(torch.clone)
    assert known.is_current(opt.state, opt.param_groups[0])
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(opt.state[opt.param_groups[0]["params"][0]]["exp_avg"], other)


def test_hooks_and_closures_run_where_torch_runs_them() -> None:
    parameters = make_parameters()
    opt = torch.optim.AdamW(parameters)
    seen: list[str] = []
    first = parameters[0].detach().clone()

    def look(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            moved = "" if torch.equal(parameters[0], first) else " moved"
            seen.append(f"{name} {len(opt.param_groups[0]['params'])}{moved}")

        return hook

    opt.register_step_pre_hook(look("before"))
    opt.register_step_post_hook(look("after"))
    step = compiled(opt)
    inner = torch.compile(lambda x: x * 2, backend="eager")

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        look("closure")()
        set_gradients(parameters, 0)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        inner(torch.ones(len(seen)))  # what a closure calls may be compiled
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
        return torch.tensor(3.0)

    assert step(closure) == 3.0
    n = len(parameters)
    assert seen == [f"before {n}", f"closure {n}", f"after {n} moved"]
    assert_shared(opt)


class Scaled(torch.optim.AdamW):
    """A step of its own, which treats one parameter in another way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][1].grad.mul_(3)
        super().step()


LEFT = [
    (Lion, {}, "Lion.step is not torch's own"),
    (Scaled, {}, "Scaled.step is not torch's own"),
]


@pytest.mark.parametrize(("make", "arguments", "reason"), LEFT, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_left_to_one_graph(make: Any, arguments: dict[str, Any], reason: str) -> None:
    made = pair(lambda parameters: make(parameters[:2], lr=0.01, **arguments))
    run(*made, steps=2)
    assert reason in shared_step._shared[made[0]].refusal
    plan = next(p for p in reversed(fp8compile.compiles()) if p.traced)
    assert reason in plan.traced
    assert "traced parameter by parameter" in str(plan) or not plan.states


def test_adafactor_is_left_to_one_graph() -> None:
    """Its rule has means of rows and columns."""
    parameters = make_parameters()
    opt = torch.optim.Adafactor(parameters)
    step = compiled(opt)
    set_gradients(parameters, 0)
    step()
    assert shared_step._shared[opt].refusal


@pytest.mark.parametrize(
    ("name", "place", "dtype"),
    [
        ("adamw", "first", torch.float32),
        ("adamw", "last", torch.bfloat16),
        ("adamw", "a group of its own", torch.bfloat16),
        ("amsgrad", "a group of its own", torch.float32),
        ("nadam", "last", torch.float32),
        ("momentum", "first", torch.bfloat16),
    ],
)
def test_a_parameter_that_is_one_number(name: str, place: str, dtype: torch.dtype) -> None:
    """A learned temperature, say, whose states have the shape of a step count: as a vector of one element."""

    def make(number: Tensor) -> torch.optim.Optimizer:
        parameters: list[Any] = make_parameters()
        mine = nn.Parameter(number.to(dtype))
        if place == "a group of its own":
            parameters = [{"params": [mine], "weight_decay": 0.0}, {"params": parameters}]
        else:
            parameters = [mine, *parameters] if place == "first" else [*parameters, mine]
        return WITH_A_NUMBER[name](parameters)

    mine, theirs = make(torch.tensor(2.0)), make(torch.tensor([2.0]))
    step, other = compiled(mine), compiled(theirs)
    for i in range(4):
        for opt, call in ((mine, step), (theirs, other)):
            set_gradients([p for group in opt.param_groups for p in group["params"]], i)
            rates(opt, i)
            call()
    assert_shared(mine)
    wanted = dict(tensors(theirs))
    for name, x in tensors(mine):
        assert torch.equal(x.float(), wanted[name].float().view_as(x)), name


WITH_A_NUMBER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("alone", [True, False])
def test_a_number_without_states(alone: bool) -> None:
    """Of SGD without momentum; gradients come from a closure."""
    number = nn.Parameter(torch.tensor(2.0))
    parameters = [number, *([] if alone else make_parameters())]
    step = compiled(torch.optim.SGD(parameters, lr=0.5))

    def closure() -> Tensor:
        for p in parameters:
            p.grad = torch.ones_like(p)
        return number.detach()

    for value in (1.5, 1.0, 0.5):
        step(closure)
        assert number.item() == value


def test_a_number_of_which_no_other_parameter_tells() -> None:
    """It alone has a third state, which might be a count."""

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        groups = [{"params": parameters, "amsgrad": False}, {"params": [nn.Parameter(torch.tensor(2.0))]}]
        return torch.optim.AdamW(groups, amsgrad=True)

    run(*(made := pair(make)), steps=2)
    assert "'max_exp_avg_sq'" in shared_step._shared[made[0]].refusal


def test_other_layouts() -> None:
    """Parameters and gradients that are not contiguous."""

    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        images = nn.Parameter(torch.randn(32, 16, 3, 3, generator=torch.Generator().manual_seed(1)))
        images.data = images.data.to(memory_format=torch.channels_last)
        return torch.optim.AdamW([parameters[0], images])

    def change(opt: torch.optim.Optimizer, i: int) -> None:
        p = opt.param_groups[0]["params"][0]
        p.grad = p.grad.t().contiguous().t()

    run(*(made := pair(make)), steps=3, change=change)
    assert_shared(made[0])


@pytest.mark.parametrize("active", ["110", "101", "011", "111", "001", "0111011"])
def test_rows_of_numbers_of_those_that_have_gradients(active: str) -> None:
    """In runs: an index would be copied to a GPU, for which a step waits and a CUDA graph cannot be captured."""
    wanted = tuple(x == "1" for x in active)
    matrix = torch.arange(20.0).view(10, 2)
    expected = [matrix[i] for i, x in enumerate(wanted) if x]
    assert torch.equal(alike._rows(matrix, wanted), torch.stack(expected))


class NothingLaunched:
    """A launch that writes nothing, nor says so to torch."""

    def __init__(self, update: Any) -> None:
        self.update = update

    def update_only(self, active: Any) -> None:
        self.active = active

    def __call__(self, matrix: Tensor | None) -> None:
        pass


@pytest.mark.parametrize("executor", ["launched", "operator"])
def test_autograd_knows_of_each_write_to_a_parameter(executor: str) -> None:
    """A graph made before a step would read what the step has overwritten: backward raises, as with torch's step."""
    parameters = make_parameters()
    opt = torch.optim.AdamW(parameters, lr=0.1)
    step = compiled(opt)
    set_gradients(parameters, 0)
    step()
    for x in (x for group in shared_step._shared[opt].groups.values() for x in group.alike):
        x.launch = NothingLaunched(x.template.update) if executor == "launched" else None  # type: ignore[assignment]
    before = [p._version for p in parameters]
    losses = [(p * p).sum() for p in parameters]
    parameters[1].grad = None  # it keeps its values
    step()
    assert [p._version > b for p, b in zip(parameters, before, strict=True)] == [True, False, True]
    losses[1].backward()
    for loss in losses[::2]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
