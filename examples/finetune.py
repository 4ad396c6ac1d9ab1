"""Fine-tuning a Hugging Face causal LM: all parameters, or LoRA on a frozen base that is kept in FP8.

    python examples/finetune.py                                all parameters of a small Llama, on a CPU
    python examples/finetune.py --size lora                    LoRA on the same, its base a byte a parameter
    python examples/finetune.py --size 1b-lora                 on a GPU (1b: all parameters)

The weights are random ones of the config, so that nothing has to be downloaded: with a checkpoint of your own, write
`transformers.AutoModelForCausalLM.from_pretrained(path)` in `make`. The text is that of `corpus.py`, as bytes.

LoRA: W x + B (A x), rank 16, on every linear layer of the blocks. The base is stored as an E4M3 payload with a scale,
and has no gradient; its matmuls run in FP8 from it. A and B train in FP32 under autocast.

On 2 CPU cores that did other things as well (FP8 is emulated there, so its time says nothing):

    $ python examples/finetune.py
           first loss  final loss  matmuls in FP8         step
    BF16       5.5317      2.8864               -      45.6 ms
    FP8        5.5309      2.8717        42 of 45     692.1 ms
    FP8 against BF16: -0.51%

    $ python examples/finetune.py --size lora
           first loss  final loss  matmuls in FP8         step
    BF16       5.5295      4.5329               -     147.1 ms
    FP8        5.5288      4.5182      104 of 106     172.1 ms
    FP8 against BF16: -0.33%

On an H200 (nothing else ran on the GPU while steps were timed; the host compiled other things, and steps wait for it):

    $ python examples/finetune.py --size 1b --steps 30
           first loss  final loss  matmuls in FP8         step
    BF16       5.8932      3.1755               -     104.4 ms    20.26 GiB
    FP8        5.9240      3.1966      336 of 340      87.7 ms    14.35 GiB
    FP8 against BF16: +0.66%

    $ python examples/finetune.py --size 1b-lora --steps 30
           first loss  final loss  matmuls in FP8         step
    BF16       5.9076      3.0365               -      84.1 ms    12.22 GiB
    FP8        5.9143      3.0438      224 of 835      71.9 ms     4.62 GiB
    FP8 against BF16: +0.24%
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from corpus import Corpus, load_corpus, windows
from side_by_side import Batch, Task, main

RANK, MAX_SEQ = 16, 1024


class Lora(nn.Module):
    """A linear layer with a frozen E4M3 weight, and a trained product of rank `RANK` beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        weight = base.weight.detach().float()
        scale = weight.abs().amax() / 448.0
        self.weight = nn.Parameter((weight / scale).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, (self.weight.to(x.dtype) * self.scale).to(x.dtype))
        return base + F.linear(F.linear(x, self.a), self.b)


def make(width: int, layers: int, lora: bool) -> nn.Module:
    """Return a Llama from a config; with `lora`, frozen but for its adapters."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1, num_key_value_heads=max(1, width // 128), use_cache=False,
        max_position_embeddings=MAX_SEQ, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if not lora:
        return model
    model.requires_grad_(False)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, nn.Linear):
            owner, _, attribute = name.rpartition(".")
            setattr(model.model.get_submodule(owner), attribute, Lora(module))
    model.model.embed_tokens.requires_grad_(True)  # random here; of a pretrained model one would leave it
    return model


@cache
def text() -> Corpus:
    return load_corpus(None, MAX_SEQ)


def batch(generator: torch.Generator, size: int, seq: int) -> Batch:
    starts = torch.randint(len(text().train) - seq, (size,), generator=generator)
    tokens, _ = windows(text().train, starts, seq)
    return {"input_ids": tokens, "labels": tokens}  # transformers shifts labels by itself


SIZES = {
    "tiny": Task(lambda: make(128, 2, False), lambda g: batch(g, 8, 128), 80, 2e-3),
    "lora": Task(lambda: make(128, 2, True), lambda g: batch(g, 8, 128), 80, 4e-3),
    "1b-lora": Task(lambda: make(2048, 16, True), lambda g: batch(g, 8, 1024), 300, 1e-3),
    "1b": Task(lambda: make(2048, 16, False), lambda g: batch(g, 8, 1024), 300, 3e-4),
}

if __name__ == "__main__":
    main(__doc__, SIZES)
