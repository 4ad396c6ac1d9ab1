"""Inference of decoders with frozen FP8 weights: a prompt, and one token after another, beside BF16 and torchao.

    python -m benchmarks.serving.inference --only "Llama 1.1B*" --json FILE    one GPU
    python -m benchmarks.serving.inference --tiny    tiny models on a CPU: that it runs, no times

Random weights and tokens, BF16 parameters. A prompt is one call without a cache, and the head runs on its last token. A
token is one call with Transformers' static cache, behind 512 tokens, and `mode="reduce-overhead"`: CUDA graphs, in
every system. Both take the greedy token of the logits. torchao's systems are `quantize_` with its float8 configs. Ours
has freed the weights that it only casts. "BF16, masks folded" is our compiler with nothing in FP8: equal attention.

ms        median time of a call, from the end of one to the end of the next
weights   GiB that stay allocated: all but the cache; CUDA graphs hold what they work in
compile   seconds of the first call
error     of the logits, against eager BF16 of the same weights: |difference| / |logits|, of norms. Weights are random:
          a trained model's logits are less near to noise

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import fp8compile
from benchmarks.harness import peers, runs
from benchmarks.harness.columns import Row, figure, ratio
from benchmarks.harness.measuring import GIB, intervals
from benchmarks.harness.peers import BASELINE, EAGER, MASKS_FOLDED, LeftOutError, System, ours
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark
from benchmarks.harness.workloads import LIBRARY, MODULES, WORKLOADS

FROZEN = ours("frozen", frozen=True)
CONFIGS = {  # of torchao.quantization
    "torchao per tensor": ("Float8DynamicActivationFloat8WeightConfig", "PerTensor"),
    "torchao per row": ("Float8DynamicActivationFloat8WeightConfig", "PerRow"),
    "torchao weights alone": ("Float8WeightOnlyConfig", ""),
}
SYSTEMS = (BASELINE, EAGER, MASKS_FOLDED, FROZEN, *(System(name) for name in CONFIGS))
MODELS = ("Llama 1.1B", "Llama-8B (8 layers)")
BEHIND, CACHED = 512, 1024  # tokens before the first that is timed, and room in the cache
WARMUP, CALLS, TINY_CALLS = 5, 40, 2
COLUMNS = (
    figure("ms", "ms", ".3f"),
    ratio("speed-up", "ms"),
    figure("tokens/s", "tokens_per_second", ".0f"),
    figure("weights", "weights_gib", ".2f"),
    ratio("of BF16's", "weights_gib", inverse=True),
    figure("compile", "compile_seconds"),
    figure("error", "error", ".3f"),
)


@dataclass(frozen=True)
class Work:
    """What is asked of a model: prompts of `length` tokens, or one token of each sequence (0)."""

    model: str
    batch: int
    length: int

    @property
    def name(self) -> str:
        what = f"prompts {self.batch}×{self.length}" if self.length else f"tokens, batch {self.batch}"
        return f"{self.model} · {what}"


WORKS = tuple(Work(model, *sizes) for model in MODELS for sizes in ((4, 4096), (1, 0), (8, 0), (64, 0)))


class Inference:
    """One system that runs one model."""

    def __init__(self, case: Case):
        self.work = next(w for w in WORKS if w.name == case.model)
        self.system = next(s for s in SYSTEMS if s.name == case.system)
        workload = next(w for w in WORKLOADS if w.name == self.work.model)
        self.model: Any = workload.built(case.device, case.tiny).model.eval().requires_grad_(False)
        self.behind, self.cached = (4, 16) if case.tiny else (BEHIND, CACHED)
        length = min(self.work.length, 32) if case.tiny else self.work.length
        generator = torch.Generator(case.device).manual_seed(1)
        shape = (self.work.batch, length or 1)
        self.tokens = torch.randint(self.model.config.vocab_size, shape, generator=generator, device=case.device)
        self.cache: Any = None if length else self._cache(case.device)
        self.run: Any = self.model

    def _cache(self, device: str) -> Any:
        config = self.model.config
        cache = import_module(LIBRARY).StaticCache(config=config, max_cache_len=self.cached)
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        cache.early_initialization(self.work.batch, heads, width, torch.bfloat16, torch.device(device))
        generator = torch.Generator(device).manual_seed(2)
        for layer in cache.layers:
            for x in (layer.keys, layer.values):
                x[:, :, : self.behind].normal_(generator=generator)
        return cache

    def rewind(self) -> None:
        """Be behind the first tokens again."""
        for layer in self.cache.layers if self.cache else ():
            layer.cumulative_length.fill_(self.behind)

    def prepare(self, case: Case) -> None:
        """Compile the model as the system does."""
        mode = "reduce-overhead" if self.cache and case.device == "cuda" else None
        if self.system is FROZEN:
            self.run = fp8compile.freeze(self.model, options=peers.ON_CPU if case.tiny else {}, mode=mode)
            return
        if self.system.name in CONFIGS:
            quantize(self.model, self.system.name, case.device)
        if self.system.compile is not None:
            given = peers.compile_arguments(self.system, case.device)
            options = {**given.pop("options", {}), **({"mode": mode} if mode else {})}
            given |= {"options": options} if self.system.ours else {"mode": mode}  # torch takes one or the other
            self.run = torch.compile(self.model, **given)

    def logits(self) -> Tensor:
        """Of the last tokens."""
        if self.cache:
            return self.run(input_ids=self.tokens, past_key_values=self.cache, use_cache=True).logits[:, -1]
        return self.run(input_ids=self.tokens, use_cache=False, logits_to_keep=1).logits[:, -1]

    def step(self) -> Tensor:
        """Return the greedy tokens. The same tokens go in again: logits can be compared."""
        return self.logits().argmax(-1)

    def warm_up(self, count: int) -> None:
        """Call it so many times."""
        for _ in range(count):
            self.rewind()
            self.step()

    def held_gib(self) -> float:
        """GiB that are allocated, without the cache."""
        gc.collect()
        torch.cuda.synchronize()
        cached = [x for layer in self.cache.layers for x in (layer.keys, layer.values)] if self.cache else []
        return (torch.cuda.memory_allocated() - sum(x.nbytes for x in cached)) / GIB


def quantize(model: nn.Module, name: str, device: str) -> None:
    """Exchange the weights of `model`, in place, as torchao's users do; the head stays in BF16."""
    if find_spec("torchao") is None:
        raise LeftOutError("torchao is not installed")
    if device != "cuda":
        raise LeftOutError("torchao's float8 inference needs a GPU")
    config, granularity = CONFIGS[name]
    quantization: Any = import_module("torchao.quantization")
    arguments = {"granularity": getattr(quantization, granularity)()} if granularity else {}
    quantization.quantize_(model, getattr(quantization, config)(**arguments), filter_fn=peers.converts)


@torch.no_grad()
def measure(case: Case) -> dict[str, Any]:
    """Return the figures of one system on one work."""
    inference = Inference(case)
    inference.rewind()
    right = inference.logits().float()
    inference.prepare(case)
    inference.rewind()
    start = time.perf_counter()
    inference.step().tolist()
    first = time.perf_counter() - start
    inference.warm_up(1 if case.tiny else WARMUP)
    if inference.system is FROZEN:
        fp8compile.free_weights(inference.model)
        inference.warm_up(1 if case.tiny else WARMUP)
    inference.rewind()
    found = inference.logits().float()
    inference.rewind()
    with case.alone():
        ms = statistics.median(intervals(inference.step, TINY_CALLS if case.tiny else CALLS, case.device))
    return {
        "ms": ms,
        "tokens_per_second": inference.tokens.numel() / ms * 1e3,
        "weights_gib": None if case.tiny else inference.held_gib(),
        "compile_seconds": None if case.turns else first,
        "error": float((found - right).norm() / right.norm()),
        "in_fp8": in_fp8(inference),
        "note": peers.failure(),
    }


def in_fp8(inference: Inference) -> str:
    """Return how many matmuls ran in FP8: what does nothing is seen."""
    if not inference.system.ours:
        return ""
    plan = fp8compile.last_compile()
    return f"{len(plan.converted)} of {len(plan.matmuls)} matmuls" if plan else "no graph"


BENCHMARK = Benchmark(
    "inference",
    {w.name: [s.name for s in SYSTEMS] for w in WORKS},
    measure,
    COLUMNS,
    BASELINE.name,
    axes=(("weights_gib", "weights, GiB"), ("ms", "call, ms")),
    imports=MODULES,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
