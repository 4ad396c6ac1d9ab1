"""A Lightning module in FP8: its model is compiled in place; precision and gradient clipping stay Trainer's.

    python examples/lightning_module.py          on a CPU or a GPU (pip install 'fp8compile[trainers]')

`compile` in `configure_model` comes before any strategy wraps the module, and leaves `training_step`, with its logging,
to Python.

On 2 CPU cores, without what Lightning prints itself:

    $ python examples/lightning_module.py
    24 of 27 matmuls in FP8
    5.5467 at first, 2.8634 in the last 8 of 40 steps
"""

from __future__ import annotations

import argparse
from statistics import fmean
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fp8compile
from corpus import load_corpus, random_starts, windows
from llama import Llama, LlamaConfig

ON_GPU = torch.cuda.is_available()
BATCH, SEQ = (8, 1024) if ON_GPU else (8, 128)
OPTIONS = {} if ON_GPU else {"select": "all", "executor": "eager"}
CONFIG = LlamaConfig(2048, 16, 32, 8, 5632) if ON_GPU else LlamaConfig(128, 2, 2, 1, 384)


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Llama(CONFIG, max_seq=SEQ)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        self.model.compile(backend="fp8", options=OPTIONS)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.model(*batch)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300 if ON_GPU else 40)
    steps = parser.parse_args(arguments).steps
    lightning.seed_everything(0)
    text = load_corpus(None, SEQ).train
    starts = random_starts(text, 1, steps * BATCH, SEQ, seed=0)[0]
    batches = DataLoader(TensorDataset(*windows(text, starts, SEQ)), batch_size=BATCH)
    module = LanguageModel()
    trainer = lightning.Trainer(
        accelerator="gpu" if ON_GPU else "cpu", precision="bf16-mixed", max_steps=steps, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, batches)
    rows = [row for plan in fp8compile.compiles() for row in plan.matmuls]
    print(f"{sum(row.decision == 'fp8' for row in rows)} of {len(rows)} matmuls in FP8")
    print(f"{module.losses[0]:.4f} at first, {fmean(module.losses[-8:]):.4f} in the last 8 of {steps} steps")
    return module.losses


if __name__ == "__main__":
    main()
