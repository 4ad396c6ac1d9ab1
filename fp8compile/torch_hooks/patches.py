"""Every place where torch is changed for this backend, or does what it has no public way for: one list.

    PERMANENT    changes of this process: `apply_patches` makes them, once, when the backend is imported
    TEMPORARY    changes for one compilation, for one call, or of one object: made where the row says

Permanent ones ask first whether the frame is compiled for this backend: for any other one torch does what it did.
Each row has a test, `tests/torch_hooks/test_patches.py::test_<name>_is_needed`, which fails as soon as torch does by
itself what the change is for. Then remove the change, the row and the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from fp8compile import torch_versions
from fp8compile.passes.lower import known_accesses
from fp8compile.torch_hooks.calls import compiled_calls, steps_as_python
from fp8compile.torch_hooks.calls.user_frame import warn_user
from fp8compile.torch_hooks.inductor import (
    buffer_reuse,
    compile_early,
    convolution_strides,
    direct_launch,
    launches_in_place,
    read_before_write,
    sparse_tensors,
)
from fp8compile.torch_hooks.modules import backward_hooks, recurrent_modules

IsOurs: TypeAlias = Callable[[Any], bool]  # of a backend, as Dynamo holds it


@dataclass(frozen=True)
class Patch:
    """One change. changes: of torch; made_by: "module:function" below `fp8compile`; lasts: how long it is in place."""

    name: str
    changes: str
    reason: str
    made_by: str
    lasts: str = "the process"
    apply: Callable[[IsOurs], None] | None = None


PERMANENT = (
    Patch(
        "backward_hooks",
        "torch._dynamo.variables.BackwardHookVariable.create, ._setup_hook; compiled_autograd_enabled meanwhile",
        "Dynamo traces backward hooks of modules for compiled autograd alone, and leaves such modules to Python",
        "torch_hooks.modules.backward_hooks:trace_hooks",
        apply=backward_hooks.trace_hooks,
    ),
    Patch(
        "recurrent_modules",
        "torch._dynamo.variables.builder.VariableBuilder.wrap_module; config.allow_rnn meanwhile",
        "Dynamo refuses a recurrent module, and leaves what is around it, or called by the same code later, to Python",
        "torch_hooks.modules.recurrent_modules:call_between_graphs",
        apply=recurrent_modules.call_between_graphs,
    ),
    Patch(
        "call_contexts",
        "torch._TorchCompileWrapper.compiler_fn",
        "torch's wrapper of a backend hands on its `reset` and not its `backend_ctx_ctor`",
        "torch_hooks.calls.compiled_calls:hand_on_contexts",
        apply=lambda is_ours: compiled_calls.hand_on_contexts(),
    ),
    Patch(
        "steps_as_python",
        "torch._dynamo.eval_frame._callback_from_stance; _warned_capturable_if_run_uncaptured of an optimizer",
        "Dynamo traces and guards all parameters of a step, of which one of each kind is all that there is to know",
        "torch_hooks.calls.steps_as_python:ask_us",
        apply=lambda is_ours: steps_as_python.ask_us(),
    ),
    Patch(
        "known_accesses",
        "torch._higher_order_ops.triton_kernel_wrap.identify_accessed_tensors (before 2.13 identify_mutated_tensors)",
        "torch makes the intermediate representation of a Triton kernel anew for each of its launches, twice",
        "passes.lower.known_accesses:declare_accesses",
        apply=lambda is_ours: known_accesses.declare_accesses(),
    ),
    Patch(
        "read_before_write",
        "torch._inductor.ir.FallbackKernel.__init__, while a graph of this backend is compiled",
        "Inductor computes what reads a buffer after a custom operator has overwritten it",
        "torch_hooks.inductor.read_before_write:realize_readers_first",
        apply=lambda is_ours: read_before_write.realize_readers_first(),
    ),
    Patch(
        "convolution_strides",
        "torch._inductor.lowering.lowerings of aten.convolution_backward, while a graph of this backend is compiled",
        "Inductor gives dimensions of one element strides by which cuDNN lays out gradients as torch does not predict",
        "torch_hooks.inductor.convolution_strides:read_dense_strides",
        apply=lambda is_ours: convolution_strides.read_dense_strides(),
    ),
    Patch(
        "sparse_tensors",
        "torch._inductor.fx_utils.get_storage, while a graph of this backend is compiled",
        "Inductor asks sparse tensors, which have none, for their storage, if what they are computed from has changed",
        "torch_hooks.inductor.sparse_tensors:give_storages",
        apply=lambda is_ours: sparse_tensors.give_storages(),
    ),
    Patch(
        "direct_launch",
        "torch._inductor.codecache.PyCodeCache.load_by_key_path, TritonCompileResult.make_launcher, for graphs of ours",
        "Inductor's autotuner and Triton's own launcher take the host longer than the launch itself",
        "torch_hooks.inductor.direct_launch:launch_directly",
        apply=lambda is_ours: direct_launch.launch_directly(),
    ),
    Patch(
        "compile_early",
        "torch._inductor.codegen.wrapper.PythonWrapperCodegen.define_kernel, for graphs of ours",
        "Inductor lets its processes compile Triton kernels that it has not written when it waits for them already",
        "torch_hooks.inductor.compile_early:compile_early",
        apply=lambda is_ours: compile_early.compile_early(),
    ),
    Patch(
        "launches_in_place",
        "torch._inductor.fx_passes.post_grad.decompose_triton_kernel_wrapper_functional",
        "Inductor traces the definition of a Triton kernel's functional form for each of its launches, twice",
        "torch_hooks.inductor.launches_in_place:decompose_directly",
        apply=lambda is_ours: launches_in_place.decompose_directly(),
    ),
    Patch(
        "buffer_reuse",
        "torch._inductor.codegen.wrapper.AllocateLine.should_reuse_buffer, for halves with FP8",
        "Inductor keeps large freed buffers by an estimate of the peak that knows no workspaces",
        "torch_hooks.inductor.buffer_reuse:hold_no_memory",
        apply=lambda is_ours: buffer_reuse.hold_no_memory(),
    ),
)
TEMPORARY = (
    Patch(
        "backward_times",
        "torch.autograd.backward is another function",
        "torch tells nobody when a backward pass begins and ends",
        "insight.step_times:StepTimes",
        "`fp8compile doctor --model`",
    ),
    Patch(
        "reset_of_backends",
        "torch._dynamo.eval_frame.cached_backends has a row more",
        "torch.compiler.reset() tells a backend once; after that, only if something is compiled with it from the start",
        "torch_hooks.calls.compiled_calls:asked",
        "until torch.compiler.reset()",
    ),
    Patch(
        "option_errors",
        "an OptionError that is a torch._dynamo.exc.ShortenTraceback, too",
        "Dynamo wraps what a backend raises into a BackendCompilerFailed, behind a long traceback",
        "torch_hooks.calls.unwrapped_errors:unwrapped",
        "one error",
    ),
    Patch(
        "base_strides",
        "user_visible_output_idxs of a graph's output has more indices",
        "Inductor keeps the strides of a model's own outputs, not of results that these are views of",
        "torch_hooks.inductor.output_strides:keep_strides_of_bases",
        "one compilation",
    ),
    Patch(
        "summed_places",
        "is_recomputable of torch's partitioner is False for places of symbolic shape, on CPUs",
        "Inductor's C++ counts the inner loop of a tile that it transposes twice, and adds at other places",
        "torch_hooks.partitioner:_but_for_places",
        "one compilation",
    ),
    Patch(
        "combined_kernels",
        "torch._inductor.config.combo_kernels = True, for optimizers",
        "Inductor makes a kernel for each parameter's step count",
        "torch_hooks.inductor.inductor_settings:inductor_settings",
        "one compilation",
    ),
    Patch(
        "numbers_not_timed",
        "torch._inductor.config.triton.autotune_pointwise = False, for numbers of an optimizer's step",
        "Inductor times two versions of a kernel on some hundred numbers, and allocates an L2 cache's bytes for that",
        "optimizer.shared_step.template:compiled",
        "one compilation",
    ),
    Patch(
        "caches_while_dumping",
        "torch._inductor.config.force_disable_caches = True, with option `dump`",
        "on a hit of torch's caches no pass runs, and there is nothing to dump",
        "torch_hooks.inductor.inductor_settings:inductor_settings",
        "one compilation",
    ),
    Patch(
        "random_numbers",
        "torch._inductor.config.fallback_random = True, with executor=eager",
        "Inductor's random operators ignore their seed when they run without Inductor",
        "torch_hooks.inductor.inductor_settings:inductor_settings",
        "one compilation",
    ),
    Patch(
        "random_decompositions",
        "the same setting, while it is looked up how operators of such a graph are decomposed",
        "Inductor decomposes random operators into its own unless it is set",
        "torch_hooks.inner_compiler:eager_decompositions",
        "one look",
    ),
    Patch(
        "short_sums",
        "torch._inductor.config.unroll_reductions_threshold = 9, if it is less",
        "Inductor adds the rows of a token's 8 experts in a loop, which takes longer to gather them",
        "torch_hooks.inductor.inductor_settings:inductor_settings",
        "one compilation",
    ),
    Patch(
        "vector_width",
        "torch._inductor.config.cpp.simdlen = 256, on CPUs with AVX-512",
        "Inductor's C++ with vectors of 512 bits transposes tiles of BF16 wrongly (GCC 12, torch 2.11 and 2.13)",
        "torch_hooks.inductor.inductor_settings:inductor_settings",
        "one compilation",
    ),
    Patch(
        "numbers_in_steps",
        "torch._dynamo.config.capture_scalar_outputs = True",
        "a step of an optimizer that reads a number from a tensor breaks into two graphs",
        "torch_hooks.calls.compiled_calls:reading_numbers",
        "one call of an optimizer's step",
    ),
    Patch(
        "changing_rates",
        "torch._dynamo.pgo: learning rates and weight decays are auto_dynamic",
        "Dynamo takes a learning rate for a constant, and compiles again when it first changes",
        "optimizer.trace:let_numbers_change",
        "until torch.compiler.reset()",
    ),
    Patch(
        "new_states",
        "_init_group of the class of a prepared optimizer: converts its states; of any other it calls what was there",
        "torch has no hook between making states and handing them to the step",
        "optimizer.prepare:_wrap_init_group",
        "the process",
    ),
    Patch(
        "exchanged_states",
        "torch._C._swap_tensor_impl, DTensor._local_tensor",
        "torch.utils.swap_tensors refuses tensors with weak references, which Dynamo has to the states it traces",
        "optimizer.state_conversion:_become",
        "the state",
    ),
    Patch(
        "loss_scales",
        "grad_scale and found_inf are taken off an optimizer for a step, _step_supports_amp_scaling is set",
        "torch's optimizers refuse what GradScaler leaves on them, unless they are fused",
        "optimizer.unscaling:_before_step",
        "one step",
    ),
    Patch(
        "recompile_limits",
        "torch._dynamo.config.recompile_limit and accumulated_recompile_limit; sizes in torch._dynamo.pgo",
        "what explain() compiles counts against the limits of the user's own code",
        "insight.isolation:recompiling",
        "one explain()",
    ),
    Patch(
        "names_of_backends",
        "accelerate.utils.DynamoBackend._missing_",
        "accelerate knows the backends of a list of its own alone",
        "registration:_tell_accelerate",
        "the process, after register_backend()",
    ),
)

_applied: set[str] = set()  # names of permanent changes that have been made


def apply_patches(is_ours: IsOurs) -> None:
    """Make the permanent changes that have not been made. is_ours: returns True of this backend, wrapped or not."""
    for patch in PERMANENT:
        if patch.name not in _applied and patch.apply is not None:
            _apply(patch.apply, is_ours, patch)
            _applied.add(patch.name)


def _apply(change: Callable[[IsOurs], None], is_ours: IsOurs, patch: Patch) -> None:
    """Make one change; a torch newer than those that were tested, which lacks what is changed, stays as it is."""
    try:
        change(is_ours)
    except (AttributeError, ImportError) as error:
        if not torch_versions.is_newer(torch.__version__):
            raise
        warn_user(f"fp8: torch {torch.__version__} has no {patch.changes} ({error}), so {patch.reason}.")
