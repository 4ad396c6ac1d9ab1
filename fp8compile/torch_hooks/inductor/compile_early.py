"""Compile early: processes compile a generated kernel as soon as Inductor has written it into a graph's code.

Inductor hands kernels of its own to its pool of processes while it writes the code. Of those that it has not written,
ours among them, it does so when the code is loaded, and then waits for all of them.
"""

from __future__ import annotations

import ast
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile  # the pool; it keeps what was begun, by source
from torch._inductor.codegen.wrapper import PythonWrapperCodegen  # what writes a graph's code

from fp8compile.torch_hooks.inductor.our_graph import is_ours

OF_OTHERS = "# Original path"  # begins the comment on a kernel that Inductor has not written


def compile_early() -> None:
    """Patch how Inductor writes the definition of a kernel; in graphs of ours the kernel is compiled from then on."""
    define = PythonWrapperCodegen.define_kernel

    def defined(
        self: Any, kernel_name: str, kernel_body: str, metadata: str | None = None, *more: Any, **others: Any
    ) -> Any:
        if is_ours() and (metadata or "").startswith(OF_OTHERS):
            _begin(kernel_body)
        return define(self, kernel_name, kernel_body, metadata, *more, **others)

    PythonWrapperCodegen.define_kernel = defined  # type: ignore[method-assign]


def _begin(definition: str) -> None:
    """Hand a kernel to the processes that compile; if they have not started, or it is none for them, do nothing."""
    if inductor_config.cpp_wrapper or not AsyncCompile.use_process_pool():
        return
    given = call_of(definition)
    if given is not None:
        name, source, device = given
        AsyncCompile().triton(name, source, device_str=device)


def call_of(definition: str) -> tuple[str, str, str] | None:
    """Return name, source and device in `async_compile.triton('…', '''…''', device_str='…')`; None of anything else."""
    try:
        call = ast.parse(definition.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "async_compile.triton":
            return None
        name, source = map(ast.literal_eval, call.args)
        (device,) = (ast.literal_eval(x.value) for x in call.keywords if x.arg == "device_str")
    except (SyntaxError, ValueError):
        return None
    return name, source, device
