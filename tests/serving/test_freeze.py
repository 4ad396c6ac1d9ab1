"""Frozen weights: cast once and kept, cast again when they were written, with the results of casts in every call."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ZOO, tokens
from ranks import Ranks
from torch import Tensor, fx, nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import fully_shard

import fp8compile
from fp8compile import devices
from fp8compile.errors import CaptureError, Fp8Warning, OptionError, ShardingError
from fp8compile.passes.core.compilation import CASTS_ARE_KEPT
from fp8compile.passes.lower.split_weight_casts import split_weight_casts
from fp8compile.torch_hooks import kept_casts

EAGER = {"select": "all", "executor": "eager", "strict": True}
INDUCTOR = {"select": "all", "strict": True}


class Layers(nn.Module):
    """Two matmuls of one input, which become one, behind a third; a weight that is used twice, once as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(48, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(x))
        return self.norm(self.a(hidden) * self.b(hidden)) + self.a.weight.float().mean()


def rows(count: int = 16, width: int = 48) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).bfloat16()


def pair(model: nn.Module, **options: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The model with kept casts, and with casts in every call."""
    options = {**EAGER, **options}
    kept = torch.compile(model, backend="fp8", options={**options, "frozen": True})
    return kept, torch.compile(model, backend="fp8", options=options)


def frozen(model: nn.Module) -> Any:
    return model.bfloat16().eval().requires_grad_(False)


def kept() -> list[Tensor]:
    values = kept_casts._values.by_key.values()
    return [x.tensor for x in values if x.tensor is not None and not x.is_of_freed]  # those stay, whoever's they are


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each run of a graph of casts was given."""
    ran: list[int] = []
    made = kept_casts.KeptCasts.__init__

    def counted(self: kept_casts.KeptCasts, run: Callable[[list[Tensor]], Any], values: Any, **settings: Any) -> None:
        def counting(weights: list[Tensor]) -> Any:
            ran.append(len(weights))
            return run(weights)

        made(self, counting, values, **settings)

    monkeypatch.setattr(kept_casts.KeptCasts, "__init__", counted)
    return ran


@pytest.mark.parametrize("options", [EAGER, INDUCTOR])
@torch.no_grad()
def test_bits_are_those_of_casts_in_every_call(options: dict[str, Any], casts: list[int]) -> None:
    mine, theirs = pair(frozen(Layers()), **options)
    for count in (16, 16, 7, 1):
        assert torch.equal(mine(rows(count)), theirs(rows(count)))
    assert casts == [3]
    assert sorted(x.dtype.itemsize * x.numel() for x in kept()) == [4, 4, 48 * 64, 64 * 64]  # scales and payloads


@torch.no_grad()
def test_graphs_of_other_shapes_share_what_is_kept(casts: list[int]) -> None:
    """A prompt, and one token at a time."""
    model = frozen(Layers())
    mine = torch.compile(model, backend="fp8", options={**EAGER, "frozen": True}, dynamic=False)
    for count in (16, 1, 5, 16):
        mine(rows(count))
    assert casts == [3]
    assert len(kept()) == 4


def fused_step(weight: nn.Parameter) -> None:
    """torch's own fused kernels write a weight, and count nothing."""
    weight.requires_grad_().grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    weight.requires_grad_(False).grad = None


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: m.a.weight.mul_(2),
    "loaded": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    "another parameter": lambda m: setattr(m, "a", frozen(nn.Linear(64, 32))),
    "fewer rows": lambda m: setattr(m.up.weight, "data", m.up.weight.data.flip(0)[:64]),
    "other memory": lambda m: setattr(m.up.weight, "data", m.up.weight.data * 2),
    "within inference mode": lambda m: torch.inference_mode()(m.up.weight.mul_)(2),
    "a fused step": lambda m: fused_step(m.a.weight),
    "through .data, and said": lambda m: (m.up.weight.data.mul_(2), increment_version(m.up.weight)),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_a_weight_that_is_written_is_cast_again(write: str, casts: list[int]) -> None:
    model = frozen(Layers())
    mine, theirs = pair(model)
    before = mine(rows())
    places = sorted(x.data_ptr() for x in kept())
    WRITES[write](model)
    after = mine(rows())
    assert torch.equal(after, theirs(rows()))
    assert not torch.equal(after, before)
    mine(rows())
    assert casts == [3, 3]
    if write not in ("assigned", "another parameter"):  # a CUDA graph goes on reading there
        assert sorted(x.data_ptr() for x in kept()) == places


@torch.no_grad()
def test_a_weight_that_lies_otherwise_in_its_memory_is_cast_again() -> None:
    """Transposed, and back, or fewer rows of it: torch counts neither."""
    linear = frozen(nn.Linear(64, 64, bias=False))
    mine, theirs = pair(lambda x: linear(x) * 1)
    for change in (lambda w: w, lambda w: w.t(), lambda w: w.t(), lambda w: w, lambda w: w[:32]):
        linear.weight.data = change(linear.weight.data)
        assert torch.equal(mine(rows(16, 64)), theirs(rows(16, 64)))


@torch.no_grad()
def test_what_is_computed_before_a_cast_is_not_shared_between_executors() -> None:
    """Inductor does not round in between."""
    a, b = (nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=False) for _ in range(2))

    def run(x: Tensor) -> Tensor:
        return nn.functional.linear(x, a * 0.37 + b * a.mul(1.7))

    for options in (INDUCTOR, EAGER):
        mine, theirs = pair(run, **{"executor": "inductor", **options})
        assert torch.equal(mine(rows(16, 64)), theirs(rows(16, 64)))


@torch.no_grad()
def test_layers_that_share_a_graph_have_casts_of_their_own(casts: list[int]) -> None:
    weights = [frozen(nn.Linear(64, 64)).weight for _ in range(3)]
    mine, theirs = pair(nn.functional.linear)
    for _ in range(2):
        for weight in weights:
            assert torch.equal(mine(rows(16, 64), weight), theirs(rows(16, 64), weight))
    assert casts == [1, 1, 1]


@torch.no_grad()
def test_what_is_kept_goes_with_its_weights() -> None:
    model = frozen(Layers())
    mine, _ = pair(model)
    mine(rows())
    assert len(kept()) == 4
    model.a = frozen(nn.Linear(64, 32))
    gc.collect()
    mine(rows())
    assert len(kept()) == 4
    payloads = [weakref.ref(x) for x in kept() if x.dim()]
    del mine
    torch.compiler.reset()
    gc.collect()
    assert not kept()
    assert [ref() for ref in payloads] == [None, None]  # though the weights are there


def test_weights_that_are_trained_are_cast_in_every_call(casts: list[int]) -> None:
    """A base with adapters: it is frozen, they are not."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = frozen(nn.Linear(64, 64))
            self.down, self.up = nn.Linear(64, 16, bias=False).bfloat16(), nn.Linear(16, 64, bias=False).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(self.base(x) + self.up(self.down(x)))

    model = Adapted()
    found = []
    for run in pair(model):
        model.zero_grad()
        for _ in range(2):
            run(rows(16, 64)).float().square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert casts == [1]


@torch.no_grad()
def test_a_cast_that_is_returned_is_the_caller_s() -> None:
    """Who gets it may write into it."""
    weight = nn.Parameter(torch.randn(32, 64).bfloat16(), requires_grad=False)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.ops.fp8.scale(torch.ops.fp8.amax(weight, "tensor"), "e4m3")
        return x * scale.bfloat16(), scale

    mine = torch.compile(run, backend="fp8", options={**EAGER, "frozen": True})
    expected = mine(rows(4, 64))[1].clone()
    mine(rows(4, 64))[1].zero_()
    assert torch.equal(mine(rows(4, 64))[1], expected)


def test_a_cast_of_constants_belongs_to_no_weight() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    weight.meta.update({"val": torch.randn(16, 32), CASTS_ARE_KEPT: True})
    ones = graph.call_function(torch.ops.aten.full.default, ([16, 32], 1.0))
    amaxes = [graph.call_function(torch.ops.fp8.amax.default, (given, "tensor")) for given in (ones, weight)]
    graph.output(tuple(graph.call_function(torch.ops.aten.mul.Tensor, (x, amax)) for amax in amaxes))
    for node in graph.nodes:
        node.meta.setdefault("val", torch.empty(()))
    module = fx.GraphModule(nn.Module(), graph)
    given = weight.meta["val"], torch.tensor(2.0)
    expected = module(*given)
    split = split_weight_casts(module)
    assert split is not None
    assert [value.weights for value in split.values] == [(0,)]
    assert module(*given, *split.module(given[0])) == expected


@torch.no_grad()
def test_scales_that_have_a_history_are_not_kept() -> None:
    """They change from call to call, whatever the weight does."""
    delayed = {"granularity": "tensor", "delayed": fp8compile.Delayed(history=4)}
    recipe = {"base": "tensorwise", "output": {"left": delayed, "right": delayed}}
    found = [[run(rows()) for _ in range(3)] for run in pair(frozen(Layers()), recipe=recipe)]
    assert all(map(torch.equal, *found))
    assert not kept()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("llama", "blockwise"), ("mixtral", "rowwise"), ("cnn", "tensorwise"), ("tied_weights", "rowwise")],
)
@torch.no_grad()
def test_models_and_recipes(name: str, recipe: str) -> None:
    case = ZOO[name]()
    mine, theirs = pair(frozen(case.model), recipe=recipe, skip=case.skip)
    for _ in range(2):
        assert torch.equal(case.loss(mine(**case.inputs)), case.loss(theirs(**case.inputs)))
    assert kept()


@torch.no_grad()
def test_autocast_of_weights_in_fp32() -> None:
    model = Layers().eval().requires_grad_(False)
    mine, theirs = pair(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert torch.equal(mine(rows()), theirs(rows()))
    assert len(kept()) == 4


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}])
@torch.no_grad()
def test_generation_by_a_frozen_model(cache: dict[str, Any], casts: list[int]) -> None:
    model, twin = ZOO["llama"]().model, frozen(ZOO["llama"]().model)
    twin.load_state_dict(model.state_dict())
    twin.compile(backend="fp8", options=EAGER)
    assert fp8compile.freeze(model, options=EAGER) is model
    assert not model.training
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **cache}
    prompt = tokens()[:, :8]
    assert torch.equal(model.generate(prompt, **settings), twin.generate(prompt, **settings))
    assert len(casts) == 1


@torch.no_grad()
def test_frozen_again_after_writes_that_nobody_counts() -> None:
    model = Layers().bfloat16()
    fp8compile.freeze(model, options=EAGER)
    before = model(rows())
    model.up.weight.data.mul_(2)
    fp8compile.freeze(model, options=EAGER)
    after = model(rows())
    assert not torch.equal(after, before)
    assert torch.equal(after, torch.compile(model.forward, backend="fp8", options=EAGER)(rows()))


class Wrapped(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("before", ["compiled", "frozen", "frozen twice"])
@pytest.mark.parametrize("wrap", [lambda layers: layers, Wrapped])
@torch.no_grad()
def test_what_was_compiled_is_frozen(wrap: Callable[[nn.Module], Any], before: str, casts: list[int]) -> None:
    """It is a model still: one of torch's own class, which `torch.compile` wraps, and one of the user's."""
    layers = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    model: Any = torch.compile(wrap(layers), backend="fp8", options=EAGER)
    for _ in range(("compiled", "frozen", "frozen twice").index(before)):
        model = fp8compile.freeze(model, options=EAGER)
    model(rows())
    layers[0].weight.data.neg_()  # which nobody counts
    model = fp8compile.freeze(model, options=EAGER)
    assert isinstance(model, nn.Module)
    assert not model.training
    right = torch.compile(layers.forward, backend="fp8", options=EAGER)(rows())
    assert torch.equal(model(rows()), right)
    count = len(casts)
    assert torch.equal(model(rows()), right)
    assert len(casts) == count > 0
    assert fp8compile.free_weights(model) == sum(layers[i].weight.numel() * 2 for i in (0, 2))
    assert torch.equal(model(rows()), right)


def test_inference_mode() -> None:
    model = frozen(Layers())
    mine, theirs = pair(model)
    with torch.inference_mode():
        assert torch.equal(mine(rows()), theirs(rows()))
        assert torch.equal(mine(rows()), theirs(rows()))
        assert len(kept()) == 4
        inside = frozen(Layers())
        mine, theirs = pair(inside)
        assert torch.equal(mine(rows()), theirs(rows()))
        inside.up.weight.mul_(2)  # which nobody counts
        assert torch.equal(mine(rows()), theirs(rows()))
        with pytest.raises(OptionError, match="made in torch"):
            fp8compile.freeze(inside)


@torch.no_grad()
def test_a_write_outside_of_the_inference_mode_that_cast() -> None:
    model = frozen(Layers())
    mine, theirs = pair(model)
    with torch.inference_mode():
        mine(rows())
    model.up.weight.mul_(2)
    assert torch.equal(mine(rows()), theirs(rows()))


@torch.no_grad()
def test_weights_are_watched_once(casts: list[int]) -> None:
    """However often torch forgets what it has compiled."""
    model = frozen(Layers())
    mine, _ = pair(model)
    counts = []
    for _ in range(3):
        mine(rows())
        torch.compiler.reset()
        counts.append(weakref.getweakrefcount(model.up.weight))
    assert counts[0] == counts[2]
    assert casts == [3, 3, 3]


@torch.no_grad()
def test_a_dump_shows_the_graph_of_casts(tmp_path: Path) -> None:
    mine, _ = pair(frozen(Layers()), dump=str(tmp_path))
    mine(rows())
    assert [x for x in tmp_path.rglob("*weights*") if x.is_file()]


@torch.no_grad()
def test_nothing_is_cast_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be cast anew in every replay."""
    model = frozen(Layers())
    mine, _ = pair(model)
    monkeypatch.setattr(kept_casts, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="run the model once"):
        mine(rows())
    monkeypatch.undo()
    expected = mine(rows())
    monkeypatch.setattr(kept_casts, "is_capturing", lambda: True)
    assert torch.equal(mine(rows()), expected)


@pytest.mark.parametrize("rows_in_all", [1, 8, 4096])
@torch.no_grad()
def test_few_rows_are_faster_where_the_weight_is_kept(rows_in_all: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul of few rows takes as long as its weight takes to be read: half as long in FP8, if it is not cast."""
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["H100"])
    model = frozen(nn.Linear(4096, 4096, bias=False))
    with torch.device("meta"):
        x = torch.empty(rows_in_all, 4096, dtype=torch.bfloat16)
    options = {"executor": "eager", "kernels": "inductor", "captured": True}
    decisions = []
    for is_frozen in (True, False):
        few = rows_in_all < 4096 and not is_frozen
        with pytest.warns(Fp8Warning, match="NOTHING was converted") if few else contextlib.nullcontext():
            (row,) = fp8compile.explain(model.to("meta"), x, options={**options, "frozen": is_frozen}).matmuls
        decisions.append(row.decision)
        if is_frozen and rows_in_all == 1:  # read in BF16: 32 MiB at the rate of casts
            assert (row.milliseconds_bf16 or 0) > 2 * 4096 * 4096 / (devices.TABLE["H100"].casts * 1e9)
    assert decisions == ["fp8", "bf16" if rows_in_all < 4096 else "fp8"]


def _sharded(rank: int) -> tuple[int, str]:
    block = frozen(Layers())
    fully_shard(block)
    run = torch.compile(block, backend="fp8", options={**EAGER, "frozen": True})
    with torch.no_grad():
        run(rows())
    try:
        fp8compile.freeze(block)
    except ShardingError as error:
        return len(kept()), str(error)
    return len(kept()), "frozen"


def test_what_fsdp_gathers_is_not_kept() -> None:
    """It fills the same memory anew in every call, and nobody counts that."""
    ranks = Ranks()
    try:
        for count, refusal in ranks.run(_sharded):
            assert count == 0
            assert refusal.startswith("FSDP gathers weights anew")
    finally:
        ranks.close()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@torch.no_grad()
def test_a_mode_and_modules_of_torch_s_own(mode: str | None, casts: list[int]) -> None:
    plain = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()
    model = fp8compile.freeze(plain, options=EAGER, mode=mode)
    assert torch.equal(model(rows()), pair(plain)[1](rows()))
    assert fp8compile.last_compile().converted
    model(rows())
    assert casts == [2]
    assert not model.training
    assert fp8compile.free_weights(model) == plain[0].weight.numel() * 2 + plain[2].weight.numel() * 2
    assert model(rows()).isfinite().all()


@torch.no_grad()
def test_sizes_that_one_graph_takes_all_of() -> None:
    with torch._dynamo.config.patch(force_parameter_static_shapes=False):
        weight = nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=False)
        whole = weight.data
        run = torch.compile(
            lambda x, w: nn.functional.linear(x, w).relu(),
            backend="fp8",
            options={**EAGER, "frozen": True},
            dynamic=True,
        )
        for count in (64, 32, 48, 32):
            weight.data = whole[:count]
            assert run(rows(16, 64), weight).shape == (16, count)
