"""Train a little, export with FP8 weights, and compare with what Transformers loads in another process.

    python examples/export_model.py --format block

    trained 20 steps: loss 6.32 -> 0.55
    runs/export: 14 layers in FP8 (block), 1.6 MiB; the model has 2.8 MiB
      not in FP8: lm_head: in training: the output head (lm_head=True converts it)
    logits of Transformers against BF16: 35.4 dB, the same next token in 100.0 %

The other process runs on the CPU, where Transformers makes BF16 weights of FP8 ones. The output is that of a CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fp8compile

SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
OPTIONS: Any = {"select": "all"}  # so small a model would stay BF16


def train(model: Any, steps: int) -> tuple[float, float]:
    """Train on the same sequences in each step; return the first and the last loss."""
    run = torch.compile(model, backend="fp8", options=OPTIONS)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = tokens(model)
        loss = run(input_ids=batch, labels=batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def tokens(model: Any) -> torch.Tensor:
    """Return sequences that count in steps of 1 to 4."""
    step = torch.arange(1, 5).repeat(4)[:, None]
    return ((torch.arange(64) * step + 7 * step) % SIZES["vocab_size"]).to(model.device)


def loaded_logits(folder: Path) -> None:
    """Load with Transformers, and write its logits beside the folder. Runs in a process of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.save(model(tokens(model)).logits.float().cpu(), folder.with_suffix(".pt"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="block", choices=["block", "channel", "tensor"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("runs/export"))
    parser.add_argument("--logits-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.logits_of:
        loaded_logits(given.logits_of)
        return
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.to(device=device, dtype=torch.bfloat16)
    first, last = train(model, given.steps)
    print(f"trained {given.steps} steps: loss {first:.2f} -> {last:.2f}")
    print(fp8compile.export(model, given.folder, given.format, overwrite=True))
    on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, __file__, "--logits-of", str(given.folder)], check=True, env=on_cpu)
    theirs = torch.load(given.folder.with_suffix(".pt"))
    with torch.no_grad():
        mine = model.eval()(tokens(model)).logits.float().cpu()
    noise = (mine - theirs).square().mean() / mine.square().mean()
    same = (mine.argmax(-1) == theirs.argmax(-1)).float().mean()
    print(
        f"logits of Transformers against BF16: {-10 * noise.log10():.1f} dB, the same next token in {100 * same:.1f} %"
    )


if __name__ == "__main__":
    main()
