"""Checkpoints: 8-bit states through torch.save, torch.distributed.checkpoint and plain dictionaries, both ways."""

from __future__ import annotations

import copy
import functools
import io
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from optimizers import compiled, make_parameters, set_gradients
from torch import Tensor, nn

import fp8compile
from fp8compile import FP8State
from fp8compile.errors import StateError

SHAPES = ((70, 65), (9,), (64, 64))
RECIPE = {"first": "e4m3/stochastic", "second": "log/stochastic", "parameters": "split"}


def fresh(dtype: torch.dtype = torch.bfloat16, recipe: object = None, prepared: bool = True):
    mine = make_parameters(SHAPES, dtype)
    opt = torch.optim.AdamW(mine, lr=1e-3, weight_decay=0.1)
    if prepared:
        fp8compile.prepare_optimizer(opt, recipe or RECIPE)
    step, _ = compiled(opt)
    return opt, mine, step


def advance(mine: list[nn.Parameter], step, first: int, last: int) -> None:
    for i in range(first, last):
        set_gradients(mine, i)
        step()


@functools.cache
def compiled_steps() -> list[tuple[list[Tensor], dict]]:
    """Parameters and the optimizer's state before each of six compiled steps and after the last, made once."""
    opt, mine, step = fresh()
    found = []
    for i in range(7):
        found.append(([p.detach().clone() for p in mine], copy.deepcopy(opt.state_dict())))
        advance(mine, step, i, i + 1)
    return found


def state_after(steps: int) -> dict:
    return copy.deepcopy(compiled_steps()[steps][1])


def trained(steps: int):
    """An optimizer that went so many steps."""
    opt, mine, step = fresh()
    with torch.no_grad():
        for p, x in zip(mine, compiled_steps()[steps][0], strict=True):
            p.copy_(x)
    opt.load_state_dict(state_after(steps))
    return opt, mine, step


def saved(state: object) -> dict:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_torch_save(state: dict, folder: Path) -> dict:
    return saved(state)


def through_dcp(state: dict, folder: Path) -> dict:
    dcp.save({"optimizer": state}, checkpoint_id=folder, no_dist=True)
    target = trained(1)[0].state_dict()
    dcp.load({"optimizer": target}, checkpoint_id=folder, no_dist=True)
    return target


@pytest.mark.parametrize("way", [through_torch_save, through_dcp])
def test_resuming_is_bit_equal(way, tmp_path):
    parameters, state = compiled_steps()[3][0], way(state_after(3), tmp_path)
    expected, states = compiled_steps()[6][0], compiled_steps()[6][1]["state"]

    other, theirs, resumed = fresh()
    with torch.no_grad():
        for p, q in zip(theirs, parameters, strict=True):
            p.copy_(q)
    other.load_state_dict(state)
    advance(theirs, resumed, 3, 6)
    for i, (p, q) in enumerate(zip(expected, theirs, strict=True)):
        assert torch.equal(p, q)
        for name, x in states[i].items():
            y = other.state[q][name]
            if isinstance(x, fp8compile.FP8State):
                for part in ("payload", "side", "counter", "low"):
                    a, b = getattr(x, part), getattr(y, part)
                    assert (a is None and b is None) or torch.equal(a, b), (name, part)
            else:
                assert torch.equal(x, y)


def test_loading_does_not_alias_the_checkpoint():
    state = state_after(2)
    before = copy.deepcopy(state)
    other, theirs, resumed = fresh()
    other.load_state_dict(state)
    advance(theirs, resumed, 2, 4)
    assert torch.equal(state["state"][0]["exp_avg"].payload, before["state"][0]["exp_avg"].payload)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_checkpoints_load_into_eight_bit_states_and_back(dtype):
    plain, theirs, _ = fresh(dtype, prepared=False)
    for i in range(3):
        set_gradients(theirs, i)
        plain.step()
    opt, mine, step = fresh(dtype, "log")
    opt.load_state_dict(saved(plain.state_dict()))
    assert opt.state[mine[0]]["exp_avg"].format == "log"
    for p, q in zip(mine, theirs, strict=True):
        a, b = opt.state[p]["exp_avg_sq"], plain.state[q]["exp_avg_sq"]
        assert torch.allclose(a + 0.0, b, rtol=0.06)  # half a step of 254 over some 20 octaves
        assert opt.state[p]["step"] == 3
    advance(mine, step, 3, 4)

    back = fp8compile.plain_state_dict(opt)
    assert all(type(x) is torch.Tensor for state in back["state"].values() for x in state.values())
    again, others, _ = fresh(dtype, prepared=False)
    again.load_state_dict(saved(back))
    assert again.state[others[0]]["exp_avg"].dtype == dtype
    set_gradients(others, 4)
    again.step()


@pytest.mark.parametrize("recipe", [None, "float32"])
def test_a_plain_checkpoint_is_a_copy_of_all_states(recipe):
    opt, mine, step = fresh(torch.bfloat16, recipe)
    advance(mine, step, 0, 2)
    kept = fp8compile.plain_state_dict(opt)
    before = copy.deepcopy(kept)
    advance(mine, step, 2, 4)
    for key, state in kept["state"].items():
        assert all(torch.equal(x, before["state"][key][name]) for name, x in state.items())


def test_plain_fp32_states_reach_a_bf16_parameter_unrounded():
    """torch casts loaded states to the parameter's dtype; what is stored must come from the FP32 values."""
    opt, mine, _ = fresh(recipe="float32")
    values = torch.rand(SHAPES[0]) + 1e-3
    state = {"step": torch.tensor(1.0), "exp_avg": values, "exp_avg_sq": values}
    whole = opt.state_dict()
    opt.load_state_dict({**whole, "state": {0: state}})
    assert torch.equal(opt.state[mine[0]]["exp_avg"].dequantize(torch.float32), values)


def test_another_format_is_converted_and_keeps_the_missing_bits():
    other, theirs, _ = fresh(recipe={**RECIPE, "first": "log"})
    other.load_state_dict(saved(state_after(3)))
    x, y = state_after(3)["state"][0]["exp_avg"], other.state[theirs[0]]["exp_avg"]
    assert (x.format, y.format) == ("e4m3/stochastic", "log")
    assert torch.equal(x.low, y.low)
    assert torch.allclose(x.float(), y.float(), rtol=0.2, atol=1e-3)


def test_eight_bit_checkpoint_in_an_optimizer_that_was_not_prepared():
    opt, mine, _ = fresh(torch.float32)
    advance(mine, opt.step, 0, 3)
    assert isinstance(opt.state[mine[0]]["exp_avg"], FP8State)
    plain, theirs, _ = fresh(torch.float32, prepared=False)
    plain.load_state_dict(saved(opt.state_dict()))
    set_gradients(theirs, 3)
    plain.step()
    assert theirs[0].isfinite().all()


def corrupt_groups(state: dict) -> None:
    state["state"][0]["exp_avg"].side[0] = torch.tensor([2.0, 1.0])


def of_another_model(state: dict) -> None:
    state["state"][0], state["state"][2] = state["state"][2], state["state"][0]


def too_few(state: dict) -> None:
    state["param_groups"][0]["params"].pop()


def cut_off(state: dict) -> None:
    broken = state["state"][0]["exp_avg"]
    broken.side = broken.side[:-1]


@pytest.mark.parametrize(
    "damage, message",
    [
        (corrupt_groups, "least magnitude above"),
        (of_another_model, "of another model"),
        (too_few, "has 2 parameters, this optimizer 3"),
        (cut_off, "side data of"),
    ],
)
def test_damaged_and_foreign_states_are_refused_and_nothing_changes(damage, message):
    opt, *_ = trained(2)
    state = copy.deepcopy(opt.state_dict())
    damage(state)
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(StateError, match=message):
        opt.load_state_dict(state)
    after = opt.state_dict()
    for key, entries in before["state"].items():
        for name, x in entries.items():
            y = after["state"][key][name]
            if isinstance(x, fp8compile.FP8State):
                assert torch.equal(x.payload, y.payload)
                assert torch.equal(x.side, y.side)
            else:
                assert torch.equal(x, y)


FACTORED = {"Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2), "LBFGS": lambda ps: torch.optim.LBFGS(ps)}


@pytest.mark.filterwarnings("ignore:fp8. nothing of LBFGS.step was compiled")
@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("name", FACTORED)
def test_states_of_other_shapes_than_their_parameters_are_loaded_in_the_middle(name, prepared):
    """A factor of a matrix, and one vector for all parameters, of which the first is a vector itself."""

    def trained_on(loads: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in ((48,), (128, 64))]
        opt = FACTORED[name](parameters)
        if prepared:
            fp8compile.prepare_optimizer(opt)
        step = torch.compile(opt.step, backend="fp8", options={"executor": "eager"})
        for i in range(4):
            for p in parameters:
                p.grad = torch.randn(p.shape)
            step(lambda: torch.tensor(1.0)) if name == "LBFGS" else step()
            if loads and i == 1:
                opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        return parameters

    for x, y in zip(trained_on(True), trained_on(False), strict=True):
        assert torch.equal(x, y)


def test_a_plain_state_of_other_sizes_is_of_another_model():
    opt, *_ = fresh(torch.float32)
    state = {**opt.state_dict(), "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(7, 9)}}}
    with pytest.raises(StateError, match="of another model"):
        opt.load_state_dict(state)


def test_a_damaged_file_is_refused():
    state = state_after(1)
    state["state"][0]["exp_avg"].counter = None
    with pytest.raises(Exception, match="lacks its counter"):
        saved(state)


@pytest.mark.parametrize("before", [0, 1], ids=["at_once", "after_a_step"])
def test_a_checkpoint_of_a_fused_optimizer_fuses_nothing(before):
    other = make_parameters(SHAPES, torch.bfloat16)
    fused = torch.optim.AdamW(other, lr=1e-3, weight_decay=0.1, fused=True)
    advance(other, fused.step, 0, 2)
    opt, mine, step = fresh()
    advance(mine, step, 0, before)
    opt.load_state_dict(fused.state_dict())
    assert not opt.param_groups[0]["fused"]
    compilations = len(fp8compile.compiles())
    advance(mine, step, 2, 4)
    assert len(fp8compile.compiles()) > compilations
    assert opt.state[mine[0]]["exp_avg"].low is not None


@pytest.mark.parametrize("foreach", [None, True, False])
def test_how_an_optimizer_was_made_is_in_its_plain_checkpoint(foreach):
    mine = make_parameters(SHAPES[:1])
    opt = torch.optim.AdamW(mine, lr=1e-3, foreach=foreach)
    fp8compile.prepare_optimizer(opt)
    advance(mine, compiled(opt)[0], 0, 2)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    stock = torch.optim.AdamW(make_parameters(SHAPES[:1]), lr=1e-3)
    stock.load_state_dict(fp8compile.plain_state_dict(opt))
    assert stock.param_groups[0]["foreach"] is foreach


def test_states_of_a_checkpoint_from_before_the_rooms_are_read(tmp_path):
    """0.1.0 wrote the module of `FP8State` as it was then into every checkpoint."""
    state = FP8State.of(torch.randn(512), format="log")
    torch.save({"exp_avg": state}, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "old.pt", "w") as old:
        for name in new.namelist():
            data = new.read(name)
            if name.endswith("data.pkl"):
                assert b"cfp8compile.optimizer.states\nrebuild\n" in data
                data = data.replace(b"cfp8compile.optimizer.states\n", b"cfp8compile.states\n")
            old.writestr(name, data)
    read = torch.load(tmp_path / "old.pt", weights_only=True)["exp_avg"]
    assert isinstance(read, FP8State)
    assert torch.equal(read.dequantize(), state.dequantize())
