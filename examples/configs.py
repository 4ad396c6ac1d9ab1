"""Configurations of pre-training, for `pretrain.py`: a model, how it is spread over GPUs, and what a step is made of.

Sizes are those that the models were published with; batches and rates are near those of the papers of Llama 2 (arXiv
2307.09288) and Qwen2 (2407.10671), in powers of two. What each should take is in docs/scale.md, by arithmetic; of these
only `tiny` has been run.
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
