"""Launch kernels directly: what Inductor asks at every launch of a Triton kernel is asked at the first one.

Inductor calls a kernel through its autotuner, which looks for tuning, dumps and hooks each time. Kernels that it has
not written, ours among them, it launches through Triton's own launcher, which takes the host longer than torch's; and
torch's asks the driver about each tensor. A step of a small model waits for the host, and has some 600 launches.

After its first launch a kernel of a graph of ours is called as a function that launches it, and nothing else. While a
profiler or a debug mode is on, it is called through its autotuner again, which tells them.

Kernels of ours have torch's launcher from the start: for each signature Triton would have a C compiler make one, 0.2 s
each, one after the other, while the first step waits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._inductor.codecache import PyCodeCache, write_atomic
from torch._inductor.runtime.runtime_utils import triton_cache_dir, triton_hash_to_path_key
from torch._inductor.runtime.triton_heuristics import (
    CachingAutotuner,
    GridExpr,
    HeuristicType,
    StaticTritonCompileResult,
    TritonCompileResult,
)
from torch.autograd import profiler
from torch.utils._debug_mode import get_active_debug_mode

from fp8compile.cuda_capture import is_capturing
from fp8compile.torch_hooks.inductor.our_graph import is_ours

LOG = logging.getLogger(__name__)
Launch = Callable[..., None]
OWN = "_fp8compile_"  # begins the names of a generated function, beside which stand those of a kernel's arguments


def launch_directly() -> None:
    """Patch how Inductor loads the code of a graph and launches kernels of others; for graphs of ours it does more."""
    load, make_launcher = PyCodeCache.load_by_key_path, TritonCompileResult.make_launcher

    def loaded(*args: Any, **kwargs: Any) -> ModuleType:
        module = load(*args, **kwargs)
        if is_ours():
            kernels = {name: x for name, x in vars(module).items() if type(x) is CachingAutotuner}
            vars(module).update({name: DirectKernel(kernel) for name, kernel in kernels.items()})
        return module

    def launcher_of(result: TritonCompileResult) -> Any:
        launcher = _static_launcher(result) if is_ours() else None
        return make_launcher(result) if launcher is None else launcher

    PyCodeCache.load_by_key_path = staticmethod(loaded)  # type: ignore[method-assign]
    TritonCompileResult.make_launcher = launcher_of  # type: ignore[method-assign]


class DirectKernel:
    """Stands for a kernel in the code of a graph; `run` launches it.

    The kernel itself stays as it is: torch's caches write it to files.
    """

    def __init__(self, kernel: CachingAutotuner) -> None:
        self.kernel = kernel
        self.run: Launch = self._first_run

    def __getattr__(self, name: str) -> Any:
        if name == "kernel":  # of an object that is being copied, and has none yet
            raise AttributeError(name)
        return getattr(self.kernel, name)

    def _first_run(self, *args: Any, stream: int, **kwargs: Any) -> Any:
        """Launch as Inductor does, until it is known how the kernel can be launched directly.

        While a CUDA graph is being captured, nothing is loaded onto the GPU.
        """
        result = self.kernel.run(*args, stream=stream, **kwargs)
        if not (kwargs.get("benchmark_run") or is_capturing() or _is_changeable(self.kernel)):
            self.run = _direct_run(self.kernel) or self.kernel.run
        return result


def _is_changeable(kernel: CachingAutotuner) -> bool:
    """Return True if the autotuner may choose another launcher yet, or does more at a launch than to launch."""
    return (
        len(kernel.launchers) != 1
        or kernel.launchers[0].store_cubin
        or bool(kernel.inductor_meta.get("coordinate_descent_tuning"))
        or kernel.triton_interpret
        or kernel.dump_launch_params
        or kernel.dump_launch_tensors
    )


def _direct_run(kernel: CachingAutotuner) -> Launch | None:
    """Return a function that launches the kernel by torch's static launcher; None where that takes it not.

    What Triton launches may need memory of an allocator that the autotuner names to it each time, for the thread that
    launches.
    """
    (launcher,) = kernel.launchers
    if not getattr(launcher, "_is_static", False) or _has_another_launcher():
        return None
    try:
        return _generated(kernel, launcher)
    except Exception as error:  # of a torch that has other launchers: its autotuner knows them
        LOG.info("%s is launched by its autotuner: %s", kernel.fn.__name__, error)
        return None


def _generated(kernel: CachingAutotuner, launcher: Any) -> Launch | None:
    """Return a function that does what `launcher` does, the grid included; while somebody watches, the autotuner does.

    Of each tensor it hands on the address: torch's launcher would ask the driver whose that is. None if `launcher`
    drops arguments in a way that is not known here, and for a kernel that is loaded for several devices.
    """
    loaded = launcher.__globals__["runner"].__self__
    given = launcher.__code__.co_varnames[: launcher.__code__.co_argcount - 1]  # the last one is the stream
    passed = [name for n, name in enumerate(loaded.arg_names) if n not in loaded.full_constexprs and name in given]
    if len(passed) != len(loaded.arg_tys) or loaded.function is None or any(x.startswith(OWN) for x in given):
        return None
    values = [f"{name}.data_ptr()" if kind == "O" else name for name, kind in zip(passed, loaded.arg_tys, strict=True)]
    scratch = ["None"] * (bool(loaded.has_global_scratch) + bool(loaded.has_profile_scratch))
    grid = GridExpr.from_meta(kernel.inductor_meta, launcher.config)
    lines = [
        f"def run({', '.join(given)}, *, stream, **{OWN}others):",
        f"    if {OWN}others or {OWN}profiler._is_profiler_enabled or {OWN}debug_mode():",
        f"        return {OWN}autotuner({', '.join(given)}, stream=stream, **{OWN}others)",
        *[f"    {line}" for line in grid.prefix],
        f"    {OWN}launch({OWN}function, {grid.x_grid}, {grid.y_grid}, {grid.z_grid},",
        f"        {loaded.num_warps}, {loaded.shared}, {OWN}types,",
        f"        ({''.join(f'{value}, ' for value in [*values, *scratch])}), stream)",
    ]
    known = {
        "profiler": profiler,
        "debug_mode": get_active_debug_mode,
        "autotuner": kernel.run,
        "launch": loaded.C_impl._launch_kernel,
        "function": loaded.function,
        "types": loaded.arg_tys + "O" * len(scratch),
        "loaded": loaded,  # torch unloads the kernel when nobody has this any more
    }
    scope: dict[str, Any] = {f"{OWN}{name}": value for name, value in known.items()}
    exec("\n".join(lines), scope)
    run: Launch = scope["run"]
    return run


def _static_launcher(result: TritonCompileResult) -> Any:
    """Return a launcher of torch's own for a kernel that Inductor has not written; None if it takes no such kernel.

    Inductor has a setting for it, which does not reach the processes that compile.
    """
    if _has_another_launcher():
        return None
    kernel: Any = result.kernel
    meta = result.inductor_meta, result.compile_meta
    try:
        _write_binary(kernel, result.compile_meta)
        static = StaticTritonCompileResult.can_statically_launch(kernel, *meta, HeuristicType.POINTWISE)
        if static is None:
            return None
        made = StaticTritonCompileResult(static, result.config, result.compile_meta, result.inductor_meta)
        return made.make_launcher()
    except Exception as error:  # of a kernel that torch takes for none of its own: Triton launches it, as before
        LOG.info("%s is launched by Triton: %s", kernel.src.fn.__name__, error)
        return None


def _write_binary(kernel: Any, compile_meta: dict[str, Any]) -> None:
    """Write the kernel's binary to the file where torch looks for it, if it is not there.

    A process that compiles keeps all binaries in the folder of the first GPU that it has compiled for; torch looks in
    the folder of the kernel's own GPU.
    """
    folder = os.path.join(triton_cache_dir(compile_meta.get("device", 0)), triton_hash_to_path_key(kernel.hash))
    path = os.path.join(folder, f"{kernel.src.fn.__name__}.cubin")
    if "cubin" in kernel.asm and not os.path.exists(path):
        write_atomic(path, kernel.asm["cubin"], make_dirs=True)


def _has_another_launcher() -> bool:
    """Return True on devices whose launcher takes other arguments than CUDA's."""
    return torch.version.hip is not None or torch.version.xpu is not None
