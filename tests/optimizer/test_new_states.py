"""New states cost what they are: no tensor of the parameter's size is made on the way, and the codes are the same."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import printed_by
from torch import nn
from torch._subclasses import FakeTensorMode

import fp8compile
from fp8compile.kernels.optimizer import state_transfer, update
from fp8compile.kernels.reference import state_reference
from fp8compile.optimizer import new_states, state_ops
from fp8compile.optimizer.state_recipe import is_weight
from fp8compile.state_formats import names

COUNTER = torch.tensor([5], dtype=torch.int32)


@pytest.mark.parametrize("name", names())
def test_pieces_are_the_whole(name: str) -> None:
    """Random bits go by position in the whole; the last group of the last piece is cut short."""
    x = torch.randn(2 * state_transfer.PIECE + 300, generator=torch.Generator().manual_seed(0))
    payload, side = state_transfer.encode(x, name, COUNTER)
    whole = state_reference.encode(x, name, COUNTER)
    assert torch.equal(payload, whole[0])
    assert torch.equal(side, whole[1])
    for dtype in (torch.float32, torch.bfloat16):
        read = state_transfer.decode(payload, side, name, dtype)
        assert torch.equal(read, state_reference.decode(*whole, name).to(dtype))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("number", [0.0, -0.0, 0.1, -3.0, 1e-30])
@pytest.mark.parametrize("name", names())
def test_a_number_is_stored_as_a_tensor_of_it(
    name: str, number: float, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stochastic or not: no random bit matters where all elements of a group are equal."""
    monkeypatch.setattr(state_transfer, "is_capturing", lambda: captured)
    shape = torch.Size((3, 111))
    for count in range(5):
        counter = torch.tensor([count], dtype=torch.int32)
        payload, side = state_transfer.constant(shape, torch.tensor(number), name, counter)
        whole = state_reference.encode(torch.full(shape, number), name, counter)
        assert payload.shape == shape
        assert torch.equal(payload, whole[0])
        assert torch.equal(side, whole[1])


@pytest.mark.parametrize("elements", [7, 64, 300])
@pytest.mark.parametrize("name", names())
def test_states_of_one_number_share_no_memory(name: str, elements: int) -> None:
    """A state of one group above all: its side data is as large as that of the number, which is encoded once."""
    first, second = (fp8compile.FP8State.of(torch.zeros(()).expand(elements), format=name) for _ in range(2))
    first.side.fill_(torch.nan)
    first.payload.fill_(1)
    third = fp8compile.FP8State.of(torch.zeros(()).expand(elements), format=name)
    for state in (second, third):
        assert torch.equal(state.dequantize(), torch.zeros(elements))


@pytest.mark.parametrize("fake", [False, True])
def test_a_number_that_nobody_knows(fake: bool) -> None:
    """On the meta device, and as a fake tensor."""
    with FakeTensorMode() if fake else torch.device("meta"):
        x = torch.zeros(()).expand(300)
        state = fp8compile.FP8State.of(x, format="log")
    assert state.shape == (300,)


@pytest.mark.parametrize("name", names())
def test_the_default_device_encodes_no_number(name: str) -> None:
    """A state is where its number is."""
    state_transfer._encoded.cache_clear()
    zero = torch.zeros(()).expand(300)
    with torch.device("meta"):
        state = fp8compile.FP8State.of(zero, format=name)
    assert torch.equal(state.dequantize(), torch.zeros(300))


def test_states_of_torchs_optimizers_are_expanded_numbers_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_states, "LARGE", 1000)
    seen: list[bool] = []
    of = fp8compile.FP8State.of

    def watched(x: torch.Tensor, *given: Any, **named: Any) -> fp8compile.FP8State:
        seen.append(new_states.is_one_number(x))
        return of(x, *given, **named)

    monkeypatch.setattr(fp8compile.FP8State, "of", staticmethod(watched))
    parameters = [nn.Parameter(torch.randn(64, 65)), nn.Parameter(torch.randn(2000)), nn.Parameter(torch.randn(7))]
    images = nn.Parameter(torch.randn(8, 8, 4, 4).to(memory_format=torch.channels_last))
    opt = torch.optim.Adagrad([*parameters, images], initial_accumulator_value=0.1, lr=0.1)
    fp8compile.prepare_optimizer(opt, {"smallest": 2048})  # Adagrad makes states at once: those are plain
    opt = fp8compile.prepare_optimizer(torch.optim.AdamW([*parameters, images]), {"smallest": 2048})
    for p in (*parameters, images):
        p.grad = torch.ones_like(p)
    seen.clear()
    torch.compile(opt.step, backend="fp8", options={"executor": "eager", "strict": True})()
    assert seen == [True, True]
    for p in (parameters[1], images):  # those that stay plain are tensors again, laid out as their parameter
        assert opt.state[p]["exp_avg"].stride() == p.stride()
        assert opt.state[p]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("is_transposed", [False, True])
def test_states_of_a_weight_that_is_gathered_as_fp8_are_plain(is_transposed: bool) -> None:
    """What is filled is laid out as the weight, and is no weight: it would be gathered as FP8, and cannot be saved."""
    weight = fp8compile.prepare_fsdp(nn.Linear(96, 64)).weight
    parameter = weight.t() if is_transposed else weight
    state: dict[str, Any] = {"exp_avg": torch.full((), 2.0).expand(parameter.shape)}
    new_states.fill(state, parameter)
    assert type(state["exp_avg"]) is torch.Tensor
    assert state["exp_avg"].stride() == parameter.stride()
    assert torch.equal(state["exp_avg"], torch.full(parameter.shape, 2.0))


def test_weights_are_told_apart_whatever_the_layout() -> None:
    weight = torch.randn(8, 16, 3, 3)
    tilted = weight.to(memory_format=torch.channels_last)
    assert is_weight("slow", tilted, weight.clone())
    assert is_weight("slow", weight, tilted.clone())
    assert not is_weight("m", tilted, torch.zeros(()).expand(tilted.shape))


ELEMENTS = 50 << 20


def grown(prepared: bool) -> None:
    """Print the MiB by which a step that makes states grows a process, and those of the states that it keeps."""

    def optimizer(prepared: bool) -> tuple[torch.optim.Optimizer, nn.Parameter, Callable[[], Any]]:
        small = nn.Parameter(torch.ones(64, 64))
        large = nn.Parameter(torch.zeros(ELEMENTS // 1024, 1024, dtype=torch.bfloat16))
        opt = torch.optim.AdamW([small, large])
        if prepared:
            fp8compile.prepare_optimizer(opt)
        step = torch.compile(opt.step, backend="fp8", options={"executor": "eager"})
        small.grad = torch.ones_like(small)
        step()
        return opt, large, step

    optimizer(False)  # all is imported now
    opt, large, step = optimizer(prepared)
    large.grad = torch.zeros_like(large)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    update.run = lambda *given: None  # the reference, which a GPU does not run
    state_ops._library.impl("update_parameters", lambda *given: None, "CPU")
    step()
    kept = sum(x.payload.nbytes + x.side.nbytes for x in opt.state[large].values() if hasattr(x, "payload"))
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, kept / 2**20, flush=True)


@pytest.mark.parametrize("prepared", [False, True])
def test_the_first_step_takes_its_states_and_little_more(prepared: bool) -> None:
    """Resident memory, in MiB, of states of 50 Mi elements that are made in a step: 64 MiB above what is kept.

    Of an optimizer that is not prepared, and of one that is; each in a process of its own.
    """
    more, kept = map(float, printed_by(grown, prepared).splitlines()[-1].split())
    assert kept > 100
    assert more < kept + 64
