"""Triton's interpreter, made to agree with a GPU: under TRITON_INTERPRET=1 generated kernels run on a CPU.

    interpreter.prepare()       once, before the first kernel runs

Its own casts truncate to BF16, and round FP8 half up and without saturation; here every cast is torch's, to nearest
even. With that a kernel agrees with the reference bit for bit, but for transcendental functions and the order of sums.
"""

from __future__ import annotations

import importlib
import linecache
import math
import os
import sys
import weakref
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
    """Correct the interpreter, and interpret Triton's own functions even if they were imported before.

    Does nothing where kernels are compiled.
    """
    if not INTERPRETED:
        return
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
    _make_shapes_once(module)
    _leave_alone_what_fits(importlib.import_module("triton.language.semantic").TritonSemantic)


def _place(code: CodeType) -> tuple[str, int]:
    """File and line of a function's `def`, without a Triton function made of it, which reads the source once more."""
    line = code.co_firstlineno  # that of its first decorator
    while not linecache.getline(code.co_filename, line).strip().startswith("def "):
        line += 1
    return code.co_filename, line


def _make_shapes_once(module: Any) -> None:
    """Every operator makes a block's type and a tensor, and both write down a shape, number by number; it is the same
    few shapes over and over, and nobody writes to them. Left to itself this takes half of the time of a kernel."""
    core = module.tl.core
    make_block, tensor = core.block_type.__init__, core.tensor
    blocks: dict[Any, dict[str, Any]] = {}  # attributes of a block type, by type of element and shape
    shapes: dict[Any, tuple[Any, Any]] = {}  # a tensor's (shape, number of elements), by its sizes
    numbers: dict[Any, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(element_ty, core.pointer_type):  # which is no key
            return make_block(self, element_ty, shape)
        key = (element_ty, *(s.value if isinstance(s, core.constexpr) else s for s in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        return vars(self).update(blocks[key])

    def of_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            numel = core.constexpr(math.prod(sizes))
            shapes[sizes] = core.tuple([core.constexpr(s) for s in sizes]), numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def numpy_type(of: Any) -> Any:
        element = of.element_ty if isinstance(of, core.block_type) else of
        if isinstance(element, core.pointer_type):
            return numpy_of(element)
        if element not in numbers:
            numbers[element] = numpy_of(element)
        return numbers[element]

    numpy_of, module._get_np_dtype = module._get_np_dtype, numpy_type
    core.block_type.__init__, tensor.__init__ = block_type, of_tensor


def _leave_alone_what_fits(semantic: Any) -> None:
    """Every operator casts and broadcasts its operands, most of which have the type and the shape already."""
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value

    def cast_others(self: Any, x: Any, to: Any, *more: Any, **named: Any) -> Any:
        return x if x.type.scalar is to.scalar else cast(self, x, to, *more, **named)

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        # tensors of one shape share the tuple (`_make_shapes_once`)
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    semantic.cast, semantic.broadcast_impl_value = cast_others, broadcast_others


def _once_a_launch(module: Any) -> Any:
    """The interpreter's own change of `triton.language` before a function runs, left out where it is in place: a kernel
    calls dozens of functions, and each would look through all of the language again."""
    patch = module._patch_lang
    modules = (module.tl, module.tl.core)
    in_place: set[Any] = set()
    named_by: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()

    def patch_lang(function: Any) -> Any:
        if (named := named_by.get(function)) is None:
            named_by[function] = named = {x for x in function.__globals__.values() if any(x is m for m in modules)}
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
