"""Experts whose weights are one tensor: files hold the weight of each expert by itself, as a layer of its own.

    mlp.experts.gate_up_proj [experts, 2·I, H]   →   mlp.experts.0.gate_proj.weight [I, H] + …weight_scale_inv, …

Which names and forms they have in files Transformers says (`write_folder.reverting`). Its loader stacks payloads and
scales of fine-grained FP8 again, so whole blocks must come together: sizes are multiples of a block's.
"""

from __future__ import annotations

import torch
from torch import nn

from fp8compile.serving.layouts import FINE_GRAINED, Layout
from fp8compile.serving.tensors import WRAPPERS, Revert


def stacked_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have the weights of all experts in one tensor, by their names."""
    return {
        WRAPPERS.sub("", name): module
        for name, module in model.named_modules()
        if name.endswith("experts") and any(p.dim() > 2 for p in module._parameters.values() if p is not None)
    }


def refusals(model: nn.Module, layout: Layout, revert: Revert) -> dict[str, str]:
    """Return why experts of `model` cannot be written in FP8, "" for those that can, by name of their module."""
    return {name: _refusal(name, module, layout, revert) for name, module in stacked_experts(model).items()}


def _refusal(name: str, module: nn.Module, layout: Layout, revert: Revert) -> str:
    if layout.method != FINE_GRAINED:
        return 'the weights of all its experts are one tensor, which format="block" alone has in FP8'
    sizes = {
        f"{name}.{n}": torch.empty(p.shape, device="meta", dtype=torch.float32)
        for n, p in module.named_parameters(recurse=False)
    }
    if any(x.dim() != 3 for x in sizes.values()):
        return "its experts have more than weights"
    files = revert(sizes)
    if not all(key.endswith(".weight") and x.dim() == 2 for key, x in files.items()):
        return "the weights of all its experts are one tensor, in files as well"
    block = layout.granularity.size
    if odd := next((tuple(x.shape) for x in files.values() if any(size % block for size in x.shape)), None):
        return f"a weight of its experts is {odd}, no multiples of {block}, and loaders stack whole blocks"
    return ""
