"""A diffusion transformer (DiT with adaLN-zero) that learns to remove noise from images of two discs.

    python examples/diffusion.py                    a small DiT on a CPU
    python examples/diffusion.py --size b           DiT-B/4, 128 × 128, batch 64, on a GPU

The loss is the mean squared error of the predicted velocity (rectified flow: x_t = (1 - t) x + t noise, v = noise - x).

On 2 CPU cores that did other things as well (FP8 is emulated there, so its time says nothing):

    $ python examples/diffusion.py
           first loss  final loss  matmuls in FP8         step
    BF16       1.8338      0.6825               -     148.2 ms
    FP8        1.8329      0.6858        55 of 55    3235.0 ms
    FP8 against BF16: +0.49%

On one H200, 1.17 times as fast, in two fifths of the memory:

    $ python examples/diffusion.py --steps 40
           first loss  final loss  matmuls in FP8         step
    BF16       1.8858      0.2720               -     105.3 ms    24.81 GiB
    FP8        1.8858      0.2721       96 of 190      89.8 ms     9.73 GiB
    FP8 against BF16: +0.02%
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from side_by_side import Batch, Task, main


class Block(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by what the time says."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp_norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """x: [batch, patches, width]; time: [batch, width]."""
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(F.silu(time))[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.attention_norm(x) * (1 + scale) + shift).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.out(attended)
        hidden = F.gelu(self.up(self.mlp_norm(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.down(hidden)


class DiT(nn.Module):
    """Patches of a noisy image in, their velocity out; forward returns the loss, f32[]."""

    def __init__(self, width: int, layers: int, heads: int, pixels: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((pixels // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.velocity = nn.Linear(width, 3 * patch * patch)

    def forward(self, image: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        t = time[:, None, None, None]
        x = self.patches((1 - t) * image + t * noise).flatten(2).transpose(1, 2) + self.position
        angles = 100 * time[:, None] * torch.exp(torch.linspace(0, -4, 32, device=time.device))
        embedded = self.time(torch.cat((angles.cos(), angles.sin()), -1))
        for block in self.blocks:
            x = block(x, embedded)
        wanted = F.pixel_unshuffle(noise - image, self.patch).flatten(2).transpose(1, 2)
        return F.mse_loss(self.velocity(self.norm(x)).float(), wanted)


def batch(generator: torch.Generator, size: int, pixels: int) -> Batch:
    """Two discs of random colours and places on black, noise, and a time for each image."""
    place = torch.linspace(-1, 1, pixels)
    image = torch.zeros(size, 3, pixels, pixels)
    for _ in range(2):
        centre = torch.rand(size, 2, generator=generator) * 1.4 - 0.7
        squares = [(place - centre[:, i : i + 1]).square() for i in range(2)]
        disc = (squares[0][:, :, None] + squares[1][:, None, :] < 0.1).float()
        image += disc[:, None] * torch.rand(size, 3, 1, 1, generator=generator)
    noise = torch.randn(size, 3, pixels, pixels, generator=generator)
    time = torch.sigmoid(torch.randn(size, generator=generator))
    return {"image": image / math.sqrt(0.1) - 0.3, "noise": noise, "time": time}


SIZES = {
    "tiny": Task(lambda: DiT(128, 3, 4, 32, 4), lambda g: batch(g, 32, 32), 40, 1e-3),
    "b": Task(lambda: DiT(768, 12, 12, 128, 4), lambda g: batch(g, 64, 128), 500, 2e-4),
}

if __name__ == "__main__":
    main(__doc__, SIZES)
