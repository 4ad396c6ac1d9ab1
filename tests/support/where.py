"""Where a test makes its tensors: on the CPU, or on the GPU that is the default of its process."""

from __future__ import annotations

import torch


def device_type() -> str:
    """Return the default device's type, "cpu" or "cuda"."""
    return torch.get_default_device().type


def seeded(seed: int) -> torch.Generator:
    """Return a generator of random numbers there."""
    return torch.Generator(device_type()).manual_seed(seed)
