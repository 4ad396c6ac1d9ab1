"""Models of time series."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.field.models.libraries import library
from benchmarks.field.models.task import Batch, Batches, FieldModel, Task, drawn, merged

LENGTHS = {"context_length": 96, "prediction_length": 48}
SMALL_LENGTHS = {"context_length": 16, "prediction_length": 8}
TRANSFORMER = {"d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 8,
               "decoder_attention_heads": 8,
               "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "num_time_features": 2, "lags_sequence": [1, 2, 3],
               "use_cache": False}  # fmt: skip
SMALL = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4,
         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip

# With convolutions that halve the sequence, a compiled encoder of transformers 5.17 has a mask of the whole length
# still, and raises.
ONE_LENGTH = {"distil": False}


def patches(batch: int) -> Batches:
    """Channels over time, and what comes after."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, channels = (4 if is_small else batch), config.num_input_channels
        return [{
            "past_values": drawn(rows, config.context_length, channels),
            "future_values": drawn(rows, config.prediction_length, channels, seed=2),
        }]  # fmt: skip

    return made


def with_times(batch: int) -> Batches:
    """One series a row, with features of each time."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, past = (4 if is_small else batch), config.context_length + max(config.lags_sequence)
        future = config.prediction_length
        return [{
            "past_values": drawn(rows, past), "past_time_features": drawn(rows, past, config.num_time_features, seed=2),
            "past_observed_mask": torch.ones(rows, past, device="cpu"), "future_values": drawn(rows, future, seed=3),
            "future_time_features": drawn(rows, future, config.num_time_features, seed=4),
        }]  # fmt: skip

    return made


def series(name: str, config: str, head: str, sizes: Any, small: Any, batches: Batches, **row: Any) -> FieldModel:

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        transformers = library("transformers")
        made = getattr(transformers, config)(**(merged(sizes, small) if is_small else sizes))
        return Task(getattr(transformers, head)(made).to(dtype), batches(made, is_small))

    return FieldModel(name, "series", make, ("transformers",), **row)


MODELS = (
    series("PatchTST", "PatchTSTConfig", "PatchTSTForPrediction",
           {"num_input_channels": 7, "context_length": 512, "prediction_length": 96, "patch_length": 16,
            "patch_stride": 8,
            "d_model": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "ffn_dim": 1024},
           {"context_length": 64, "prediction_length": 8, "d_model": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64}, patches(64), autocast=True),
    series("Informer", "InformerConfig", "InformerForPrediction", {**LENGTHS, **TRANSFORMER, **ONE_LENGTH},
           {**SMALL_LENGTHS, **SMALL}, with_times(64), autocast=True),
    series("Time series transformer", "TimeSeriesTransformerConfig", "TimeSeriesTransformerForPrediction",
           {**LENGTHS, **TRANSFORMER}, {**SMALL_LENGTHS, **SMALL}, with_times(64), autocast=True),
    series("PatchTSMixer", "PatchTSMixerConfig", "PatchTSMixerForPrediction",
           {"num_input_channels": 7, "context_length": 512, "prediction_length": 96, "patch_length": 16,
            "patch_stride": 8,
            "d_model": 256, "num_layers": 4},
           {"context_length": 64, "prediction_length": 8, "d_model": 32, "num_layers": 2}, patches(64), autocast=True),
)  # fmt: skip
