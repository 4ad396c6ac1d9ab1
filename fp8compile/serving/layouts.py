"""Formats of FP8 checkpoints: how payload and scale of a weight are named and shaped, and what the config says.

| format | a scale for | the form of | scale of weight [N, K] |
|---|---|---|---|
| block   | 128×128 elements | Transformers' fine-grained FP8, DeepSeek | weight_scale_inv [⌈N/128⌉, ⌈K/128⌉] |
| channel | a row            | compressed-tensors                       | weight_scale [N, 1] |
| tensor  | the weight       | compressed-tensors                       | weight_scale [1] |

weight = payload (E4M3) · scale (FP32) in all of them, whatever the scale is called. compressed-tensors keeps scales in
the precision of the model: its scales are numbers that BF16 has, so that nothing is rounded there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.errors import unknown_name
from fp8compile.formats import BLOCK128, E4M3, ROW, TENSOR, Granularity
from fp8compile.kernels.reference import markers

FINE_GRAINED, COMPRESSED = "fp8", "compressed-tensors"


@dataclass(frozen=True)
class Layout:
    """One format. method: quant_method of the config; scale, input_scale: what a layer's tensors are called."""

    name: str
    granularity: Granularity
    method: str
    scale: str
    input_scale: str = ""

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return payload and scale of a weight [N, K]."""
        how = str(self.granularity)
        scale = markers.scale(markers.amax(weight, how), E4M3.name)
        if self.method == COMPRESSED:
            scale = rounded_up_to_bf16(scale)
        return markers.quantize(weight, scale, E4M3.name, how), scale.reshape(self.scale_shape(weight.shape))

    def dequantized(self, payload: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight that payload and scale, in any of the shapes that are in use, stand for."""
        shape = self.granularity.scale_shape(payload.shape)
        return markers.dequantize(payload, scale.float().reshape(shape), str(self.granularity), dtype)

    def scale_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape in which the scale of a weight with this shape is written."""
        return self.granularity.scale_shape(shape) or [1]

    def refusal(self, shape: Sequence[int]) -> str:
        """Return why a weight of this shape is not written in FP8; "" if it is.

        Where Transformers' loader makes weights of blocks, it takes all of them to be equally large.
        """
        block = self.granularity.size
        if not block or all(size <= block or size % block == 0 for size in shape):
            return ""
        return (
            f"a weight of {' × '.join(map(str, shape))}, no multiples of {block}: loaders read its last block wrongly "
            '(format="channel" has it in FP8)'
        )

    def config(self, kept: Sequence[str], is_static: bool) -> dict[str, Any]:
        """Return the config's `quantization_config`. kept: layers not in FP8; is_static: scales of activations are."""
        if self.method == FINE_GRAINED:
            return {
                "quant_method": FINE_GRAINED,
                "activation_scheme": "dynamic",
                "weight_block_size": [self.granularity.size, self.granularity.size],
                "modules_to_not_convert": list(kept),
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        inputs = {"strategy": "tensor", "dynamic": False} if is_static else {"strategy": "token", "dynamic": True}
        weights = {**number, "strategy": self.name, "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": {**number, **inputs}}
        return {
            "quant_method": COMPRESSED,
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(kept),
        }


def rounded_up_to_bf16(x: Tensor) -> Tensor:
    """Return the least numbers of BF16 that are not below those of x (FP32, positive), in FP32."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("block", BLOCK128, FINE_GRAINED, "weight_scale_inv"),
        Layout("channel", ROW, COMPRESSED, "weight_scale", "input_scale"),
        Layout("tensor", TENSOR, COMPRESSED, "weight_scale", "input_scale"),
    )
}


def layout_called(name: str) -> Layout:
    """Return the `Layout` of this name; raises `OptionError`."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise unknown_name("format", name, LAYOUTS)
    return LAYOUTS[name]
