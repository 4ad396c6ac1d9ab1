"""Settings of Inductor for one compilation, each with its reason; options["inductor"] of a user go before them."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config as inductor_config  # whether a user has chosen the width of a CPU's vectors
from torch._inductor import list_mode_options  # `mode` reaches a backend untranslated

from fp8compile.options import Options

VECTOR_BITS = 256


def inductor_settings(options: Options, of_optimizer: bool = False) -> dict[str, Any]:
    """Return what to set for one graph, by name. `torch_hooks/patches.py` says what each is for."""
    settings = dict(list_mode_options(options.mode)) if options.mode else {}
    settings["allow_buffer_reuse"] = False  # a buffer kept for reuse later in backward is one that nobody else can have
    if of_optimizer:  # step counts and what is computed of them: one kernel, not one for each parameter
        settings |= {"combo_kernels": True, "combo_kernels_autotune": 0}
    if options.dump:  # on a hit no pass runs, and there would be nothing to write
        settings["force_disable_caches"] = True
    if options.executor == "eager":  # Inductor's own random operators ignore their seed when run eagerly
        settings["fallback_random"] = True
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and inductor_config.cpp.simdlen is None:
        settings["cpp.simdlen"] = VECTOR_BITS  # Inductor's C++ of 512 bits transposes tiles of BF16 wrongly
    return settings | dict(options.inductor)
