"""Exporting and loading models that FSDP2 shards: the files of one process, no rank with all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import Ranks
from safetensors.torch import load_file
from sharding import Model, make_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fp8compile
from fp8compile.errors import CheckpointError


def blocks() -> Model:
    return make_model().bfloat16()


def experts() -> transformers.MixtralForCausalLM:
    """A mixture whose experts are one tensor of each kind; files have them one by one."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).bfloat16()


LAYERS = {blocks: ["blocks"], experts: ["*"]}


def sharded(make: Callable[[], Any]) -> Any:
    model = make()
    for block in model.blocks if isinstance(model, Model) else model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def exported(rank: int, make: Callable[[], Any], folder: str) -> tuple[str, ...]:
    return fp8compile.export(sharded(make), folder, layers=LAYERS[make]).quantized


def loaded(rank: int, make: Callable[[], Any], folder: str) -> dict[str, torch.Tensor]:
    model = sharded(make)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fp8compile.load(model, folder)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()}


def broken(rank: int, folder: str) -> str:
    """Return the error of a weight that one rank alone finds not to be finite."""
    model = sharded(blocks)
    with torch.no_grad():
        model.blocks[1].down.weight.fill_(torch.inf)
    try:
        fp8compile.export(model, folder, layers=["blocks"])
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("make", "written"), [
    (blocks, "blocks.1.down.weight_scale_inv"),
    (experts, "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale_inv"),
])  # fmt: skip
def test_two_ranks(ranks: Ranks, tmp_path: Path, make: Callable[[], Any], written: str) -> None:
    alone = make()
    one = fp8compile.export(alone, tmp_path / "one", layers=LAYERS[make])
    assert ranks.run(exported, make, str(tmp_path / "two")) == [one.quantized] * 2
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(tmp_path / "two" / name) for name in set(index.values())}
    assert len(files) == 2
    expected = load_file(tmp_path / "one" / "model.safetensors")
    assert written in index
    assert index.keys() == expected.keys()
    for name, file in index.items():
        assert torch.equal(files[file][name].view(torch.uint8), expected[name].view(torch.uint8)), name
    fp8compile.load(alone, tmp_path / "one")
    for found in ranks.run(loaded, make, str(tmp_path / "two")):
        for name, x in alone.state_dict().items():
            assert torch.equal(found[name], x), name


def test_a_rank_that_fails_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    for text in ranks.run(broken, str(tmp_path / "out")):
        assert text.startswith("blocks.1.down.weight has numbers that are not finite")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(AssertionError, match="is not empty"):
        ranks.run(exported, blocks, str(tmp_path))
    assert (tmp_path / "file").read_text() == "kept"
