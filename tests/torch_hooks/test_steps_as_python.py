"""A step that Dynamo does not look at: on one thread, for one call, whatever other threads compile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import eval_frame

import fp8compile
from fp8compile.torch_hooks.calls import steps_as_python

OPTIONS: dict[str, Any] = {"executor": "eager"}


class Counting:
    """A backend that counts the graphs that it was asked for."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return gm.forward


def made_step() -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    parameter = nn.Parameter(torch.randn(64, 64))
    parameter.grad = torch.randn(64, 64)
    opt = torch.optim.AdamW([parameter])
    return opt, torch.compile(opt.step, backend="fp8", options=OPTIONS)


def reaches_a_backend() -> bool:
    backend = Counting()
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    return backend.graphs == 1


def test_other_threads_compile_while_a_step_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our context and the step itself, where torch asks for a depth: another thread calls what is compiled."""
    _, step = made_step()
    step()
    found: list[bool] = []
    original = torch._C._functorch.get_dynamic_layer_stack_depth

    def depth() -> int:
        if not found and steps_as_python._next.is_python:
            found.append(False)
            other = threading.Thread(target=lambda: found.append(reaches_a_backend()))
            other.start()
            other.join()
        return original()

    monkeypatch.setattr(torch._C._functorch, "get_dynamic_layer_stack_depth", depth)
    step()
    assert found == [False, True]


def test_what_a_hook_calls_is_compiled() -> None:
    opt, step = made_step()
    found: list[tuple[str, bool]] = []
    opt.register_step_pre_hook(lambda *_: found.append((eval_frame._stance.stance, reaches_a_backend())))
    step()
    assert found == [("default", True)]


def test_a_step_that_raises_leaves_nothing() -> None:
    opt, step = made_step()
    step()

    def refuse(*_: Any) -> None:
        raise KeyError("a hook")

    handle = opt.register_step_pre_hook(refuse)
    with pytest.raises(KeyError, match="a hook"):
        step()
    handle.remove()
    assert reaches_a_backend()
    step()


def test_a_call_that_never_came_is_forgotten() -> None:
    steps_as_python.leave_to_python()
    steps_as_python.forget()
    assert reaches_a_backend()


def test_a_step_that_was_not_asked_of_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def callback_from_stance(callback: Any) -> None:
        return None

    vars(callback_from_stance)["asks_us"] = True
    _, step = made_step()
    step()
    with monkeypatch.context() as patched:
        patched.setattr(eval_frame, "_callback_from_stance", callback_from_stance)
        step()
    assert reaches_a_backend()


def test_the_next_call_alone_is_left_to_python() -> None:
    steps_as_python.leave_to_python()
    assert not reaches_a_backend()
    assert reaches_a_backend()


def test_without_torchs_function_dynamo_sees_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that has no such function: the step is compiled as a whole."""
    monkeypatch.setattr(eval_frame, "_callback_from_stance", lambda callback: callback)
    assert not steps_as_python.is_possible()
    opt, step = made_step()
    step()
    assert any(isinstance(x, fp8compile.FP8State) for x in opt.state[opt.param_groups[0]["params"][0]].values())
