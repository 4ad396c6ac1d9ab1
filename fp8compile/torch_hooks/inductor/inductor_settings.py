"""Settings of Inductor for one compilation, each with its reason; options["inductor"] of a user go before them."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config as inductor_config  # what a user has chosen: vectors of a CPU, sums without a loop
from torch._inductor import list_mode_options  # `mode` reaches a backend untranslated
from torch._inductor.compile_fx import get_cpp_wrapper_config  # what torch sets beside cpp_wrapper

from fp8compile.options import Options

VECTOR_BITS = 256
SHORT_SUM = 8  # rows that are added without a loop: those of a token's experts, which are gathered from anywhere
# For a graph of an optimizer's step: the first of a process would wait for patterns of attention to be made.
WITHOUT_JOINT_PASSES: dict[str, Any] = {"use_joint_graph_passes": False}


def inductor_settings(options: Options, of_optimizer: bool = False) -> dict[str, Any]:
    """Return what to set for one graph, by name. `torch_hooks/patches.py` says what each is for."""
    settings = dict(list_mode_options(options.mode)) if options.mode else {}
    if of_optimizer:  # step counts and what is computed of them: one kernel, not one for each parameter
        settings |= {"combo_kernels": True, "combo_kernels_autotune": 0}
    settings["unroll_reductions_threshold"] = max(inductor_config.unroll_reductions_threshold, SHORT_SUM + 1)
    if options.dump:  # on a hit no pass runs, and there would be nothing to write
        settings["force_disable_caches"] = True
    if options.executor == "eager":  # Inductor's own random operators ignore their seed when run eagerly
        settings["fallback_random"] = True
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and inductor_config.cpp.simdlen is None:
        settings["cpp.simdlen"] = VECTOR_BITS  # Inductor's C++ of 512 bits transposes tiles of BF16 wrongly
    if options.offload:  # copies stand where they run beside kernels, which torch's estimate of a peak does not know
        settings["reorder_for_peak_memory"] = False
    theirs = dict(options.inductor)
    if theirs.get("cpp_wrapper"):  # torch sets what belongs to it for forward alone: backward is compiled later
        settings |= get_cpp_wrapper_config()
    return settings | theirs
