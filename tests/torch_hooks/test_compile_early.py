"""Kernels that Inductor has not written are compiled from when they are written into a graph's code."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from fp8compile.torch_hooks.inductor.compile_early import OF_OTHERS
from fp8compile.torch_hooks.inductor.our_graph import compiling_ours

SOURCE = """
@triton_heuristics.user_autotune(configs=[{'num_warps': 8}])
@triton.jit
def rows_e4m3(x0, y0):
    # a \\'\\'\\'quote\\'\\'\\'
    pass
"""
DEFINITION = f"async_compile.triton('rows_e4m3', '''{SOURCE}''', device_str='cuda')\n"
COMMENT = f"{OF_OTHERS}: kernels/rows.py:12"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was handed to the processes that compile."""
    handed: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: True))
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, *args, **kwargs: handed.append((*args, *kwargs.values())))
    return handed


def define(definition: str = DEFINITION, comment: str | None = COMMENT) -> list[Any]:
    """The lines of a graph's code, after a kernel has been defined in it."""
    lines: list[Any] = []
    PythonWrapperCodegen.define_kernel(SimpleNamespace(writeline=lines.append), "rows_e4m3_0", definition, comment)  # type: ignore[arg-type]
    return lines


def test_it_is_what_the_code_of_the_graph_hands_on_later(begun: list[Any]) -> None:
    with compiling_ours():
        (line,) = define()
    (early,) = begun
    exec(f"{line.kernel_name} = {line.kernel_body}", {"async_compile": AsyncCompile()})
    assert begun == [early, early]
    assert "a '''quote'''" in early[1]


@pytest.mark.parametrize("why", ["not ours", "Inductor's own", "no process", "C++", "not a kernel"])
def test_other_definitions_are_only_written(begun: list[Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no process":
        monkeypatch.setattr(AsyncCompile, "use_process_pool", classmethod(lambda cls: False))
    ours = compiling_ours() if why != "not ours" else contextlib.nullcontext()
    with ours, inductor_config.patch(cpp_wrapper=why == "C++"):
        given = "cpp_pybinding(['x'])" if why == "not a kernel" else DEFINITION
        assert len(define(given, None if why == "Inductor's own" else COMMENT)) == 1
    assert not begun
