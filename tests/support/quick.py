"""What makes compiling quicker in every process of the tests, and changes nothing that is compiled or computed.

quicken()                              once a process
command("benchmarks.name", "--tiny")   runs a module in a process that does so first
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp.decompositions_for_rng import PhiloxState
from torch._dynamo import config as dynamo_config
from torch._dynamo import guards
from torch._dynamo import utils as dynamo_utils
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import config, cpp_builder
from torch._inductor.cpu_vec_isa import VecISA
from torch._logging._internal import trace_log
from torch._subclasses import FakeTensorMode
from torch.fx._symbolic_trace import Tracer, _Patcher
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.fx.experimental.symbolic_shapes import TLS, ShapeEnv


class Suppressed:
    """What `ShapeEnv.suppress_guards` does, without a line for the log of each call: there is one an operator."""

    def __enter__(self) -> None:
        self.before = getattr(TLS, "suppress_guards", False)
        TLS.suppress_guards = True

    def __exit__(self, *_: object) -> None:
        TLS.suppress_guards = self.before


NOTHING = torch.tensor(())


def _forget(state: PhiloxState) -> None:
    """What `PhiloxState.reset` does, of one tensor: twelve are traced for each graph, and asked for by
    functionalize_rng_ops alone."""
    state.seed = state.base_offset = NOTHING
    state.relative_offset, state.offset_advanced_at_least_once = 0, False


_patch = _Patcher.patch_method


def _patch_method(self: _Patcher, cls: type, name: str, new: Any, deduplicate: bool = True) -> None:
    """Do what `_Patcher.patch_method` does, but for the tracer of make_fx, which lets modules do what they do.

    Every attribute of `nn.Module` that is set has Python look up anew what it knew of hundreds of classes.
    """
    tracers = [cell.cell_contents for cell in new.__closure__ or () if isinstance(cell.cell_contents, Tracer)]
    if cls is not torch.nn.Module or not tracers or any(type(x) is not PythonKeyTracer for x in tracers):
        _patch(self, cls, name, new, deduplicate)


def _seed(seed: int) -> torch.Generator:
    """Seed the CPU's generator."""
    return torch.default_generator.manual_seed(int(seed))


_cached_dispatch: Callable[..., Any] = FakeTensorMode._cached_dispatch_impl  # type: ignore[assignment]


def _dispatch(self: FakeTensorMode, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Do what `FakeTensorMode._cached_dispatch_impl` does, without its cache where a size is a symbol.

    Such entries belong to one compilation. Making one takes longer than what it would save.
    """
    shapes: Any = self.shape_env
    has_symbols = shapes is not None and bool(getattr(shapes, "backed_var_to_val", None))
    dispatch = self._dispatch_impl if has_symbols else functools.partial(_cached_dispatch, self)
    return dispatch(func, types, args, kwargs)


UNDERSTOOD = "FP8COMPILE_TESTS_UNDERSTOOD"  # environment variable: what the compiler has been asked, with its answers


def _is_understood(instructions: VecISA, code: str) -> bool:
    """Whether the compiler knows the instructions of a program; processes that this one starts need not ask again."""
    compiler, flags = cpp_builder.get_cpp_compiler(), instructions.build_arch_flags().split()
    asked = hashlib.sha256(repr((compiler, flags, code)).encode()).hexdigest()
    known: dict[str, bool] = json.loads(os.environ.get(UNDERSTOOD, "{}"))
    if asked not in known:
        command = [compiler, "-x", "c++", "-fsyntax-only", *flags, "-"]
        done = subprocess.run(command, input=code, text=True, capture_output=True, check=False)
        known[asked] = done.returncode == 0
        os.environ[UNDERSTOOD] = json.dumps(known)
    return known[asked]


@functools.cache
def quicken() -> None:
    """Leave out what a run of many compilations has no use for."""
    # Tracing makes ten thousands of objects that live on: looking for garbage among them every 700 finds next to none,
    # and among what has been imported none at all.
    gc.freeze()
    gc.set_threshold(1_000_000)
    # torch prints graphs for its structured log if anyone listens, and pytest listens to loggers that do not propagate.
    trace_log.propagate = True
    # Dynamo times the guards of each graph, for its log, behind a flush of the processor's caches: 30 to 50 ms.
    guards.profile_guard_manager = lambda *_: 0.0
    # AOTAutograd prints three graphs for each that it compiles, for its log.
    graph_compile._log_joint_graph = lambda *_: None
    graph_compile._log_fw_bw_graphs = lambda *_: (None, None)
    ShapeEnv.suppress_guards = lambda _: Suppressed()
    # Dynamo writes down the stack of each change that it makes to an object, and all settings, for its log.
    if hasattr(dynamo_config, "side_effect_replay_policy"):
        dynamo_config.side_effect_replay_policy = "silent"
    for settings in ("_get_dynamo_config_for_logging", "_scrubbed_inductor_config_for_logging"):
        setattr(dynamo_utils, settings, lambda: None)
    # Without a GPU a seed is kept for each kind, with the text of the stack, until one is found.
    if not torch.cuda.is_available():
        torch.random.manual_seed = torch.manual_seed = _seed
    # Dynamo looks for garbage after each graph.
    dynamo_config.run_gc_after_compile = False
    _Patcher.patch_method = _patch_method
    PhiloxState.reset = _forget
    FakeTensorMode._cached_dispatch_impl = _dispatch  # type: ignore[method-assign]
    # Inductor compiles and loads programs to see that instructions work which the processor names: seven seconds.
    config.cpp.vec_isa_ok = True
    VecISA.check_build = _is_understood  # of those that it looks at in spite of this setting
    if _gold_links():
        _link_by_gold()


def _gold_links() -> bool:
    """Whether the compiler can link by gold: one of its own prefix may find gold, and gold not its libraries."""
    with tempfile.TemporaryDirectory() as folder:
        command = [cpp_builder.get_cpp_compiler(), "-fuse-ld=gold", "-shared", "-x", "c++", os.devnull]
        return subprocess.run([*command, "-o", f"{folder}/x.so"], capture_output=True, check=False).returncode == 0


def _link_by_gold() -> None:
    """Have kernels linked by what reads the names in torch's libraries, a third of what g++ takes, in half the time."""
    flags = cpp_builder._get_shared_cflags

    def faster(*given: Any) -> list[str]:  # (do_link); from torch 2.14 on (compiler, do_link)
        found = flags(*given)
        return [*found, "fuse-ld=gold"] if "shared" in found else found

    cpp_builder._get_shared_cflags = faster


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, quickened, in another process."""
    return [sys.executable, __file__, module, *arguments]


if __name__ == "__main__":
    quicken()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
