"""Paths in graphs that begin inside of a model, after a graph break: as in the model without a break."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from quick import quicken
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8compile
from fp8compile.torch_hooks.modules import whole_paths

quicken()
FP8: dict[str, Any] = {"select": "all", "strict": True, "executor": "eager"}


class Block(nn.Module):
    def __init__(self, hidden: int, breaks: bool) -> None:
        super().__init__()
        self.breaks = breaks
        self.up, self.down = nn.Linear(64, hidden), nn.Linear(hidden, 64)
        self.gate = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(y) * (x @ self.gate)


class Backbone(nn.Module):
    def __init__(self, widths: tuple[int, ...], breaks: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, breaks) for hidden in widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """A backbone, and a last layer of this name and width, whose results are returned."""

    def __init__(self, breaks: bool = True, last: str = "lm_head", width: int = 256, widths: tuple[int, ...] = (128,)):
        super().__init__()
        self.model, self.last = Backbone(widths, breaks), last
        setattr(self, last, nn.Linear(64, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.last)(self.model(x))


class Layer(nn.Linear):
    """Code of the user's; Dynamo compiles no forward of torch's own by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class TwoAlike(nn.Module):
    """Layers of one kind, called in a loop that Dynamo cannot trace: it compiles the layer itself, once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(64, 64), Layer(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class Whole(nn.Module):
    """A model around another, as trainers make them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def decisions(model: nn.Module, run: Any = None, **options: Any) -> dict[str, set[str]]:
    """Train a step; return what was decided about the output matmuls, by path. Gradients are near those of eager."""
    torch.compiler.reset()
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    warnings.filterwarnings("ignore", "fp8: NOTHING was converted in a graph")  # of a part that is left by choice
    run = torch.compile(model if run is None else run, backend="fp8", options={**FP8, **options})
    for p in model.parameters():
        p.grad = None
    run(x).square().mean().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    exact = torch.autograd.grad(model(x).square().mean(), [p for p in model.parameters() if p.requires_grad])
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine - theirs).norm()) < 0.2 * float(theirs.norm())
    rows = [m for plan in fp8compile.last_compile().plans for m in plan.matmuls if m.role == "output"]
    return {path: {m.decision for m in rows if m.path == path} for path in {m.path for m in rows}}


LAYER = ("model.layers.0.up", "model.layers.0.down", "model.layers.0")


@pytest.mark.parametrize("breaks", [False, True])
def test_a_head_is_known_by_its_name(breaks: bool) -> None:
    """Its result is returned, so its name alone says what it is."""
    assert decisions(Model(breaks)) == {**{key: {"fp8"} for key in LAYER}, "lm_head": {"bf16"}}


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("pattern", ["model.layers.0.down", "model.*", "lm_head"])
def test_patterns_see_whole_paths(pattern: str, breaks: bool) -> None:
    found = decisions(Model(breaks), skip=[pattern], lm_head=True)
    skipped = {"model.layers.0.down": LAYER[1:2], "model.*": LAYER, "lm_head": ("lm_head",)}[pattern]
    assert found == {path: {"bf16" if path in skipped else "fp8"} for path in (*LAYER, "lm_head")}


def test_layers_that_share_code_share_a_path() -> None:
    """One of another size has its own."""
    found = decisions(Model(widths=(128, 128, 192)), lm_head=True)
    layers = [f"model.layers.{number}{end}" for number in "*2" for end in ("", ".up", ".down")]
    assert found == {key: {"fp8"} for key in [*layers, "lm_head"]}


def test_one_layer_of_several_that_share_code_is_not_skipped_with_the_others() -> None:
    with pytest.warns(fp8compile.Fp8Warning, match=r"'model.layers.0.up' matches no matmul .*model.layers.\*.up"):
        found = decisions(Model(widths=(128, 128)), skip=["model.layers.0.up"])
    assert found["model.layers.*.up"] == {"fp8"}


def test_modules_of_other_names_that_share_code_have_none() -> None:
    assert decisions(TwoAlike(), lm_head=True) == {"": {"fp8"}}


def test_paths_begin_at_what_was_compiled() -> None:
    model = Model()
    assert "inner.model.layers.0.up" in decisions(Whole(model))
    whole = Whole(model)
    assert {"lm_head", "model.layers.0.up"} <= decisions(whole, torch.compile(model, backend="fp8", options=FP8)).keys()
    assert "model.layers.0.up" in decisions(model, lambda x: model(x))


def test_wrappers_of_torch_are_no_part_of_a_path() -> None:
    assert "model.layers.0.up" in decisions(type("DistributedDataParallel", (Whole,), {})(Model()))


def test_tied_weights_are_found() -> None:
    model = Model(width=64)
    model.model.layers[0].gate = model.lm_head.weight  # type: ignore[union-attr, assignment]
    assert decisions(model, lm_head=True).keys() == {*LAYER, "lm_head"}


def test_caches_tell_names_apart() -> None:
    """Of two models whose last frames differ in the name of the layer alone."""
    caches = inductor_config.patch(fx_graph_cache=True), functorch_config.patch(enable_autograd_cache=True)
    with caches[0], caches[1]:
        found = [decisions(Model(last=name), executor="inductor")[name] for name in ("projection", "lm_head")]
    assert found == [{"fp8"}, {"bf16"}]


def test_nothing_is_looked_for_outside_of_what_is_compiled() -> None:
    class Outside(nn.Module):
        def forward(self) -> list[nn.Module]:
            return whole_paths._running_modules()

    assert Outside()() == []


@pytest.mark.parametrize("strict", [False, True])
def test_a_failure_leaves_paths_as_they_are(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such frame")

    monkeypatch.setattr(whole_paths, "_given", fail)
    if strict:
        with pytest.raises(Exception, match="no such frame"):
            decisions(Model())
    else:
        with pytest.warns(fp8compile.Fp8Warning, match="no such frame.*modules are named from there on"):
            found = decisions(Model(), strict=False)
        assert {"", "up", "down"} <= found.keys()


def test_wrappers_of_checkpoints_are_no_part_of_a_path() -> None:
    model = Model(breaks=False, widths=(128, 128))
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
        model.model.layers[i].register_forward_pre_hook(torch.compiler.disable(lambda *_: None))
    assert {"model.layers.*.up", "model.layers.*.down", "lm_head"} <= decisions(model, lm_head=True).keys()


def test_sharded_modules_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`fully_shard` gives modules a class of its own; a layer that is gathered has other parameters than the rest."""
    monkeypatch.setattr(Block, "__module__", "torch.distributed.fsdp._fully_shard._fully_shard")
    model = Model(widths=(128, 128))
    model.model.layers[1].requires_grad_(False)
    assert {"model.layers.*.up", "model.layers.*.down", "lm_head"} == decisions(model, lm_head=True).keys() - {
        "model.layers.*"
    }


def through(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    torch._dynamo.graph_break()
    return y.sin()


class ByFunction(nn.Module):
    """Layers that a function is given, which Dynamo compiles once for layers of one shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, width)

    def forward(self, x: Tensor) -> Tensor:
        return through(self.last, through(self.second, through(self.first, x)))


@pytest.mark.filterwarnings("ignore:fp8. skip pattern")
def test_what_a_function_is_given_may_be_another_layer() -> None:
    """Where no other has its shape, it is known."""
    assert decisions(ByFunction(64), skip=["second"]) == {"": {"fp8"}}
    assert decisions(ByFunction(128), skip=["last"]) == {"": {"fp8"}, "last": {"bf16"}}


class InTurn(nn.Module):
    """Two stacks of layers, which run the same code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (Backbone((128,), breaks=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def test_a_pattern_that_no_graph_obeys_is_said() -> None:
    with pytest.warns(fp8compile.Fp8Warning, match=r"'encoder\.\*' matches no matmul"):
        found = decisions(InTurn(), skip=["encoder.*"])
    assert found.keys() == {"", "up", "down"}


def test_a_layer_with_two_names_has_the_first() -> None:
    model = Model(width=64)
    model.again = model.lm_head  # type: ignore[assignment]
    assert decisions(model, lm_head=True).keys() == {*LAYER, "again"}


def test_nothing_is_kept_alive() -> None:
    """What a forward has deleted is freed in the call that compiles, too."""
    alive, inner = [], Backbone((128,), breaks=True)

    class Deleting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        @torch.compiler.disable(recursive=False)
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            reference = weakref.ref(y)
            z = self.inner(y)
            del y
            alive.append(reference() is not None)
            return z

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(Deleting(), backend="fp8", options=FP8)(torch.randn(32, 64))
    assert "inner.layers.0.up" in {m.path for plan in fp8compile.last_compile().plans for m in plan.matmuls}
    assert alive == [False]
