"""Exported folders: read back by Transformers' own loaders, against weights rounded here; which layers, and why not."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationConfig
from fake_quantized import sqnr
from models import SIZES, ZOO, tokens, unsettled
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8compile
from fp8compile.errors import CheckpointError, OptionError
from fp8compile.serving import write_folder
from fp8compile.serving.layouts import LAYOUTS

EAGER = {"select": "all", "executor": "eager", "kernels": "inductor", "strict": True}
FORMATS = tuple(LAYOUTS)
# A row or block of E4M3 leaves 31 dB; a scale of BF16, rounded up, up to 2^-8 more of a step.
LEAST = 30.0


def trained(model: nn.Module, **options: Any) -> nn.Module:
    """The model after the forward and backward of one compiled step."""
    run = torch.compile(model, backend="fp8", options={**EAGER, **options})
    batch = tokens()
    run(input_ids=batch, labels=batch).loss.backward()
    return model


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, **sizes}, num_key_value_heads=2, use_cache=False)
    return unsettled(transformers.LlamaForCausalLM(config))


def expected(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Payload and scale of a weight, by a loop over what shares a scale."""
    rows, cols = weight.shape
    tall, wide = {"block": (128, 128), "channel": (1, cols), "tensor": (rows, cols)}[format]
    payload, scales = torch.empty(rows, cols, dtype=torch.float8_e4m3fn), []
    for i in range(0, rows, tall):
        for j in range(0, cols, wide):
            part = weight[i : i + tall, j : j + wide].float()
            scale = part.abs().max() / 448
            if format != "block" and scale.bfloat16().float() < scale:
                scale = torch.nextafter(scale.bfloat16(), torch.tensor(torch.inf).bfloat16())
            scale = scale.bfloat16().float() if format != "block" else scale
            payload[i : i + tall, j : j + wide] = (part / scale).to(torch.float8_e4m3fn)
            scales.append(scale)
    return payload, torch.stack(scales)


def test_files(tmp_path: Path) -> None:
    model = trained(llama(intermediate_size=200))
    for format in FORMATS:
        assert_files(model, fp8compile.export(model, tmp_path / format, format), tmp_path / format, format)


def test_layers_that_share_code(tmp_path: Path) -> None:
    """Graph breaks within layers: one compilation serves all of them, and says so of all."""
    model = llama(num_hidden_layers=3)
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    exported = fp8compile.export(trained(model), tmp_path / "block", "block")
    assert "model.layers.*.mlp.down_proj" in {m.path for plan in fp8compile.last_compile().plans for m in plan.matmuls}
    layers = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    assert len(layers) == 21
    assert set(exported.quantized) == layers
    assert exported.kept == {"lm_head": "in training: the output head (lm_head=True converts it)"}


def assert_files(model: Any, exported: fp8compile.Exported, out: Path, format: str) -> None:
    """Names, dtypes, shapes and values of all tensors; the config is one that its library validates."""
    files = load_file(out / "model.safetensors")
    layers = {name for name, m in model.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    if format == "block":  # of which the last block would be smaller than the others
        layers -= {name for name in layers if ".mlp." in name}
    assert set(exported.quantized) == layers
    assert exported.kept.pop("lm_head") == "in training: the output head (lm_head=True converts it)"
    assert all("200, no multiples of 128" in why or "200 × " in why for why in exported.kept.values())
    assert bool(exported.kept) == (format == "block")
    suffix = "weight_scale_inv" if format == "block" else "weight_scale"
    assert files.keys() == model.state_dict().keys() | {f"{name}.{suffix}" for name in layers}
    for name, x in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer not in layers:
            assert torch.equal(files[name], x)
            continue
        payload, scale = expected(x, format)
        rows, cols = x.shape
        shape = {"block": [-(-rows // 128), -(-cols // 128)], "channel": [rows, 1], "tensor": [1]}[format]
        got = files[f"{layer}.{suffix}"]
        assert list(got.shape) == shape
        assert torch.equal(got, scale.reshape(shape))
        assert torch.equal(files[name].view(torch.uint8), payload.view(torch.uint8))
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    if format == "block":
        assert transformers.FineGrainedFP8Config(**config["quantization_config"]).weight_block_size == [128, 128]
    else:
        scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups["group_0"]
        assert scheme.weights.strategy == format
        assert scheme.input_activations.dynamic
    assert exported.bytes == sum(x.numel() * x.itemsize for x in files.values()) < exported.before
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it(tied: bool, tmp_path: Path) -> None:
    model = trained(llama(tie_word_embeddings=tied))
    for format in [*FORMATS][:1] if tied else FORMATS:  # the tied head is in none
        model.train()
        exported = fp8compile.export(model, tmp_path / format, format)
        assert_loads(model, exported, llama(tie_word_embeddings=tied), tmp_path / format)


def assert_loads(model: Any, exported: fp8compile.Exported, mine: Any, out: Path) -> None:
    """By Transformers and by us alike, near what was exported."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    fp8compile.load(mine, out)
    loaded(tokens())  # compressed-tensors decompresses at the first call
    theirs = loaded.state_dict()
    for name, x in mine.state_dict().items():
        assert torch.equal(theirs[name], x), name
        original = model.state_dict()[name]
        if name.removesuffix(".weight") in exported.quantized:
            assert LEAST < sqnr(original, x) < 60
        else:
            assert torch.equal(original, x), name
    with torch.no_grad():
        logits = [m.eval()(tokens()).logits for m in (model, loaded)]
    assert sqnr(*logits) > 15  # compressed-tensors rounds activations as well


EXPERTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, {"num_experts": 4, "head_dim": 32}),
    "deepseek": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            "n_routed_experts": 4,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
        }
        | {"q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32},
    ),
}


def with_experts(family: str, inner: int = 128) -> Any:
    """A model of Transformers whose experts are `inner` wide."""
    make_config, make, sizes = EXPERTS[family]
    common = {"hidden_size": 128, "num_experts_per_tok": 2, "num_key_value_heads": 2, "use_cache": False}
    common |= {"moe_intermediate_size": inner, "intermediate_size": inner, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return unsettled(make(make_config(**{**SIZES, **common, **sizes})))


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_fp8_one_by_one(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers stores experts one by one, and stacks them as it loads: payloads and scales, or weights."""
    model = with_experts(family)
    if family == "qwen3":  # of others all layers are named
        trained(model, kernels="generated")
    exported = fp8compile.export(model, tmp_path, layers=None if family == "qwen3" else ["*"])
    names = [name for name in exported.quantized if name.endswith("experts")]
    assert names
    assert not any(name.endswith("experts") for name in exported.kept)
    files, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    for name in names:
        last = state[f"{name}.down_proj"]
        ends = [key for key in files if key.endswith(("down_proj.weight", "w2.weight")) and ".experts." in key]
        assert len(ends) == len(names) * last.shape[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    fp8compile.load(mine := with_experts(family), tmp_path)
    for name, x in mine.state_dict().items():
        assert torch.equal(x, loaded.state_dict()[name]), name
        owner = name.rpartition(".")[0]
        if owner in names:
            wanted = [torch.cat([as_read(half) for half in each.split(128)]) for each in state[name]]
            assert torch.equal(x, torch.stack(wanted)), name
        elif owner not in exported.quantized:
            assert torch.equal(x, state[name]), name
    # With a GPU it keeps them in FP8: that its modules find all they need is seen without one
    quantizer = transformers.quantizers.quantizer_finegrained_fp8.FineGrainedFP8HfQuantizer
    monkeypatch.setattr(quantizer, "validate_environment", lambda *args, **kwargs: None)
    kept, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    for name in names:
        payload, scale = (kept.state_dict()[f"{name}.down_proj{end}"] for end in ("", "_scale_inv"))
        for got, of, weight in zip(payload, scale, state[f"{name}.down_proj"], strict=True):
            wanted_payload, wanted_scale = expected(weight, "block")
            assert torch.equal(got.view(torch.uint8), wanted_payload.view(torch.uint8))
            assert torch.equal(of, wanted_scale.view_as(of))


def as_read(weight: Tensor) -> Tensor:
    """A weight [≤ 128, K] as it is read back from blocks."""
    payload, scale = expected(weight, "block")
    return (payload.float() * scale.repeat_interleave(128)[: weight.shape[1]]).to(weight.dtype)


def test_experts_that_stay_are_read_back(tmp_path: Path) -> None:
    for format, inner, how in (("block", 128, "not in layers"), ("channel", 128, 'format="block" alone'),
                               ("block", 192, "no multiples of 128")):  # fmt: skip
        layers = ["self_attn"] if how == "not in layers" else ["self_attn", "experts"]
        out = tmp_path / f"{format}{inner}"
        model = with_experts("mixtral", inner)
        exported = fp8compile.export(model, out, format, layers=layers)
        assert how in exported.kept["model.layers.0.mlp.experts"]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
        loaded(tokens())
        fp8compile.load(mine := with_experts("mixtral", inner), out)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        kept = config.get("modules_to_not_convert") or config["ignore"]
        assert {"model.layers.0.block_sparse_moe.experts", "model.layers.0.mlp.experts", "lm_head"} <= set(kept)
        for name, x in model.state_dict().items():
            near = sqnr(x, loaded.state_dict()[name])
            assert (LEAST < near < 60) if ".self_attn." in name else near > 100, name
            assert torch.equal(mine.state_dict()[name], loaded.state_dict()[name])


def test_experts_of_which_a_matmul_was_not_fp8_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(with_experts("mixtral"), kernels="generated")
    (plan,) = fp8compile.last_compile().plans
    rows = [m for m in plan.matmuls if m.path.endswith("0.mlp.experts") and m.role == "output"]
    assert [m.decision for m in rows] == ["fp8", "fp8"]
    plan.matmuls[plan.matmuls.index(rows[1])] = replace(rows[1], decision="bf16", reason="of my choice")
    exported = fp8compile.export(model, tmp_path)
    assert exported.kept["model.layers.0.mlp.experts"] == "in training: of my choice"
    assert "model.layers.1.mlp.experts" in exported.quantized


def test_experts_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = with_experts("qwen3")
    model.model.layers[1].mlp.experts.down_proj.data[2, 3, 4] = torch.nan
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.down_proj has numbers that are not finite"):
        fp8compile.export(model, tmp_path / "out", layers=["experts"])
    assert not (tmp_path / "out").exists()


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    """Shared parameters, buffers, an embedding that is the head, a layer without FP8; compiled inside of a wrapper."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
            self.again = self.b
            self.conv = nn.Conv1d(4, 4, 3)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("steps", torch.arange(3))
            self.unused = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(torch.tanh(self.a(self.embedding(x)))))

    class Loss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).float().logsumexp(-1).mean()

    model = Own().bfloat16()
    torch.compile(Loss(model), backend="fp8", options=EAGER)(tokens() % 64).backward()
    exported = fp8compile.export(model, tmp_path / "out", "channel")
    assert exported.quantized == ("a",)
    assert exported.kept["b"] == "its weight is again.weight as well"
    assert exported.kept["unused"] == "no compiled graph has a matmul of this name"
    other = Own().bfloat16()
    fp8compile.load(torch.compile(other), tmp_path / "out")
    for (name, x), (_, y) in zip(model.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(x, y) != (name == "a.weight"), name
    assert other.head.weight is other.embedding.weight
    assert sqnr(model.a.weight, other.a.weight) > LEAST


def test_a_layer_with_two_names(tmp_path: Path) -> None:
    """Plans know it by the name under which it is called; its weight has both, and so stays."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
            self.again = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.again(x)))

    model = Twice().bfloat16()
    torch.compile(model, backend="fp8", options=EAGER)(torch.randn(16, 32).bfloat16()).sum().backward()
    shared = "its weight is again.weight as well"
    assert fp8compile.export(model, tmp_path / "out", "channel").kept == {"a": shared}
    for name in ("a", "again"):
        kept = fp8compile.export(model, tmp_path / name, "channel", layers=[name, "b"]).kept
        assert kept == {"a": shared}
        skipped = fp8compile.export(model, tmp_path / f"no {name}", "channel", layers=["*"], skip=[name]).kept
        assert skipped == {"a": f"skip={name!r}"}
    with pytest.raises(OptionError, match=r"'c'.*Valid: a, again, b"):
        fp8compile.export(model, tmp_path / "none", "channel", layers=["c"])


@pytest.mark.parametrize(
    ("format", "name", "shape"),
    [("channel", "weight_scale", (256, 1)), ("block", "weight_scale_inv", (2, 2)), ("tensor", "input_scale", (1,))],
)
@pytest.mark.parametrize("persistent", [True, False])
def test_a_layer_with_a_tensor_that_is_called_as_a_scale(
    format: str, name: str, shape: tuple[int, ...], persistent: bool, tmp_path: Path
) -> None:
    """It would be written over the scale. One that the state_dict leaves out is in nobody's way."""

    def model() -> nn.Module:
        layers = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        layers[0].register_buffer(name, torch.full(shape, 5.0), persistent)
        return layers

    trained, again = model(), model()
    exported = fp8compile.export(trained, tmp_path / "out", format, layers=["*"])
    assert ("0" in exported.kept) == persistent
    assert all(f"a tensor of its own that is called {name}" in reason for reason in exported.kept.values())
    fp8compile.load(again, tmp_path / "out")
    for key, x in trained.state_dict().items():
        assert sqnr(x, again.state_dict()[key]) > LEAST, key


def test_no_tensor_is_written_over_another(tmp_path: Path) -> None:
    files = write_folder._Files(tmp_path, 0)
    files.add("a", torch.ones(1))
    with pytest.raises(CheckpointError, match="two tensors would be called a"):
        files.add("a", torch.ones(1))


@pytest.mark.parametrize("layers", [None, ["*"]])
@pytest.mark.parametrize("format", ["block", "channel", "tensor"])
def test_a_model_that_is_a_layer(format: str, layers: list[str] | None, tmp_path: Path) -> None:
    model, again = nn.Linear(256, 128), nn.Linear(256, 128)
    torch.compile(model, backend="fp8", options=EAGER)(torch.randn(16, 256)).sum().backward()
    assert fp8compile.export(model, tmp_path / "out", format, layers=layers).quantized == ("",)
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert names == {"weight", LAYOUTS[format].scale, "bias"}
    fp8compile.load(again, tmp_path / "out")
    assert sqnr(model.weight, again.weight) > LEAST
    assert not torch.equal(model.weight, again.weight)
    assert torch.equal(model.bias, again.bias)


def test_wrapped_models(tmp_path: Path) -> None:
    """Activation checkpointing's and torch.compile's wrappers leave no trace in names."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))).bfloat16()
    original = {name: x.clone() for name, x in model.state_dict().items()}
    model[1] = checkpoint_wrapper(model[1])
    run = torch.compile(model, backend="fp8", options=EAGER)
    run(torch.randn(16, 32).bfloat16()).sum().backward()
    exported = fp8compile.export(run, tmp_path / "out", "tensor")
    assert exported.quantized == ("0", "1.0", "1.2")
    files = load_file(tmp_path / "out" / "model.safetensors")
    assert files.keys() == original.keys() | {f"{name}.weight_scale" for name in exported.quantized}
    fp8compile.load(model, tmp_path / "out")
    for name, x in model.state_dict().items():
        assert sqnr(original[name], x) > LEAST, name


def test_scales_of_activations(tmp_path: Path) -> None:
    """As a watched step has seen them: the largest magnitude over 448."""
    model = llama()
    watched = fp8compile.watch(model, steps=1, options=EAGER)
    seen: dict[str, float] = {}
    hooks: list[Any] = []
    for name, m in model.named_modules():
        if isinstance(m, nn.Linear):
            hooks.append(
                m.register_forward_pre_hook(
                    lambda _, args, name=name: seen.update(((name, args[0].abs().max().item()),))
                )
            )
    model(tokens())
    for hook in hooks:
        hook.remove()
    batch = tokens()
    watched(input_ids=batch, labels=batch).loss.backward()
    exported = fp8compile.export(trained(model), tmp_path / "out", "tensor", statistics=watched.statistics)
    files = load_file(tmp_path / "out" / "model.safetensors")
    for name in exported.quantized:
        assert files[f"{name}.input_scale"].item() * 448 == pytest.approx(seen[name], rel=0.05), name
    scheme = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"][
        "group_0"
    ]
    assert scheme["input_activations"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded(tokens()).logits.isfinite().all()
    with pytest.raises(OptionError, match="no scales of activations"):
        fp8compile.export(model, tmp_path / "other", "block", statistics=watched.statistics)


def test_what_servers_fuse_stays_together(tmp_path: Path) -> None:
    exported = fp8compile.export(trained(llama(), skip=["k_proj"]), tmp_path / "out")
    layer = "model.layers.0.self_attn"
    assert exported.kept[f"{layer}.k_proj"] == "in training: skip='k_proj'"
    for name in ("q_proj", "v_proj"):
        assert exported.kept[f"{layer}.{name}"] == f"servers fuse it with {layer}.k_proj, which is not FP8"
    assert f"{layer}.o_proj" in exported.quantized
    assert str(exported).count("not in FP8") == 4


def test_large_models_become_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_folder, "LARGEST", 20_000)
    model = llama()
    fp8compile.export(model, tmp_path / "out", layers=["*"], skip=["lm_head"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert {f for f in os.listdir(tmp_path / "out") if f.endswith("safetensors")} == set(names)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_weights_of_fp32(tmp_path: Path) -> None:
    """Rounded once, from what the optimizer keeps."""
    model = llama().float()
    fp8compile.export(model, tmp_path / "out", "channel", layers=["down_proj"])
    other = llama().float()
    fp8compile.load(other, tmp_path / "out")
    payload, scale = expected(model.model.layers[0].mlp.down_proj.weight, "channel")
    assert torch.equal(other.model.layers[0].mlp.down_proj.weight, payload.float() * scale[:, None])
    assert other.model.norm.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"format": "blok"}, OptionError, "Did you mean 'block'"),
        ({"layers": ["q_porj"]}, OptionError, "unknown layer in layers 'q_porj'"),
        ({"layers": ["*"], "skip": ["nothing"]}, OptionError, "unknown layer in skip"),
        ({}, CheckpointError, "has compiled no model"),
        ({"layers": ["lm_head"], "skip": ["lm_head"]}, CheckpointError, "no layer of this LlamaForCausalLM"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], text: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=text):
        fp8compile.export(llama(), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_models_without_linear_layers_and_plans_of_others(tmp_path: Path) -> None:
    case = ZOO["gpt2"]()
    trained(llama())
    with pytest.raises(CheckpointError, match="1× in training: the output head"):  # it has lm_head as well
        fp8compile.export(case.model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"not of this Sequential: they name model\.layers\.0"):
        fp8compile.export(nn.Sequential(nn.Linear(8, 8)), tmp_path / "out")
    for layers in ([], ["*"], None):
        with pytest.raises(CheckpointError, match=r"it has no nn\.Linear"):
            fp8compile.export(nn.Conv1d(2, 2, 2), tmp_path / "out", layers=layers)


def test_the_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = llama(), tmp_path / "out"
    fp8compile.export(model, out, layers=["*"])
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    with pytest.raises(CheckpointError, match="is not empty: choose another folder, or overwrite=True"):
        fp8compile.export(model, out, layers=["*"])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has numbers that are not finite"):
        fp8compile.export(model, out, layers=["*"], overwrite=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device; nothing was written"):
        fp8compile.export(llama(), out, layers=["*"], overwrite=True)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    fp8compile.export(llama(), out, "channel", layers=["*"], overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(CheckpointError, match="is a file"):
        fp8compile.export(llama(), out / "config.json", layers=["*"])


def test_a_model_without_memory_is_not_exported(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(CheckpointError, match=r"has no memory for model.*call model.to_empty.*; nothing was written"):
        fp8compile.export(model, tmp_path / "out", layers=["*"])
    assert not (tmp_path / "out").exists()


def test_data_parallel_gives_names_no_prefix(tmp_path: Path) -> None:
    model = llama()
    for name, exported in (("alone", model), ("parallel", nn.DataParallel(model))):
        fp8compile.export(exported, tmp_path / name, layers=["*"])
    alone, parallel = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "parallel"))
    assert alone.keys() == parallel.keys()


def test_what_lies_beside_a_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder is a link, or was left by a process that was killed, or is where we are."""
    out, link = tmp_path / "out", tmp_path / "latest"
    fp8compile.export(llama(), out, layers=["*"])
    (out / "tokenizer.json").write_text("{}")
    (out / "adapter_model.safetensors").write_text("somebody's")
    out.chmod(0o700)
    (out / "more").mkdir()
    (out / "more" / "notes").write_text("mine")
    (out / "model-00002-of-00002.safetensors").write_text("of an older checkpoint, with an index")
    (out / "model.safetensors.index.json").write_text("{}")
    link.symlink_to(out)
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "model.safetensors").write_text("")
    monkeypatch.chdir(out)
    for folder in (out, link, "."):
        fp8compile.export(llama(), folder, "channel", layers=["*"], overwrite=True)
        monkeypatch.chdir(out)  # the new one
        names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "more"}
        assert {p.name for p in out.iterdir()} == names | {"adapter_model.safetensors"}
        assert out.stat().st_mode & 0o777 == 0o700
        assert (out / "more" / "notes").read_text() == "mine"
        assert link.is_symlink()
        fp8compile.load(llama(), link)
    assert {p.name for p in tmp_path.iterdir()} == {"out", "latest"}

    before, rename = {p.name for p in out.iterdir()}, Path.rename

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    def not_in_place(path: Path, to: Path) -> Path:
        return full() if path.name.endswith(".partial") else rename(path, to)  # type: ignore[return-value]

    for owner, name, failing in ((shutil, "copy2", full), (Path, "rename", not_in_place)):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing)
            with pytest.raises(CheckpointError, match=r"No space left on device; .*out is as it was"):
                fp8compile.export(llama(), out, "channel", layers=["*"], overwrite=True)
        assert {p.name for p in out.iterdir()} == before
        assert {p.name for p in tmp_path.iterdir()} == {"out", "latest"}
