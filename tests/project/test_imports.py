"""Imports run down from room to room, without circles; docs/imports.md shows them (FP8COMPILE_ACCEPT=1 renews it)."""

from __future__ import annotations

import os

import networkx
import pytest

from docs import imports

# Rooms stand in an order (`docs.imports.ROOMS`), and a room may import those that stand lower. Beside that:
MAY_RUN_UP = {
    ("insight", "front door"): "explain compiles with the backend; the doctor knows the versions of torch",
    ("passes.optimizer", "optimizer"): "the operators that load and store states",
    ("torch_hooks", "optimizer"): "graphs of optimizers are known by their states, and warn of what is not merged",
    ("plan", "torch_hooks"): "which graphs one call made, and the user's line",
    ("options", "adaptive"): "the settings of the automatic mode",
    ("options", "optimizer"): "the recipe of an optimizer's states",
    ("options", "plan"): "a plan that is handed back",
    ("operators", "plan"): "the operators that measure casts add up statistics",
    ("kernels.codegen.spec", "kernels.reference"): "what operations on scales mean: the same as for the operators",
}
READ_INSIGHT = {  # the front door, and dumps, which observe what is compiled
    "fp8compile": "fp8compile.insight",
    "fp8compile.__main__": "fp8compile.insight.command_line",
    "fp8compile.compile_graph": "fp8compile.insight.dump",
}


def test_modules_make_no_circle():
    graph = networkx.DiGraph([(a, b) for a, targets in imports.imports().items() for b in targets])
    circles = [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]
    assert circles == [], "these modules import each other, perhaps within functions or for types"


def test_imports_between_rooms_run_down():
    arrows = {(a, b) for a, targets in imports.room_imports().items() for b in targets}
    assert {room for arrow in arrows for room in arrow} <= set(imports.ROOMS), "a room has no place in the order"
    place = imports.ROOMS.index
    up = {(a, b) for a, b in arrows if place(a) > place(b)}
    assert up - MAY_RUN_UP.keys() == set(), "these rooms import one that stands higher"
    assert MAY_RUN_UP.keys() - up == set(), "no longer needed"


def test_only_the_front_door_and_dumps_read_insight():
    for module, targets in imports.imports().items():
        if not module.startswith("fp8compile.insight"):
            for target in targets:
                allowed = READ_INSIGHT.get(module, "no module")
                assert not target.startswith("fp8compile.insight") or target.startswith(allowed), f"{module} → {target}"


def test_imports_within_functions_and_for_types_count(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.py").write_text("def f():\n    from fp8compile import b\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    from .a import f\n")
    monkeypatch.setattr(imports, "TREES", {"fp8compile": tmp_path})
    assert imports.imports() == {"fp8compile.a": {"fp8compile.b"}, "fp8compile.b": {"fp8compile.a"}}


def test_the_page_is_current():
    if os.environ.get("FP8COMPILE_ACCEPT"):
        imports.PAGE.write_text(imports.page())
    assert imports.PAGE.read_text() == imports.page(), "run `make accept`"
