"""Instruction tuning: answers are learned, instructions are not, and short examples of all lengths share a sequence.

    python examples/instruct.py                 a small Llama on a CPU
    python examples/instruct.py --size 1b       on a GPU

An example is an instruction ("sort: dbac") and its answer ("abcd"), as bytes. Examples are packed one behind the other
until a sequence is full: positions begin again at each (by that transformers keeps them from attending to each other),
labels are -100 wherever nothing is asked: in instructions, in the rest of a sequence, and at the first byte of each
example, which the last byte of the one before must not predict.

-100 makes rows of gradients exactly zero, which FP8 keeps. Sequences have one length, whatever is in them, so the model
is compiled once.

On 2 CPU cores that did other things as well (FP8 is emulated there, so its time says nothing):

    $ python examples/instruct.py
           first loss  final loss  matmuls in FP8         step
    BF16       5.5488      3.0230               -      30.9 ms
    FP8        5.5487      3.0250        42 of 45     316.9 ms
    FP8 against BF16: +0.07%

On an H200 (nothing else ran on the GPU while steps were timed; the host compiled other things, and steps wait for it):

    $ python examples/instruct.py --size 1b --steps 30
           first loss  final loss  matmuls in FP8         step
    BF16       5.9925      3.0167               -     104.4 ms    20.26 GiB
    FP8        6.0035      2.9271      336 of 340      80.1 ms    14.35 GiB
    FP8 against BF16: -2.97%
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

from side_by_side import Batch, Task, main

IGNORED = -100
TASKS = {
    "sort": sorted,
    "reverse": lambda letters: letters[::-1],
    "copy": lambda letters: letters,
    "shout": lambda letters: [c.upper() for c in letters],
}


def make(width: int, layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64 or 1, num_key_value_heads=max(1, width // 128), use_cache=False,
        max_position_embeddings=1024,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def example(generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Return an instruction and its answer, of 3 to 12 letters."""
    name = list(TASKS)[int(torch.randint(len(TASKS), (), generator=generator))]
    count = int(torch.randint(3, 13, (), generator=generator))
    letters = [chr(97 + int(i)) for i in torch.randint(26, (count,), generator=generator)]
    return list(f"{name}: {''.join(letters)}\n".encode()), list(f"{''.join(TASKS[name](letters))}\n".encode())


def packed(generator: torch.Generator, seq: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, labels and positions of one sequence; transformers predicts label i from the tokens before i."""
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    while True:
        question, answer = example(generator)
        length = len(question) + len(answer)
        if len(tokens) + length > seq:
            rest = seq - len(tokens)
            return tokens + [0] * rest, labels + [IGNORED] * rest, positions + list(range(rest))
        tokens += question + answer
        labels += [IGNORED] * len(question) + answer
        positions += range(length)


def batch(generator: torch.Generator, size: int, seq: int) -> Batch:
    rows = [packed(generator, seq) for _ in range(size)]
    tokens, labels, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


SIZES = {
    "tiny": Task(lambda: make(128, 2), lambda g: batch(g, 8, 128), 80, 2e-3),
    "1b": Task(lambda: make(2048, 16), lambda g: batch(g, 8, 1024), 300, 2e-4),
}

if __name__ == "__main__":
    main(__doc__, SIZES)
