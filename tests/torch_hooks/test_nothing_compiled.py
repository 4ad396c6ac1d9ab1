"""Where torch compiles nothing of a function, one warning says so, and why; where it compiles something, none does.

Warnings of this package are errors in all tests, so every compiled function of the suite is a case of the second.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables.builder import VariableBuilder

import fp8compile
from fp8compile.errors import Fp8Warning
from fp8compile.torch_hooks.calls import compiled_calls

SIZE = 32
OPTIONS = {"executor": "eager", "strict": True, "select": "all"}
FP8: Any = {"backend": "fp8", "options": OPTIONS}


def data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 6, SIZE)


class Around(nn.Module):
    """Linears around a recurrent module."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.middle, self.last = (
            nn.Linear(SIZE, SIZE), kind(SIZE, SIZE, batch_first=True), nn.Linear(SIZE, SIZE)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu())[0])


class Breaking(nn.Module):
    """Reads a number, and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x * 2 if x.sum().item() > 0 else x)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))


def messages(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, Fp8Warning)]


# Every kind, and every way to compile it.
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("torch.compile", nn.LSTM),
        ("model.compile", nn.GRU),
        ("in a function", nn.RNN),
        ("in a module", nn.LSTM),
        ("torch.compile", nn.GRU),
    ],
)
def test_a_recurrent_module_alone_is_said_once(kind: type[nn.RNNBase], how: str) -> None:
    m: Any = kind(SIZE, SIZE, batch_first=True)
    given = mlp()
    torch.compile(given, **FP8)(data())
    if how == "torch.compile":
        call, name = torch.compile(m, **FP8), kind.__name__
    elif how == "model.compile":
        m.compile(**FP8)
        call, name = m, kind.__name__
    elif how == "in a module":
        call, name = torch.compile(nn.Sequential(m), **FP8), "Sequential"
    else:
        call, name = torch.compile(lambda x: m(x)[0], **FP8), "<lambda>"
    (message,) = messages(lambda: call(data()))
    plan = fp8compile.last_compile()
    assert plan.failure == message.removeprefix("fp8: ")
    assert not plan.matmuls
    assert f"{name} was compiled" in message
    assert not messages(lambda: [call(data()) for _ in range(3)])
    if how == "model.compile" and not graphs_of(lambda: nn.Linear(SIZE, SIZE), in_place=True):
        assert "Use torch.compile(module, …)" in message  # torch takes up none of its own modules in place
    else:
        assert "nn.LSTM, nn.GRU and nn.RNN run in torch's own kernels" in message
    assert message.removeprefix("fp8: ")[:40] in " ".join(str(plan).split())
    assert [p.matmuls for p in fp8compile.compiles() if p.matmuls], "the model before is there"


def test_the_warning_points_at_the_call() -> None:
    compiled = torch.compile(nn.LSTM(SIZE, SIZE), **FP8)
    with pytest.warns(Fp8Warning) as caught:
        compiled(data())
    assert caught[0].filename == __file__


class Stacked(nn.Module):
    """Recurrent modules within expressions; the second is surrounded by graphs of the first, but for the gradient of
    what it is given."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Around(kind) for _ in range(2)])
        self.head = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.parts[0](x)
        return self.head(x + self.parts[1](x))


@pytest.mark.parametrize(
    "kind, of, matmuls",
    [(nn.LSTM, Around, 2 + 3), (nn.GRU, Stacked, 2 + 3 + 3), (nn.RNN, Around, 2 + 3)],  # not the head
)
def test_what_is_around_a_recurrent_module_is_compiled(of: Any, matmuls: int, kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    m = of(kind)
    plain = copy.deepcopy(m)
    output = torch.compile(m, **FP8)(data())
    output.square().mean().backward()
    assert sum(len(plan.converted) for plan in fp8compile.compiles()) == matmuls
    expected = plain(data())
    expected.square().mean().backward()
    assert torch.nn.functional.cosine_similarity(output.flatten(), expected.flatten(), 0) > 0.99
    for p, q in zip(m.parameters(), plain.parameters(), strict=True):
        assert torch.nn.functional.cosine_similarity(p.grad.flatten(), q.grad.flatten(), 0) > 0.95  # FP8's noise


def graphs_of(made: Callable[[], nn.Module], in_place: bool = False) -> list[str]:
    """The graphs that another backend gets of a module."""
    graphs: list[str] = []

    def other(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(str(gm.graph))
        return gm

    m: Any = made()
    if in_place:
        m.compile(backend=other)
    else:
        m = torch.compile(m, backend=other)
    m(data())
    return graphs


def test_other_backends_meet_recurrent_modules_as_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    found = graphs_of(lambda: Around(nn.GRU))
    torch.compiler.reset()
    monkeypatch.setattr(VariableBuilder, "wrap_module", VariableBuilder.wrap_module.__wrapped__)
    assert found == graphs_of(lambda: Around(nn.GRU))


def test_a_module_after_a_recurrent_one() -> None:
    """Both are torch's own, which Dynamo takes up by one frame that they share."""
    (message,) = messages(lambda: torch.compile(nn.LSTM(SIZE, SIZE), **FP8)(data()))
    assert "LSTM" in message
    torch.compile(nn.Linear(SIZE, SIZE), **FP8)(data())
    assert fp8compile.last_compile().converted


@pytest.mark.parametrize("made", [mlp, lambda: nn.Linear(SIZE, SIZE)])
def test_torchs_own_modules_compiled_in_place(made: Callable[[], nn.Module]) -> None:
    """torch before 2.14 takes up none of their frames."""
    taken_up = graphs_of(made, in_place=True)
    m = made()
    m.compile(**FP8)
    found = messages(lambda: [m(data()) for _ in range(2)])
    if taken_up:
        assert not found
        assert fp8compile.last_compile().converted
    else:
        (message,) = found
        assert "Use torch.compile(module, …)" in message
        assert fp8compile.last_compile().failure in message


def test_own_modules_in_one_of_torchs_compiled_in_place() -> None:
    m = nn.Sequential(Breaking())
    m.compile(**FP8)
    m(data())
    assert fp8compile.last_compile().converted


class Untraceable(nn.Module):
    """Dynamo leaves it as a whole: what it cannot trace is in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x * x.sum().item()
        return x @ self.linear.weight


def test_what_dynamo_leaves_is_said_of_each_model_of_the_class() -> None:
    """The second time Dynamo does not even try."""
    for _ in range(2):
        (message,) = messages(lambda: torch.compile(Untraceable(), **FP8)(data()))
        assert "nothing of Untraceable was compiled" in message
    assert "torch.compiler.reset()" in message


def test_nothing_is_said_where_a_graph_was_reached_or_found_compiled() -> None:
    for m in (mlp(), mlp(), Breaking(), Breaking(), Around(nn.GRU), Around(nn.GRU)):
        compiled = torch.compile(m, **FP8)
        for _ in range(2):
            compiled(data())
    torch.compiler.reset()
    for _ in range(2):
        torch.compile(mlp(), **FP8)(data())
    assert len(fp8compile.compiles()) == 1, "Dynamo's cache had it"


def test_nothing_is_said_where_there_is_nothing_to_compile() -> None:
    for function in (lambda: 3, lambda x: x, lambda x: x.shape, lambda x: None):
        arguments = [data()] if function.__code__.co_argcount else []
        for _ in range(2):
            compiled = torch.compile(function, **FP8)
            for _ in range(2):
                compiled(*arguments)


@torch.compiler.disable
def by_choice(x: Tensor) -> Tensor:
    return x @ x.mT


def test_nothing_is_said_of_what_is_left_by_choice() -> None:
    torch.compile(lambda x: by_choice(x), **FP8)(data())
    torch.compile(by_choice, **FP8)(data())
    torch.compile(lambda x: torch._dynamo.graph_break(), **FP8)(data())
    with torch.compiler.set_stance("force_eager"):
        torch.compile(mlp(), **FP8)(data())
        torch.compile(nn.LSTM(SIZE, SIZE), **FP8)(data())
    torch.compile(mlp(), **FP8, disable=True)(data())


def test_other_backends_are_not_watched() -> None:
    torch.compile(nn.LSTM(SIZE, SIZE), backend="eager")(data())
    torch.compile(nn.LSTM(SIZE, SIZE), backend="aot_eager")(data())


def test_functions_that_call_compiled_ones_are_not_taken_for_them() -> None:
    """The outer one is left by torch, and what it calls is compiled by itself."""
    inner = torch.compile(mlp(), **FP8)
    outer = torch.compile(lambda x: inner(x), **FP8)
    outer(data())
    broken = torch.compile(lambda x: inner(x + x.sum().item()), **FP8)
    broken(data())
    aside = torch.compile(lambda x: by_choice(inner(x)), **FP8)
    aside(data())


def test_a_call_that_raises_is_not_judged() -> None:
    lstm = nn.LSTM(SIZE, SIZE)
    compiled = torch.compile(lstm, **FP8)
    with pytest.raises((RuntimeError, ValueError)):
        compiled(torch.zeros(3, 4, SIZE + 1))
    try:
        raise KeyError
    except KeyError:  # while another error is handled
        (message,) = messages(lambda: compiled(data()))
    assert "nothing of LSTM" in message


def test_a_model_that_raised_first_is_said_at_its_next_call() -> None:
    m = Untraceable()
    compiled = torch.compile(m, **FP8)
    with pytest.raises(RuntimeError):
        compiled(torch.zeros(3, SIZE + 1))
    (message,) = messages(lambda: compiled(data()))
    assert "nothing of Untraceable was compiled" in message


def test_fullgraph_raises_as_torch_does() -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(nn.LSTM(SIZE, SIZE), **FP8, fullgraph=True)(data())


def test_a_registered_name_is_watched() -> None:
    name = fp8compile.register_backend("fp8_watched", **OPTIONS)
    with pytest.warns(Fp8Warning, match="nothing of LSTM"):
        torch.compile(nn.LSTM(SIZE, SIZE), backend=name)(data())


def test_explain_says_it() -> None:
    with pytest.warns(Fp8Warning, match="nothing of"):
        told = fp8compile.explain(nn.LSTM(SIZE, SIZE), data())
    assert "run in torch's own kernels" in told.failure
    with pytest.raises(LookupError):
        fp8compile.last_compile()


@pytest.mark.parametrize("reset", [torch.compiler.reset, torch._dynamo.reset])
def test_reset_forgets_every_time(reset: Callable[[], None]) -> None:
    compiled = torch.compile(mlp(), **FP8)
    for _ in range(3):
        compiled(data())
        assert fp8compile.last_compile().matmuls
        reset()
        assert not fp8compile.compiles()
        with pytest.raises(LookupError):
            fp8compile.last_compile()


def test_reset_forgets_what_was_not_compiled() -> None:
    compiled = torch.compile(nn.LSTM(SIZE, SIZE), **FP8)
    assert messages(lambda: compiled(data()))
    assert fp8compile.last_compile().failure
    torch.compiler.reset()
    with pytest.raises(LookupError):
        fp8compile.last_compile()
    assert not compiled_calls._given_up


def test_compiled_models_are_copied_and_pickled() -> None:
    compiled = torch.compile(mlp(), **FP8)
    expected = compiled(data())
    assert torch.equal(copy.deepcopy(compiled)(data()), expected)
    calls = pickle.loads(pickle.dumps(compiled_calls.Calls(len, None, is_known=True)))
    assert calls.is_known
    m = Breaking()
    m.compile(**FP8)
    m(data())
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert twin(data()).shape == m(data()).shape
