"""State that a process keeps is in one list, and one call empties it."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sized
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile import delayed, process_state, weight_uses
from fp8compile.optimizer.shared_step import shared_step, template
from fp8compile.optimizer.state_conversion import is_prepared
from fp8compile.options import Options
from fp8compile.plan import cast_statistics, plan_warnings, store
from fp8compile.plan.plan import Plan
from fp8compile.process_state import STORES, Until
from fp8compile.torch_hooks import kept_casts
from fp8compile.torch_hooks.calls import compiled_calls, graph_runs, late_host, trainers

PACKAGE = Path(fp8compile.__file__).parent
LIBRARIES = (PACKAGE, PACKAGE / "passes", PACKAGE / "kernels")  # links are not followed by rglob
WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
MUTABLE = (dict, list, set, bytearray, deque, itertools.count, *WEAK)
WRITES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "sort", "update",
}  # fmt: skip


def modules() -> Iterator[tuple[str, ModuleType, ast.Module]]:
    """Every module of the package, by its name below it, with its source."""
    files = {f.relative_to(PACKAGE): f for root in LIBRARIES for f in root.rglob("*.py")}
    for path, file in sorted(files.items()):
        name = ".".join(path.with_suffix("").parts)
        if path.name not in ("__init__.py", "__main__.py"):
            yield name, importlib.import_module(f"fp8compile.{name}"), ast.parse(file.read_text())


def assigned(tree: ast.Module) -> set[str]:
    """Names to which a module assigns something outside of functions."""
    found = set()
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def written(tree: ast.Module) -> set[str]:
    """Names that functions rebind, or what lies under which they change in place."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found |= set(node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WRITES:
            found |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            found |= {t.value.id for t in targets if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name)}
    return found


def is_mutable(value: Any) -> bool:
    """A container that can change, or an object of a class of ours that is not frozen."""
    if isinstance(value, MUTABLE):
        return True
    parameters = getattr(type(value), "__dataclass_params__", None)
    return type(value).__module__.startswith("fp8compile") and parameters is not None and not parameters.frozen


def test_the_list_has_every_variable_that_keeps_state():
    found = set()
    for name, module, tree in modules():
        own = {n for n in assigned(tree) if not n.startswith("__")}
        rewritten = written(tree) & own
        kept = {n for n in own if not n.isupper() and is_mutable(getattr(module, n, None))}
        found |= {(name, n) for n in kept | rewritten}
    listed = {(s.module, s.variable) for s in STORES}
    assert found - listed == set(), "give these a row in fp8compile/process_state.py, or names in capitals"
    assert listed - found == set(), "these keep nothing any more"


def test_what_a_cache_holds_depends_on_no_state():
    for name, module, _ in modules():
        state = {s.variable for s in STORES if s.module == name}
        for function in vars(module).values():
            if isinstance(function, functools._lru_cache_wrapper):
                read = state & set(function.__wrapped__.__code__.co_names)
                assert not read, f"{name}.{function.__name__} remembers what depends on {read}"


def test_every_store_that_is_emptied_can_be():
    for name, module, _ in modules():
        for s in STORES:
            if s.module == name and s.until in (Until.TORCH_RESET, Until.RESET):
                assert callable(getattr(module, s.variable).clear), s


@pytest.fixture
def filled() -> dict[tuple[str, str], Any]:
    """Something in every store that a reset empties, and nothing of models of other tests whose weights were freed."""
    process_state.reset()
    gc.collect()
    store._compiled.add([Plan()], None)
    plan_warnings._matched.add("skip head")
    plan_warnings._layers["a.layer"] = True
    compiled_calls._given_up[filled_code] = ["a reason"]
    graph_runs.runs.graphs = 3
    late_host._looked.looks = 7
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    shared_step._shared[optimizer] = shared_step.SharedStep(optimizer, Options())
    shared_step._templates["kind"] = []  # type: ignore[index]
    template._compiled["code"] = len  # type: ignore[index]
    trainers._warned.add(optimizer)
    kept_casts._values.keep(("key", ()), torch.zeros(2), (), (), in_place=True)
    parameter = torch.nn.Parameter(torch.zeros(2))
    delayed.scale(torch.ones(()), f"{delayed.namespace([parameter])}/a/output/left", "e4m3", 4, 0)
    delayed._loaded.add("model9/a/output/left")
    cast_statistics.start("a name")
    weight_uses._steps.count()
    fp8compile.adaptive.adaptive_graph._all.append(lambda: None)
    fp8compile.kernels.optimizer.update_launch._tables["key"] = "tables"
    return {"optimizer": optimizer, "parameter": parameter}


filled_code = (lambda: None).__code__


def sizes() -> dict[str, int]:
    """How much each store has that a reset empties."""
    empty = {}
    for s in STORES:
        if s.until in (Until.TORCH_RESET, Until.RESET):
            value = s.value()
            content = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, WEAK) else [value]
            empty[f"{s.module}.{s.variable}"] = sum(map(amount, content))
    return empty


def amount(x: Any) -> int:
    """How many `x` is, or holds; 1 of what holds nothing, and of nothing 0."""
    if x is None or isinstance(x, int):
        return x or 0
    return len(x) if isinstance(x, Sized) else 1


def test_reset_empties_all(filled):
    assert all(sizes().values()), sizes()
    process_state.reset()
    assert not any(sizes().values()), sizes()


def test_a_reset_of_torch_leaves_what_is_measured(filled):
    before = sizes()
    compiled_calls.reset()
    emptied = {f"{s.module}.{s.variable}" for s in STORES if s.until is Until.TORCH_RESET}
    assert sizes() == {name: 0 if name in emptied else size for name, size in before.items()}


def test_a_prepared_optimizer_stays_prepared():
    parameter = torch.nn.Parameter(torch.zeros(64, 128))
    optimizer = fp8compile.prepare_optimizer(torch.optim.AdamW([parameter]))
    process_state.reset()
    assert is_prepared(optimizer)


def test_a_store_of_a_module_that_nobody_imported_is_empty():
    assert process_state.Store("no.such.module", "_x", "nothing", Until.RESET).value() is None
