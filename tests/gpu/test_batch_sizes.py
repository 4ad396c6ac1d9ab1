"""Batches of few rows on a GPU, in memory that is NaN where nobody has written: every model of the zoo, experts,
and convolutions.

The rows of a batch are contracted in every gradient of a weight, and are filled up to a multiple of 16.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from convolutions import CASES, OfTokens
from fake_quantized import sqnr
from models import BATCH, LENGTH, SIZES, ZOO, Case, noise, unsettled
from poison import poison_free_memory
from torch import Tensor

from tests.train.test_models import LEAST, Reference, train_step

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 7, 17)
SEQUENCES = ("llama", "llama_eager_attention", "qwen2", "gpt2", "mixtral", "t5", "bert", "mamba", "tied_weights")
FULL = 16  # rows for which the bounds were derived: the error of a gradient that adds up n of them falls with √n
MOST_SLACK = 8.0  # dB: beyond, a bound would say nothing; what is not finite is wrong at any number of rows


def resized(case: Case, rows: int, length: int = LENGTH) -> Case:
    """The case on the GPU with `rows` sequences of `length` (or images, or rows), and a loss of any number of them."""
    case.model.cuda()
    for name, x in case.inputs.items():
        x = x[torch.arange(rows) % x.shape[0]]
        if x.dim() == 2 and not x.is_floating_point():
            x = x[:, torch.arange(length) % x.shape[1]]
        case.inputs[name] = x.cuda().contiguous()
    case.loss = weighted
    return case


def weighted(out: Any) -> Tensor:
    logits = out if isinstance(out, Tensor) else out.logits
    return (logits.float() * noise(*logits.shape, seed=9).to(logits.device)).sum() / logits.shape[0]


def check(case: Case, rows: int, steps: int = 2) -> None:
    """Train some steps, each in poisoned memory, and compare the last with BF16 eager."""
    options = {"select": "all", "strict": True, "skip": case.skip, "executor": "eager"}
    run = torch.compile(case.model, backend="fp8", options=options)
    got: dict[str, Tensor] = {}
    for _ in range(steps):
        poison_free_memory()
        got = train_step(case, run)
    wrong = [f"{name}: {(~x.isfinite()).sum()} not finite" for name, x in got.items() if not x.isfinite().all()]
    reference = Reference.of(case)
    least = LEAST["mixed"] - min(MOST_SLACK, max(0.0, 10 * math.log10(FULL / rows)))
    found = {name: sqnr(reference.bf16[name], got[name]) for name in reference.noise}
    wrong += [f"{name}: {db:.1f} dB" for name, db in found.items() if not db >= least]
    assert not wrong, wrong


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ZOO)
def test_few_rows(name: str, rows: int) -> None:
    check(resized(ZOO[name](), rows), rows)


@pytest.mark.parametrize("length", [1, 3, 17])
@pytest.mark.parametrize("name", SEQUENCES)
def test_one_short_sequence(name: str, length: int) -> None:
    if name in ("gpt2", "bert") and length > LENGTH:
        pytest.skip("it has no more positions")
    check(resized(ZOO[name](), 1, length), length)


QWEN_MOE: dict[str, Any] = dict(
    SIZES, num_key_value_heads=2, use_cache=False, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64,
    decoder_sparse_step=1, hidden_size=128, experts_implementation="grouped_mm",
)  # fmt: skip


def qwen2_moe() -> torch.nn.Module:
    config = transformers.Qwen2MoeConfig(**QWEN_MOE, shared_expert_intermediate_size=128)
    return transformers.Qwen2MoeForCausalLM(config)


def qwen3_moe() -> torch.nn.Module:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN_MOE, head_dim=32))


def mixtral() -> torch.nn.Module:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, use_cache=False, num_local_experts=4, num_experts_per_tok=4,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("build", [qwen2_moe, qwen3_moe, mixtral], ids=lambda b: b.__name__)
def test_experts(build: Any, seed: int) -> None:
    """All experts take every token: a choice of the router's that noise flips would leave no gradient to compare."""
    torch.manual_seed(seed)
    model = unsettled(build())
    tokens = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    check(resized(Case(model, {"input_ids": tokens}, weighted, 0, skip=("mlp.gate",)), BATCH), BATCH)


@pytest.mark.parametrize(("space", "batch", "checkpointed"), CASES, ids=str)
def test_convolutions_of_tokens(space: tuple[int, ...], batch: int, checkpointed: bool) -> None:
    model = OfTokens(space, checkpointed).cuda()
    x = torch.randn(batch, model.tokens, model.channels, device="cuda")
    found = []
    for run in (model, torch.compile(model, backend="fp8", options={"select": "all", "save_min_bytes": 0})):
        model.zero_grad()
        poison_free_memory()
        run(x).backward()
        found.append([p.grad for p in model.parameters()])
    for exact, got in zip(*found, strict=True):
        assert sqnr(exact, got) > LEAST["mixed"]
