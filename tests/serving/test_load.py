"""Loading FP8 checkpoints to train on; folders that are damaged, foreign or of another model change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import tokens
from safetensors.torch import load_file, save_file

import fp8compile
from fp8compile.errors import CheckpointError
from tests.serving.test_export import EAGER, llama

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "out"
    fp8compile.export(llama(), folder, layers=["*"], skip=["lm_head"])
    return folder


def test_training_goes_on(written: Path) -> None:
    """The loss after loading is finite, falls, and its weights are casts of what was loaded: the same payload."""
    model = llama()
    fp8compile.load(model, written)
    payload = load_file(written / "model.safetensors")[f"{UP}.weight"]
    fp8compile.export(model, written.with_name("again"), layers=["*"], skip=["lm_head"], overwrite=True)
    again = load_file(written.with_name("again") / "model.safetensors")[f"{UP}.weight"]
    assert (payload.view(torch.uint8) == again.view(torch.uint8)).float().mean() > 0.99
    run = torch.compile(model, backend="fp8", options=EAGER)
    opt, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        loss = run(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def changed_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def changed_config(**values: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= values
        (folder / "config.json").write_text(json.dumps(config))

    return damage


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def without_quantization(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def indexed(index: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def compressed(groups: Any) -> Callable[[Path], None]:
    return changed_config(quant_method="compressed-tensors", format="float-quantized", config_groups=groups)


def not_a_number(tensors: dict[str, Any]) -> None:
    tensors[f"{UP}.weight"].view(torch.uint8)[3, 4] = 0x7F


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
        (without_quantization, "this checkpoint is not in FP8"),
        (cut, "was it written to its end"),
        (indexed({"weight_map": {"a.weight": "model.safetensors"}}), "has no a.weight"),
        (indexed({"weight_map": ["a"]}), "has no weight_map"),
        (indexed({"metadata": {}}), "has no weight_map"),
        (indexed({"weight_map": {"a.weight": 3}}), "a.weight is in 3, which is no file of this folder"),
        (indexed({"weight_map": {"a.weight": "../x.safetensors"}}), "which is no file of this folder"),
        *(
            (compressed(groups), "none of the formats that are read")
            for groups in (None, [1], {"a": 5}, {"a": {"weights": 3}}, {"a": {"weights": {"strategy": [1]}}}, {})
        ),
        (changed_tensors(not_a_number), f"not finite are {UP}.weight"),
        (changed_config(quant_method="gptq"), "quant_method 'gptq'"),
        (changed_config(weight_block_size=[64, 64]), "none of the formats that are read"),
        (changed_config(scale_fmt="ue8m0"), "none of the formats that are read"),
        (changed_tensors(lambda t: t.pop(f"{UP}.weight_scale_inv")), f"it lacks the scale {UP}.weight_scale_inv"),
        (changed_tensors(lambda t: t.pop(f"{UP}.weight")), f"it lacks {UP}.weight"),
        (changed_tensors(lambda t: t.update(more=torch.ones(1))), "it has, and the model has not more"),
        (
            changed_tensors(lambda t: t.update({f"{UP}.weight": torch.ones(3, 4)})),
            r"of another shape are .*up_proj.weight \(\[3, 4\]",
        ),
        (
            changed_tensors(lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(7)})),
            r"weight_scale_inv \(\[7\], not",
        ),
        *(
            (changed_tensors(lambda t, x=x: t[f"{UP}.weight_scale_inv"].fill_(x)), "no finite numbers above zero are")
            for x in (torch.nan, torch.inf, 0.0, -1.0)
        ),
        (
            changed_tensors(
                lambda t: t.update({f"{UP}.weight": torch.ones_like(t[f"{UP}.weight"], dtype=torch.int32)})
            ),
            r"of another kind of numbers are .*up_proj.weight",
        ),
    ],
)
def test_bad_folders(damage: Callable[[Path], Any], text: str, written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    for file in written.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    model = llama()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=text):
        fp8compile.load(model, folder)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_a_model_that_shares_what_differs_in_the_files(written: Path) -> None:
    model = llama(tie_word_embeddings=True)
    before = model.lm_head.weight.clone()
    with pytest.raises(CheckpointError, match=r"lm_head.weight and model.embed_tokens.weight differ"):
        fp8compile.load(model, written)
    assert torch.equal(model.lm_head.weight, before)


def test_a_model_without_memory(written: Path) -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(CheckpointError, match=r"has no memory for model.*and \d+ more.*call model.to_empty"):
        fp8compile.load(model, written)
    model.to_empty(device="cpu")
    fp8compile.load(model, written)
    assert all(x.isfinite().all() for x in model.state_dict().values())


def test_a_model_of_other_sizes(written: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it lacks model.layers.1.*and \d+ more; nothing was loaded"):
        fp8compile.load(llama(num_hidden_layers=2), written)
