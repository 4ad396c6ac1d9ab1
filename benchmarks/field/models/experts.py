"""Mixtures of experts."""

from __future__ import annotations

from typing import Any

from benchmarks.field.models.task import FieldModel, Sizes, tokens, transformer
from benchmarks.harness.workloads import TINY_DECODER, TINY_DEEPSEEK_V3, TINY_QWEN3_MOE, decoder

SMALL = {**TINY_DECODER, "pad_token_id": 0}
ROUTED = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}


def mixture(name: str, config: str, sizes: Sizes, small: Sizes, **row: Any) -> FieldModel:
    batches = tokens(4, 2048)
    return transformer(name, "experts", config, "ForCausalLM", sizes, {**SMALL, **small}, batches, gib=30, **row)


MODELS = (
    mixture("Mixtral", "MixtralConfig", decoder(2048, 3584, 4, 32, 8, 32000, num_local_experts=8),
            {"num_local_experts": 4}),
    mixture("Qwen2-MoE", "Qwen2MoeConfig",
            decoder(2048, 5632, 4, 16, 16, 32000, num_experts=32, moe_intermediate_size=1408,
                    shared_expert_intermediate_size=5632, num_experts_per_tok=4),
            {**ROUTED, "shared_expert_intermediate_size": 64}),
    mixture("Qwen3-MoE", "Qwen3MoeConfig",
            decoder(2048, 6144, 4, 32, 4, 32000, num_experts=32, moe_intermediate_size=768, num_experts_per_tok=8),
            TINY_QWEN3_MOE),
    mixture("DeepSeek-V3", "DeepseekV3Config",
            decoder(2048, 6144, 4, 16, 16, 32000, n_routed_experts=32, moe_intermediate_size=1024,
                    num_experts_per_tok=4,
                    n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=768, kv_lora_rank=512,
                    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128),
            TINY_DEEPSEEK_V3),
    mixture("gpt-oss", "GptOssConfig",
            decoder(2048, 2048, 4, 32, 8, 32000, num_local_experts=16, num_experts_per_tok=4, head_dim=64),
            {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    mixture("OLMoE", "OlmoeConfig",
            decoder(2048, 1024, 4, 16, 16, 50304, num_experts=32, num_experts_per_tok=8),
            {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    mixture("Granite MoE", "GraniteMoeConfig",
            decoder(1536, 512, 4, 24, 8, 49152, num_local_experts=32, num_experts_per_tok=8),
            {"num_local_experts": 4, "num_experts_per_tok": 2}),
    mixture("Mixtral · FP32 under autocast", "MixtralConfig", decoder(1024, 3584, 4, 16, 8, 32000, num_local_experts=8),
            {"num_local_experts": 4}, autocast=True),
)  # fmt: skip
