"""Known accesses: torch finds out once for each of our kernels, not twice a launch, which arguments it writes.

torch reads that off Triton's intermediate representation, which it makes anew each time. A model of many layers
launches few kernels often: making it was a third of the time that compiling took. The answer depends on the kernel
alone, whose arguments always have the same types; other kernels are analysed as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._higher_order_ops import triton_kernel_wrap  # where torch keeps the analysis, which has no cache

ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")  # torch 2.13; before

_ours: dict[int, Any] = {}  # by identity, and kept alive for that


def analyse_once(kernel: Any) -> None:
    """Let torch remember what it finds out about `kernel`, a Triton function."""
    _ours[id(kernel)] = kernel


def analyse_kernels_once() -> None:
    """Replace torch's analysis by one that remembers what it found out about our kernels."""
    for name in ANALYSES:
        analysis = getattr(triton_kernel_wrap, name, None)
        if analysis is not None:
            setattr(triton_kernel_wrap, name, remembering(analysis))


def remembering(analysis: Callable[..., Any]) -> Callable[..., Any]:
    """Return `analysis`, a function of a kernel and its arguments, done once for each of our kernels."""
    answers: dict[int, Any] = {}

    @functools.wraps(analysis)
    def remembered(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        key = id(kernel.fn if hasattr(kernel, "configs") else kernel)  # seen through an autotuner
        if key not in _ours:
            return analysis(kernel, *args, **kwargs)
        if key not in answers:
            answers[key] = analysis(kernel, *args, **kwargs)
        return answers[key]

    return remembered
