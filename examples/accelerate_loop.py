"""A training loop with accelerate, in FP8: the backend and its options are what its dynamo plugin takes.

    python examples/accelerate_loop.py                          on a CPU or a GPU (pip install 'fp8compile[trainers]')
    torchrun --nproc-per-node 2 examples/accelerate_loop.py     in two processes

`register_backend` lets accelerate know the name; then the plugin takes it, with options. `prepare` compiles the model,
DistributedDataParallel included where there are several processes: torch then compiles a graph for each of its buckets.

On 2 CPU cores:

    $ python examples/accelerate_loop.py
    processes: 1; 42 of 45 matmuls in FP8
    5.5648 at first, 3.0170 in the last 8 of 40 steps

    $ torchrun --nproc-per-node 2 examples/accelerate_loop.py
    processes: 2; 42 of 45 matmuls in FP8
    5.5624 at first, 2.9706 in the last 8 of 40 steps
"""

from __future__ import annotations

import argparse
from statistics import fmean

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, set_seed
from torch.utils.data import DataLoader, TensorDataset

import fp8compile
from corpus import load_corpus, random_starts, windows
from finetune import make

ON_GPU = torch.cuda.is_available()
WIDTH, LAYERS, BATCH, SEQ = (2048, 16, 8, 1024) if ON_GPU else (128, 2, 8, 128)
OPTIONS = {} if ON_GPU else {"select": "all", "executor": "eager"}


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300 if ON_GPU else 40)
    steps = parser.parse_args(arguments).steps
    set_seed(0)

    plugin = TorchDynamoPlugin(backend=fp8compile.register_backend(), options=OPTIONS)  # type: ignore[arg-type]
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin, cpu=not ON_GPU)

    text = load_corpus(None, SEQ).train
    starts = random_starts(text, 1, steps * BATCH * accelerator.num_processes, SEQ, seed=0)[0]
    batches = DataLoader(TensorDataset(windows(text, starts, SEQ)[0]), batch_size=BATCH)
    model = make(WIDTH, LAYERS, False)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, opt, batches = accelerator.prepare(model, opt, batches)

    losses = []
    for (tokens,) in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())  # type: ignore[union-attr]

    rows = [row for plan in fp8compile.compiles() for row in plan.matmuls]
    converted = sum(row.decision == "fp8" for row in rows)
    accelerator.print(f"processes: {accelerator.num_processes}; {converted} of {len(rows)} matmuls in FP8")
    accelerator.print(f"{losses[0]:.4f} at first, {fmean(losses[-8:]):.4f} in the last 8 of {steps} steps")
    accelerator.end_training()
    return losses


if __name__ == "__main__":
    main()
