"""torchtitan's trainer on CPUs, to try a configuration: `torchtitan.train`, and answers to what it asks of a GPU.

    torchrun --nproc-per-node 2 examples/titan_on_cpu.py --module titan --config bytes_fp8

Written for torchtitan 0.3.0.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import _utils
from torch.distributed.fsdp import FSDPModule

GPU_ANSWERS: dict[str, Any] = {
    "get_device_name": lambda *_: "CPU",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34),
    "current_device": lambda: 0,
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda: None,
}


def answer_for_a_gpu() -> None:
    """Before torchtitan is imported."""
    _utils._get_available_device_type = lambda: "cpu"
    for name, answer in GPU_ANSWERS.items():
        setattr(torch.cpu, name, answer)
    if not hasattr(dist, "set_timeout"):  # newer than torch 2.13
        dist.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it adds up

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum


if __name__ == "__main__":
    answer_for_a_gpu()
    from torchtitan.train import main

    main()
