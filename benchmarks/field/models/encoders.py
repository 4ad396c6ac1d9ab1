"""Encoders of text, and encoders with decoders."""

from __future__ import annotations

from typing import Any

from benchmarks.field.models.task import (
    Batches,
    FieldModel,
    Sizes,
    bert,
    classified_tokens,
    padded_tokens,
    pairs_of_tokens,
    tokens,
    transformer,
)

LARGE = bert(1024, 8, 16, 30522)
SMALL = {**bert(64, 2, 4, 256), "intermediate_size": 128}
FILLED = tokens(32, 512)


def encoder(
    name: str,
    config: str,
    sizes: Sizes,
    small: Sizes = SMALL,
    batches: Batches = FILLED,
    head: str = "ForMaskedLM",
    **row: Any,
) -> FieldModel:
    return transformer(name, "encoder", config, head, sizes, small, batches, **{"gib": 25, **row})


ENCODERS = (
    encoder("BERT-large wide", "BertConfig", LARGE),
    encoder("BERT-large wide · padded · dropout", "BertConfig", LARGE, batches=padded_tokens(16, 512), dropout=True),
    encoder("BERT · FP32 under autocast · dropout", "BertConfig", bert(768, 8, 12, 30522), autocast=True,
            batches=tokens(16, 512), dropout=True),
    encoder("RoBERTa · classes", "RobertaConfig", {**bert(768, 8, 12, 50265), "num_labels": 3,
                                                   "max_position_embeddings": 514},
            {**SMALL, "max_position_embeddings": 66}, classified_tokens(32, 256), "ForSequenceClassification",
            dropout=True),
    encoder("RoBERTa · one row", "RobertaConfig", {**bert(768, 8, 12, 50265), "num_labels": 2,
                                                   "max_position_embeddings": 514},
            {**SMALL, "max_position_embeddings": 66}, classified_tokens(1, 256, (1, 32)), "ForSequenceClassification"),
    encoder("DeBERTa-v2", "DebertaV2Config",
            {**bert(1024, 6, 16, 128100), "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
             "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0},
            {**SMALL, "position_buckets": 8, "max_position_embeddings": 64}, tokens(8, 512)),
    encoder("ModernBERT", "ModernBertConfig", {**bert(768, 8, 12, 50368), "intermediate_size": 1152,
                                               "reference_compile": False},
            {**SMALL, "pad_token_id": 0, "local_attention": 16, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1,
             "eos_token_id": 2}),
    encoder("ELECTRA", "ElectraConfig", {**bert(1024, 8, 16, 30522), "embedding_size": 1024}, {**SMALL,
                                                                                               "embedding_size": 32},
            head="ForPreTraining", batches=lambda config, small: replaced(config, small)),
    encoder("ALBERT (shared weights)", "AlbertConfig", {**bert(1024, 8, 16, 30000), "embedding_size": 128},
            {**SMALL, "embedding_size": 32}),
    encoder("XLNet", "XLNetConfig", {"d_model": 1024, "n_layer": 6, "n_head": 16, "d_inner": 4096, "vocab_size": 32000},
            {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 256}, tokens(8, 512),
            "ForCausalLM", autocast=True),
    encoder("Longformer", "LongformerConfig", {**bert(768, 4, 12, 30522), "attention_window": 256,
                                               "max_position_embeddings": 2050},
            {**SMALL, "attention_window": 8, "max_position_embeddings": 66}, tokens(4, 2048)),
    encoder("DistilBERT", "DistilBertConfig", {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
            {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 256}),
    encoder("MPNet", "MPNetConfig", bert(768, 6, 12, 30527), SMALL, tokens(16, 512)),
)  # fmt: skip


def replaced(config: Any, is_small: bool) -> list[dict[str, Any]]:
    """Tokens, and for each whether it was replaced."""
    batches = FILLED(config, is_small)
    return [{"input_ids": b["input_ids"], "labels": b["input_ids"] % 2} for b in batches]


T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 4, "num_heads": 16, "feed_forward_proj": "gated-gelu",
      "vocab_size": 32128, "use_cache": False, "decoder_start_token_id": 0}  # fmt: skip
SMALL_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
BART = {"d_model": 1024, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 16,
        "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
        "use_cache": False}  # fmt: skip
SMALL_BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
              "decoder_attention_heads": 4,
              "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256, "pad_token_id": 1, "bos_token_id": 0,
              "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip


def translator(name: str, config: str, sizes: Sizes, small: Sizes, **row: Any) -> FieldModel:
    batches = pairs_of_tokens(16, 512, 256)
    return transformer(name, "encoder-decoder", config, "ForSeq2SeqLM", sizes, small, batches, **{"gib": 25, **row})


TRANSLATORS = (
    translator("T5 · gated", "T5Config", T5, SMALL_T5),
    translator("T5 · dropout · FP32 under autocast", "T5Config", {**T5, "d_model": 768, "num_heads": 12}, SMALL_T5,
               autocast=True, dropout=True),
    translator("mT5", "MT5Config", {**T5, "d_model": 768, "num_heads": 12, "d_ff": 2048, "vocab_size": 250112},
               SMALL_T5, gib=45),
    translator("BART", "BartConfig", BART, SMALL_BART),
    translator("BART · dropout", "BartConfig", BART, SMALL_BART, dropout=True),
    translator("Pegasus", "PegasusConfig", {**BART, "vocab_size": 96103}, {**SMALL_BART, "forced_eos_token_id": 2},
               gib=35),
    translator("Marian", "MarianConfig", {**BART, "d_model": 512, "encoder_attention_heads": 8,
                                          "decoder_attention_heads": 8,
                                          "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048},
               {**SMALL_BART, "decoder_vocab_size": 256}),
    translator("T5Gemma-like: UMT5", "UMT5Config", {**T5, "d_model": 512, "num_heads": 6, "d_ff": 1024}, SMALL_T5),
)  # fmt: skip
MODELS = ENCODERS + TRANSLATORS
