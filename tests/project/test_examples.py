"""The recipes in examples/: each trains in FP8 as in BF16, and does what it says of its data."""

from __future__ import annotations

import gc
import importlib
import io
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8compile

FOLDER = Path(__file__).parents[2] / "examples"
RECIPES = ("vit", "diffusion", "finetune", "instruct", "vision_language")
# The smallest sizes with one layer of each kind, and smaller batches.
ONE_LAYER: dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    ("vit", "tiny"): (lambda r: r.make(128, 1, 32, 8), lambda r, g: r.batch(g, 16, 32)),
    ("diffusion", "tiny"): (lambda r: r.DiT(128, 1, 4, 16, 4), lambda r, g: r.batch(g, 16, 16)),
    ("finetune", "tiny"): (lambda r: r.make(128, 1, False), lambda r, g: r.batch(g, 4, 64)),
    ("finetune", "lora"): (lambda r: r.make(128, 1, True), lambda r, g: r.batch(g, 4, 64)),
    ("instruct", "tiny"): (lambda r: r.make(128, 1), lambda r, g: r.batch(g, 4, 96)),
    ("vision_language", "tiny"): (lambda r: r.VisionLanguage(128, 1, 32, 8, 128, 1), lambda r, g: r.batch(g, 8, 32)),
}
# All parameters of the Llama that instruct trains as well, by the script that lora is of.
TRAINED = [key for key in ONE_LAYER if key != ("finetune", "tiny")]


def leaving_steps(compile: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile, but for optimizers' steps: half of the time, for what the loop does for all recipes alike."""

    def chosen(given: Any, **how: Any) -> Any:
        return given if getattr(given, "__name__", "") == "step" else compile(given, **how)  # a schedule wraps it

    return chosen


@pytest.mark.parametrize(("name", "size"), TRAINED, ids=lambda x: x)
def test_a_recipe_trains_in_fp8_as_in_bf16(name, size, capsys, monkeypatch):
    recipe = importlib.import_module(name)
    from side_by_side import main

    monkeypatch.setattr(gc, "collect", lambda: 0)  # of all that other tests have left: half a second
    if name != "instruct":  # vectors and matrices
        monkeypatch.setattr(torch, "compile", leaving_steps(torch.compile))
    make, batch = ONE_LAYER[name, size]
    task = replace(recipe.SIZES[size], make=lambda: make(recipe), batch=lambda generator: batch(recipe, generator))
    bf16, fp8 = main(recipe.__doc__, recipe.SIZES | {size: task}, ["--size", size, "--steps", "3"])
    assert "FP8 against BF16" in capsys.readouterr().out
    assert fp8.converted >= 0.8 * fp8.matmuls  # all but the head's three
    for a, b in zip(bf16.losses, fp8.losses, strict=True):
        assert b == pytest.approx(a, rel=0.02)  # three steps: FP8 noise of a loss is about a hundredth of it


@pytest.mark.parametrize(("name", "size"), ONE_LAYER, ids=lambda x: x)
def test_the_smallest_size_of_a_recipe_fits_its_data(name, size):
    task = importlib.import_module(name).SIZES[size]
    torch.manual_seed(0)
    batch = task.batch(torch.Generator().manual_seed(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        loss = task.make()(**{key: x[:1] for key, x in batch.items()})
    assert torch.isfinite(loss if isinstance(loss, torch.Tensor) else loss.loss)


@pytest.mark.parametrize("name", RECIPES)
def test_the_docstring_shows_commands_and_what_they_print(name):
    text = importlib.import_module(name).__doc__
    assert re.search(rf"python examples/{name}\.py", text)
    assert re.search(r"FP8 against BF16: [+-]\d\.\d\d%", text)


def test_a_progress_bar_in_a_file_is_a_line_now_and_then(monkeypatch):
    import training

    monkeypatch.setattr(training, "LINE_EVERY", 0.1)
    text = io.StringIO()
    start = time.perf_counter()
    for _ in training.progress_bar(range(60), "fp8", text):
        time.sleep(0.005)
    *lines, last = text.getvalue().split("\n")
    assert 2 <= len(lines) <= 3 + (time.perf_counter() - start) / 0.1
    assert all(re.match(r"fp8: +\d+%\|", line) for line in lines)
    assert "60/60" in lines[-1]
    assert last == ""
    assert "\r" not in text.getvalue()


def test_packed_examples_do_not_see_each_other():
    import instruct

    torch.manual_seed(0)
    model = instruct.make(64, 1).eval()
    batch = instruct.batch(torch.Generator().manual_seed(1), 2, 96)
    starts = [i for i, position in enumerate(batch["position_ids"][0].tolist()) if position == 0]
    changed = {name: x.clone() for name, x in batch.items()}
    changed["input_ids"][0, : starts[1]] = 65  # the first example becomes another one
    compiled = torch.compile(model, backend="fp8", options={"select": "all", "executor": "eager", "strict": True})
    with torch.no_grad():
        outs = [compiled(x["input_ids"], position_ids=x["position_ids"]).logits for x in (batch, changed)]
    assert {m.decision for m in fp8compile.last_compile().matmuls if "layers" in m.path} == {"fp8"}
    # rows of activations have scales of their own: not even rounding tells of a neighbour
    assert torch.equal(outs[0][0, starts[1] :], outs[1][0, starts[1] :])
    assert not torch.equal(outs[0][0, : starts[1]], outs[1][0, : starts[1]])


def test_packed_labels_are_the_answers():
    import instruct

    tokens, labels, positions = instruct.packed(torch.Generator().manual_seed(1), 256)
    assert len(tokens) == len(labels) == len(positions) == 256
    text = bytes(tokens).rstrip(b"\0").decode()
    answers = bytes(x for x in labels if x != instruct.IGNORED).decode()
    lines = text.splitlines()
    assert answers.splitlines() == lines[1::2]
    for question, answer in zip(lines[::2], lines[1::2], strict=True):
        name, _, letters = question.partition(": ")
        assert "".join(instruct.TASKS[name](letters)) == answer
    assert all(x == y for x, y in zip(tokens, labels, strict=True) if y != instruct.IGNORED)


def test_lora_trains_its_adapters_and_keeps_its_base_in_a_byte():
    import finetune

    torch.manual_seed(0)
    whole = finetune.make(128, 2, False)
    torch.manual_seed(0)
    model = finetune.make(128, 2, True)
    layer, base = model.model.layers[0].mlp.down_proj, whole.model.layers[0].mlp.down_proj
    assert layer.weight.dtype == torch.float8_e4m3fn
    trained = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"a", "b", "weight"}  # the weight is that of the embedding
    assert model.model.embed_tokens.weight.requires_grad
    x = torch.randn(8, 384)
    exact, found = base(x), layer(x)
    # B is zero at first; E4M3 keeps 31 dB of a weight
    assert (exact - found).square().sum() < 2e-3 * exact.square().sum()
