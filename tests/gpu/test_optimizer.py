"""Optimizer kernels and compiled optimizer steps on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, make_parameters, set_gradients
from torch import nn
from torch.profiler import ProfilerActivity, profile
from updates import SIZES, Data, adam, data_for, hard

import fp8compile
from fp8compile.kernels.optimizer import update as reference
from fp8compile.kernels.optimizer import update_launch
from fp8compile.kernels.optimizer.emit_update import UpdateSchedule
from fp8compile.kernels.optimizer.update_spec import Update

pytestmark = pytest.mark.gpu
FORMATS = ["log", "e4m3", "e5m2", "e4m3/linear", "e5m2/linear"]


def both(update: Update, schedule: UpdateSchedule | None = None) -> tuple[Data, Data]:
    sizes = (*SIZES, 100_000)
    mine, theirs = data_for(update, sizes, "cuda"), data_for(update, sizes)
    update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars, "cuda", schedule)
    reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    return mine, theirs


def assert_equal(update: Update, mine: Data, theirs: Data) -> None:
    names = [(i, name) for i in update.stored for name in update.slots[i].tensors]
    for k, (x, y) in enumerate(zip(mine.stored, theirs.stored, strict=True)):
        slot, name = names[k % len(names)]
        if name != "counter":
            as_bits = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[x.element_size()]
            assert torch.equal(x.cpu().view(as_bits), y.view(as_bits)), (slot, name, k // len(names))


@pytest.mark.parametrize("schedule", [(16, 4), (8, 2), (32, 8), (8, 4)])
@pytest.mark.parametrize("noise", ["", "/stochastic"])
@pytest.mark.parametrize("name", FORMATS)
def test_codes_bit_for_bit(name: str, noise: str, schedule: tuple[int, int]) -> None:
    update = adam(f"{name}{noise}", f"{name}{noise}", root="abs", quotient="mul")
    assert_equal(update, *both(update, UpdateSchedule(*schedule)))


@pytest.mark.parametrize("noise", ["", "/stochastic"])
@pytest.mark.parametrize("positive", [False, True])
def test_hard_groups_bit_for_bit(positive: bool, noise: str) -> None:
    """Wide, narrow, tiny and huge ones, with zeros."""
    update, theirs = hard(f"log{noise}", positive)
    mine = Data(*([x.cuda() for x in xs] for xs in (theirs.stored, theirs.read, theirs.scalars)))
    update_launch.launch(update.to_json(), mine.stored, mine.read, mine.scalars)
    reference.run(theirs.stored, theirs.read, theirs.scalars, update.to_json())
    assert_equal(update, mine, theirs)


@pytest.mark.parametrize("parameter", ["float32", "bfloat16", "stochastic", "split"])
def test_parameters_bit_for_bit(parameter: str) -> None:
    update = adam("log", "log/stochastic", parameter, "bfloat16", root="abs", quotient="mul")
    assert_equal(update, *both(update))


def test_updates_with_few_registers_bit_for_bit() -> None:
    update = adam("e4m3/linear", "e5m2/linear", "bfloat16", "bfloat16", root="abs", quotient="mul")
    assert update_launch.schedule_of(update) == update_launch.LIGHT
    assert_equal(update, *both(update))


def test_reference_on_the_gpu_is_the_reference() -> None:
    """The eager form of a state, on the device, stores the same codes."""
    from fp8compile.kernels.reference import state_reference

    x = torch.randn(5000) * torch.exp(torch.randn(5000))
    counter = torch.tensor([3], dtype=torch.int32)
    for name in FORMATS:
        payload, side = state_reference.encode(x, f"{name}/stochastic", counter)
        on_gpu = state_reference.encode(x.cuda(), f"{name}/stochastic", counter.cuda())
        assert torch.equal(on_gpu[0].cpu(), payload), name
        assert torch.equal(on_gpu[1].cpu(), side), name


def train(opt: torch.optim.Optimizer, step: Callable[[], Any], parameters: list[nn.Parameter], steps: int = 4) -> None:
    for i in range(steps):
        host = [p.detach().cpu() for p in parameters]
        set_gradients(host, i)
        for p, h in zip(parameters, host, strict=True):
            assert h.grad is not None
            p.grad = h.grad.cuda()
        opt.param_groups[0]["lr"] = 0.01 / (i + 1)
        step()


@pytest.mark.parametrize("arguments", [{}, {"foreach": True}, {"capturable": True}])
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "lion"])
def test_compiled_steps(name: str, arguments: dict[str, Any]) -> None:
    make, given = OPTIMIZERS[name]
    if "capturable" in arguments and name in ("adagrad", "sgd", "nesterov", "plain_sgd"):
        pytest.skip("this optimizer has no such argument")
    mine = [nn.Parameter(p.detach().cuda()) for p in make_parameters()]
    theirs = copy.deepcopy(mine)
    opt, full = make(mine, lr=0.01, **{**given, **arguments}), make(theirs, lr=0.01, **given)
    train(opt, torch.compile(opt.step, backend="fp8", options={"states": "float32", "strict": True}), mine)
    train(full, full.step, theirs)
    for p, q in zip(mine, theirs, strict=True):
        assert ((p - q).norm() / q.norm()).item() < 1e-5


def test_one_launch_and_little_memory() -> None:
    """200 parameters, 105 M elements: one kernel of ours a step, and no copy of anything in FP32."""
    parameters = [nn.Parameter(torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)) for _ in range(200)]
    opt = torch.optim.AdamW(parameters)
    step = torch.compile(opt.step, backend="fp8", options={"strict": True})
    for p in parameters:
        p.grad = torch.randn_like(p)
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    launches = [e for e in profiled.key_averages() if e.key.startswith("update_")]
    assert [e.count for e in launches] == [1]
    states = [x for state in opt.state.values() for x in state.values() if isinstance(x, fp8compile.FP8State)]
    stored = sum(x.payload.nbytes + x.side.nbytes for x in states)
    assert stored <= 2.2 * sum(p.numel() for p in parameters)


def test_resuming_is_bit_equal() -> None:
    def fresh() -> tuple[torch.optim.Optimizer, Callable[[], Any], list[nn.Parameter]]:
        parameters = [nn.Parameter(p.detach().cuda().bfloat16()) for p in make_parameters()]
        opt = fp8compile.prepare_optimizer(torch.optim.AdamW(parameters), {"parameters": "stochastic"})
        return opt, torch.compile(opt.step, backend="fp8", options={"strict": True}), parameters

    opt, step, mine = fresh()
    train(opt, step, mine, 2)
    state, parameters = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in mine]
    train(opt, step, mine, 2)
    other, resumed, theirs = fresh()
    other.load_state_dict(state)
    with torch.no_grad():
        for p, q in zip(theirs, parameters, strict=True):
            p.copy_(q)
    train(other, resumed, theirs, 2)
    for p, q in zip(mine, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("capturable", [False, True])
def test_unscaling_in_the_step(capturable: bool) -> None:
    """As GradScaler's own passes and a step: parameters and states bit for bit, also of a step that overflowed."""
    runs = []
    for fused in (True, False):
        parameters = [nn.Parameter(p.detach().cuda()) for p in make_parameters()]
        opt = torch.optim.AdamW(parameters, capturable=capturable)
        fp8compile.prepare_optimizer(opt, unscale=fused)
        opt.step = torch.compile(opt.step, backend="fp8", options={"strict": True})
        runs.append((parameters, opt, torch.amp.GradScaler("cuda", init_scale=3.0 * 2**14, growth_interval=2)))
    for i in range(6):
        found = []
        for parameters, opt, scaler in runs:
            generator = torch.Generator().manual_seed(i)
            factor = scaler.scale(torch.ones(1, device="cuda"))
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).cuda() * factor
            if i == 3:
                parameters[0].grad[1, 2] = torch.inf  # type: ignore[index]
            scaler.step(opt)
            scaler.update()
            states = [x for state in opt.state.values() for x in state.values()]
            plain = [x.dequantize() if isinstance(x, fp8compile.FP8State) else x.clone() for x in states]
            found.append([*(p.detach().clone() for p in parameters), *plain])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), i
