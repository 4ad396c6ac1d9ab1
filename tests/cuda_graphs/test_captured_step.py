"""When a captured step runs as it is, records and replays.

On a CPU a stand-in records: its replay calls the step, and recording changes no tensor, as with a CUDA graph. That
graphs compute the same is shown in tests/gpu/test_captured_steps.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from optimizers import Lion
from torch import nn
from torch.utils import _pytree as pytree

import fp8compile
from fp8compile import backend
from fp8compile.cuda_capture import to_be_captured
from fp8compile.cuda_graphs import captured_step
from fp8compile.cuda_graphs.captured_step import CapturedStep


@dataclass
class Replayed:
    recorder: StandIn
    step: Callable[..., Any]
    results: Any
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)

    def replay(self, args: Any, kwargs: Any) -> Any:
        self.recorder.did.append("replay")
        before = [p.grad for p, _ in self.after]
        results = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self.step(*args, **kwargs))
        for (p, gradient), was in zip(self.after, before, strict=True):  # a graph writes where it has written
            if gradient is not None and p.grad is not gradient:
                gradient.copy_(p.grad)
            p.grad = was
        return results


@dataclass
class StandIn:
    """Records a step by running it, and putting every tensor back."""

    owners: Any
    did: list[str] = field(default_factory=list)

    def begin_anew(self) -> None:
        self.did.append("forget")

    def run(self, step: Any, args: Any, kwargs: Any) -> Any:
        self.did.append("run")
        return step(*args, **kwargs)

    def record(self, step: Any, args: Any, kwargs: Any) -> Replayed:
        self.did.append("record")
        tensors = [*self.owners.parameters(), *(g for _, g in self.owners.gradients() if g is not None)]
        for opt in self.owners.optimizers:
            tensors += [x for x in pytree.tree_leaves(list(opt.state.values())) if isinstance(x, torch.Tensor)]
        values = [x.detach().clone() for x in tensors]
        results = step(*args, **kwargs)
        for x, value in zip(tensors, values, strict=True):
            x.data.copy_(value)  # with no count of it
        return Replayed(self, step, results)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    did: list[str] = []

    def can_record(self: CapturedStep) -> bool:
        self.recorder = StandIn(self.owners, did)
        return True

    monkeypatch.setattr(CapturedStep, "_can_record", can_record)
    return did


class Training:
    """A small model, an optimizer that counts on its tensors, a step of both."""

    def __init__(self, zero: str = "after", **arguments: Any):
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        arguments = {"lr": 0.1, "momentum": 0.9, **arguments}
        self.opt = torch.optim.SGD(self.model.parameters(), **arguments)
        self.zero = zero

    def step(self, x: torch.Tensor) -> torch.Tensor:
        if self.zero == "before":
            self.opt.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.opt.step()
        if self.zero == "after":
            self.opt.zero_grad()
        return loss

    def captured(self, **given: Any) -> Callable[..., Any]:
        return fp8compile.capture_step(self.step, self.model, self.opt, **given)


def batch(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 4)


def losses(run: Callable[[torch.Tensor], torch.Tensor], steps: int = 6) -> list[float]:
    torch.manual_seed(1)
    return [run(batch()).item() for _ in range(steps)]


@pytest.mark.parametrize("zero", ["after", "before"])
def test_every_call_trains_one_step(recorder: list[str], zero: str) -> None:
    training = Training(zero)
    twin = copy.deepcopy(training)
    assert losses(training.captured(), 6) == pytest.approx(losses(twin.step, 6))
    assert recorder == ["run"] * 3 + ["record"] + ["replay"] * 3


def test_autograd_knows_what_a_replay_has_written(recorder: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph writes and says nothing: a backward through what it has overwritten would be wrong."""
    training = Training()
    training.model[0].bias.requires_grad_(False)
    run = training.captured(warmup=1)
    for _ in range(3):
        run(batch())
    monkeypatch.setattr(Replayed, "replay", lambda self, args, kwargs: self.recorder.did.append("replay"))
    parameters = dict(training.model.named_parameters())
    sums = {name: (p * p * torch.ones((), requires_grad=True)).sum() for name, p in parameters.items()}
    run(batch())
    assert recorder == ["run", "record", "replay", "replay", "replay"]
    for name, loss in sums.items():
        with contextlib.nullcontext() if name == "0.bias" else pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_gradients_of_each_shape(recorder: list[str]) -> None:
    """They lie where its recording writes them."""
    training = Training("before")
    twin = copy.deepcopy(training)
    run = training.captured(warmup=1)
    for rows in (3, 3, 5, 5, 3, 5, 3):
        x = batch(rows)
        run(x)
        twin.step(x)
        for p, q in zip(training.model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert recorder == ["run", "record", "replay"] * 2 + ["replay"] * 3


def test_on_a_cpu_the_step_runs_as_it_is() -> None:
    training = Training()
    twin = copy.deepcopy(training)
    assert losses(training.captured()) == losses(twin.step)
    assert type(training.opt.param_groups[0]["lr"]) is float


def test_each_shape_has_its_recording(recorder: list[str]) -> None:
    run = Training().captured(warmup=1)
    for rows in (3, 3, 5, 5, 3, 5):
        run(batch(rows))
    assert recorder == ["run", "record", "replay"] * 2 + ["replay"] * 2


def test_values_of_numbers_are_forms(recorder: list[str]) -> None:
    training = Training()
    run = fp8compile.capture_step(lambda x, scale: training.step(x * scale), training.model, training.opt, warmup=1)
    for scale in (1.0, 1.0, 2.0, 1):
        run(batch(), scale)
    assert recorder == ["run", "record", "replay", "run", "run"]


def test_more_shapes_than_graphs(recorder: list[str]) -> None:
    run = Training().captured(warmup=1, most_graphs=1)
    run(batch(3))
    run(batch(3))
    run(batch(5))
    with pytest.warns(fp8compile.Fp8Warning, match="has 1 graphs"):
        run(batch(5))
    run(batch(5))
    run(batch(3))
    assert recorder == ["run", "record", "replay", "run", "run", "run", "replay"]


def test_schedulers_outside_of_the_step(recorder: list[str]) -> None:
    training = Training()
    twin = copy.deepcopy(training)
    found = []
    for t, run in ((training, training.captured()), (twin, twin.step)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(t.opt, 0.5, total_steps=8, cycle_momentum=False)
        torch.manual_seed(1)
        found.append([])
        for _ in range(7):
            found[-1].append(run(batch()).item())
            scheduler.step()
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert recorder.count("record") == 1


def test_a_rate_that_becomes_a_float(recorder: list[str]) -> None:
    training = Training()
    run = training.captured(warmup=1)
    run(batch())
    run(batch())
    before = [p.detach().clone() for p in training.model.parameters()]
    training.opt.param_groups[0]["lr"] = 0.0
    run(batch())
    assert all(map(torch.equal, training.model.parameters(), before))
    assert recorder == ["run", "record", "replay", "replay"]


def _load(t: Training) -> None:
    t.opt.load_state_dict(copy.deepcopy(t.opt.state_dict()))


CHANGES: dict[str, Callable[[Training], Any]] = {
    "evaluation": lambda t: t.model.eval(),
    "a loaded checkpoint": _load,
    "a parameter's memory": lambda t: setattr(t.model[0].weight, "data", t.model[0].weight.data.clone()),
    "a setting": lambda t: t.opt.param_groups[0].update(weight_decay=0.1),
    "a setting of somebody's own": lambda t: t.opt.param_groups[0].update(scale_of_mine=2),
    "a parameter that is frozen": lambda t: t.model[0].weight.requires_grad_(False),
    "a module's number": lambda t: setattr(t.model[1], "temperature", 2.0),
    "a module's tensor": lambda t: setattr(t.model[1], "table", torch.ones(3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_recorded_again(recorder: list[str], change: str) -> None:
    training = Training()
    run = training.captured(warmup=1)
    for _ in range(3):
        run(batch())
    twin = copy.deepcopy(training)
    CHANGES[change](training)
    CHANGES[change](twin)
    assert losses(run, 3) == pytest.approx(losses(twin.step, 3), rel=1e-6)
    assert recorder == ["run", "record", "replay", "replay", "forget", "run", "record", "replay", "replay"]


def test_a_gradient_from_elsewhere(recorder: list[str]) -> None:
    """What a backward pass outside of the step has left is added to, as without a graph."""
    training = Training()
    run = training.captured(warmup=1)
    for _ in range(3):
        run(batch())
    twin = copy.deepcopy(training)
    for t in (training, twin):
        t.model[0].weight.grad = torch.ones(8, 4)
    assert losses(run, 3) == pytest.approx(losses(twin.step, 3), rel=1e-6)
    assert recorder == ["run", "record", "replay", "replay", "run", "record", "replay", "replay"]


def test_two_steps_of_one_model(recorder: list[str]) -> None:
    """Each begins with zero_grad, and leaves gradients of its own."""
    training = Training("before")
    first, second = training.captured(warmup=1), training.captured(warmup=1)
    for _ in range(4):
        first(batch())
        second(batch())
    assert recorder == ["run"] * 2 + ["record", "replay"] * 2 + ["replay"] * 4


def test_what_changes_in_every_step_ends_it(recorder: list[str]) -> None:
    training = Training()
    run = training.captured(warmup=1)
    for i in range(2 * captured_step.MOST_LOST):
        training.opt.param_groups[0]["weight_decay"] = (i // 2) * 0.1
        run(batch())
    training.opt.param_groups[0]["weight_decay"] = 0.0
    with pytest.warns(fp8compile.Fp8Warning, match="recorded 8 times, as settings changed.*cycle_momentum=False"):
        run(batch())
    del recorder[:]
    for _ in range(5):
        run(batch())
    assert recorder == ["run"] * 5


def test_inputs_that_are_never_alike_end_it(recorder: list[str]) -> None:
    training = Training()
    step = lambda x, i: training.step(x * (1 + i))  # noqa: E731
    run = fp8compile.capture_step(step, training.model, training.opt, most_graphs=2)
    for i in range(8):
        run(batch(), i)
    with pytest.warns(fp8compile.Fp8Warning, match="its inputs have had 9 forms"):
        run(batch(), 8)
    for i in range(9, 20):
        run(batch(), i)
    assert recorder == ["run"] * 20


def test_rates_that_groups_share(recorder: list[str]) -> None:
    """torch gives a rate that is a tensor to every group."""
    training = Training()
    first, second = training.model[0].weight, training.model[2].weight
    rate = torch.tensor(0.1)
    training.opt = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=rate)
    run = training.captured(warmup=1)
    run(batch())
    training.opt.param_groups[0]["lr"] = 0.0
    before = first.detach().clone(), second.detach().clone()
    run(batch())
    assert [float(group["lr"]) for group in training.opt.param_groups] == pytest.approx([0.0, 0.1])
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])
    training.opt.param_groups[1]["lr"] = torch.tensor([0.3])
    run(batch())
    assert float(training.opt.param_groups[1]["lr"]) == pytest.approx(0.3)


def test_a_scaler_that_does_nothing_is_an_owner(recorder: list[str]) -> None:
    training = Training()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    run = fp8compile.capture_step(training.step, training.model, training.opt, scaler, warmup=1)
    losses(run, 3)
    assert recorder == ["run", "record", "replay", "replay"]


def test_states_in_lists(recorder: list[str]) -> None:
    training = Training()
    run = training.captured(warmup=1)
    run(batch())
    state = training.opt.state[training.model[0].weight]
    state["factors"] = [torch.ones(2), torch.ones(3)]
    run(batch())
    run(batch())
    state["factors"][1] = torch.ones(3)
    run(batch())
    assert recorder == ["run", "record", "replay", "replay", "forget", "run"]


def test_a_call_that_fails_is_no_warmup(recorder: list[str]) -> None:
    training = Training()
    run = training.captured(warmup=2)
    with pytest.raises(RuntimeError):
        run(torch.randn(3, 5))
    assert not run.captured.calls  # type: ignore[attr-defined]


def test_modes_around_the_call_are_forms(recorder: list[str]) -> None:
    training = Training()
    run = training.captured(warmup=1)
    run(batch())
    with torch.no_grad():
        assert captured_step._form((batch(),), {}) not in run.captured.calls  # type: ignore[attr-defined]
    assert captured_step._form((batch(),), {}) in run.captured.calls  # type: ignore[attr-defined]


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1


def _scheduled(t: Training) -> Callable[..., Any]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(t.opt, lambda i: 0.9**i)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.step(x)
        scheduler.step()
        return loss

    return step


def _counting(t: Training) -> Callable[..., Any]:
    t.opt = Counting(t.model.parameters(), lr=0.1)
    return t.step


def _replacing(t: Training) -> Callable[..., Any]:
    t.model.register_buffer("mean", torch.zeros(4))

    def step(x: torch.Tensor) -> torch.Tensor:
        t.model.mean = t.model.mean + x.mean(0)  # not in place
        return t.step(x)

    return step


def _switching(t: Training) -> Callable[..., Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.step(x)
        t.model.train(not t.model.training)
        return loss

    return step


def _counted(counts_of: Callable[[Training], dict[str, Any]]) -> Callable[[Training], Callable[..., Any]]:
    def make(t: Training) -> Callable[..., Any]:
        counts = counts_of(t)
        counts["steps"] = 0

        def step(x: torch.Tensor) -> torch.Tensor:
            counts["steps"] += 1
            return t.step(x)

        return step

    return make


def _another_optimizer(t: Training) -> Callable[..., Any]:
    other = torch.optim.SGD([t.model[2].bias], lr=0.1)
    t.opt = torch.optim.SGD([t.model[0].weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.model(x).square().mean()
        loss.backward()
        t.opt.step()
        other.step()
        t.model.zero_grad()
        return loss

    return step


def _replaced_gradient(t: Training) -> Callable[..., Any]:
    weight = t.model[0].weight

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = t.model(x).square().mean()
        loss.backward()
        weight.grad = weight.grad.clamp(-1, 1)
        return loss

    return step


def _returning(t: Training) -> Callable[..., Any]:
    return lambda x: (t.step(x), t)


REFUSED: dict[str, tuple[Callable[[Training], Callable[..., Any]], str]] = {
    "a scheduler": (_scheduled, "writes a learning rate"),
    "a count in Python": (_counting, "changes states on the host"),
    "a buffer that is replaced": (_replacing, "changes tensors on the host"),
    "another mode": (_switching, "changes modes on the host"),
    "a count of an optimizer's own": (_counted(lambda t: t.opt.param_groups[0]), "changes settings on the host"),
    "a count of all parameters": (_counted(lambda t: t.opt.state), "changes states on the host"),
    "a count of a module": (_counted(lambda t: vars(t.model)), "changes modes on the host"),
    "an optimizer that was not given": (_another_optimizer, "not given the optimizer"),
    "a gradient that is replaced": (_replaced_gradient, "leaves another gradient"),
    "a result of no known kind": (_returning, "returns a Training"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_replay_would_not_do_is_refused(recorder: list[str], case: str) -> None:
    training = Training()
    make, text = REFUSED[case]
    step = make(training)
    run = fp8compile.capture_step(step, training.model, training.opt)
    for _ in range(3):
        run(batch())
    with pytest.raises(fp8compile.CaptureError, match=text):
        run(batch())
    assert "replay" not in recorder


def test_what_a_refused_step_has_exchanged_is_put_back(recorder: list[str]) -> None:
    training = Training()
    run = fp8compile.capture_step(_replacing(training), training.model, training.opt)
    for _ in range(3):
        run(batch())
    kept, weight = training.model.mean, training.model[0].weight
    with pytest.raises(fp8compile.CaptureError):
        run(batch())
    assert training.model.mean is kept
    assert training.model[0].weight is weight
    assert "zero_grad" not in vars(training.opt)


def test_gradients_that_are_zeroed_outside(recorder: list[str]) -> None:
    training = Training(zero="outside")
    run = training.captured()
    for _ in range(3):
        run(batch())
        training.opt.zero_grad()
    with pytest.raises(fp8compile.CaptureError, match=r"put zero_grad\(\) of the model or the optimizer into"):
        run(batch())
    assert all(p.grad is None for p in training.model.parameters())


def test_gradients_that_stay_where_they_are_may_be_zeroed_outside(recorder: list[str]) -> None:
    training = Training(zero="outside")
    twin = copy.deepcopy(training)
    found = []
    for t, run in ((training, training.captured()), (twin, twin.step)):
        torch.manual_seed(1)
        found.append([])
        for _ in range(6):
            found[-1].append(run(batch()).item())
            t.opt.zero_grad(set_to_none=False)
    assert found[0] == pytest.approx(found[1])
    assert recorder == ["run"] * 3 + ["record"] + ["replay"] * 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (torch.zeros(3, 4, requires_grad=True), "whose gradient is asked for"),
        (torch.zeros(3, 4).to_sparse().to_dense().as_subclass(type("Mine", (torch.Tensor,), {})), "not a Mine"),
        (object(), "not a object"),
    ],
)
def test_inputs_that_no_graph_takes(recorder: list[str], given: Any, text: str) -> None:
    training = Training()
    with pytest.raises(fp8compile.OptionError, match=text):
        training.captured()(given)
    assert recorder == []


def test_owners() -> None:
    training = Training()
    with pytest.raises(fp8compile.OptionError, match="not a dict"):
        fp8compile.capture_step(training.step, {})
    with pytest.raises(fp8compile.OptionError, match="needs the model"):
        fp8compile.capture_step(training.step)
    with pytest.raises(fp8compile.OptionError, match="warmup=0"):
        training.captured(warmup=0)
    with pytest.raises(fp8compile.OptionError, match="most_graphs=0"):
        training.captured(most_graphs=0)
    with pytest.raises(fp8compile.OptionError, match="captures a function, and 3 is none"):
        fp8compile.capture_step(3, training.model)  # pyright: ignore[reportArgumentType]


def test_8_bit_states_are_seen(recorder: list[str]) -> None:
    model = nn.Linear(64, 64)
    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters(), capturable=True))
    step = torch.compile(opt.step, backend="fp8", options={"executor": "eager"})

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        step()
        opt.zero_grad()
        return loss

    run = fp8compile.capture_step(train, model, opt, warmup=1)
    for _ in range(3):
        run(torch.randn(2, 64))
    state = opt.state[model.weight]["exp_avg"]
    assert isinstance(state, fp8compile.FP8State)
    state.payload.data = state.payload.data.clone()
    run(torch.randn(2, 64))
    assert recorder == ["run", "record", "replay", "replay", "forget", "run"]


@pytest.mark.parametrize("own", [{"mode": "reduce-overhead"}, {"inductor": {"triton.cudagraphs": True}}])
def test_a_model_with_graphs_of_its_own_is_refused(own: dict[str, Any]) -> None:
    run = torch.compile(nn.Linear(32, 32), backend="fp8", options={"executor": "eager", **own})
    with to_be_captured(), pytest.raises(fp8compile.OptionError, match="CUDA graphs of its own"):
        run(torch.randn(32, 32))


def test_what_is_compiled_in_a_captured_step_is_compiled_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(backend, "compile_graph", lambda gm, inputs, options, **_: seen.append(options) or (gm, []))
    for context in (contextlib.nullcontext(), to_be_captured()):
        torch.compiler.reset()
        with context:
            torch.compile(nn.Linear(32, 32), backend="fp8")(torch.randn(32, 32))
    assert [options.captured for options in seen] == [False, True]


@pytest.mark.parametrize("own", [False, True])
def test_nothing_is_compiled_again_for_the_recording(recorder: list[str], own: bool) -> None:
    """What watches `zero_grad` and keeps tensors changes nothing that Dynamo guards; own: a step traced as a whole."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.LayerNorm(64))
    kind = Lion if own else torch.optim.AdamW
    opt = kind(model.parameters(), **({} if own else {"capturable": True}))
    run = torch.compile(model, backend="fp8", options={"executor": "eager", "select": "all"})
    update = torch.compile(opt.step, backend="fp8", options={"executor": "eager"})

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = run(x).square().mean()
        loss.backward()
        update()
        model.zero_grad()
        return loss

    captured = fp8compile.capture_step(step, model, opt)
    for _ in range(3):
        captured(torch.randn(32, 64))
    with torch._dynamo.config.patch(error_on_recompile=True):
        captured(torch.randn(32, 64))
        captured(torch.randn(32, 64))
    assert recorder[-3:] == ["record", "replay", "replay"]
