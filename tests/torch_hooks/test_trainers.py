"""Trainers of other libraries really train in FP8, and as a plain loop in BF16 does."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import MethodType
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fp8compile

STEPS = 3


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Trainer leaves variables for accelerate, which keeps one state for the process."""
    with mock.patch.dict(os.environ):
        yield
    try:
        from accelerate.state import AcceleratorState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)


def example(name: str, needs: str):
    pytest.importorskip(needs, reason=f"needs {needs}: pip install 'fp8compile[trainers]'")
    return importlib.import_module(name)


def batches(module) -> list[tuple[Tensor, Tensor]]:
    """Those of the examples: tokens and the tokens that follow them."""
    from corpus import load_corpus, random_starts, windows

    text = load_corpus(None, module.SEQ).train
    starts = random_starts(text, 1, STEPS * module.BATCH, module.SEQ, seed=0)[0]
    tokens, targets = windows(text, starts, module.SEQ)
    return list(zip(tokens.split(module.BATCH), targets.split(module.BATCH), strict=True))


def plain(model: nn.Module, steps: list[tuple[Tensor, Tensor]], loss_of: Callable[..., Tensor]) -> list[float]:
    """The same training as a loop, uncompiled."""
    opt, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for tokens, targets in steps:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def parameters(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in opt.param_groups for p in group["params"]]


def assert_trained_in_fp8(found: list[float], expected: list[float], out: str, matmuls: str) -> None:
    """Losses differ, by less than FP8's noise (about a hundredth), and nearly all matmuls were converted."""
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
    assert expected[-1] < expected[0] - 0.3
    assert f"{matmuls} matmuls in FP8" in out
    assert {m.decision for plan in fp8compile.compiles() for m in plan.matmuls if "lm_head" not in m.path} == {"fp8"}


@pytest.mark.slow
def test_hugging_face_trainer(capsys, monkeypatch):
    module = example("hf_trainer", "accelerate")
    monkeypatch.setattr(module, "LAYERS", 1)
    with pytest.warns(
        fp8compile.Fp8Warning, match=r"Trainer steps AdamW\(fused=True\).*states stay as they are"
    ) as told:
        bf16, fp8 = module.main(["--steps", str(STEPS)])
    assert len([w for w in told if issubclass(w.category, fp8compile.Fp8Warning)]) == 1
    assert_trained_in_fp8(fp8, bf16, capsys.readouterr().out, "21 of 24")


@pytest.mark.slow
def test_accelerate(capsys, monkeypatch):
    module = example("accelerate_loop", "accelerate")
    monkeypatch.setattr(module, "LAYERS", 1)
    found = module.main(["--steps", str(STEPS)])
    torch.manual_seed(0)
    model = module.make(module.WIDTH, module.LAYERS, False)
    expected = plain(model, batches(module), lambda m, x, y: m(input_ids=x, labels=x).loss)
    assert_trained_in_fp8(found, expected, capsys.readouterr().out, "21 of 24")


@pytest.mark.slow
def test_accelerate_compiles_blocks_one_by_one():
    module = example("accelerate_loop", "accelerate")
    options = module.OPTIONS | {"strict": True}
    plugin = module.TorchDynamoPlugin(
        backend=fp8compile.register_backend(), options=options, use_regional_compilation=True
    )
    accelerator = module.Accelerator(mixed_precision="bf16", dynamo_plugin=plugin, cpu=True)
    model = accelerator.prepare(module.make(64, 2, False))
    tokens = batches(module)[0][0][:2]
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    block, head = (plan.matmuls for plan in fp8compile.compiles() if plan.matmuls)
    assert len(block) == 3 * 7, "one graph for both blocks"
    assert len(head) == 3, "by itself, where nothing says that it is a head"
    assert {m.decision for m in (*block, *head)} == {"fp8"}
    assert 256 in (head[0].m, head[0].n)


@pytest.mark.slow
def test_lightning(capsys, monkeypatch):
    module = example("lightning_module", "lightning")
    monkeypatch.setattr(module, "CONFIG", replace(module.CONFIG, n_layers=1))
    found = module.main(["--steps", str(STEPS)])
    torch.manual_seed(0)
    expected = plain(module.Llama(module.CONFIG, max_seq=module.SEQ), batches(module), lambda m, x, y: m(x, y))
    assert_trained_in_fp8(found, expected, capsys.readouterr().out, "12 of 15")


class Bytes(nn.Module):
    """Predicts the next byte from this one; returns its loss as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))[:, :-1].flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}


@pytest.mark.slow
def test_hugging_face_trainer_resumes_8_bit_states(tmp_path):
    """The model, which has no states of ours, is not compiled."""
    module = example("hf_trainer", "accelerate")
    import transformers

    backend = fp8compile.register_backend("fp8_resumed", executor="eager", strict=True)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in batches(module)[0][0][:, :32]]

    def train(checkpoint: str | None) -> tuple[float, torch.optim.Optimizer]:
        transformers.set_seed(0)
        model = Bytes()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        opt.step = MethodType(torch.compile(type(opt).step, backend=backend), fp8compile.prepare_optimizer(opt))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, save_steps=2, per_device_train_batch_size=2, logging_steps=1,
            use_cpu=True, bf16=True, report_to=[], disable_tqdm=True, lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, optimizers=(opt, None))
        trainer.train(resume_from_checkpoint=checkpoint)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1], opt

    loss, opt = train(None)
    resumed, again = train(str(tmp_path / "checkpoint-2"))
    assert resumed == loss
    states = [(opt.state[p], again.state[q]) for p, q in zip(parameters(opt), parameters(again), strict=True)]
    eight_bit = [(s[n], t[n]) for s, t in states for n in s if isinstance(s[n], fp8compile.FP8State)]
    assert len(eight_bit) == 2 * 2  # both moments of each matrix
    assert all(torch.equal(s.payload, t.payload) and torch.equal(s.side, t.side) for s, t in eight_bit)
