"""Generate text with weights that are cast to FP8 once, and free those in BF16.

    python examples/generate.py --tokens 32

    trained 20 steps: loss 6.32 -> 0.54
    BF16                 the same tokens      2.8 MiB of weights
    FP8 weights kept     the same tokens      3.9 MiB of weights
    BF16 weights freed   the same tokens      1.6 MiB of weights

The output is that of a CPU. Transformers would compile what a static cache allows by itself, in BF16: `disable_compile`
leaves that to `freeze`. On a GPU tokens are launched by CUDA graphs (`mode="reduce-overhead"`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8compile
from export_model import SIZES, tokens, train

OPTIONS: Any = {"select": "all"}  # so small a model would stay BF16


@torch.no_grad()
def generated(model: Any, count: int) -> torch.Tensor:
    """Return `count` greedy tokens behind each of some prompts."""
    prompts = tokens(model)[:, :16]
    how = {"do_sample": False, "cache_implementation": "static", "disable_compile": True, "pad_token_id": 0}
    return model.generate(prompts, min_new_tokens=count, max_new_tokens=count, **how)[:, 16:]


def report(what: str, found: torch.Tensor, right: torch.Tensor, held: int) -> None:
    """Print how many tokens are those of BF16, and what the weights take."""
    same = (found == right).float().mean()
    print(
        f"{what:<20} {'the same tokens' if same == 1 else f'{same:.1%} the same':<20} {held / 2**20:.1f} MiB of weights"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, "use_cache": True}))
    model.to(device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16)
    first, last = train(model, given.steps)
    print(f"trained {given.steps} steps: loss {first:.2f} -> {last:.2f}")

    weights = sum(p.nbytes for p in model.parameters())
    model.eval()
    right = generated(model, given.tokens)
    report("BF16", right, right, weights)
    fp8compile.freeze(model, options=OPTIONS, mode="reduce-overhead" if on_gpu else None)
    found = generated(model, given.tokens)
    freed = fp8compile.free_weights(model)
    report("FP8 weights kept", found, right, weights + freed // 2)
    report("BF16 weights freed", generated(model, given.tokens), right, weights - freed // 2)


if __name__ == "__main__":
    main()
