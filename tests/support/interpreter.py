"""Triton's interpreter, made to agree with a GPU: under TRITON_INTERPRET=1 generated kernels run on a CPU.

    interpreter.prepare()       once, before the first kernel runs

Its own casts truncate to BF16, and round FP8 half up and without saturation; here every cast is torch's, to nearest
even. With that a kernel agrees with the reference bit for bit, but for transcendental functions and the order of sums.
"""

from __future__ import annotations

import importlib
import linecache
import os
import sys
from types import CodeType
from typing import Any

import numpy as np
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def prepare() -> None:
    """Correct the interpreter, and interpret Triton's own functions even if they were imported before."""
    module: Any = importlib.import_module("triton.runtime.interpreter")
    if module._convert_float is _convert_float:
        return
    _interpret_library(module)
    module._convert_float = _convert_float
    module.InterpreterBuilder.create_splat = _create_splat
    patch = module._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # int() of it NumPy 2.4 refuses

    module._patch_lang_tensor = patch_lang_tensor
    module._patch_lang = _once_a_launch(module)
    module.FunctionRewriter._get_jit_fn_file_line = lambda rewriter: _place(rewriter.fn.__code__)


def _place(code: CodeType) -> tuple[str, int]:
    """File and line of a function's `def`, without a Triton function made of it, which reads the source once more."""
    line = code.co_firstlineno  # that of its first decorator
    while not linecache.getline(code.co_filename, line).strip().startswith("def "):
        line += 1
    return code.co_filename, line


def _once_a_launch(module: Any) -> Any:
    """The interpreter's own change of `triton.language` before a function runs, left out where it is in place: a kernel
    calls dozens of functions, and each would look through all of the language again."""
    patch = module._patch_lang
    modules = (module.tl, module.tl.core)
    in_place: set[Any] = set()

    def patch_lang(function: Any) -> Any:
        named = {x for x in function.__globals__.values() if any(x is m for m in modules)}
        if named and named <= in_place:
            return None  # the function is called by a kernel, and nobody restores anything
        scope = patch(function)
        restore = scope.restore

        def forget() -> None:
            in_place.clear()
            restore()

        in_place.update(named)
        scope.restore = forget
        return scope

    return patch_lang


def _interpret_library(module: Any) -> None:
    """`tl.max` and its like are compiled functions if Triton was imported before TRITON_INTERPRET was set: pytest does,
    when it reads the filter of warnings, which names a class of ours."""
    jit = importlib.import_module("triton.runtime.jit")
    interpreted: dict[Any, Any] = {}
    for name in [name for name in sys.modules if name.split(".")[:2] == ["triton", "language"]]:
        for attribute, function in list(vars(sys.modules[name]).items()):
            if isinstance(function, jit.JITFunction):
                if function.fn not in interpreted:
                    interpreted[function.fn] = module.InterpretedFunction(function.fn)
                setattr(sys.modules[name], attribute, interpreted[function.fn])


def _create_splat(builder: Any, block: Any, scalar: Any) -> Any:
    """A block full of `scalar`, in the dtype of its data: that of a comparison is bool, whatever its label says."""
    return type(scalar)(np.full(block.shape, scalar.data.reshape(-1)[0], scalar.data.dtype), scalar.dtype.scalar)


def _convert_float(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """Bit patterns of `values` (numbers or bit patterns of type `source`) cast to `target`; same shape."""
    bits = np.array(values, order="C").view(BITS[values.dtype.itemsize])
    cast = torch.from_numpy(bits).view(DTYPES[source.name]).to(DTYPES[target.name])
    return cast.view(getattr(torch, f"int{8 * cast.dtype.itemsize}")).numpy()
