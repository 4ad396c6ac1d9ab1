"""Models of several kinds of input: images with text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.field.models.libraries import library
from benchmarks.field.models.task import Batch, Batches, FieldModel, Sizes, Task, drawn, transformer
from benchmarks.harness.workloads import TINY_DECODER, decoder

TEXT = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6, "num_attention_heads": 12,
          "image_size": 224,
          "patch_size": 16}  # fmt: skip
SMALL_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "vocab_size": 256,
              "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
              "projection_size": 64}  # fmt: skip
SMALL_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                "image_size": 32, "patch_size": 8}  # fmt: skip


def captions(batch: int, length: int, **more: Any) -> Batches:
    """Images with a caption each."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, words = (4, 16) if is_small else (batch, length)
        side = config.vision_config.image_size
        ids = 3 + drawn(rows, words, below=config.text_config.vocab_size - 3)
        ids[:, -1] = config.text_config.eos_token_id
        return [{"input_ids": ids, "pixel_values": drawn(rows, 3, side, side), **more}]

    return made


def with_labels(batch: int, length: int) -> Batches:
    def made(config: Any, is_small: bool) -> list[Batch]:
        (batch_made,) = captions(batch, length)(config, is_small)
        return [{**batch_made, "labels": batch_made["input_ids"].clone()}]

    return made


def sigmoids(run: Any, batch: Batch) -> Tensor:
    """SigLIP's loss, of each pair by itself."""
    logits = run(**batch).logits_per_text.float()
    signs = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(signs * logits).sum(-1).mean()


def llava(is_small: bool, dtype: torch.dtype) -> Task:
    """LLaVA: the tokens of an image stand within the text."""
    transformers = library("transformers")
    text = transformers.LlamaConfig(**(TINY_DECODER if is_small else decoder(2048, 5632, 4, 16, 16, 32064)))
    vision = transformers.CLIPVisionConfig(**(SMALL_VISION if is_small else {**VISION, "patch_size": 14}))
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=3, vision_feature_layer=-1
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    rows, words = (2, 16) if is_small else (4, 512)
    count = (vision.image_size // vision.patch_size) ** 2
    ids = 4 + drawn(rows, words, below=text.vocab_size - 4)
    ids = torch.cat([torch.full((rows, count), 3, device="cpu"), ids], dim=1)
    labels = ids.masked_fill(ids == 3, -100)
    pixels = drawn(rows, 3, vision.image_size, vision.image_size)
    return Task(model, [{"input_ids": ids, "pixel_values": pixels, "labels": labels}])


def blip(is_small: bool, dtype: torch.dtype) -> Task:
    """BLIP: captions of images."""
    transformers = library("transformers")
    text: Sizes = {**(SMALL_TEXT if is_small else {**TEXT, "hidden_size": 768, "num_attention_heads": 12,
                                                   "vocab_size": 30524}),
                   "encoder_hidden_size": 64 if is_small else 768}  # fmt: skip
    config = transformers.BlipConfig(text_config=text, vision_config=SMALL_VISION if is_small else VISION)
    model = transformers.BlipForConditionalGeneration._from_config(config, dtype=dtype)
    rows, words = (2, 16) if is_small else (32, 64)
    ids = 4 + drawn(rows, words, below=config.text_config.vocab_size - 4)
    side = config.vision_config.image_size
    return Task(model, [{"input_ids": ids, "pixel_values": drawn(rows, 3, side, side), "labels": ids.clone()}])


MODELS = (
    transformer("CLIP", "together", "CLIPConfig", "", {"text_config": TEXT, "vision_config": VISION,
                                                       "projection_dim": 512},
                {"text_config": SMALL_TEXT, "vision_config": SMALL_VISION, "projection_dim": 64},
                captions(128, 77, return_loss=True), gib=25),
    transformer("SigLIP · FP32 under autocast", "together", "SiglipConfig", "",
                {"text_config": {**TEXT, "hidden_size": 768, "num_attention_heads": 12, "projection_size": 768},
                 "vision_config": VISION},
                {"text_config": SMALL_TEXT, "vision_config": SMALL_VISION}, captions(64, 64), loss=sigmoids,
                autocast=True, gib=25),
    FieldModel("LLaVA", "together", llava, ("transformers",), gib=25),
    FieldModel("BLIP", "together", blip, ("transformers",), gib=25),
)  # fmt: skip
