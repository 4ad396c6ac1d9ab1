"""Configurations of training: a model, how it is spread over GPUs, and what a step is made of.

`CONFIGS` are language models for `pretrain.py`. `VISION_LANGUAGE` are such models behind a vision tower, for
docs/scale.md: no example trains them at their size (`vision_language.py` trains a small one).

Sizes are those that the models were published with; batches and rates are near those of the papers of Llama 2 (arXiv
2307.09288), Qwen2 (2407.10671) and LLaVA-1.5 (2310.03744: 128 sequences of up to 2048 tokens, an image each), in powers
of two; Qwen2-VL (2409.12191) says nothing of its batches. What each should take is in docs/scale.md, by arithmetic; of
these `tiny` has been run, and `llama-7b` for a few steps on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pretraining:
    """`batch` sequences of `sequence` tokens on each of `gpus` GPUs (141 GiB each) make a global batch.

    family: of transformers, "llama" or "qwen2" (which has biases in attention).
    checkpoint: whether blocks run their forward again in backward, instead of keeping activations.
    gather: whether weights are gathered in FP8; it pays where links between hosts are slow (docs/scale.md).
    """

    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    gpus: int
    batch: int
    sequence: int
    rate: float
    checkpoint: bool = False
    gather: bool = False

    @property
    def global_batch(self) -> int:
        """Tokens of a step."""
        return self.gpus * self.batch * self.sequence


CONFIGS = {
    "tiny": Pretraining("llama", 128, 2, 4, 2, 384, 256, 2, 4, 128, 3e-3),
    "llama-7b": Pretraining("llama", 4096, 32, 32, 32, 11008, 32000, 64, 16, 4096, 3e-4),
    "llama-13b": Pretraining("llama", 5120, 40, 40, 40, 13824, 32000, 128, 8, 4096, 3e-4),
    "llama-70b": Pretraining("llama", 8192, 80, 64, 8, 28672, 32000, 512, 2, 4096, 1.5e-4, gather=True),
    "qwen2-7b": Pretraining("qwen2", 3584, 28, 28, 4, 18944, 152064, 64, 16, 4096, 3e-4),
    "qwen2-72b": Pretraining("qwen2", 8192, 80, 64, 8, 29568, 152064, 512, 2, 4096, 1.5e-4, gather=True),
}


@dataclass(frozen=True)
class Tower:
    """A vision transformer, and the projector that makes tokens of its patches; biases in all linear layers.

    family: of transformers, "clip" (learned positions, a class token that is not handed on, two more norms; the
    projector has a layer of the language model's width in the middle) or "qwen2_vl" (rotary positions, patches of two
    frames; the projector joins `merged` patches, and keeps their width in the middle).
    patches: of an image. frozen: whether it is trained; the projector always is.
    """

    family: str
    width: int
    layers: int
    heads: int
    inner: int
    patches: int
    merged: int = 1
    frozen: bool = False


@dataclass(frozen=True)
class VisionLanguage:
    """`language` behind `tower`: of each sequence, `images` times patches/merged tokens are those of images."""

    tower: Tower
    language: Pretraining
    images: int = 1


CLIP = Tower("clip", 1024, 24, 16, 4096, 576, frozen=True)  # ViT-L/14 at 336 × 336
QWEN = Tower("qwen2_vl", 1280, 32, 16, 5120, 1024, merged=4)  # at 448 × 448, which is as large as one likes
VISION_LANGUAGE = {
    "llava-7b": VisionLanguage(CLIP, Pretraining("llama", 4096, 32, 32, 32, 11008, 32064, 8, 16, 2048, 2e-5)),
    "llava-13b": VisionLanguage(CLIP, Pretraining("llama", 5120, 40, 40, 40, 13824, 32064, 8, 16, 2048, 2e-5)),
    "qwen2-vl-7b": VisionLanguage(QWEN, Pretraining("qwen2", 3584, 28, 28, 4, 18944, 152064, 64, 8, 4096, 1e-5), 4),
}
