"""Models of speech and sound."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.field.models.task import Batch, Batches, drawn, transformer

WAV2VEC = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072,
           "vocab_size": 32,
           "apply_spec_augment": False, "layerdrop": 0.0, "ctc_zero_infinity": True, "pad_token_id": 0}  # fmt: skip
SMALL_WAV2VEC = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                 "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
                 "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}  # fmt: skip
WHISPER = {"d_model": 768, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 12,
           "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
           "use_cache": False}  # fmt: skip
SMALL_WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
                 "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256,
                 "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0,
                 "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip


def waves(batch: int, seconds: int) -> Batches:
    """Sound of 16 kHz, with the letters that are said."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, samples, letters = (2, 800, 4) if is_small else (batch, 16000 * seconds, 40)
        return [{"input_values": drawn(rows, samples), "labels": 1 + drawn(rows, letters, below=config.vocab_size - 1)}]

    return made


def spectra(batch: int, length: int) -> Batches:
    """Mel spectra of 30 seconds, with the tokens that are said."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, length_of_text = (2, 16) if is_small else (batch, length)
        frames = 2 * config.max_source_positions
        labels = drawn(rows, length_of_text, below=config.vocab_size)
        return [{"input_features": drawn(rows, config.num_mel_bins, frames), "labels": labels}]

    return made


def spectrograms(batch: int) -> Batches:
    """Spectrograms with classes."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows = 2 if is_small else batch
        classes = torch.arange(rows, device="cpu") % config.num_labels
        return [{"input_values": drawn(rows, config.max_length, config.num_mel_bins), "labels": classes}]

    return made


MODELS = (
    transformer("Wav2Vec2 · CTC · FP32 under autocast", "sound", "Wav2Vec2Config", "ForCTC", WAV2VEC, SMALL_WAV2VEC,
                waves(8, 10), autocast=True, gib=20),
    transformer("HuBERT · CTC", "sound", "HubertConfig", "ForCTC", WAV2VEC, SMALL_WAV2VEC, waves(8, 10), gib=20),
    transformer("Whisper-small wide", "sound", "WhisperConfig", "ForSpeechSeq2Seq", WHISPER, SMALL_WHISPER,
                spectra(8, 256), gib=20),
    transformer("Whisper · dropout · FP32 under autocast", "sound", "WhisperConfig", "ForSpeechSeq2Seq",
                {**WHISPER, "dropout": 0.1}, SMALL_WHISPER, spectra(8, 256), autocast=True, dropout=True, gib=20),
    transformer("Audio spectrogram transformer", "sound", "ASTConfig", "ForAudioClassification",
                {"hidden_size": 768, "num_hidden_layers": 6, "num_labels": 527},
                {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
                 "num_labels": 16, "max_length": 64, "num_mel_bins": 32}, spectrograms(8), gib=20),
)  # fmt: skip
