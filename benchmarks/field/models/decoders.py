"""Decoders: language models that read one way, at real widths and a few layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.field.models.libraries import library
from benchmarks.field.models.task import Batches, FieldModel, Sizes, tokens, transformer
from benchmarks.harness.workloads import TIED, TINY_DECODER, TINY_GPT2, decoder, gpt2

TEXT = tokens(4, 2048)
SMALL = {**TINY_DECODER, "pad_token_id": 0}
SMALL_NEOX = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
              "vocab_size": 256}  # fmt: skip
LLAMA = decoder(2048, 8192, 6, 32, 8, 32000)


def causal(
    name: str, config: str, sizes: Sizes, small: Sizes = SMALL, batches: Batches = TEXT, **row: Any
) -> FieldModel:
    return transformer(name, "decoder", config, "ForCausalLM", sizes, small, batches, **row)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def frozen_below(model: Any) -> None:
    """Freeze the embeddings and the first half of the layers, as in fine-tuning on little memory."""
    layers = model.model.layers
    for part in (model.model.embed_tokens, *layers[: len(layers) // 2]):
        part.requires_grad_(False)


def with_lora(model: Any) -> nn.Module:
    peft = library("peft")
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


LLAMAS = (
    causal("Llama 1.1B wide · 8×2048", "LlamaConfig", LLAMA, batches=tokens(8, 2048), gib=28),
    causal("Llama 1.1B wide · 1×1024", "LlamaConfig", {**LLAMA, "num_hidden_layers": 8}, batches=tokens(1, 1024, (1,
                                                                                                                  32))),
    causal("Llama · FP32 under autocast", "LlamaConfig", LLAMA, autocast=True, gib=25),
    causal("Llama · checkpointed", "LlamaConfig", LLAMA, adapt=checkpointed, gib=18),
    causal("Llama · frozen below", "LlamaConfig", LLAMA, adapt=frozen_below, gib=18),
    causal("Llama · LoRA", "LlamaConfig", LLAMA, adapt=with_lora, needs=("peft",), gib=18),
    causal("Llama · lengths that change", "LlamaConfig", LLAMA,
           batches=tokens(4, 2048, lengths=(1.0, 0.75, 0.5)), gib=18),
    causal("Llama · block by block", "LlamaConfig", LLAMA, parts=("model.layers.*",), gib=16),
    causal("Llama 7B wide · 2×4096", "LlamaConfig", decoder(4096, 11008, 2, 32, 32, 32000), batches=tokens(2, 4096),
           gib=16),
)  # fmt: skip
OTHERS = (
    causal("Qwen2 1.5B wide", "Qwen2Config", decoder(1536, 8960, 6, 12, 2, 151936, **TIED), batches=tokens(4, 2048),
           gib=30),
    causal("Qwen3", "Qwen3Config", decoder(2048, 6144, 6, 16, 8, 32000, head_dim=128), {**SMALL, "head_dim": 16},
           gib=16),
    causal("Gemma 2", "Gemma2Config", decoder(2304, 9216, 4, 8, 4, 32000, head_dim=256, attn_implementation="eager"),
           {**SMALL, "head_dim": 16}, tokens(2, 2048), gib=16),
    causal("Gemma 3 · vocabulary 256k", "Gemma3TextConfig", decoder(1152, 6912, 6, 4, 1, 262144, head_dim=256),
           {**SMALL, "head_dim": 16}, tokens(2, 2048), gib=35),
    causal("Mistral · sliding window", "MistralConfig", decoder(2048, 7168, 6, 16, 4, 32000, sliding_window=1024),
           {**SMALL, "sliding_window": 16}, gib=16),
    causal("Phi-3", "Phi3Config", decoder(3072, 8192, 4, 32, 32, 32064, pad_token_id=0), batches=tokens(4, 2048),
           gib=16),
    causal("GPT-2 large wide · dropout", "GPT2Config", gpt2(1280, 8, 20), TINY_GPT2, tokens(8, 1024), dropout=True,
           gib=18),
    causal("GPT-2 large wide", "GPT2Config", gpt2(1280, 8, 20), TINY_GPT2, tokens(8, 1024), gib=18),
    causal("GPT-NeoX", "GPTNeoXConfig",
           {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 6, "num_attention_heads": 16,
            "vocab_size": 50432, "use_cache": False}, SMALL_NEOX, gib=16),
    causal("OPT", "OPTConfig",
           {"hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 6, "num_attention_heads": 32,
            "vocab_size": 50272, "use_cache": False},
           {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 256}, gib=16),
    causal("Falcon", "FalconConfig",
           {"hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "vocab_size": 65024,
            "use_cache": False, "multi_query": True}, SMALL_NEOX, gib=28),
    causal("OLMo 2", "Olmo2Config", decoder(2048, 8192, 6, 16, 16, 50304), gib=32),
    causal("StableLM", "StableLmConfig", decoder(2048, 5632, 6, 32, 32, 50304), gib=26),
    causal("Cohere", "CohereConfig", decoder(2048, 8192, 6, 16, 16, 64000, pad_token_id=0), batches=tokens(4, 2048),
           gib=16),
    causal("Bloom (ALiBi)", "BloomConfig",
           {"hidden_size": 2048, "n_layer": 6, "n_head": 16, "vocab_size": 65024, "use_cache": False},
           {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256}, tokens(4, 1024), gib=16),
    causal("MPT", "MptConfig",
           {"d_model": 2048, "n_heads": 16, "n_layers": 6, "max_seq_len": 2048, "vocab_size": 50368,
            "use_cache": False},
           {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 256}, tokens(4, 1024), gib=16),
    causal("StarCoder 2", "Starcoder2Config", decoder(2048, 8192, 6, 16, 2, 49152), gib=16),
    causal("Granite", "GraniteConfig", decoder(2048, 8192, 6, 32, 8, 49152), gib=28),
    causal("GPT-J", "GPTJConfig",
           {"n_embd": 2048, "n_layer": 6, "n_head": 16, "vocab_size": 50400, "use_cache": False},
           {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "vocab_size": 256}, tokens(4, 1024), gib=16),
)  # fmt: skip
MODELS = LLAMAS + OTHERS
