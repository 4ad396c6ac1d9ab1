"""A ViT classifier (transformers, from a config) on images whose class is the direction and width of their stripes.

    python examples/vit.py                      a small ViT on a CPU
    python examples/vit.py --size base          ViT-B/16, 224 × 224, batch 128, on a GPU

On 2 CPU cores that did other things as well (FP8 is emulated there, so its time says nothing):

    $ python examples/vit.py
           first loss  final loss  matmuls in FP8         step
    BF16       2.7852      0.9341               -      58.3 ms
    FP8        2.7856      0.9352        56 of 59     330.3 ms
    FP8 against BF16: +0.11%

On an H200, long before either has converged (nothing else ran on the GPU while steps were timed; the host compiled
other things, and steps wait for it):

    $ python examples/vit.py --size base --steps 60
           first loss  final loss  matmuls in FP8         step
    BF16       2.9122      0.7408               -      59.8 ms    12.04 GiB
    FP8        2.9059      0.7602      109 of 221      45.8 ms     3.83 GiB
    FP8 against BF16: +2.62%
"""

from __future__ import annotations

import math

import torch
import transformers
from torch import nn

from side_by_side import Batch, Task, main

CLASSES, MISTAKEN = 16, 0.1


def make(width: int, layers: int, pixels: int, patch: int) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 32 // 2,
        image_size=pixels, patch_size=patch, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = CLASSES
    return transformers.ViTForImageClassification(config)


def batch(generator: torch.Generator, size: int, pixels: int) -> Batch:
    """Noisy stripes: four directions, four widths; some labels are wrong, so that no loss gets below a floor."""
    labels = torch.randint(CLASSES, (size,), generator=generator)
    angle, waves = (labels % 4) * math.pi / 4, 2.0 + 1.5 * (labels // 4)
    place = torch.linspace(-1, 1, pixels)
    along = angle.cos()[:, None, None] * place[None, :, None] + angle.sin()[:, None, None] * place[None, None, :]
    phase = 2 * math.pi * torch.rand(size, 1, 1, generator=generator)
    stripes = torch.sin(math.pi * waves[:, None, None] * along + phase)
    noise = torch.randn(size, 3, pixels, pixels, generator=generator)
    mistaken = torch.rand(size, generator=generator) < MISTAKEN
    labels = torch.where(mistaken, torch.randint(CLASSES, (size,), generator=generator), labels)
    return {"pixel_values": stripes[:, None] + 0.5 * noise, "labels": labels}


SIZES = {
    "tiny": Task(lambda: make(128, 3, 32, 8), lambda g: batch(g, 64, 32), 50, 1e-3),
    "base": Task(lambda: make(768, 12, 224, 16), lambda g: batch(g, 128, 224), 500, 3e-4),
}

if __name__ == "__main__":
    main(__doc__, SIZES)
