"""torchtitan in FP8: configurations for its `--module`, made of its own by one function.

    torchrun --nproc-per-node 2 examples/titan_on_cpu.py --module titan --config bytes_fp8                without GPUs
    PYTHONPATH=examples torchrun --nproc-per-node 2 -m torchtitan.train --module titan --config bytes_fp8    with them

torchtitan compiles each block with the backend that its configuration names, around activation checkpointing and inside
of FSDP2. Its specification of a model has places for what comes before (weights that are gathered as FP8) and after
(8-bit optimizer states). It refuses FlexAttention with other backends than torch's: use another attention.

With `--debug.seed 0` on 2 CPU cores, losses of steps 1 to 6 as the trainer prints them:

    bytes_fp8     8.26238 7.91599 7.30559 6.64090 6.48925 6.37255
    bytes_bf16    8.26269 7.91551 7.30400 6.63794 6.48665 6.37085
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import fp8compile
from corpus import load_corpus, random_starts, windows

ON_GPU = torch.cuda.is_available()


def in_fp8(config: Trainer.Config, **options: Any) -> Trainer.Config:
    """`config` with FP8 matmuls, weights that are gathered as FP8, and 8-bit optimizer states."""
    backend = fp8compile.register_backend("fp8_titan", **options)
    spec: Any = config.model_spec
    parallelize = spec.parallelize_fn

    def prepare_and_parallelize(model: nn.Module, **how: Any) -> nn.Module:
        return parallelize(fp8compile.prepare_fsdp(model), **how)

    def prepare_optimizers(optimizers: Any, *_: Any) -> None:
        for opt in optimizers:
            opt.step = MethodType(torch.compile(type(opt).step, backend=backend), opt)  # a method: schedulers wrap it

    spec.parallelize_fn, spec.post_optimizer_build_fn = prepare_and_parallelize, prepare_optimizers
    config.compile = CompileConfig(enable=True, components=["model"], backend=backend)
    config.optimizer.implementation = "foreach"  # of "fused" a compiled step takes the flag off (docs/optimizer.md)
    return config


class Bytes(BaseTokenizer):
    """The tokenizer that the trainer asks for; the loader reads bytes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config): ...

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


class Windows(BaseDataLoader):
    """Random windows of the text of `corpus.py`, others on each rank; a checkpoint keeps how many."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config): ...

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.text, self.rank = load_corpus(None, seq_len).train, dp_rank
        self.batch, self.seq, self.step = local_batch_size, seq_len, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self.step += 1
            starts = random_starts(self.text, 1, self.batch, self.seq, seed=2**20 * self.rank + self.step)[0]
            tokens, targets = windows(self.text, starts, self.seq)
            yield {"input": tokens}, targets

    def state_dict(self) -> dict[str, Any]:
        return {f"steps of rank {self.rank}": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict[f"steps of rank {self.rank}"]


def bytes_bf16() -> Trainer.Config:
    """torchtitan's debug model on bytes."""
    config = llama3_debugmodel()
    model: Any = config.model_spec.model  # type: ignore[union-attr]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = Bytes.Config(), Windows.Config()
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    if not ON_GPU:
        del model.layers[2:]
        config.optimizer.implementation = "foreach"
        config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 128, 6
    return config


def bytes_fp8() -> Trainer.Config:
    return in_fp8(bytes_bf16(), **({} if ON_GPU else {"select": "all", "executor": "eager"}))
