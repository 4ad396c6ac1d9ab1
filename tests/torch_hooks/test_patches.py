"""Changes to torch are in one list, made once; each has a test here that fails once torch needs the change no more."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import in_place
import pytest
import torch
from convolutions import OfTokens
from test_buffer_reuse import LARGE, around_an_operator, reused
from test_launches_in_place import lowered
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.variables import BackwardHookVariable
from torch._functorch._aot_autograd.descriptors import IntermediateBaseAOTOutput
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor import async_compile, fx_utils, ir, pattern_matcher
from torch._inductor import config as inductor_config
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import post_grad
from torch.optim import SGD, AdamW

import fp8compile
from fp8compile import torch_versions
from fp8compile.errors import Fp8Warning, OptionError
from fp8compile.passes.lower import known_accesses
from fp8compile.passes.lower.launch_nodes import LAUNCH
from fp8compile.torch_hooks import patches
from fp8compile.torch_hooks.inductor.inductor_settings import SHORT_SUM
from fp8compile.torch_hooks.inductor.output_strides import VISIBLE
from fp8compile.torch_hooks.patches import PERMANENT, TEMPORARY

PACKAGE = Path(fp8compile.__file__).parent
PATCHES = (*PERMANENT, *TEMPORARY)


def still(is_needed: bool) -> None:
    """Fail where torch does by itself what a change is for."""
    assert is_needed, "torch has this now: remove the patch, its row in torch_hooks/patches.py, and this test"


def looked_for_up_to(*version: int) -> None:
    """Fail under a newer torch. What Inductor's C++ gets wrong varies with the code around it: nothing small shows it.

    Then let tests/train/test_hostile.py and test_scattered_gradients.py run without the change. It stays as long as a
    torch is supported that needs it.
    """
    here = torch_versions.parsed(torch.__version__)
    assert here <= version, "look whether this torch has it still; if not, remove the patch, its row and this test"


class Counting:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.resets = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    def reset(self) -> None:
        self.resets += 1

    def context(self) -> Any:
        raise AssertionError("not called here")


# ---- the list -------------------------------------------------------------------------------------------------------


def test_each_patch_has_a_test_that_says_when_it_is_over():
    tests = {name for name, value in globals().items() if callable(value)}
    assert {f"test_{p.name}_is_needed" for p in PATCHES} <= tests
    assert len({p.name for p in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_each_patch_names_the_function_that_makes_it(patch: patches.Patch):
    module, _, function = patch.made_by.partition(":")
    assert callable(getattr(importlib.import_module(f"fp8compile.{module}"), function))
    assert (patch.apply is not None) == (patch in PERMANENT)


def changes_torch(tree: ast.Module) -> set[str]:
    """Names from torch whose attributes a module sets, or whose settings it changes."""
    torchs = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "accelerate"))
        for alias in node.names
    }
    found = set()
    for node in ast.walk(tree):
        changed: list[Any] = []
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed = [t.value for t in targets if isinstance(t, ast.Attribute)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr":
            changed = node.args[:1]
        elif isinstance(node, ast.Attribute) and node.attr in ("patch", "_make_closure_patcher"):
            changed = [node.value]
        found |= {x.id for x in changed if isinstance(x, ast.Name)}
    return found & torchs


def test_nothing_of_torch_is_changed_that_is_not_in_the_list():
    named = {p.made_by.partition(":")[0] for p in PATCHES}
    changing = set()
    for root in (PACKAGE, PACKAGE / "passes", PACKAGE / "kernels"):
        for file in root.rglob("*.py"):
            if changes_torch(ast.parse(file.read_text())):
                changing.add(".".join(file.relative_to(PACKAGE).with_suffix("").parts))
    assert changing <= named
    assert {
        "torch_hooks.modules.backward_hooks",
        "torch_hooks.modules.recurrent_modules",
        "passes.lower.known_accesses",
    } <= changing


def test_patches_are_made_once():
    before = BackwardHookVariable.create, torch._TorchCompileWrapper.__dict__["compiler_fn"]
    patches.apply_patches(lambda backend: False)
    assert (BackwardHookVariable.create, torch._TorchCompileWrapper.__dict__["compiler_fn"]) == before


class Moved:
    """A patch of something that this torch does not have, as a newer one may not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def change(is_ours: Any) -> None:
            raise AttributeError("it has moved")

        patch = patches.Patch("moved", "torch.moved", "something is not compiled", "here:there", apply=change)
        monkeypatch.setattr(patches, "PERMANENT", (patch,))


def test_a_newer_torch_that_lacks_what_is_changed_is_warned_of(monkeypatch: pytest.MonkeyPatch):
    Moved(monkeypatch)
    monkeypatch.setattr(torch_versions, "is_newer", lambda version: True)
    with pytest.warns(Fp8Warning, match=r"has no torch.moved \(it has moved\), so something is not compiled"):
        patches.apply_patches(lambda backend: False)
    patches.apply_patches(lambda backend: False)  # not said again
    patches._applied.discard("moved")


def test_a_tested_torch_that_lacks_what_is_changed_is_an_error(monkeypatch: pytest.MonkeyPatch):
    Moved(monkeypatch)
    monkeypatch.setattr(torch_versions, "is_newer", lambda version: False)
    with pytest.raises(AttributeError, match="it has moved"):
        patches.apply_patches(lambda backend: False)


# ---- permanent ------------------------------------------------------------------------------------------------------


def test_backward_hooks_is_needed():
    model, backend = nn.Linear(8, 8), Counting()
    model.register_full_backward_hook(lambda module, inputs, outputs: None)
    torch.compile(model, backend=backend)(torch.randn(2, 8, requires_grad=True)).sum().backward()
    still(not backend.graphs)


def test_recurrent_modules_is_needed():
    backend = Counting()
    torch.compile(nn.LSTM(8, 8), backend=backend)(torch.randn(3, 2, 8))
    torch.compile(nn.Linear(8, 8), backend=backend)(torch.randn(3, 2, 8))
    still(not backend.graphs)  # of the linear: both are called by the same code


class WithContext:
    """A backend that counts how often calls enter its context."""

    def __init__(self) -> None:
        self.entered = 0
        self.backend_ctx_ctor = self.context  # its own attribute: torch copies those to what it makes of a backend

    def __call__(self, gm: fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        return gm.forward

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.entered += 1
        yield


def test_call_contexts_is_needed():
    plain, wrapped = WithContext(), WithContext()
    torch._dynamo.optimize(plain)(lambda x: x + 1)(torch.ones(2))  # without torch.compile, which wraps all backends
    torch.compile(lambda x: x + 1, backend=wrapped, options={"an": "option"})(torch.ones(2))
    assert plain.entered
    still(not wrapped.entered)


def test_known_accesses_is_needed(monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []

    def generate(kernel: Any, *_: Any) -> Any:
        made.append(kernel)
        raise NotImplementedError  # torch then takes all arguments for written

    name = next(n for n in known_accesses.ANALYSES if hasattr(triton_kernel_wrap, n))
    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", generate)
    kernel = object()
    for _ in range(2):
        getattr(triton_kernel_wrap, name)(kernel, {"x": torch.ones(1)}, {})
    still(len(made) == 2)


def test_read_before_write_is_needed():
    x = torch.ones(())
    got = torch.compile(in_place.one)(x, torch.ones(()))
    assert x == 101
    still(got == 203)  # eager: 3


def test_convolution_strides_is_needed(monkeypatch):
    """A view computed again in backward: eager PyTorch saves it with strides (228, 1, 76, 19)."""
    read = []
    create = ir.FallbackKernel.create
    monkeypatch.setattr(
        ir.FallbackKernel, "create", lambda *args, **named: (read.append(args), create(*args, **named))[1]
    )
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(OfTokens((3, 4), checkpointed=True))(torch.randn(1, 12, 19, requires_grad=True)).backward()
    (strides,) = [args[2].get_stride() for args in read if args[0] is torch.ops.aten.convolution_backward.default]
    still([*strides] != [228, 1, 76, 19])


def test_sparse_tensors_is_needed():
    try:
        fx_utils.get_storage(torch.eye(2).to_sparse())
        raised = False
    except NotImplementedError:
        raised = True
    still(raised)


# ---- for a time -----------------------------------------------------------------------------------------------------


def test_reset_of_backends_is_needed():
    backend = Counting()
    compiled = torch.compile(lambda x: x + 1, backend=backend)
    for _ in range(2):
        compiled(torch.ones(2))
        torch.compiler.reset()
    assert len(backend.graphs) == 2
    still(backend.resets == 1)


def test_option_errors_is_needed():
    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        raise OptionError("unknown option")

    with pytest.raises(Exception, match="unknown option") as raised:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    still(isinstance(raised.value, BackendCompilerFailed))


def test_base_strides_is_needed():
    left_out = []

    def inner(gm: fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
        meta = gm.graph.output_node().meta
        bases = [i for i, desc in enumerate(meta.get("desc") or []) if isinstance(desc, IntermediateBaseAOTOutput)]
        if bases and VISIBLE in meta:
            left_out.append(not {*bases} & {*meta[VISIBLE]})
        return run_boxed(gm)

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ x
        return y.flatten(), y.t()

    backend = functools.partial(compile_fx, inner_compile=inner)
    torch.compile(views, backend=backend)(torch.randn(4, 4, requires_grad=True))
    still(left_out == [True])


def run_boxed(gm: fx.GraphModule) -> Callable[..., Any]:
    """A graph as AOTAutograd calls it."""

    def run(args: list[Any]) -> Any:
        return gm.forward(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def test_summed_places_is_needed():
    looked_for_up_to(2, 15)  # seen in 2.11 and 2.13; under 2.15 those tests pass without the change


def test_buffer_reuse_is_needed():
    still(reused(around_an_operator, LARGE, has_fp8=False))


def test_direct_launch_is_needed():
    """A setting lets torch's launcher take kernels of others; processes that compile are not told of it."""
    still("static_launch_user_defined_triton_kernels" not in inspect.getsource(async_compile))


def test_compile_early_is_needed():
    """Before it writes a kernel of its own, Inductor asks whether the processes are there."""
    still("use_process_pool" not in inspect.getsource(PythonWrapperCodegen.define_user_defined_triton_kernel))


def test_launches_in_place_is_needed(monkeypatch: pytest.MonkeyPatch):
    """A launch without our mark is a user's, and left to torch."""
    module, traced = lowered(), list[Any]()
    for node in module.graph.nodes:
        node.meta.pop(LAUNCH, None)

    def replace_by_example(*arguments: Any, **named: Any) -> None:
        traced.append(arguments)
        raise StopIteration

    monkeypatch.setattr(pattern_matcher.Match, "replace_by_example", replace_by_example)
    with contextlib.suppress(StopIteration):
        post_grad.decompose_triton_kernel_wrapper_functional(module.graph)
    still(bool(traced))


def test_combined_kernels_is_needed():
    """A look at the setting alone: C++ for a CPU has one kernel for all."""
    still(not inductor_config.combo_kernels)


def test_numbers_not_timed_is_needed():
    """A look at the setting alone: without a GPU nothing is timed."""
    still(inductor_config.triton.autotune_pointwise)


class CountingPass(CustomGraphPass):
    """Notes that it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "counting"


def test_caches_while_dumping_is_needed():
    counting = CountingPass()
    backend = functools.partial(compile_fx, config_patches={"joint_custom_pre_pass": counting})
    for _ in range(2):
        torch.compiler.reset()
        torch.compile(lambda x: x @ x, backend=backend)(torch.ones(8, 8))  # no C++ to compile
    still(counting.calls == 1)


def test_random_numbers_is_needed():
    seed = torch.tensor(3)
    first, second = (torch.ops.prims.inductor_random.default([64], seed, "rand") for _ in range(2))
    still(not torch.equal(first, second))


def test_random_decompositions_is_needed():
    with inductor_config.patch(fallback_random=True):  # type: ignore[attr-defined]
        as_asked = set(select_decomp_table())
    still(set(select_decomp_table()) != as_asked)


def test_short_sums_is_needed():
    """A look at the setting alone: a CPU adds rows as fast in a loop."""
    still(inductor_config.unroll_reductions_threshold <= SHORT_SUM)


def test_vector_width_is_needed():
    looked_for_up_to(2, 15)  # seen in 2.11 and 2.13; under 2.15 those tests pass without the change


def test_numbers_in_steps_is_needed():
    backend = Counting()
    torch.compile(lambda x: x * (x.sum().item() + 1), backend=backend)(torch.ones(4))
    still(len(backend.graphs) > 1)


def test_changing_rates_is_needed():
    parameter, backend = nn.Parameter(torch.zeros(4)), Counting()
    parameter.grad = torch.ones(4)
    optimizer = SGD([parameter], lr=0.5, foreach=False)
    step = torch.compile(optimizer.step, backend=backend)
    step()
    before = len(backend.graphs)
    optimizer.param_groups[0]["lr"] = 0.25
    step()
    assert before
    still(len(backend.graphs) > before)


def test_steps_as_python_is_needed():
    """As many inputs as parameters: torch traces a step one by one."""
    counts = []
    for count in (2, 9):
        parameters, backend = [nn.Parameter(torch.zeros(4)) for _ in range(count)], Counting()
        for p in parameters:
            p.grad = torch.ones(4)
        torch.compile(SGD(parameters, lr=0.5, foreach=False).step, backend=backend)()
        counts.append(sum(len(gm.graph.nodes) for gm in backend.graphs))
    still(counts[1] > counts[0] > 0)


def test_new_states_is_needed():
    parameter, seen = nn.Parameter(torch.zeros(4)), []
    parameter.grad = torch.ones(4)
    optimizer = AdamW([parameter])
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append(len(opt.state)))
    optimizer.step()
    assert len(optimizer.state) == 1
    still(seen == [0] and not any("state" in name and "init" in name for name in vars(torch.optim.Optimizer)))


def test_exchanged_states_is_needed():
    state, other = torch.zeros(4), torch.ones(4)
    reference = weakref.ref(state)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(state, other)
    assert reference() is state


def test_loss_scales_is_needed():
    parameter = nn.Parameter(torch.zeros(4))
    parameter.grad = torch.ones(4)
    optimizer: Any = AdamW([parameter], foreach=False)
    optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())
    with pytest.raises(AssertionError):
        optimizer.step()


def test_recompile_limits_is_needed():
    """What is compiled aside of a function leaves less for its user."""

    def double(x: Tensor) -> Tensor:
        return x + x

    aside, users = Counting(), Counting()
    with dynamo_config.patch(recompile_limit=1):  # type: ignore[attr-defined]
        torch.compile(double, backend=aside)(torch.ones(2))
        torch.compile(double, backend=users)(torch.ones(2, dtype=torch.float64))
    assert aside.graphs
    still(not users.graphs)


def test_names_of_backends_is_needed():
    utils = pytest.importorskip("accelerate.utils")
    with pytest.raises(ValueError, match="FP8_OF_ANOTHER_NAME"):
        utils.DynamoBackend("FP8_OF_ANOTHER_NAME")


def test_backward_times_is_needed():
    """Of hooks, torch has only those that tensors call."""
    offered = {name for name in dir(torch.autograd.graph) if name.startswith("register")}
    still(offered == {"register_multi_grad_hook"})
