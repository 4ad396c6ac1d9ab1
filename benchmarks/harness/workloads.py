"""Models of Hugging Face that are trained, built from their configs with random weights, and random batches for them.

Called with its batch, a `Trained` model returns its loss and nothing else, so that one graph holds all of a step's
forward, loss and backward.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

LIBRARY = "transformers"
TEXT, MASKED_TEXT, IMAGES = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification"
Sizes = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    length: tokens of a sequence, 0 for images; sizes: of the config; tiny: sizes for a CPU, in their place; auto: the
    class of transformers that makes the model.
    """

    name: str
    config: str
    batch: int
    length: int
    sizes: Sizes
    tiny: Sizes
    auto: str = TEXT

    def built(self, device: str, tiny: bool = False) -> Trained:
        """Return the model in BF16, in training; equal weights at every call."""
        transformers = import_module(LIBRARY)
        config = getattr(transformers, self.config)(**{**self.sizes, **(self.tiny if tiny else {})})
        torch.manual_seed(0)
        with torch.device(device):
            model = getattr(transformers, self.auto).from_config(config, dtype=torch.bfloat16)
        if self.auto == TEXT:
            model.loss_type = "ForCausalLM"  # GPT-2 names none, and the warning about that would break its graph
        return Trained(model.train())

    def made(self, model: Trained, device: str, tiny: bool = False) -> dict[str, Tensor]:
        """Return a batch: tokens with themselves as labels (the model shifts them), or images with classes."""
        config: Any = model.model.config
        batch, length = (2, min(self.length, 32)) if tiny else (self.batch, self.length)
        generator = torch.Generator(device).manual_seed(1)
        if length:
            tokens = torch.randint(config.vocab_size, (batch, length), generator=generator, device=device)
            return {"input_ids": tokens, "labels": tokens.clone()}
        shape = (batch, config.num_channels, config.image_size, config.image_size)
        images = torch.randn(shape, generator=generator, device=device).bfloat16()
        return {"pixel_values": images, "labels": torch.arange(batch, device=device) % config.num_labels}


class Trained(nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).loss


def decoder(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any) -> Sizes:
    """Sizes of a Llama, and of what has the same names for them."""
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocabulary, "use_cache": False, **more,
    }  # fmt: skip


def gpt2(width: int, layers: int, heads: int, **more: Any) -> Sizes:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, "use_cache": False, **more}


def bert(width: int, inner: int, layers: int, heads: int, **more: Any) -> Sizes:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        **more,
    }  # fmt: skip


def vit(width: int, inner: int, layers: int, heads: int, **more: Any) -> Sizes:
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "problem_type": "single_label_classification", **more,
    }  # fmt: skip


TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
MIXTRAL = decoder(2048, 7168, 8, 32, 8, 32000, **EXPERTS)
QWEN3_MOE = decoder(2048, 6144, 6, 32, 4, 32000, num_experts=64, moe_intermediate_size=768, num_experts_per_tok=8,
                    experts_implementation="grouped_mm")  # fmt: skip
DEEPSEEK_V3 = decoder(2048, 6144, 6, 16, 16, 32000, n_routed_experts=32, moe_intermediate_size=1024,
                      num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=768,
                      kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
                      experts_implementation="grouped_mm")  # fmt: skip
LLAMA_3_8B = decoder(4096, 14336, 32, 32, 8, 128256, rope_theta=500000.0, max_position_embeddings=8192)
GEMMA = decoder(2048, 16384, 8, 8, 1, 256000, head_dim=256, **TIED)
TINY_DECODER = decoder(64, 128, 2, 4, 2, 256)
TINY_QWEN3_MOE = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
TINY_DEEPSEEK_V3 = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
TINY_GPT2 = gpt2(64, 2, 4, vocab_size=256)
TINY_BERT = bert(64, 128, 2, 4, vocab_size=256)
TINY_VIT = vit(64, 128, 2, 4, image_size=32, patch_size=8, num_labels=16)

WORKLOADS = (
    Workload("Llama 1.1B", "LlamaConfig", 8, 2048, decoder(2048, 8192, 16, 32, 8, 32000), TINY_DECODER),
    Workload("Llama-8B (8 layers)", "LlamaConfig", 4, 4096, decoder(4096, 14336, 8, 32, 8, 128256), TINY_DECODER),
    Workload("Llama-3-8B 1×8192", "LlamaConfig", 1, 8192, LLAMA_3_8B, TINY_DECODER),
    Workload("Llama-3-8B 2×8192", "LlamaConfig", 2, 8192, LLAMA_3_8B, TINY_DECODER),
    Workload("Llama 100M", "LlamaConfig", 16, 1024, decoder(768, 2048, 12, 12, 12, 32000, **TIED), TINY_DECODER),
    Workload("Qwen2 1.5B", "Qwen2Config", 8, 2048, decoder(1536, 8960, 28, 12, 2, 151936, **TIED), TINY_DECODER),
    Workload("Gemma 2B (8 layers)", "GemmaConfig", 4, 2048, GEMMA, {**TINY_DECODER, "head_dim": 16}),
    Workload("GPT-2 XL (16 layers)", "GPT2Config", 8, 1024, gpt2(1600, 16, 25), TINY_GPT2),
    Workload("GPT-2 medium", "GPT2Config", 8, 1024, gpt2(1024, 24, 16), TINY_GPT2),
    Workload("BERT-large", "BertConfig", 32, 512, bert(1024, 4096, 24, 16), TINY_BERT, MASKED_TEXT),
    Workload("ViT-L", "ViTConfig", 64, 0, vit(1024, 4096, 24, 16, num_labels=1000), TINY_VIT, IMAGES),
    Workload("ViT-H", "ViTConfig", 64, 0, vit(1280, 5120, 32, 16, patch_size=14, num_labels=1000), TINY_VIT, IMAGES),
    Workload("Mixtral (8 layers)", "MixtralConfig", 8, 2048, MIXTRAL, TINY_DECODER),
    Workload("Qwen3-MoE (6 layers)", "Qwen3MoeConfig", 8, 2048, QWEN3_MOE, {**TINY_DECODER, **TINY_QWEN3_MOE}),
    Workload("DeepSeek-V3 (6 layers)", "DeepseekV3Config", 8, 2048, DEEPSEEK_V3, {**TINY_DECODER, **TINY_DEEPSEEK_V3}),
)
FAMILIES = dict.fromkeys(  # as transformers names their modules: Qwen3Moe is qwen3_moe, ViT is vit
    re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z0-9])", "_", w.config.removesuffix("Config")).lower() for w in WORKLOADS
)
MODULES = tuple(f"{LIBRARY}.models.{family}.modeling_{family}" for family in FAMILIES)  # imported when they are needed
