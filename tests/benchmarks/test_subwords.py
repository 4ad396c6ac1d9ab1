"""Subwords: tokens that are made once, whose text is the bytes'."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from benchmarks.training import subwords
from corpus import Corpus, load_corpus

TEXT = Path(asyncio.__file__).parent
VOCABULARY = 600


def test_tokens_spell_the_text() -> None:
    text = load_corpus(TEXT, 16).train
    tokenizer = subwords.learned(text, VOCABULARY)
    tokens = subwords.encoded(tokenizer, text)
    assert tokens.dtype == torch.int32
    assert tokens.max() < VOCABULARY
    assert len(tokens) < len(text) / 2
    assert tokenizer.decode(tokens.tolist()) == text.numpy().tobytes().decode(errors="replace")


def test_the_training_part_decides_the_tokens(tmp_path: Path) -> None:
    corpus = load_corpus(TEXT, 16)
    made = subwords.in_subwords(corpus, VOCABULARY, tmp_path / "tokens.pt")
    other = Corpus(corpus.train, corpus.train[: len(corpus.held_out)], "")
    again = subwords.in_subwords(other, VOCABULARY, tmp_path / "other.pt")
    assert torch.equal(again.train, made.train)
    assert torch.equal(again.held_out[:100], made.train[:100])
    assert "600 subwords" in made.source


def test_tokens_are_made_once(tmp_path: Path) -> None:
    corpus = load_corpus(TEXT, 16)
    cache = tmp_path / "tokens.pt"
    torch.save([torch.arange(3, dtype=torch.int32), torch.arange(2, dtype=torch.int32)], cache)
    assert subwords.in_subwords(corpus, VOCABULARY, cache).train.tolist() == [0, 1, 2]
