"""Trains one language model twice, in BF16 and through `torch.compile(model, backend="fp8")`, and compares the two.

    python examples/train_lm.py                     on a CPU: a small model in a few minutes, FP8 emulated
    python examples/train_lm.py --size 1b           on a GPU: speed and memory as well
    python examples/train_lm.py --text my_novel.txt

Both runs start from the same weights and see the same bytes in the same order. Parameters and AdamW states are FP32,
with autocast to BF16 around the forward pass; only the backend differs. At the end a table is printed, and the loss
curves (loss.png) and all numbers (results.json) are written to --out.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import torch

import fp8compile
from comparison import save, table
from corpus import load_corpus
from llama import LlamaConfig
from training import WARM_UP_STEPS, DivergedError, Job, Size, train

TINY = LlamaConfig(dim=256, n_layers=4, n_heads=4, n_kv_heads=2, hidden=768)
LLAMA_120M = LlamaConfig(dim=768, n_layers=12, n_heads=12, n_kv_heads=4, hidden=3584)
LLAMA_1B = LlamaConfig(dim=2048, n_layers=16, n_heads=16, n_kv_heads=4, hidden=8192)

SIZES = {
    "tiny": Size(TINY, batch=8, seq=256, steps=300, lr=1e-3, held_out_batches=16),
    "120m": Size(LLAMA_120M, batch=32, seq=1024, steps=1000, lr=6e-4, held_out_batches=32),
    "1b": Size(LLAMA_1B, batch=8, seq=2048, steps=1000, lr=3e-4, held_out_batches=32),
}
MIN_STEPS = 2 * WARM_UP_STEPS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train one language model in BF16 and in FP8, and compare.")
    add = parser.add_argument
    add("--size", choices=SIZES, help="the model (default: tiny on a CPU, 120m on a GPU)")
    add("--only", choices=["bf16", "fp8", "both"], default="both", help="which runs (default: both)")
    add("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    add("--text", type=Path, help="file or folder to train on (default: Python's standard library)")
    add("--out", type=Path, default=Path("runs/train_lm"), help="where results go (default: runs/train_lm)")
    add("--steps", type=int, help="default: as the size has it; likewise for the next three")
    add("--batch", type=int, help="sequences in a step")
    add("--seq", type=int, help="bytes in a sequence")
    add("--lr", type=float, help="peak learning rate")
    add("--seed", type=int, default=0, help="of the weights and of the order of the data (default: 0)")
    add("--baseline", choices=["eager", "inductor"], help="runs BF16 (default: eager on a CPU, inductor on a GPU)")
    add("--executor", choices=["eager", "inductor"], help="runs FP8 (default: eager on a CPU, inductor on a GPU)")
    add("--recipe", default="mixed", help="FP8 recipe (default: mixed)")
    add("--select", choices=["profitable", "all"], help="FP8 matmuls (default: all on a CPU, profitable on a GPU)")
    return parser


def choose_device(arguments: argparse.Namespace) -> torch.device:
    """Return the device asked for, or CUDA if there is one; raises ValueError where size or flag need a GPU."""
    has_gpu = torch.cuda.is_available()
    device = torch.device(arguments.device or ("cuda" if has_gpu else "cpu"))
    if device.type == "cuda" and not has_gpu:
        raise ValueError("--device cuda: this PyTorch finds no GPU; leave the flag out, or install a CUDA build")
    if device.type == "cpu" and arguments.size not in (None, "tiny"):
        raise ValueError(f"--size {arguments.size} needs a CUDA GPU, on a CPU it would take days; use --size tiny")
    return device


def choose_size(arguments: argparse.Namespace, device: torch.device) -> Size:
    """Return the named size with the flags' changes; raises ValueError for numbers that cannot work."""
    arguments.size = arguments.size or ("120m" if device.type == "cuda" else "tiny")
    flags = {name: getattr(arguments, name) for name in ("steps", "batch", "seq", "lr")}
    size = replace(SIZES[arguments.size], **{name: value for name, value in flags.items() if value is not None})
    if size.steps < MIN_STEPS:
        raise ValueError(f"--steps {size.steps}: at least {MIN_STEPS}, of which {WARM_UP_STEPS} are not timed")
    if size.batch < 1 or size.lr <= 0:
        raise ValueError("--batch and --lr must be positive")
    if size.seq < 16 or size.seq % 16:
        raise ValueError(f"--seq {size.seq}: FP8 matmuls need a positive multiple of 16")
    return size


def make_job(arguments: argparse.Namespace) -> Job:
    """Turns the flags into a job; raises ValueError (CorpusError is one) with what to do."""
    device = choose_device(arguments)
    size = choose_size(arguments, device)
    on_gpu = device.type == "cuda"
    options = {
        "recipe": arguments.recipe,
        "select": arguments.select or ("profitable" if on_gpu else "all"),
        "executor": arguments.executor or ("inductor" if on_gpu else "eager"),
        "strict": True,  # a graph that fell back to BF16 unnoticed would make the comparison a lie
    }
    fp8compile.Options.parse(options)  # a misspelt recipe is said now, not after the first run
    return Job(
        size=size,
        corpus=load_corpus(arguments.text, size.seq).to(device),
        device=device,
        seed=arguments.seed,
        baseline=arguments.baseline or ("inductor" if on_gpu else "eager"),
        fp8_options=options,
    )


def describe(job: Job, name: str) -> str:
    """Return what is about to be trained, on what, and how."""
    size, corpus = job.size, job.corpus
    passes = size.steps * size.batch * size.seq / len(corpus.train)
    where = torch.cuda.get_device_name() if job.device.type == "cuda" else "CPU"
    options = ", ".join(f"{key}={value}" for key, value in job.fp8_options.items())
    lines = [
        f"model      {name}: dim {size.model.dim}, {size.model.n_layers} layers, hidden {size.model.hidden}",
        f"text       {corpus.source}: {len(corpus.train):,} bytes, and {len(corpus.held_out):,} held out",
        f"training   {size.steps} steps of {size.batch} × {size.seq} bytes, {passes:.2f} passes over the text",
        f"device     {where}; BF16 by {job.baseline}, FP8 with {options}",
    ]
    if job.device.type == "cpu":
        lines.append("note       a CPU emulates FP8, so no matmul is profitable: compare the losses, not the speed")
        if job.fp8_options["select"] == "all":
            lines.append("           select=all converts every matmul that can be, as --select profitable would not")
        if torch.backends.cpu.get_cpu_capability() == "AVX2":
            lines.append("           without AVX-512 it has no fast BF16 matmuls: over ten seconds a step (--steps N)")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser()
    arguments = parser.parse_args()
    try:
        job = make_job(arguments)
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    print(describe(job, arguments.size), flush=True)

    names = ["bf16", "fp8"] if arguments.only == "both" else [arguments.only]
    try:
        runs = [train(job, name) for name in names]
    except DivergedError as error:
        raise SystemExit(str(error)) from error

    entropy = job.corpus.unigram_entropy()
    settings = {"size": asdict(job.size), "text": job.corpus.source, "device": str(job.device), "seed": job.seed}
    settings |= {"baseline": job.baseline, "fp8_options": job.fp8_options, "torch": torch.__version__}
    print("\n" + table(runs, entropy))
    print("\nwritten: " + ", ".join(str(path) for path in save(arguments.out, runs, entropy, settings)))


if __name__ == "__main__":
    main()
