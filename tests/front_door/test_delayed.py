"""Delayed scaling: what enters the history, what comes out of it, and that a checkpoint carries it."""

from __future__ import annotations

import copy
import functools
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import delayed, ops
from fp8compile.errors import Fp8Error

CAST = {"delayed": {"history": 3}}
ROLE = {"left": CAST, "right": CAST}
RECIPE = {"base": "tensorwise", "output": ROLE, "grad_input": ROLE, "grad_weight": ROLE}
OPTIONS = {"recipe": RECIPE, "select": "all", "executor": "eager", "strict": True}
INF, NAN = float("inf"), float("nan")


def scales(amaxes: list[float], history: int = 3, margin: int = 0, power_of_two: bool = False) -> list[float]:
    """The scales of a tensor whose amaxes come one a step."""
    return [ops.delayed_scale(torch.tensor(a), "key", "e4m3", history, margin, power_of_two).item() for a in amaxes]


def history(key: str = "key") -> list[float]:
    return delayed.state_dict()[key].tolist()


# --- one history


def test_the_scale_is_the_maximum_of_the_history_over_the_format_max():
    # step 1 has no history: current. Then max of the last three, all of which are at least this step's amax
    assert scales([448.0, 44.8, 4.48, 0.448]) == [1.0, 1.0, 1.0, 1.0]
    # now 448 has left the history: 44.8 is the largest of the last three
    assert scales([0.448]) == [pytest.approx(0.1)]
    assert history() == pytest.approx([0.448, 0.448, 4.48])


def test_the_history_holds_the_newest_first():
    scales([1.0, 2.0, 3.0, 4.0])
    assert history() == [4.0, 3.0, 2.0]


def test_the_guard_takes_the_current_amax_where_the_history_would_saturate():
    assert scales([448.0, 896.0]) == [1.0, 2.0]
    assert scales([895.0]) == [2.0]  # 895 < 896: the history serves


def test_an_amax_equal_to_the_history_does_not_need_the_guard_and_does_not_saturate():
    (first, second) = scales([3.3, 3.3])
    assert first == second
    data = ops.quantize(torch.tensor([[3.3, -3.3]]), torch.tensor(second), "e4m3", "tensor")
    assert data.float().tolist() == [[448.0, -448.0]]


@pytest.mark.parametrize(("margin", "wanted"), [(0, 1.0), (1, 2.0), (3, 8.0), (-1, 0.5)])
def test_the_margin_doubles_the_scale_of_the_history(margin, wanted):
    # the current scale of a first step has no margin; -1 halves, as long as 100 stays below 224
    assert scales([448.0, 100.0], margin=margin) == [1.0, wanted]


def test_a_power_of_two_scale_is_rounded_up():
    assert scales([448.0 * 3, 1.0], power_of_two=True) == [4.0, 4.0]


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_non_finite_amax_is_not_recorded_but_seen(bad):
    scales([448.0, 44.8])
    (scale,) = scales([bad])
    assert not torch.isfinite(torch.tensor(scale))
    assert history() == pytest.approx([44.8, 448.0, 0.0])
    assert scales([1.0]) == [1.0]


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_first_step_that_overflows_leaves_an_empty_history(bad):
    (scale,) = scales([bad])
    assert not torch.isfinite(torch.tensor(scale))
    assert history() == [0.0, 0.0, 0.0]


def test_zeros_have_scale_one():
    assert scales([0.0, 0.0]) == [1.0, 1.0]


def test_keys_have_separate_histories():
    for key, amax in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        ops.delayed_scale(torch.tensor(amax), key, "e4m3", 2, 0)
    assert {k: v.tolist() for k, v in delayed.state_dict().items()} == {"a": [3.0, 1.0], "b": [2.0, 0.0]}


@pytest.mark.parametrize(("length", "kept"), [(2, [4.0, 3.0]), (5, [4.0, 3.0, 2.0, 0.0, 0.0])])
def test_a_history_of_another_length_keeps_its_newest_entries(length, kept):
    scales([1.0, 2.0, 3.0, 4.0])
    scales([INF], history=length)  # records nothing
    assert history() == kept


def test_state_dict_is_a_copy():
    scales([1.0])
    state = delayed.state_dict()
    scales([2.0])
    assert state["key"].tolist() == [1.0, 0.0, 0.0]


def test_load_state_dict_copies_and_keeps_the_tensor_in_use():
    scales([1.0])
    state = {"key": torch.tensor([5.0, 4.0, 3.0]), "other": torch.tensor([1.0])}
    delayed.load_state_dict(state)
    scales([2.0])
    assert history() == [2.0, 5.0, 4.0]
    assert state["key"].tolist() == [5.0, 4.0, 3.0]
    assert history("other") == [1.0]


@pytest.mark.parametrize("wrong", [3.0, torch.ones(2, 2), torch.ones(3, dtype=torch.int64), None])
def test_load_state_dict_refuses_what_is_no_history(wrong):
    scales([1.0])
    with pytest.raises(Fp8Error, match=r"'bad' is not an amax history \(a 1-D float tensor\)"):
        delayed.load_state_dict({"key": torch.ones(3), "bad": wrong})
    assert history() == [1.0, 0.0, 0.0]  # nothing was loaded by halves


def test_reset_forgets_everything():
    scales([1.0])
    delayed.reset()
    assert delayed.state_dict() == {}


# --- in a model


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 32))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of the steps, on batches that the step number seeds and makes larger."""
    losses = []
    for i in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) * (1 + i)
        loss = (net(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, list[float]]:
    plain = model(seed)
    compiled = torch.compile(plain, backend="fp8", options=OPTIONS)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    return plain, compiled, optimizer, train(compiled, optimizer, range(steps))


class Long:
    """Seven steps of one model, compiled once; then the last four again, from what was saved after the third."""

    def __init__(self) -> None:
        plain, compiled, optimizer, _ = trained(0)
        self.losses, self.histories, self.weights = [], [], []
        for i in range(7):
            self.weights.append(plain[0].weight.abs().max().item())
            self.losses += train(compiled, optimizer, range(i, i + 1))
            self.histories.append(delayed.state_dict())
            if i == 2:
                saved = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
        self.plan = fp8compile.last_compile()
        self.state = {"model": saved[0], "optimizer": saved[1], "fp8": self.histories[2]}

        def again(histories: dict[str, torch.Tensor]) -> list[float]:
            plain.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            delayed.load_state_dict(histories)
            return train(compiled, optimizer, range(3, 7))

        self.again = again(self.histories[2])
        self.end = delayed.state_dict()
        self.without = again({k: torch.zeros_like(v) for k, v in self.histories[2].items()})


long = functools.cache(Long)


def test_every_operand_of_every_matmul_has_a_history_under_its_path():
    roles = {"0": ("output", "grad_weight"), "2": ("output", "grad_input", "grad_weight")}
    assert set(long().histories[0]) == {
        f"model0/{path}/{role}/{side}" for path in roles for role in roles[path] for side in ("left", "right")
    }
    assert {str(m.left) for m in long().plan.converted} == {"e4m3 tensor delayed(3)", "e5m2 tensor delayed(3)"}


def test_every_step_records_the_amax_of_the_tensor():
    amaxes = [
        torch.randn(16, 32, generator=torch.Generator().manual_seed(i)).mul(1 + i).abs().max().item() for i in (1, 0)
    ]
    histories = long().histories[1]
    assert histories["model0/0/output/left"].tolist() == [*amaxes, 0.0]
    # the weight before its update
    assert histories["model0/0/output/right"].tolist() == [long().weights[1], long().weights[0], 0.0]


def test_the_scale_in_the_model_is_that_of_the_history():
    plain = nn.Sequential(nn.Linear(32, 48))
    compiled = torch.compile(plain, backend="fp8", options=OPTIONS)
    compiled(torch.randn(16, 32)).sum().backward()
    x = torch.randn(16, 32) / 4
    amax_x = history("model0/0/output/left")[0]
    assert amax_x > 2 * x.abs().max()
    got = compiled(x).detach()

    def fake(t, amax):
        s = torch.tensor(amax) / 448.0
        return (t.detach() / s).to(torch.float8_e4m3fn).double() * s.double()

    bias = plain[0].bias.detach().double()
    wanted = fake(x, amax_x) @ fake(plain[0].weight, plain[0].weight.abs().max().item()).T + bias
    # FP32 sums of 32 products below 1/4: 32·2^-24 each at worst, with room for the scales and the bias
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=32 * 2.0**-24)
    current = fake(x, x.abs().max().item()) @ fake(plain[0].weight, plain[0].weight.abs().max().item()).T + bias
    assert (got.double() - current).abs().max() > 1e-3


def test_training_follows_current_scaling():
    losses = long().losses[:6]
    torch.compiler.reset()
    delayed.reset()
    plain = model()
    options = {**OPTIONS, "recipe": "tensorwise"}
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    current = train(torch.compile(plain, backend="fp8", options=options), optimizer, range(6))
    # E4M3 rounds to 2^-4 at worst; a loss averages 512 such errors of 32 products: well below a twentieth
    assert losses == pytest.approx(current, rel=0.05)
    assert losses[0] == current[0]  # the first step has no history
    assert losses != current


def test_a_checkpoint_continues_bitwise():
    assert long().again == long().losses[3:]
    assert all(torch.equal(long().end[k], v) for k, v in long().histories[-1].items())


def test_a_checkpoint_continues_bitwise_in_a_fresh_process(tmp_path):
    torch.save(long().state, tmp_path / "checkpoint.pt")
    torch.compiler.reset()  # as a fresh process: nothing compiled, no history
    delayed.reset()
    fresh = model(seed=1)
    fresh_optimizer = torch.optim.SGD(fresh.parameters(), lr=0.01, momentum=0.9)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    fresh.load_state_dict(state["model"])
    fresh_optimizer.load_state_dict(state["optimizer"])
    delayed.load_state_dict(state["fp8"])
    compiled = torch.compile(fresh, backend="fp8", options=OPTIONS)
    assert train(compiled, fresh_optimizer, range(3, 7)) == long().losses[3:]


def test_without_the_histories_training_continues_otherwise():
    assert long().without != long().again


def test_two_models_have_separate_histories():
    _a, _, _, alone = trained(3, seed=0)
    first = delayed.state_dict()
    _b, compiled_b, optimizer_b, _ = trained(2, seed=1)
    both = delayed.state_dict()
    assert {k.split("/")[0] for k in both} == {"model0", "model1"}
    assert all(torch.equal(both[k], v) for k, v in first.items())
    assert len(both) == 2 * len(first)
    del compiled_b, optimizer_b
    gc.collect()
    assert alone  # the first model is alive to here


def test_a_recompilation_keeps_the_history():
    _, compiled, _, _ = trained(2)
    before = delayed.state_dict()
    (compiled(torch.full((24, 32), 1e-3)) - 1).square().mean().backward()  # another batch size
    after = delayed.state_dict()
    assert set(after) == set(before)
    assert after["model0/0/output/left"].tolist() == [pytest.approx(1e-3), *before["model0/0/output/left"].tolist()[:2]]


def test_inference_and_an_overflow_do_not_touch_the_history():
    _, compiled, _, _ = trained(2)
    before = delayed.state_dict()
    with torch.no_grad():
        out = compiled(torch.full((16, 32), 1e6))
    plan = fp8compile.last_compile()
    assert plan.graph == "inference"
    assert {m.left.history for m in plan.converted} == {0}
    assert torch.isfinite(out).all()
    assert all(torch.equal(before[k], v) for k, v in delayed.state_dict().items())
    # nor does an overflow
    loss = compiled(torch.full((16, 32), INF)).square().mean()
    loss.backward()
    assert not torch.isfinite(loss)
    activations = ("model0/0/output/left", "model0/2/output/left", "model0/2/grad_input/left")
    after = delayed.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in activations)


def test_a_checkpointed_region_is_recorded_once_a_step():
    plain = model()
    compiled = torch.compile(
        lambda x: checkpoint(lambda y: plain(y), x, use_reentrant=False), backend="fp8", options=OPTIONS
    )
    for i in range(2):
        compiled(torch.full((16, 32), 1.0 + i)).sum().backward()
    records = {k: v.tolist() for k, v in delayed.state_dict().items()}
    # the input, as left operand of the output and as right operand of the weight gradient
    assert [v for v in records.values() if v[0] == 2.0] == [[2.0, 1.0, 0.0]] * 2
    assert [k for k, v in records.items() if v[2] != 0.0] == []


def test_a_module_called_twice_in_a_step_has_two_histories():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return self.fc(self.fc(x) * 100)

    plain = Twice()
    compiled = torch.compile(plain, backend="fp8", options=OPTIONS)
    for _ in range(3):
        out = compiled(torch.randn(16, 32))
        out.sum().backward()
    assert torch.isfinite(out).all()
    first, second = history("model0/fc/output/left"), history("model0/fc/output#1/left")
    assert len([v for v in first if v]) == len([v for v in second if v]) == 3  # one record a step
    assert min(second[:3]) > 10 * max(first[:3])


class OnTrunk(nn.Module):
    """Layers of its own behind a layer that it may share."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.own = trunk, nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.trunk(x).sin())


def test_models_that_share_a_layer_have_separate_histories() -> None:
    """The loss of one has a weight that puts its gradients far below those of the other."""
    trunk = nn.Linear(32, 48)
    models = [OnTrunk(trunk), OnTrunk(trunk)]
    steps = [torch.compile(m, backend="fp8", options=OPTIONS) for m in models]
    x = torch.randn(16, 32)
    for _ in range(3):
        for step, weight in zip(steps, (1.0, 1e-6), strict=True):
            trunk.zero_grad()
            models[1].zero_grad()
            (step(x).square().mean() * weight).backward()
    (exact,) = torch.autograd.grad(models[1](x).square().mean() * 1e-6, [models[1].own.weight])
    got = models[1].own.weight.grad
    assert got is not None
    assert float((got - exact).norm()) < 0.1 * float(exact.norm())
    sides = [history(f"model{i}/own/grad_weight/left") for i in range(2)]
    assert sides[0] == pytest.approx([1e6 * amax for amax in sides[1]], rel=0.1)


def resumed(seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model with what `long` saved after its third step."""
    plain = model(seed)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    plain.load_state_dict(long().state["model"])
    optimizer.load_state_dict(copy.deepcopy(long().state["optimizer"]))
    return plain, optimizer


@pytest.mark.parametrize("loads", [True, False])
def test_a_model_that_is_gone_leaves_its_number(loads: bool) -> None:
    """A model made anew in a process trains as one that is the first: with what was loaded, or without histories."""
    losses = []
    for is_first in (True, False):
        torch.compiler.reset()
        delayed.reset()
        if not is_first:
            trained(2, seed=5)
            torch.compiler.reset()
            gc.collect()
            assert max(history("model0/0/output/left")) > 0
        plain, optimizer = resumed()
        if loads:
            delayed.load_state_dict(long().state["fp8"])
        losses.append(train(torch.compile(plain, backend="fp8", options=OPTIONS), optimizer, range(3, 7)))
        assert {key.split("/")[0] for key in delayed.state_dict()} == {"model0"}
        del plain, optimizer
    assert losses[0] == losses[1]
    assert (losses[0] == long().losses[3:]) == loads


def test_evaluating_numbers_no_model() -> None:
    expected, state = long().losses[3:], long().state
    torch.compiler.reset()
    delayed.reset()
    other = torch.compile(model(seed=2), backend="fp8", options=OPTIONS)
    plain, optimizer = resumed()
    delayed.load_state_dict(state["fp8"])
    with torch.no_grad():
        other(torch.randn(16, 32))
    assert train(torch.compile(plain, backend="fp8", options=OPTIONS), optimizer, range(3, 7)) == expected


def test_histories_of_another_number_are_warned_of_once() -> None:
    """A model is trained before the one whose histories were loaded: it has none, and takes the number."""
    state = {key.replace("model0", "model1"): x for key, x in long().state["fp8"].items()}
    torch.compiler.reset()
    delayed.reset()
    plain, optimizer = resumed()
    delayed.load_state_dict(state)
    step = torch.compile(plain, backend="fp8", options=OPTIONS)
    with pytest.warns(fp8compile.Fp8Warning, match="loaded for 'model1/.*, and this model is numbered model0") as said:
        train(step, optimizer, range(3, 5))
    assert len(said) == 1


def test_layers_keep_their_histories_when_the_model_is_evaluated() -> None:
    """They are compiled one by one for training, and as a whole for evaluation; then for another batch."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32, bias=False)) for _ in range(3)))
    for i, layer in enumerate(layers):
        layer[0].weight.data.mul_(10.0**i)
    steps = [torch.compile(layer, backend="fp8", options=OPTIONS, dynamic=False) for layer in layers]
    whole = torch.compile(layers, backend="fp8", options=OPTIONS)

    def train_on(rows: int) -> None:
        x = torch.randn(rows, 32)
        for step in steps:
            x = step(x)
        x.square().mean().backward()

    train_on(16)
    with torch.no_grad():
        whole(torch.randn(16, 32))
    train_on(24)
    kept = [history(f"model{i}/0/output/right") for i in range(3)]
    for i, layer in enumerate(layers):
        assert kept[i][:2] == [layer[0].weight.abs().max().item()] * 2
