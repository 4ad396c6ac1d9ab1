"""Compiled optimizer steps on 8-bit states against torch's own optimizers, eager, in FP32."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from optimizers import (
    OPTIMIZERS,
    SHAPES,
    Lion,
    Simulated,
    assert_near,
    compiled,
    formats,
    make_parameters,
    relative,
    set_gradients,
    step_both,
    twins,
)
from pipelines import replace_pass
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import fp8compile
from fp8compile.errors import Fp8Warning, OptionError, StateError
from fp8compile.optimizer.state_conversion import is_prepared
from fp8compile.optimizer.state_recipe import StateRecipe
from fp8compile.optimizer.states import FP8State

EXACT = "float32"  # states kept in FP32: what is left are the passes
MIXED = SHAPES[1:3]  # a large one and a small one: tracing, parameter by parameter, takes most of the time


def run(name: str, states: object, steps: int = 5, foreach: bool | None = None, **changes: object):
    make, arguments = OPTIMIZERS[name]
    arguments = {**arguments, **({"foreach": foreach} if foreach is not None else {}), **changes}
    two_alike = name in ("adamw", "amsgrad")  # their update is one for both
    opt, mine, reference, theirs = twins(make, arguments, SHAPES[:3] if two_alike else MIXED)
    step, compilations = compiled(opt, states=states)
    simulated = Simulated(reference, StateRecipe.parse(states))
    for i in range(steps):
        for o in (opt, reference):
            o.param_groups[0]["lr"] = 0.01 / (i + 1)
        step_both(i, step, mine, simulated.step, theirs)
    return opt, mine, reference, theirs, compilations


SINGLE = ("adam", "adamw", "nadam", "adamax", "rmsprop", "adagrad", "sgd")
FOREACH = ("adam", "adam_decayed", "amsgrad", "radam", "asgd", "rmsprop_centered", "adadelta", "nesterov", "plain_sgd")


@pytest.mark.parametrize(
    ("name", "foreach"), [*((name, None) for name in SINGLE), *((name, True) for name in FOREACH)], ids=str
)
def test_passes_change_nothing_but_rounding(name, foreach):
    """At a rate that changes, for which a step is compiled once more and no more."""
    opt, mine, reference, theirs, compilations = run(name, EXACT, foreach=foreach)
    assert len(compilations) <= 2 + name.startswith("sgd")  # its momentum is made by the first step
    for p, q in zip(mine, theirs, strict=True):
        # Both sides are FP32, in another order of operations: some ULPs, and the roots of the smallest second moments.
        assert relative(p, q) < 2e-6
        for key, x in reference.state[q].items():
            if isinstance(x, Tensor) and x.numel() > 1:
                assert relative(opt.state[p][key], x) < 2e-6, key


@pytest.mark.parametrize("name", ["amsgrad", "nadam", "rmsprop_centered", "adagrad", "adadelta", "adamax"])
def test_eight_bit_states_are_those_of_the_reference(name):
    opt, mine, reference, theirs, compilations = run(name, None, steps=3)
    assert len(compilations) <= 2
    assert [bool(formats(opt, p)) for p in mine] == [p.numel() > 4096 for p in mine]
    for p, q in zip(mine[:-1], theirs[:-1], strict=True):
        for key in formats(opt, p):
            mine_read, theirs_read = opt.state[p][key].dequantize(), reference.state[q][key]
            # Another order of operations moves the ends of a group by ULPs (of what was subtracted, for the least of a
            # first moment), and here and there a value to the next code: a code is 2 to 10 %.
            differ = (mine_read - theirs_read).abs() > 1e-2 * theirs_read.abs()
            assert differ.float().mean() < 0.01, key
        assert relative(p, q) < 1e-4


@pytest.mark.parametrize("name", ["sgd", "lion"])
def test_states_made_while_stepping_become_eight_bit_at_the_second_step(name):
    make, arguments = OPTIMIZERS[name]
    opt, mine, reference, theirs = twins(make, arguments, MIXED)
    step, _ = compiled(opt, states=EXACT)
    for i in range(4):
        step_both(i, step, mine, reference.step, theirs)
        assert bool(formats(opt, mine[0])) == (i > 0)
    assert_near(mine, theirs, 1e-6)


class Anew(torch.optim.Optimizer):
    """Momentum that is a new tensor at each step, and a second state that is written in place."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["m"] = state["m"] * 0.9 + p.grad
            state["v"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
            p.add_(state["m"] / (state["v"].sqrt() + 1e-3), alpha=-self.param_groups[0]["lr"])


def test_states_made_anew_at_each_step_stay_plain():
    """Or every step would be compiled. Those of a state that is cleared, or loaded, are 8-bit ones again."""
    opt, mine, _, _ = twins(Anew, {}, [(128, 128)] * 2)
    step, compilations = compiled(opt)
    for i in range(7):
        set_gradients(mine, i)
        step()
    assert len(compilations) == 4
    assert formats(opt, mine[0]) == {"v": "log"}
    rows = {row["name"]: row["reason"] for row in fp8compile.last_compile().rows("states")}
    assert rows == {"m": "made anew at each step; in 8 bits only if it is written in place", "v": "8 bits an element"}
    opt.state.clear()
    for _ in range(2):
        step()
    assert formats(opt, mine[0]) == {"v": "log"}


def test_states_that_are_cleared_are_let_go():
    """That they are counted must not keep them."""
    opt, mine, _, _ = twins(torch.optim.AdamW, {}, [(128, 128)])
    step, _ = compiled(opt)
    set_gradients(mine, 0)
    step()
    old = weakref.ref(opt.state[mine[0]]["exp_avg"])
    opt.state.clear()
    step()
    torch.compiler.reset()
    gc.collect()
    assert old() is None


def test_states_that_are_cleared_are_8_bit_ones_again():
    opt, mine, _, _ = twins(torch.optim.SGD, {"momentum": 0.9}, [(128, 128)])
    step, _ = compiled(opt)
    for i in range(4):
        set_gradients(mine, i)
        if i % 2 == 0:
            opt.state.clear()
        step()
    assert formats(opt, mine[0]) == {"momentum_buffer": "log"}


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_plain_states_are_gone_once_they_are_eight_bit_ones(name):
    make, arguments = OPTIMIZERS[name]
    opt, mine, *_ = twins(make, arguments, MIXED)
    set_gradients(mine, 0)
    opt.step()
    tensors = [x for p in mine for x in opt.state[p].values() if isinstance(x, Tensor) and x.dim()]
    plain = [StorageWeakRef(x.untyped_storage()) for x in tensors]
    step, _ = compiled(opt)
    for _ in range(2):
        step()
    assert formats(opt, mine[0])
    gc.collect()
    assert tensors
    for x, memory in zip(tensors, plain, strict=True):  # small ones stay as they are
        assert memory.expired() == isinstance(x, FP8State)


@pytest.mark.parametrize(
    ("name", "is_compiled", "foreach"),
    [
        ("adamw", True, True),
        *((n, False, None) for n in ("adamw", "amsgrad", "nadam", "rmsprop_centered", "adadelta", "adamax")),
        *((n, False, True) for n in ("adamw", "amsgrad", "nadam", "rmsprop_centered", "adadelta", "adamax")),
    ],
)
def test_plain_states_of_a_prepared_optimizer_are_never_there_at_once(name, is_compiled, foreach, monkeypatch):
    """Otherwise the first step, of all, would not fit where the others do."""
    make, arguments = OPTIMIZERS[name]
    given = {**arguments, **({"foreach": foreach} if foreach is not None else {})}
    parameters = make_parameters([(128, 64)] * 5)
    set_gradients(parameters, 0)
    opt = fp8compile.prepare_optimizer(make(parameters, **given))
    plain, convert = [], FP8State.of

    def watched(x, *positional, **named):
        states = [value for state in opt.state.values() for value in state.values() if isinstance(value, Tensor)]
        plain.append(sum(type(value) is Tensor and value.numel() > 1 for value in states))
        return convert(x, *positional, **named)

    monkeypatch.setattr(FP8State, "of", staticmethod(watched))
    (torch.compile(opt.step, backend="fp8", options={"executor": "eager"}) if is_compiled else opt.step)()
    made = sum(isinstance(value, FP8State) for state in opt.state.values() for value in state.values())
    assert len(plain) == made >= len(parameters)
    assert max(plain) == made / len(parameters)  # those of one parameter


class ByNumber(torch.optim.Optimizer):
    """Its `_init_group` takes the number of a group."""

    def __init__(self, parameters: list[Tensor]):
        super().__init__(parameters, {"lr": 0.1})

    def _init_group(self, number: int, found: list[Tensor]) -> None:
        for p in self.param_groups[number]["params"]:
            self.state[p].setdefault("mean", torch.zeros_like(p))
            found.append(p)

    @torch.no_grad()
    def step(self, closure=None):
        for number in range(len(self.param_groups)):
            found: list[Tensor] = []
            self._init_group(number, found)
            for p in found:
                p.sub_(self.state[p]["mean"].mul_(0.9).add_(p.grad), alpha=0.1)


def test_groups_of_another_kind():
    mine, theirs = make_parameters([(128, 64)] * 2), make_parameters([(128, 64)] * 2)
    opt, reference = fp8compile.prepare_optimizer(ByNumber(mine)), torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step in range(3):
        for parameters in (mine, theirs):
            set_gradients(parameters, step)
        opt.step()
        reference.step()
    assert all(isinstance(opt.state[p]["mean"], FP8State) for p in mine)
    for p, q in zip(mine, theirs, strict=True):
        assert relative(p, q) < 0.02


def test_a_state_that_joins_others_is_8_bit_when_it_is_handed_out():
    class Joined(ByNumber):
        def _init_group(self, group, found):
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("mean" if not state or self.is_first else "late", torch.zeros_like(p))
                found += state.values()

        def step(self, closure=None):
            found: list[Tensor] = []
            self._init_group(self.param_groups[0], found)
            return found

    opt = fp8compile.prepare_optimizer(Joined(make_parameters([(128, 64)] * 2)))
    opt.is_first = True
    assert [type(x) for x in opt.step()] == [FP8State] * 2
    opt.is_first = False
    assert [type(x) for x in opt.step()] == [FP8State] * 4


def test_a_class_of_which_one_optimizer_is_prepared_makes_plain_states_for_others():
    kinds = [torch.optim.AdamW(make_parameters([(96, 64)])) for _ in range(2)]
    fp8compile.prepare_optimizer(kinds[0])
    for opt in kinds:
        set_gradients(opt.param_groups[0]["params"], 0)
        opt.step()
        assert "_init_group" not in vars(opt)  # torch from 2.15 on breaks the graph at a function that an object has
    sizes = [len(formats(opt, opt.param_groups[0]["params"][0])) for opt in kinds]
    assert sizes == [2, 0]


def test_first_step_from_zero_states():
    """v = 0.001 g², m = 0.1 g: after one step AdamW moved every element by the rate, in 8 bits as in 32."""
    opt, mine, _, theirs, _ = run("adam", None, steps=1)
    before = make_parameters(MIXED)
    for p, q, start in zip(mine, theirs, before, strict=True):
        assert torch.allclose(p - start, q - start, atol=5e-7)
    assert formats(opt, mine[0]) == {"exp_avg": "log", "exp_avg_sq": "log/stochastic"}


def test_one_launch_for_each_kind_of_update():
    parameters = make_parameters([(64, 64)] * 3 + [(8,)] * 2)
    groups = [
        {"params": parameters[:1], "weight_decay": 0.1},
        {"params": parameters[1:3], "weight_decay": 0.0},
        {"params": parameters[3:]},
    ]
    opt = torch.optim.AdamW(groups, weight_decay=0.0)
    step, _ = compiled(opt)
    set_gradients(parameters, 0)
    step()
    plan = fp8compile.compiles()[-1]
    assert plan.graph == "optimizer"
    assert sorted((u.parameters, len(u.formats)) for u in plan.updates) == [(1, 2), (2, 0), (2, 2)]
    assert all(not u.reason for u in plan.updates)
    reasons = {(s.parameter, s.reason) for s in plan.states if not s.format}
    assert reasons == {(i, "kept in FP32: small: 8 elements, fewer than 4096") for i in range(3, 5)}


def test_plan_as_json():
    opt = torch.optim.AdamW(make_parameters(MIXED))
    step, _ = compiled(opt)
    set_gradients(opt.param_groups[0]["params"], 0)
    step()
    plan = fp8compile.compiles()[-1]
    assert fp8compile.Plan.from_json(plan.to_json()) == plan


def test_parameters_without_a_gradient_are_left():
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {}, SHAPES[:3])
    step, _ = compiled(opt, states=EXACT)
    for i, only in enumerate(([0, 2], [0, 1, 2], [1])):
        step_both(i, step, mine, reference.step, theirs, only)
    assert_near(mine, theirs, 1e-6)
    for p, q in zip(mine, theirs, strict=True):
        assert set(opt.state[p]) == set(reference.state[q])


def test_parameters_added_later_and_empty_groups():
    opt, mine, *_ = twins(torch.optim.AdamW, {}, MIXED)
    opt.add_param_group({"params": []})
    step, _ = compiled(opt)
    set_gradients(mine, 0)
    step()
    late = nn.Parameter(torch.ones(80, 80))
    opt.add_param_group({"params": [late], "lr": 0.5})
    set_gradients([*mine, late], 1)
    step()
    assert formats(opt, late) == {"exp_avg": "log", "exp_avg_sq": "log/stochastic"}
    assert torch.allclose((late - 1).abs(), torch.full_like(late, 0.5), atol=1e-2)


def test_degenerate_shapes():
    parameters = make_parameters([(), (0,), (0, 5), (1, 1), (70, 70)])
    opt = torch.optim.AdamW(parameters, lr=0.1)
    reference = torch.optim.AdamW(copies := [nn.Parameter(p.detach().clone()) for p in parameters], lr=0.1)
    step, _ = compiled(opt, states={"first": "float32", "second": "float32", "smallest": 0})
    for i in range(3):
        step_both(i, step, parameters, reference.step, copies)
    for p, q in zip(parameters, copies, strict=True):
        # steps of 0.1, each off by some ULPs of a root and a quotient; (1, 1) is near zero, so not relative to it
        torch.testing.assert_close(p, q, rtol=0, atol=5e-6)


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_rate_from_a_scheduler(rate):
    """It is compiled once: no rate is taken for a constant."""
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {}, MIXED)
    opt.param_groups[0]["lr"] = rate
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)) for o in (opt, reference)]
    step, compilations = compiled(opt, states=EXACT)
    for i in range(5):
        step_both(i, step, mine, reference.step, theirs)
        for schedule in schedules:
            schedule.step()
    assert len(compilations) == 1
    assert_near(mine, theirs, 1e-6)


@pytest.mark.parametrize(
    ("kind", "given"),
    [(torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_betas_and_momentum_from_a_scheduler(kind, given):
    """OneCycleLR moves them as well: what was a constant is compiled once more, and then no more."""
    opt, mine, reference, theirs = twins(kind, given, MIXED)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=9) for o in (opt, reference)]
    step, compilations = compiled(opt, states=EXACT)
    for i in range(7):
        step_both(i, step, mine, reference.step, theirs)
        for schedule in schedules:
            schedule.step()
    assert len(compilations) == 2
    assert not [u.reason for u in fp8compile.compiles()[-1].updates if u.reason]
    assert_near(mine, theirs, 1e-6)


class Named(torch.optim.Optimizer):
    """Arguments by their names."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["m"].lerp_(end=p.grad, weight=2 * group["lr"])
            state["v"].add_(other=p.grad.square(), alpha=group["lr"])
            p.addcdiv_(tensor1=state["m"], tensor2=state["v"].sqrt() + 1e-3, value=-group["lr"])


def test_arguments_by_name():
    opt, mine, reference, theirs = twins(Named, {}, MIXED)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (opt, reference)]
    step, compilations = compiled(opt, states=EXACT)
    for i in range(5):
        step_both(i, step, mine, reference.step, theirs)
        for schedule in schedules:
            schedule.step()
    assert len(compilations) <= 2
    assert_near(mine, theirs, 1e-6)


def test_a_rate_is_a_constant_in_a_cuda_graph():
    opt, mine, *_ = twins(torch.optim.AdamW, {}, SHAPES[1:2])
    step, compilations = compiled(opt, inductor={"triton.cudagraphs": True})
    for i in range(2):
        set_gradients(mine, i)
        step()
    assert len(compilations) == 1
    opt.param_groups[0]["lr"] *= 0.5
    step()
    assert len(compilations) == 2


def test_capturable():
    _, mine, _, theirs, _ = run("adamw", EXACT, steps=3, capturable=True)
    assert_near(mine, theirs, 1e-6)


def test_after_a_fused_one_a_warning_says_why_nothing_is_converted():
    """Dynamo then runs no step of this class as a whole any more."""
    torch._dynamo.reset()
    fused = torch.optim.AdamW(parameters := make_parameters(SHAPES[1:2]), fused=True)
    set_gradients(parameters, 0)
    compiled(fused, states="float32")[0]()
    with pytest.warns(fp8compile.Fp8Warning, match=r"compiled by itself.*torch\._dynamo\.reset\(\)"):
        compiled(torch.optim.AdamW(parameters))[0]()
    torch._dynamo.reset()
    compiled(opt := torch.optim.AdamW(parameters))[0]()
    assert formats(opt, parameters[0])


def test_clipping_and_a_skipped_step():
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {}, MIXED)
    fp8compile.prepare_optimizer(opt, EXACT)
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2))
    opt.step, _ = compiled(opt)
    for i in range(4):
        for o, parameters, s in ((opt, mine, scaler), (reference, theirs, other)):
            set_gradients(parameters, i)
            s.scale(torch.ones(1, requires_grad=True))
            for p in parameters:
                p.grad.mul_(4.0)
            if i == 2:
                mine_before = [p.detach().clone() for p in parameters]
                parameters[0].grad[0, 0] = torch.inf
            s.unscale_(o)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            s.step(o)
            s.update()
            if i == 2:
                assert all(torch.equal(a, b) for a, b in zip(mine_before, parameters, strict=True))
    assert_near(mine, theirs, 1e-6)
    for p in mine:
        assert opt.state[p]["step"] == 3


def test_non_finite_gradients_show():
    opt, mine, _, _ = twins(torch.optim.AdamW, {}, SHAPES[1:2])
    step, _ = compiled(opt)
    set_gradients(mine, 0)
    mine[0].grad[3, 3] = torch.nan
    step()
    assert mine[0][3, 3].isnan()
    assert opt.state[mine[0]]["exp_avg"].dequantize()[3, 3].isnan()


def test_a_matmul_in_the_update_stays_outside():
    """An update of which a part is no pointwise operator: the rest is merged and reads it."""

    class Mixing(Lion):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"].lerp_(p.grad, 0.1)
                p.add_(m @ m.T @ p, alpha=-0.01)

    mine, theirs = make_parameters([(80, 80)]), make_parameters([(80, 80)])
    opt, reference = Mixing(mine), Mixing(theirs)
    step, _ = compiled(opt, states=EXACT)
    for i in range(3):
        step_both(i, step, mine, reference.step, theirs)
    assert relative(mine[0], theirs[0]) < 1e-5
    updates = fp8compile.compiles()[-1].updates  # the moment's, and the parameter's, which have no element in common
    assert sorted((u.formats, u.reason) for u in updates) == [((), ""), (("float32",), "")]


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.view(-1)[:100].zero_(),
        lambda m: m.T.mul_(2),
        lambda m: m.mT.mul_(2),
        lambda m: m.adjoint().mul_(2),
        lambda m: m.swapdims(0, 1).mul_(2),
        lambda m: torch.transpose(m, 0, 1).mul_(2),
        lambda m: torch.ops.aten.transpose.int(m, 0, 1).mul_(2),
        lambda m: m.moveaxis(0, 1).mul_(2),
        lambda m: m[0].copy_(m[1]),
    ],
)
def test_writing_to_a_part_of_a_state_is_refused(write):
    """A view is made of the state's values: a write to it would be lost."""

    class Forgetful(Lion):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"].lerp_(p.grad, 0.1)
                write(m)
                p.sub_(m)

    mine = make_parameters([(80, 80)])
    opt = Forgetful(mine)
    fp8compile.prepare_optimizer(opt)
    set_gradients(mine, 0)
    opt.step()
    step, _ = compiled(opt)
    with pytest.raises(Exception, match="writes to a part of an optimizer state"):
        step()
    kept = opt.state[mine[0]]["exp_avg"]
    assert isinstance(kept, fp8compile.FP8State)
    with pytest.raises(StateError, match="would be lost"):
        kept[:3]


def test_a_failing_pass_costs_the_merging_and_warns(monkeypatch):
    def fails_half_way(c):
        for copy in list(c.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)):
            c.graph.erase_node(copy)
        raise RuntimeError("on purpose")

    replace_pass(monkeypatch, "merge_updates", fails_half_way)
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {}, MIXED)
    step, _ = compiled(opt, states=EXACT, strict=False)
    set_gradients(mine, 0)
    set_gradients(theirs, 0)
    with pytest.warns(Fp8Warning, match="operator by operator"):
        step()
    reference.step()
    assert_near(mine, theirs, 1e-6)


def test_with_inductor():
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {}, SHAPES[1:2])
    step, _ = compiled(opt, states=EXACT, executor="inductor")
    for i in range(3):
        for o in (opt, reference):
            o.param_groups[0]["lr"] = 0.01 / (i + 1)
        step_both(i, step, mine, reference.step, theirs)
    assert_near(mine, theirs, 1e-6)


def test_run_without_a_compiler():
    opt, mine, reference, theirs = twins(torch.optim.AdamW, {}, MIXED)
    fp8compile.prepare_optimizer(opt, EXACT)
    for i in range(3):
        step_both(i, opt.step, mine, reference.step, theirs)
    assert isinstance(opt.state[mine[0]]["exp_avg"], fp8compile.FP8State)
    assert_near(mine, theirs, 1e-6)


# ---- the recipe -----------------------------------------------------------------------------------------------------


def test_recipe_names_formats_by_state():
    recipe = {"first": "e4m3", "second": "e5m2/stochastic", "formats": {"max_exp_avg_sq": "log"}}
    opt, mine, *_ = run("amsgrad", recipe, steps=1)
    expected = {"exp_avg": "e4m3", "exp_avg_sq": "e5m2/stochastic", "max_exp_avg_sq": "log"}
    assert formats(opt, mine[0]) == expected


def test_the_rule_of_what_is_small():
    recipe = StateRecipe()
    for shape, why in [((64, 64), "8 bits"), ((63, 65), "small: 4095"), ((8192,), "a vector"), ((1 << 20,), "8 bits")]:
        p = torch.empty(shape, device="meta")
        assert why in recipe.decide("exp_avg", p, p).reason
    p = torch.empty(64, 64, device="meta")
    assert recipe.decide("row_norms", p, torch.empty(64, device="meta")).reason == "not one number an element"


def test_mistakes_in_recipes_are_named():
    with pytest.raises(OptionError, match="Did you mean 'stochastic'"):
        StateRecipe.parse({"parameters": "stochastik"})
    with pytest.raises(OptionError, match="Did you mean 'second'"):
        StateRecipe.parse({"secnd": "log"})
    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(make_parameters()))
    with pytest.raises(OptionError, match="another recipe"):
        fp8compile.prepare_optimizer(opt, "e4m3")
    assert is_prepared(opt)


class WarmedUp(torch.optim.Optimizer):
    """A user's own: a number of its step grows with each parameter's own count, in Python."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["mean"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                p.add_(state["mean"].sign(), alpha=-group["lr"] * min(1, state["count"] / 3))


def test_numbers_of_python_that_differ_between_parameters():
    """Some have been updated less often: their numbers are other symbols of the graph."""
    torch.manual_seed(0)
    mine, exact = ([nn.Parameter(torch.ones(64, 64)) for _ in range(4)] for _ in range(2))
    opts = [WarmedUp(p) for p in (mine, exact)]
    step = torch.compile(
        opts[0].step, backend="fp8", options={"executor": "eager", "strict": True, "states": "float32"}
    )
    for without in ({0}, {2}, {2}, {0}, {1, 2, 3}, set()):
        for i, (p, q) in enumerate(zip(mine, exact, strict=True)):
            p.grad = None if i in without else torch.randn(64, 64)
            q.grad = p.grad
        opts[0].param_groups[0]["lr"] = opts[1].param_groups[0]["lr"] = 0.01 * (1 + len(without))
        step()
        opts[1].step()
        for p, q in zip(mine, exact, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
