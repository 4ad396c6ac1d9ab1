"""Pre-training on several GPUs: FSDP2 around blocks that are compiled to FP8, 8-bit optimizer states, checkpoints.

    torchrun --nproc-per-node 2 examples/pretrain.py                            two processes on a CPU
    torchrun --nproc-per-node 2 examples/pretrain.py --backend inductor         the same in BF16
    torchrun --nnodes 8 --nproc-per-node 8 … examples/pretrain.py --config llama-7b --checkpoints FOLDER

`configs.py` has the configurations; the text is that of `corpus.py`, as bytes. Started again with the same folder of
checkpoints it goes on after the last one, also with another number of processes; a step then has as many sequences more
or less, as each process brings its batch.

On 2 CPU cores that did other things as well (FP8 is emulated there, so its time says nothing):

    $ torchrun --nproc-per-node 2 examples/pretrain.py
    step     1  loss 5.6546  44 tokens/s a GPU
    step    10  loss 3.2423  2,708 tokens/s a GPU
    step    20  loss 2.9266  3,518 tokens/s a GPU
    step    30  loss 3.1843  3,178 tokens/s a GPU
    step    40  loss 3.1045  2,737 tokens/s a GPU

    $ torchrun --nproc-per-node 2 examples/pretrain.py --backend inductor
    step     1  loss 5.6521  40 tokens/s a GPU
    step    10  loss 3.2444  8,528 tokens/s a GPU
    step    20  loss 2.9223  7,513 tokens/s a GPU
    step    30  loss 3.1854  7,731 tokens/s a GPU
    step    40  loss 3.1046  10,037 tokens/s a GPU

On one H200, with a quarter of the configuration's batch, as nothing is sharded (the first step compiles):

    $ torchrun --nproc-per-node 1 examples/pretrain.py --config llama-7b --batch 4 --steps 12
    step     1  loss 11.4298  163 tokens/s a GPU  71.1 GiB
    step    10  loss 7.3893  19,029 tokens/s a GPU  71.1 GiB
    step    12  loss 6.7925  19,108 tokens/s a GPU  71.1 GiB
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper  # as torchtitan's
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

import fp8compile
from configs import CONFIGS, Pretraining
from corpus import load_corpus, windows

WARM_UP = 0.05  # of all steps
LAST_RATE = 0.1  # of the peak


class HeadAndLoss(nn.Module):
    """Compiled as one, so that logits of a large vocabulary are never whole."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())


class Decoder(nn.Module):
    """A causal LM of transformers; forward returns its loss, f32[], on tokens and targets i64[batch, sequence]."""

    def __init__(self, config: Pretraining) -> None:
        super().__init__()
        of_family = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[config.family]
        model = transformers.AutoModelForCausalLM.from_config(
            of_family(
                vocab_size=config.vocabulary, hidden_size=config.width, intermediate_size=config.inner,
                num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.sequence, tie_word_embeddings=False, use_cache=False,
            )
        )  # fmt: skip
        self.body, self.head = model.model, HeadAndLoss(model.lm_head)
        self.reset = model._init_weights

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.body(input_ids=tokens).last_hidden_state, targets)


def parallel(config: Pretraining, device: str, **how: Any) -> Decoder:
    """Return the model, sharded over all ranks: made without memory, compiled, sharded, and only then given values."""
    with torch.device("meta"):
        model = Decoder(config)
    if config.gather and how["backend"] == "fp8":
        fp8compile.prepare_fsdp(model, skip=["head*"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.body.layers
    for i, block in enumerate(layers):
        layers[i] = block = checkpoint_wrapper(block) if config.checkpoint else block
        block.compile(**how)
        fully_shard(block, mp_policy=policy)
    model.head.compile(**how)
    fully_shard(model.head, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        model.apply(model.reset)
    return model


def batches(config: Pretraining, start: int, steps: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's tokens and targets of each step from `start` on: random windows of the text."""
    text = load_corpus(None, config.sequence).train
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - config.sequence, (world * config.batch,), generator=generator)
        tokens, targets = windows(text, starts.chunk(world)[rank], config.sequence)
        yield tokens.to(device), targets.to(device)


def rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to LAST_RATE."""
    warm_up = max(1, round(WARM_UP * steps))
    done = max(0.0, (step - warm_up) / max(1, steps - warm_up))
    return min((step + 1) / warm_up, LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass
class Training:
    """What is trained, and all that a checkpoint holds."""

    model: Decoder
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR

    def contents(self) -> dict[str, Any]:
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states, "schedule": self.schedule.state_dict()}

    def save(self, folder: Path) -> None:
        dcp.save(self.contents(), checkpoint_id=folder / f"step-{self.schedule.last_epoch:08}")

    def resume(self, folder: Path) -> None:
        """From the last whole checkpoint, if there is one: its metadata is written when all else is there."""
        if not (whole := sorted(folder.glob("step-*/.metadata"))):
            return
        found = self.contents()
        dcp.load(found, checkpoint_id=whole[-1].parent)
        set_state_dict(self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        self.schedule.load_state_dict(found["schedule"])


def mean(loss: Tensor) -> float:
    """Of all ranks."""
    dist.all_reduce(loss := loss.detach().clone())
    return loss.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=CONFIGS, default="tiny")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, help="sequences of a GPU, else those of the configuration")
    parser.add_argument("--backend", default="fp8", help="fp8, or inductor for BF16")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks can read")
    parser.add_argument("--every", type=int, default=1000, help="steps between checkpoints")
    args = parser.parse_args()
    config, fp8 = CONFIGS[args.config], args.backend == "fp8"
    if args.batch is not None:
        if args.batch < 1:
            parser.error(f"--batch takes a positive number, not {args.batch}")
        config = replace(config, batch=args.batch)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0 if device == "cuda" else dist.get_rank())  # on CPUs DTensor draws the same for every shard

    emulated: dict[str, Any] = {"executor": "eager", "select": "all"} if fp8 and device == "cpu" else {}
    model = parallel(config, device, backend=args.backend, options=emulated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, betas=(0.9, 0.95), weight_decay=0.1)
    if fp8:
        fp8compile.prepare_optimizer(optimizer)  # before a checkpoint is loaded, so that it finds 8-bit states
    training = Training(model, optimizer, LambdaLR(optimizer, lambda step: rate(step, args.steps)))
    update = torch.compile(optimizer.step, backend=args.backend, options=emulated)
    if args.checkpoints:
        training.resume(args.checkpoints)

    first = training.schedule.last_epoch
    for step, (tokens, targets) in enumerate(batches(config, first, args.steps, device), start=first + 1):
        began = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update()
        training.schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step in (1, args.steps):
            found, seconds = mean(loss), time.perf_counter() - began
            memory = f"  {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device == "cuda" else ""
            if dist.get_rank() == 0:
                print(f"step {step:5}  loss {found:.4f}  {tokens.numel() / seconds:,.0f} tokens/s a GPU{memory}")
        if args.checkpoints and (step % args.every == 0 or step == args.steps):
            training.save(args.checkpoints)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
