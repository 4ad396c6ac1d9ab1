"""fp8compile: `torch.compile(model, backend="fp8")` trains any PyTorch model in FP8.

The backend needs no import: it is found by its entry point. What is here is for looking and tuning.
"""

from __future__ import annotations

import torch

from fp8compile import torch_versions
from fp8compile.torch_hooks.calls.user_frame import warn_user

torch_versions.check(torch.__version__, warn_user)

from fp8compile import delayed  # noqa: E402
from fp8compile.adaptive.adaptive_graph import AdaptiveGraph, adaptive_graphs, observe_loss  # noqa: E402
from fp8compile.adaptive.settings import Adaptive  # noqa: E402
from fp8compile.cuda_graphs.captured_step import capture_step  # noqa: E402
from fp8compile.distributed.fsdp import prepare_fsdp  # noqa: E402
from fp8compile.distributed.gradients import compress_gradients  # noqa: E402
from fp8compile.errors import (  # noqa: E402
    CaptureError,
    CheckpointError,
    Fp8Error,
    Fp8Warning,
    OptionError,
    ShardingError,
    StateError,
    VerificationError,
)
from fp8compile.formats import E4M3, E5M2, Granularity  # noqa: E402
from fp8compile.insight.compiled import adaptive_plan, last_compile  # noqa: E402
from fp8compile.insight.dry_run import explain  # noqa: E402
from fp8compile.insight.dump.dumps import dump  # noqa: E402
from fp8compile.insight.dump.graph_files import example_inputs, load_graph  # noqa: E402
from fp8compile.insight.dump.stages import diff  # noqa: E402
from fp8compile.insight.explanation import Explanation  # noqa: E402
from fp8compile.insight.metrics import metrics  # noqa: E402
from fp8compile.insight.printers import register_printers  # noqa: E402
from fp8compile.insight.watching import watch  # noqa: E402
from fp8compile.optimizer.checkpoints import plain_state_dict  # noqa: E402
from fp8compile.optimizer.prepare import prepare_optimizer  # noqa: E402
from fp8compile.optimizer.state_recipe import StateRecipe  # noqa: E402
from fp8compile.optimizer.states import FP8State  # noqa: E402
from fp8compile.options import Options  # noqa: E402
from fp8compile.plan.cast_statistics import Statistics  # noqa: E402
from fp8compile.plan.plan import Plan  # noqa: E402
from fp8compile.plan.rows import Kernel, Loss, Lowered, Mask, Matmul, Saved, Transfer  # noqa: E402
from fp8compile.plan.store import compiles  # noqa: E402
from fp8compile.recipe import RECIPES, Cast, Delayed, Recipe, Role  # noqa: E402
from fp8compile.registration import register_backend, register_what_is_not_installed  # noqa: E402
from fp8compile.serving.export import Exported, export  # noqa: E402
from fp8compile.serving.free_weights import free_weights  # noqa: E402
from fp8compile.serving.freeze import freeze  # noqa: E402
from fp8compile.serving.load import load  # noqa: E402

__all__ = [
    "E4M3",
    "E5M2",
    "RECIPES",
    "Adaptive",
    "AdaptiveGraph",
    "CaptureError",
    "Cast",
    "CheckpointError",
    "Delayed",
    "Explanation",
    "Exported",
    "FP8State",
    "Fp8Error",
    "Fp8Warning",
    "Granularity",
    "Kernel",
    "Loss",
    "Lowered",
    "Mask",
    "Matmul",
    "OptionError",
    "Options",
    "Plan",
    "Recipe",
    "Role",
    "Saved",
    "ShardingError",
    "StateError",
    "StateRecipe",
    "Statistics",
    "Transfer",
    "VerificationError",
    "adaptive_graphs",
    "adaptive_plan",
    "capture_step",
    "compiles",
    "compress_gradients",
    "delayed",
    "diff",
    "dump",
    "example_inputs",
    "explain",
    "export",
    "free_weights",
    "freeze",
    "last_compile",
    "load",
    "load_graph",
    "metrics",
    "observe_loss",
    "plain_state_dict",
    "prepare_fsdp",
    "prepare_optimizer",
    "register_backend",
    "watch",
]

register_what_is_not_installed()
register_printers()
