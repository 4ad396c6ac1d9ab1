"""Modules with full backward hooks are compiled whole, and their hooks see what they see without torch.compile."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook, register_module_full_backward_pre_hook
from torch.utils.checkpoint import checkpoint

import fp8compile

SIZE = 32
PLAIN = fp8compile.Recipe("bf16", None, None, None)
EXACT = {"executor": "eager", "strict": True, "recipe": PLAIN, "save": "bf16"}  # computes as torch does
FP8 = {"executor": "eager", "strict": True, "select": "all"}

Seen = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns of hooks on modules whose inputs take no gradients, and of global hooks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        warnings.filterwarnings("ignore", "Using `torch.compile")
        yield


class Two(nn.Module):
    """Takes two tensors, something else and a keyword; gives two tensors and something else."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, mode: str, y: Tensor, n: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor, str]:
        return self.left(x) * scale + n, self.right(y).relu(), mode


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.middle = nn.Sequential(nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE))
        self.two, self.last = Two(), nn.Linear(SIZE, SIZE)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = x + (checkpoint(self.middle, x, use_reentrant=False) if self.checkpointed else self.middle(x))
        a, b, _ = self.two(x, "mode", x * 2, torch.ones((), dtype=torch.long), scale=0.5)
        return self.last(a + b)


def model(**kind: bool) -> Model:
    torch.manual_seed(0)
    return Model(**kind)


class Small(nn.Module):
    """Two linears, the second in a module of several."""

    def __init__(self) -> None:
        super().__init__()
        self.first, last = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        self.middle = nn.Sequential(nn.GELU(), last)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.middle(self.first(x))


def noting(seen: Seen, name: str, change: Callable[[Tensor], Tensor] | None = None) -> Callable[..., Any]:
    """A hook that notes its gradients, and may change the first."""

    def hook(module: nn.Module, *values: tuple[Tensor | None, ...]) -> Any:
        seen.append((name, type(module).__name__, *([x if x is None else x.clone() for x in v] for v in values)))
        given = values[0]
        changes = change is not None and given and given[0] is not None
        return (change(given[0]), *given[1:]) if changes else None  # type: ignore[misc]

    return hook


def double(x: Tensor) -> Tensor:
    return x * 2


def on_every_module(m: nn.Module, seen: Seen) -> None:
    for name, module in m.named_modules():
        module.register_full_backward_hook(noting(seen, name))


def on_every_module_before(m: nn.Module, seen: Seen) -> None:
    for name, module in m.named_modules():
        module.register_full_backward_pre_hook(noting(seen, name))


def both_on_torchs_own(m: nn.Module, seen: Seen) -> None:
    for name in ("first", "middle", "middle.2", "last"):
        module = m.get_submodule(name)
        module.register_full_backward_hook(noting(seen, f"{name} after"))
        module.register_full_backward_pre_hook(noting(seen, f"{name} before"))


def that_change_gradients(m: nn.Module, seen: Seen) -> None:
    middle, two = m.get_submodule("middle"), m.get_submodule("two")
    middle.register_full_backward_hook(noting(seen, "after", double))
    middle.register_full_backward_hook(noting(seen, "after that", double))
    middle.register_full_backward_pre_hook(noting(seen, "before", double))
    two.register_full_backward_hook(noting(seen, "two", double))


def on_a_module_of_many_inputs(m: nn.Module, seen: Seen) -> None:
    m.get_submodule("two").register_full_backward_hook(noting(seen, "two"))


def beside_forward_hooks(m: nn.Module, seen: Seen) -> None:
    middle = m.get_submodule("middle")
    middle.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    middle.register_forward_hook(lambda module, args, output: output + 1)
    middle.register_full_backward_hook(noting(seen, "middle"))


COMPILE: dict[str, Callable[..., Callable[..., Tensor]]] = {
    "torch.compile": lambda m, **options: torch.compile(m, backend="fp8", options=options),
    "model.compile": lambda m, **options: m.compile(backend="fp8", options=options) or m,
    "a function": lambda m, **options: torch.compile(lambda x: m(x), backend="fp8", options=options),
}


def run(m: nn.Module, call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Forward for all inputs, then backward for all; outputs and gradients."""
    outputs = [call(x) for x in inputs]
    for output in outputs:
        output.square().mean().backward()
    return [*outputs, *(p.grad for p in m.parameters()), *(x.grad for x in inputs if x.requires_grad)]  # type: ignore[misc]


def batches(count: int = 2, needs_gradient: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, SIZE).requires_grad_(needs_gradient) for _ in range(count)]


def assert_same(found: Seen, expected: Seen) -> None:
    assert [call[:2] for call in found] == [call[:2] for call in expected], "order and number of calls"
    for call, other in zip(found, expected, strict=True):
        for values, wanted in zip(call[2:], other[2:], strict=True):
            assert [x is None for x in values] == [x is None for x in wanted]
            for x, y in zip(values, wanted, strict=True):
                if x is not None:
                    torch.testing.assert_close(x, y)


# Every two of a way to compile and of an input that takes a gradient, or none, are met together; each site is met once.
@pytest.mark.parametrize(
    "how, site, needs_gradient",
    [
        ("torch.compile", on_every_module, False),
        ("torch.compile", on_every_module_before, True),
        ("model.compile", on_every_module, True),
        ("model.compile", both_on_torchs_own, False),
        ("a function", that_change_gradients, True),
        ("a function", on_a_module_of_many_inputs, False),
        ("torch.compile", beside_forward_hooks, True),
    ],
)
def test_hooks_see_what_they_see_in_eager(how: str, site: Callable[..., None], needs_gradient: bool) -> None:
    """Two forwards before two backwards: hooks of each call know their own."""
    found, expected = [], []
    mine, theirs = model(), model()
    site(mine, found)
    site(theirs, expected)
    actual = run(mine, COMPILE[how](mine, **EXACT), batches(needs_gradient=needs_gradient))
    wanted = run(theirs, theirs, batches(needs_gradient=needs_gradient))
    assert expected
    assert_same(found, expected)
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y)
    (plan,) = [plan for plan in fp8compile.compiles() if plan.matmuls]
    assert len(plan.matmuls) >= 6 * 3 - 1, "all linears are in one graph"


def test_global_hooks() -> None:
    found, expected = [], []
    torch.manual_seed(0)
    mine = Small()
    theirs = copy.deepcopy(mine)
    mine.compile(backend="fp8", options=EXACT)
    for m, seen in ((mine, found), (theirs, expected)):
        handles = [
            register_module_full_backward_hook(noting(seen, "after")),
            register_module_full_backward_pre_hook(noting(seen, "before")),
        ]
        try:
            run(m, m, batches())
        finally:
            for handle in handles:
                handle.remove()
    assert len(expected) == 2 * 2 * 5
    assert_same(found, expected)


def test_matmuls_are_in_fp8() -> None:
    """As they are without hooks, bit by bit."""
    mine, seen = model(), []
    on_every_module(mine, seen)
    run(mine, torch.compile(mine, backend="fp8", options=FP8), batches(1))
    assert len(fp8compile.last_compile().converted) == 6 * 3 - 1
    plain = model()
    run(plain, torch.compile(plain, backend="fp8", options=FP8), batches(1))
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.slow
def test_inductors_code_calls_them() -> None:
    found, expected = [], []
    torch.manual_seed(0)
    mine = Small()
    theirs = copy.deepcopy(mine)
    for m, seen in ((mine, found), (theirs, expected)):
        m.middle.register_full_backward_hook(noting(seen, "after", double))
        m.middle.register_full_backward_hook(noting(seen, "after that", double))
        m.middle.register_full_backward_pre_hook(noting(seen, "before", double))
    compiled = torch.compile(mine, backend="fp8", options={**EXACT, "executor": "inductor"})
    actual, wanted = run(mine, compiled, batches()), run(theirs, theirs, batches())
    assert_same(found, expected)
    for x, y in zip(actual, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_checkpointed() -> None:
    found, expected = [], []
    mine, theirs = model(checkpointed=True), model(checkpointed=True)
    both_on_torchs_own(mine, found)
    both_on_torchs_own(theirs, expected)
    run(mine, torch.compile(mine, backend="fp8", options=EXACT), batches(1))
    run(theirs, theirs, batches(1))
    assert_same(found, expected)


@pytest.mark.parametrize(
    "options",
    [{"recipe": {"base": "tensorwise", "output": {"left": {"delayed": True}}}, "save": "fp8"}, {"adaptive": "auto"}],
    ids=str,
)
def test_other_options(options: dict[str, Any]) -> None:
    mine, seen = model(), []
    both_on_torchs_own(mine, seen)
    compiled = torch.compile(mine, backend="fp8", options=FP8 | options)
    for _ in range(3):
        run(mine, compiled, batches(1))
    assert len(seen) == 3 * 8


def test_sizes_that_change() -> None:
    mine, seen = Small(), []
    on_every_module(mine, seen)
    compiled = torch.compile(mine, backend="fp8", options=EXACT)
    for rows in (4, 6, 9):
        run(mine, compiled, [torch.randn(rows, SIZE)])
    assert [call[3][0].shape[0] for call in seen] == [4] * 5 + [6] * 5 + [9] * 5


def test_backward_twice() -> None:
    mine, seen = Small(), []
    mine.middle.register_full_backward_hook(noting(seen, "middle"))
    loss = torch.compile(mine, backend="fp8", options=EXACT)(batches(1)[0]).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    assert len(seen) == 2


def test_what_a_hook_raises_is_raised() -> None:
    mine = Small()
    mine.middle.register_full_backward_hook(lambda *_: 1 / 0)
    loss = torch.compile(mine, backend="fp8", options=EXACT)(batches(1)[0]).square().mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()


@pytest.mark.parametrize("before", [False, True])
def test_another_number_of_gradients_is_refused(before: bool) -> None:
    mine = Small()
    register = mine.middle.register_full_backward_pre_hook if before else mine.middle.register_full_backward_hook
    register(lambda module, *values: (*values[0], None))
    loss = torch.compile(mine, backend="fp8", options=EXACT)(batches(1)[0]).square().mean()
    with pytest.raises(RuntimeError, match="invalid number of grad_"):
        loss.backward()


def test_no_gradients_no_hooks() -> None:
    mine, seen = Small(), []
    on_every_module(mine, seen)
    with torch.no_grad():
        torch.compile(mine, backend="fp8", options=EXACT)(batches(1)[0])
    assert not seen


def test_other_backends_are_as_they_were() -> None:
    """Only where this backend compiles are hooks traced: others break their graphs, as torch has it."""
    mine, seen = Small(), []
    mine.middle.register_full_backward_hook(noting(seen, "middle"))
    graphs = []

    def other(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    torch.compile(mine, backend=other)(batches(1)[0]).sum().backward()
    assert len(graphs) == 2
    assert len(seen) == 1


def test_hooks_that_come_and_go() -> None:
    """Dynamo sees them where a module had one when it was compiled."""
    mine, seen = Small(), []
    compiled = torch.compile(mine, backend="fp8", options=EXACT)

    def names() -> list[str]:
        seen.clear()
        run(mine, compiled, batches(1))
        return [call[0] for call in seen]

    first = mine.middle.register_full_backward_hook(noting(seen, "first"))
    assert names() == ["first"]
    second = mine.middle.register_full_backward_hook(noting(seen, "second"))
    assert names() == ["first", "second"]
    first.remove()
    assert names() == ["second"]
    second.remove()
    assert names() == []


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1

    def method(self, *_: Any) -> None:
        self.calls += 1

    def of(self, _: str, *__: Any) -> None:
        self.calls += 1


def test_kinds_of_hooks() -> None:
    """An object, a method, a partial function and a lambda."""
    counters = [Counter() for _ in range(4)]
    mine = Small()
    for hook in (
        counters[0],
        counters[1].method,
        functools.partial(counters[2].of, "name"),
        lambda *_: counters[3].method(),
    ):
        mine.middle.register_full_backward_hook(hook)
    compiled = torch.compile(mine, backend="fp8", options=EXACT)
    for i in range(3):
        run(mine, compiled, batches(1))
        assert [counter.calls for counter in counters] == 4 * [i + 1]
    assert len(fp8compile.compiles()) == 1
