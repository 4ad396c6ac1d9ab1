"""Kernels are launched directly: what the first launch has found out, later ones do not ask again."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key
from torch._inductor.runtime.triton_heuristics import (
    CachingAutotuner,
    HeuristicType,
    StaticTritonCompileResult,
    TritonCompileResult,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils._debug_mode import DebugMode

from fp8compile.torch_hooks.inductor.our_graph import compiling_ours

Calls = list[tuple[str, Any]]


CONFIG = {"XBLOCK": 4}
GRID = {"grid_type": "Grid1D"}
X, Y = torch.ones(8), torch.ones(8)
ADDRESSES = X.data_ptr(), Y.data_ptr()


class Loaded:
    """A kernel as torch's static launcher has it: with a constant, and one scratch argument that Triton adds."""

    has_global_scratch, has_profile_scratch, arg_tys, function, num_warps, shared = True, False, "OOi", 17, 4, 512
    arg_names, full_constexprs = ["x", "y", "xnumel", "XBLOCK"], {3: 4}

    def __init__(self, calls: Calls) -> None:
        self.C_impl = SimpleNamespace(_launch_kernel=lambda *args: calls.append(("launched", args)))

    def run(self, *args: Any) -> None:
        raise AssertionError(args)


def static_launcher(loaded: Loaded) -> Any:
    scope: dict[str, Any] = {"runner": loaded.run}
    exec("def launcher(x, y, xnumel, stream):\n    runner(-(xnumel // -4), 1, 1, stream, x, y, xnumel)", scope)
    launcher: Any = scope["launcher"]
    launcher._is_static, launcher.store_cubin, launcher.config = True, False, CONFIG
    return launcher


def own_launcher(calls: Calls) -> Any:
    def launcher(*args: Any) -> None:
        calls.append(("triton", args))

    made: Any = launcher
    made.store_cubin, made.config = False, CONFIG
    return made


def autotuner(*launchers: Any, **settings: Any) -> CachingAutotuner:
    kernel = CachingAutotuner.__new__(CachingAutotuner)
    told = {
        "inductor_meta": GRID,
        "triton_meta": {},
        "triton_interpret": False,
        "heuristic_type": HeuristicType.POINTWISE,
    }
    told |= {"dump_launch_params": False, "dump_launch_tensors": False, "fn": SimpleNamespace(__name__="kernel")}
    vars(kernel).update({**told, "launchers": list(launchers), "compile_results": [], **settings})
    return kernel


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    noted: Calls = []
    monkeypatch.setattr(CachingAutotuner, "run", lambda self, *args, **kwargs: noted.append(("autotuner", args)))
    return noted


def loaded(tmp_path: Path, kernel: CachingAutotuner) -> Any:
    """The module of a graph with one kernel, as Inductor loads it."""
    path = tmp_path / f"graph{id(kernel)}.py"
    path.write_text("import builtins\nkernel = builtins._kernel_of_a_test\n")
    return PyCodeCache.load_by_key_path(path.stem, str(path))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def load(kernel: CachingAutotuner, ours: bool = True) -> Any:
        monkeypatch.setattr("builtins._kernel_of_a_test", kernel, raising=False)
        if not ours:
            return loaded(tmp_path, kernel).kernel
        with compiling_ours():
            return loaded(tmp_path, kernel).kernel

    return load


def test_the_second_launch_is_direct(load: Any, calls: Calls) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls))))
    kernel.run(X, Y, 10, stream=3)
    kernel.run(Y, X, 9, stream=5)
    launched = (17, 3, 1, 1, 4, 512, "OOiO", (*reversed(ADDRESSES), 9, None), 5)
    assert calls == [("autotuner", (X, Y, 10)), ("launched", launched)]


def test_the_kernel_itself_is_left_as_it_is(load: Any, calls: Calls) -> None:
    """torch's caches pickle kernels, with all that they have."""
    tuner = autotuner(static_launcher(Loaded(calls)))
    before = dict(vars(tuner))
    kernel = load(tuner)
    for _ in range(2):
        kernel.run(X, Y, 10, stream=3)
    assert vars(tuner) == before
    assert kernel.launchers is tuner.launchers


def test_it_can_be_copied(load: Any, calls: Calls) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls))))
    assert copy.copy(kernel).kernel is kernel.kernel


def test_graphs_of_others_stay_as_they_are(load: Any, calls: Calls) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls))), ours=False)
    for _ in range(3):
        kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner"] * 3


def test_who_watches_sees_every_launch(load: Any, calls: Calls) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls))))
    kernel.run(X, Y, 10, stream=3)
    with profile(activities=[ProfilerActivity.CPU]):
        kernel.run(X, Y, 10, stream=3)
    with DebugMode():
        kernel.run(X, Y, 10, stream=3)
    kernel.run(X, Y, 10, stream=3, benchmark_run=True)
    kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner"] * 4 + ["launched"]


@pytest.mark.parametrize(
    "settings",
    [
        {"inductor_meta": {**GRID, "coordinate_descent_tuning": True}},
        {"triton_interpret": True},
        {"dump_launch_params": True},
        {"dump_launch_tensors": True},
        {"launchers": []},
    ],
)
def test_what_the_autotuner_does_at_every_launch_it_goes_on_doing(
    load: Any, calls: Calls, settings: dict[str, Any]
) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls)), **settings))
    for _ in range(2):
        kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner"] * 2


def test_nothing_is_loaded_while_a_cuda_graph_is_captured(
    load: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls))))
    with monkeypatch.context() as captured:
        captured.setattr(torch.cuda, "is_initialized", lambda: True)
        captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kernel.run(X, Y, 10, stream=3)
    kernel.run(X, Y, 10, stream=3)
    kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner", "autotuner", "launched"]


@pytest.fixture
def by_torch(calls: Calls, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bool | None], Any]:
    """Say if torch's launcher takes kernels that Inductor has not written, or fails (None); return that launcher."""

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def by_torch(taken: bool | None) -> Any:
        def can_launch(*args: Any) -> Any:
            if taken is None:
                raise OSError("no cubin")
            return "static" if taken else None

        static = static_launcher(Loaded(calls))
        monkeypatch.setattr(StaticTritonCompileResult, "can_statically_launch", can_launch)
        monkeypatch.setattr(StaticTritonCompileResult, "__init__", lambda self, *args: None)
        monkeypatch.setattr(StaticTritonCompileResult, "make_launcher", lambda self: static)
        return static

    return by_torch


class Refusing:
    """A compiled kernel that notes that Triton has been asked for a launcher of its own."""

    src = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"))
    asm: ClassVar = {"cubin": b"binary"}
    hash = "ab" * 32

    def _init_handles(self) -> None:
        raise AssertionError("Triton's launcher is made")


def compiled() -> TritonCompileResult:
    result = TritonCompileResult.__new__(TritonCompileResult)
    vars(result).update(kernel=Refusing(), config=CONFIG, compile_meta={}, inductor_meta=GRID)
    return result


def test_torch_s_launcher_is_made_in_place_of_triton_s(by_torch: Callable[[bool | None], Any]) -> None:
    """Triton's would be compiled by a C compiler first."""
    static = by_torch(True)
    with compiling_ours():
        assert compiled().make_launcher() is static


@pytest.mark.parametrize("there", [None, b"the same"])
def test_torch_finds_a_binary_that_was_compiled_into_another_gpu_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bytes | None
) -> None:
    """A process that compiles keeps the folder of the first GPU; torch looks in the folder of the kernel's own."""
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    path = tmp_path / "triton" / "1" / triton_hash_to_path_key(Refusing.hash) / "kernel.cubin"
    if there is not None:
        path.parent.mkdir(parents=True)
        path.write_bytes(there)
    found: list[str] = []

    def by_device(kernel: Any, device_type: str) -> Any:
        found.append(kernel._cubin_path)
        raise NotImplementedError("this test goes no further")

    monkeypatch.setattr(triton_heuristics, "statically_launched_kernel_by_device", by_device)
    result = compiled()
    result.compile_meta = {"device": 1, "device_type": "cuda"}
    result.kernel.metadata = SimpleNamespace()
    with compiling_ours(), pytest.raises(AssertionError, match="Triton's"):
        result.make_launcher()
    assert found == [str(path)]
    assert path.read_bytes() == (there or Refusing.asm["cubin"])


@pytest.mark.parametrize("ours, taken", [(True, False), (True, None), (False, True)])
def test_triton_s_launcher_is_made_where_torch_s_is_not(
    by_torch: Callable[[bool | None], Any], ours: bool, taken: bool | None
) -> None:
    by_torch(taken)
    with compiling_ours() if ours else contextlib.nullcontext(), pytest.raises(AssertionError, match="Triton's"):
        compiled().make_launcher()


def test_what_triton_launches_is_left_to_the_autotuner(load: Any, calls: Calls) -> None:
    kernel = load(autotuner(own_launcher(calls)))
    for _ in range(2):
        kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner", "autotuner"]


def test_the_grid_is_the_launcher_s(load: Any, calls: Calls) -> None:
    kernel = load(autotuner(static_launcher(Loaded(calls))))
    for _ in range(2):
        kernel.run(X, Y, 4097, stream=0)
    assert calls[1][1][1:4] == (1025, 1, 1)


def test_the_loaded_kernel_lives_as_long_as_it_is_launched(load: Any, calls: Calls) -> None:
    """Newer torch unloads a kernel together with the object that has loaded it."""
    gone: list[str] = []
    made = Loaded(calls)
    weakref.finalize(made, gone.append, "unloaded")
    tuner = autotuner(static_launcher(made))
    kernel = load(tuner)
    kernel.run(X, Y, 10, stream=3)
    tuner.launchers.clear()
    del made
    gc.collect()
    kernel.run(X, Y, 10, stream=3)
    assert not gone


@pytest.mark.parametrize("name", ["others", "types", "launch", "stream_", "_types", "run"])
def test_arguments_of_any_name(load: Any, calls: Calls, name: str) -> None:
    made, scope = Loaded(calls), dict[str, Any]()
    made.arg_names = ["x", name, "xnumel", "XBLOCK"]
    scope["runner"] = made.run
    text = f"def launcher(x, {name}, xnumel, stream):\n    runner(-(xnumel // -4), 1, 1, stream, x, {name}, xnumel)"
    exec(text, scope)
    launcher: Any = scope["launcher"]
    launcher._is_static, launcher.store_cubin, launcher.config = True, False, CONFIG
    kernel = load(autotuner(launcher))
    for _ in range(2):
        kernel.run(X, Y, 10, stream=3)
    assert calls[1] == ("launched", (17, 3, 1, 1, 4, 512, "OOiO", (*ADDRESSES, 10, None), 3))


def test_a_kernel_for_several_devices_is_left_to_the_autotuner(load: Any, calls: Calls) -> None:
    made: Any = Loaded(calls)
    made.function = None
    kernel = load(autotuner(static_launcher(made)))
    for _ in range(2):
        kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner"] * 2


def test_arguments_that_are_dropped_otherwise_are_left_to_the_autotuner(load: Any, calls: Calls) -> None:
    made = Loaded(calls)
    made.arg_names = ["x", "another", "xnumel", "XBLOCK"]
    kernel = load(autotuner(static_launcher(made)))
    for _ in range(2):
        kernel.run(X, Y, 10, stream=3)
    assert [name for name, _ in calls] == ["autotuner"] * 2
