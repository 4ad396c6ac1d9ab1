"""Denoisers of diffusion models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.field.models.libraries import library
from benchmarks.field.models.task import Batch, FieldModel, Sizes, Task, drawn, merged


def denoised(run: Any, batch: Batch) -> Tensor:
    """Mean squared error of the noise that is found."""
    (found,) = run(**{k: v for k, v in batch.items() if k != "noise"}, return_dict=False)
    return F.mse_loss(found.float()[:, : batch["noise"].shape[1]], batch["noise"].float())


def denoiser(
    name: str, model: str, sizes: Sizes, small: Sizes, batch: Callable[[Any, bool], Batch], **row: Any
) -> FieldModel:
    """Return a row of diffusers. batch: given the model's config, and whether it is small."""

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        made = getattr(library("diffusers"), model)(**(merged(sizes, small) if is_small else sizes))
        return Task(made.to(dtype), [batch(made.config, is_small)], denoised)

    return FieldModel(name, "diffusion", make, ("diffusers",), **{"gib": 20, **row})


def latents(rows: int, small_rows: int = 2) -> Callable[[Any, bool], Batch]:
    """Latent images, times and classes of a DiT."""

    def made(config: Any, is_small: bool) -> Batch:
        count = small_rows if is_small else rows
        image = drawn(count, config.in_channels, config.sample_size, config.sample_size)
        return {
            "hidden_states": image, "timestep": drawn(count, below=1000), "class_labels": drawn(count, below=10),
            "noise": drawn(*image.shape, seed=2),
        }  # fmt: skip

    return made


def prompted(rows: int, name: str = "sample", length: int = 77) -> Callable[[Any, bool], Batch]:
    """Latent images with the encoding of a prompt."""

    def made(config: Any, is_small: bool) -> Batch:
        count, words = (2, 16) if is_small else (rows, length)
        image = drawn(count, config.in_channels, config.sample_size, config.sample_size)
        width = config.get("cross_attention_dim") or config.joint_attention_dim
        batch: Batch = {name: image, "timestep": drawn(count, below=1000), "noise": drawn(*image.shape, seed=2)}
        if config.get("pooled_projection_dim"):
            batch["pooled_projections"] = drawn(count, config.pooled_projection_dim, seed=3)
        return {**batch, "encoder_hidden_states": drawn(count, words, width, seed=4)}

    return made


def packed(config: Any, is_small: bool) -> Batch:
    """Return a packed image and a prompt, with their places, for Flux."""
    rows, side, words = (2, 4, 16) if is_small else (4, 32, 256)
    image = drawn(rows, side * side, config.in_channels)
    places = torch.stack(torch.meshgrid(*[torch.arange(n, device="cpu") for n in (1, side, side)], indexing="ij"), -1)
    return {
        "hidden_states": image, "timestep": drawn(rows).abs(), "guidance": None,
        "encoder_hidden_states": drawn(rows, words, config.joint_attention_dim, seed=3),
        "pooled_projections": drawn(rows, config.pooled_projection_dim, seed=4),
        "img_ids": places.view(-1, 3).float(), "txt_ids": torch.zeros(words, 3, device="cpu"),
        "noise": drawn(*image.shape, seed=2),
    }  # fmt: skip


UNET = {"sample_size": 32, "cross_attention_dim": 768, "block_out_channels": (320, 640, 640),
        "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"), "layers_per_block": 1}  # fmt: skip
MODELS = (
    denoiser("DiT", "DiTTransformer2DModel",
             {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 6, "sample_size": 32,
              "in_channels": 4},
             {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8,
              "norm_num_groups": 4},
             latents(32)),
    denoiser("DiT · one image · FP32 under autocast", "DiTTransformer2DModel",
             {"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 6, "sample_size": 32,
              "in_channels": 4},
             {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8,
              "norm_num_groups": 4},
             latents(1, 1), autocast=True),
    denoiser("Stable Diffusion's U-Net", "UNet2DConditionModel", UNET,
             {"sample_size": 8, "cross_attention_dim": 32, "block_out_channels": (32, 64, 64), "attention_head_dim": 4,
              "norm_num_groups": 8}, prompted(8), autocast=True, gib=25),
    denoiser("SD3", "SD3Transformer2DModel",
             {"sample_size": 64, "num_layers": 4, "attention_head_dim": 64, "num_attention_heads": 24,
              "caption_projection_dim": 1536,
              "joint_attention_dim": 4096, "pooled_projection_dim": 2048},
             {"sample_size": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4,
              "caption_projection_dim": 64,
              "joint_attention_dim": 32, "pooled_projection_dim": 32, "pos_embed_max_size": 16},
             prompted(4, "hidden_states", 154), gib=25),
    denoiser("Flux", "FluxTransformer2DModel",
             {"num_layers": 1, "num_single_layers": 2},
             {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4,
              "in_channels": 16,
              "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": (4, 6, 6)}, packed, gib=25),
    denoiser("PixArt", "PixArtTransformer2DModel",
             {"num_layers": 4, "sample_size": 32, "caption_channels": 4096},
             {"num_layers": 2, "sample_size": 8, "num_attention_heads": 4, "attention_head_dim": 16,
              "cross_attention_dim": 64,
              "caption_channels": 32, "norm_num_groups": 4},
             lambda config, small: captioned(config, small)),
)  # fmt: skip


def captioned(config: Any, is_small: bool) -> Batch:
    """Latent images with a caption, for PixArt."""
    rows, words = (2, 16) if is_small else (16, 120)
    image = drawn(rows, config.in_channels, config.sample_size, config.sample_size)
    return {
        "hidden_states": image, "timestep": drawn(rows, below=1000), "added_cond_kwargs": {},
        "encoder_hidden_states": drawn(rows, words, config.caption_channels, seed=3), "noise": drawn(*image.shape,
                                                                                                     seed=2),
    }  # fmt: skip
