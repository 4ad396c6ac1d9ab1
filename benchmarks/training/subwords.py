"""A text in subwords: byte pairs merged by how often they occur, learned by Hugging Face's tokenizers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from corpus import Corpus

PIECE = 2**16  # bytes that are encoded at a time: a token never goes across


def in_subwords(corpus: Corpus, vocabulary: int, cache: Path) -> Corpus:
    """Return `corpus`, whose texts are bytes, as i32 tokens below `vocabulary`; its training part decides the merges.

    cache: a file that keeps the tokens, which take half a minute to make; it is read if it is there.
    """
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = learned(corpus.train, vocabulary)
        made = [encoded(tokenizer, text) for text in (corpus.train, corpus.held_out)]
        part = cache.with_suffix(f".{os.getpid()}")
        torch.save(made, part)
        part.replace(cache)  # another process may read it meanwhile
    train, held_out = torch.load(cache, weights_only=True)
    return replace(corpus, train=train, held_out=held_out, source=f"{corpus.source}, {vocabulary} subwords")


def learned(text: Tensor, vocabulary: int) -> Any:
    """Return the tokenizer of so many tokens whose merges are the most frequent of `text`, u8[n]."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_pieces(text), trainer)
    return tokenizer


def encoded(tokenizer: Any, text: Tensor) -> Tensor:
    """Return the tokens, i32[n], of a text, u8[m]."""
    pieces = tokenizer.encode_batch(list(_pieces(text)))
    return torch.tensor([token for piece in pieces for token in piece.ids], dtype=torch.int32)


def _pieces(text: Tensor) -> Iterator[str]:
    whole = text.numpy().tobytes()
    for start in range(0, len(whole), PIECE):
        yield whole[start : start + PIECE].decode(errors="replace")
