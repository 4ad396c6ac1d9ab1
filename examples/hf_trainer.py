"""Hugging Face's Trainer in FP8: one argument, and beside BF16 on the same data.

    python examples/hf_trainer.py                on a CPU or a GPU (pip install 'fp8compile[trainers]')

Trainer takes a backend by its name, without options, and accelerate decides which names there are: `register_backend`
makes one, here for options that suit a CPU. Trainer compiles the model that it trains, and evaluates it uncompiled.
Its optimizer it steps uncompiled, so states stay plain, which a warning says of the fused default.
8-bit optimizer states go through Trainer and its checkpoints too: `Trainer(…, optimizers=(opt, None))` after

    opt = fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    opt.step = types.MethodType(torch.compile(type(opt).step, backend="fp8"), opt)

On 2 CPU cores, without what Trainer prints itself:

    $ python examples/hf_trainer.py
    42 of 45 matmuls in FP8
    BF16 5.5710 at first, 3.0308 in the last 8 steps
    FP8  5.5693 at first, 3.0296 in the last 8 steps
"""

from __future__ import annotations

import argparse
import tempfile
from statistics import fmean

import torch
import transformers

import fp8compile
from corpus import load_corpus, random_starts, windows
from finetune import make

ON_GPU = torch.cuda.is_available()
WIDTH, LAYERS, BATCH, SEQ = (2048, 16, 8, 1024) if ON_GPU else (128, 2, 8, 128)


def train(backend: str | None, steps: int) -> list[float]:
    """Return the losses of a small Llama on real text; `backend` None: BF16, not compiled."""
    text = load_corpus(None, SEQ).train
    starts = random_starts(text, 1, steps * BATCH, SEQ, seed=0)[0]
    tokens, _ = windows(text, starts, SEQ)
    transformers.set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=2e-3, bf16=True,
            torch_compile_backend=backend, use_cpu=not ON_GPU, logging_steps=1, save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=make(WIDTH, LAYERS, False),
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],  # type: ignore[arg-type]
        )
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> tuple[list[float], list[float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300 if ON_GPU else 40)
    steps = parser.parse_args(arguments).steps
    options = {} if ON_GPU else {"select": "all", "executor": "eager"}
    bf16 = train(None, steps)
    fp8 = train(fp8compile.register_backend("fp8" if ON_GPU else "fp8_on_cpu", **options), steps)
    rows = [row for plan in fp8compile.compiles() for row in plan.matmuls]
    print(f"{sum(row.decision == 'fp8' for row in rows)} of {len(rows)} matmuls in FP8")
    for name, losses in (("BF16", bf16), ("FP8", fp8)):
        print(f"{name:<4} {losses[0]:.4f} at first, {fmean(losses[-8:]):.4f} in the last 8 steps")
    return bf16, fp8


if __name__ == "__main__":
    main()
