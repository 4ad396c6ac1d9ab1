"""A vision-language model: a SigLIP vision tower, a projector of two layers, and a Llama that reads image and text.

    python examples/vision_language.py                  a small one on a CPU
    python examples/vision_language.py --size 1b        SigLIP-B/16 and a 1 B Llama, on a GPU

All parts are built from their configs (transformers), as in LLaVA and VILA: the patches of an image, projected, stand
in front of its caption. The images show a few bright squares; the caption says where, as bytes ("r2c5 r7c1"). Only the
caption is learned: labels of what stands in front of it are -100.

On 2 CPU cores that did other things as well (FP8 is emulated there, so its time says nothing):

    $ python examples/vision_language.py
           first loss  final loss  matmuls in FP8         step
    BF16       5.5648      0.5177               -     223.3 ms
    FP8        5.5551      0.5144        86 of 89     994.8 ms
    FP8 against BF16: -0.64%

On an H200 (nothing else ran on the GPU while steps were timed; the host compiled other things, and steps wait for it):

    $ python examples/vision_language.py --size 1b --steps 30
           first loss  final loss  matmuls in FP8         step
    BF16       6.2611      1.2930               -     100.5 ms    21.07 GiB
    FP8        6.2550      1.3148      412 of 564     103.8 ms    15.94 GiB
    FP8 against BF16: +1.68%
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from side_by_side import Batch, Task, main

IGNORED, CELLS, SQUARES = -100, 8, 2


class VisionLanguage(nn.Module):
    """forward returns the loss of the caption, f32[]."""

    def __init__(self, vision: int, vision_layers: int, pixels: int, patch: int, width: int, layers: int) -> None:
        super().__init__()
        tower = transformers.SiglipVisionConfig(
            hidden_size=vision, intermediate_size=4 * vision, num_hidden_layers=vision_layers,
            num_attention_heads=vision // 64 or 1, image_size=pixels, patch_size=patch, vision_use_head=False,
        )  # fmt: skip
        text = transformers.LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 64 or 1, num_key_value_heads=max(1, width // 128), use_cache=False,
            max_position_embeddings=1024,
        )  # fmt: skip
        self.tower = transformers.SiglipVisionModel(tower)
        self.projector = nn.Sequential(nn.Linear(vision, width), nn.GELU(), nn.Linear(width, width))
        self.language = transformers.LlamaForCausalLM(text)

    def forward(self, pixel_values: Tensor, tokens: Tensor) -> Tensor:
        """pixel_values: f32[batch, 3, pixels, pixels]; tokens: i64[batch, length], of the caption."""
        image = self.projector(self.tower(pixel_values).last_hidden_state)
        caption = self.language.get_input_embeddings()(tokens)
        hidden = self.language.model(inputs_embeds=torch.cat((image, caption.to(image.dtype)), 1)).last_hidden_state
        before = hidden[:, image.shape[1] - 1 : -1]  # what stands in front of each byte of the caption
        logits = self.language.lm_head(before).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), ignore_index=IGNORED)


def batch(generator: torch.Generator, size: int, pixels: int) -> Batch:
    """Images of `CELLS` × `CELLS` cells, some of them bright, and captions of one length."""
    images = 0.3 * torch.randn(size, 3, CELLS, CELLS, generator=generator)
    captions = []
    for image in images:
        cells = torch.randperm(CELLS * CELLS, generator=generator)[:SQUARES].sort().values.tolist()
        for cell in cells:
            image[:, cell // CELLS, cell % CELLS] += 2.0
        captions.append(list(" ".join(f"r{cell // CELLS}c{cell % CELLS}" for cell in cells).ljust(16).encode()))
    large = images.repeat_interleave(pixels // CELLS, 2).repeat_interleave(pixels // CELLS, 3)
    return {"pixel_values": large, "tokens": torch.tensor(captions)}


SIZES = {
    "tiny": Task(lambda: VisionLanguage(128, 2, 32, 4, 128, 2), lambda g: batch(g, 16, 32), 80, 2e-3),
    "1b": Task(lambda: VisionLanguage(768, 12, 224, 16, 2048, 16), lambda g: batch(g, 32, 224), 300, 2e-4),
}

if __name__ == "__main__":
    main(__doc__, SIZES)
