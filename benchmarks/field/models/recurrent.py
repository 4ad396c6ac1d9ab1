"""State space models and other successors of recurrent nets."""

from __future__ import annotations

from typing import Any

from benchmarks.field.models.task import FieldModel, Sizes, tokens, transformer

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}


def recurrent(name: str, config: str, sizes: Sizes, small: Sizes, **row: Any) -> FieldModel:
    batches = tokens(2, row.pop("length", 512), (2, row.pop("small_length", 16)))
    return transformer(name, "recurrent", config, "ForCausalLM", sizes, {**SMALL, **small}, batches, gib=30, **row)


MODELS = (
    # without its CUDA kernels Mamba walks through a sequence token by token, in Python: one graph node each
    recurrent("Mamba (slow path)", "MambaConfig", {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 32000,
                                                   "use_cache": False},
              {"state_size": 8}, length=64),
    recurrent("Mamba 2 (slow path)", "Mamba2Config",
              {"hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 32000, "use_cache": False, "num_heads": 32,
               "head_dim": 64,
               "n_groups": 1}, {"num_heads": 8, "head_dim": 16, "state_size": 16, "chunk_size": 8}),
    recurrent("RWKV", "RwkvConfig", {"hidden_size": 1024, "num_hidden_layers": 2, "vocab_size": 32000,
                                     "use_cache": False},
              {}, length=64),
    recurrent("RecurrentGemma", "RecurrentGemmaConfig",
              {"hidden_size": 1024, "num_hidden_layers": 3, "vocab_size": 32000, "num_attention_heads": 8,
               "lru_width": 1024,
               "intermediate_size": 6144, "use_cache": False},
              {"num_attention_heads": 4, "lru_width": 64, "intermediate_size": 128, "num_hidden_layers": 3,
               "attention_window_size": 16},
              length=64),
)  # fmt: skip
