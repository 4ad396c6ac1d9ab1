"""Casts of weights: a layer's are two launches, and a scale that a matmul wants for each row is written so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pipelines import look_after
from torch import Tensor, fx, nn

from fp8compile import ops
from fp8compile.kernels.codegen.schedule import one_pass
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.passes.core.compilation import getitems
from fp8compile.passes.core.marker_views import ScaledMM
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.core.snapshot import copy_graph
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.regions import combine_regions, join_regions, join_weights, one_pass_casts, spread_scales
from fp8compile.passes.regions.region_graph import is_from_region, regions_of, spec_of


class Layers(nn.Module):
    """Layers of two matmuls of different shapes, and one whose weight is two that are merged."""

    def __init__(self, layers: int, width: int = 128) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down, left, right in zip(self.up, self.down, self.left, self.right, strict=True):
            x = x + down(torch.relu(up(x)))
            y = torch.tanh(x)
            x = x + left(y) * right(y)
        return x


def step(monkeypatch: pytest.MonkeyPatch, layers: int, **options: Any) -> tuple[dict[str, fx.Graph], list[Tensor]]:
    """The graphs of forward and backward, and what a step computes."""
    found: dict[str, fx.Graph] = {}

    def look(c: HalfGraph) -> None:
        found[c.half] = copy_graph(c.graph)

    torch.compiler.reset()
    torch.manual_seed(0)
    model = Layers(layers).bfloat16()
    x = torch.randn(96, 128, dtype=torch.bfloat16, requires_grad=True)
    with monkeypatch.context() as patch:
        look_after(patch, "combine_regions", look)
        given = {"executor": "eager", "select": "all", "strict": True, "save_min_bytes": 0, **options}
        y = torch.compile(model, backend="fp8", options=given)(x)
        y.float().square().sum().backward()
    return found, [y, x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]


def of_weights(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in regions_of(graph) if join_weights._reads(n, set(regions_of(graph)))]


def test_two_launches_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, results = [], []
    for is_joined in (True, False):
        with monkeypatch.context() as patch:
            if not is_joined:
                patch.setattr(combine_regions, "join_weights", lambda *_: None)
            (few, _), (many, found) = step(monkeypatch, 1), step(monkeypatch, 3)
        counts.append(len(of_weights(many["forward"])) - len(of_weights(few["forward"])))
        results.append(found)
    assert counts == [2 * 2, 6 * 2]  # of two layers more: what reads x alone, which is given too, is the same
    assert all(map(torch.equal, *results))


def test_no_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 64 KiB, another one and two of 32, where 100 KiB are the most: the first alone, the second with one
    that is merged of two."""
    monkeypatch.setattr(join_weights, "LARGE", 140 << 10)
    graphs, _ = step(monkeypatch, 2)
    sizes = [join_regions.bytes_read(n) for n in of_weights(graphs["forward"])]
    assert max(sizes) <= 140 << 10
    assert sum(size > 120 << 10 for size in sizes) >= 4


def test_scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's scale is that of the weight; merged weights are parts of one region, each with its rows."""
    graphs, found = step(monkeypatch, 2)
    matmuls = [ScaledMM(n) for n in graphs["forward"].find_nodes(op="call_function", target=ops.scaled_mm)]
    assert len(matmuls) == 6
    for mm in matmuls:
        assert (mm.granularity_a, mm.granularity_b) == ("row", "row")
        assert mm.scale_b.meta["val"].shape == (mm.b.meta["val"].shape[0], 1)
    with monkeypatch.context() as patch:
        patch.setattr(combine_regions, "spread_scales", lambda _: None)
        graphs, expected = step(monkeypatch, 2)
    matmuls = [ScaledMM(n) for n in graphs["forward"].find_nodes(op="call_function", target=ops.scaled_mm)]
    assert {mm.granularity_b for mm in matmuls} == {"tensor"}
    assert all(map(torch.equal, found, expected))


def test_a_weight_that_two_matmuls_read_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(torch.tanh(self.linear(x)))

    monkeypatch.setattr(f"{__name__}.Layers", lambda _: Twice())
    graphs, _ = step(monkeypatch, 1)
    scales = [ScaledMM(n).scale_b for n in graphs["forward"].find_nodes(op="call_function", target=ops.scaled_mm)]
    assert len(scales) == 2
    assert len(set(scales)) == 1
    region, _ = spec_of(Getitem(scales[0]).source)
    assert len(getitems(Getitem(scales[0]).source)) <= len(region.buffers)
    assert sum(b.shape == (128, 1) for b in region.buffers) == 1


def test_a_weight_beside_one_that_is_computed_of_it() -> None:
    """As a running mean is that forward writes: one part of a kernel casts both, and both have scales of their rows."""
    torch.manual_seed(0)
    weight, other = (nn.Parameter(torch.randn(64, 64).bfloat16(), requires_grad=False) for _ in range(2))
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    found = []
    for kernels in ("generated", "inductor"):
        module = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        module.weight.data.copy_(weight)

        def run(x: Tensor, module: nn.Module = module) -> Tensor:
            y = module(x)
            module.weight.mul_(0.9).add_(other, alpha=0.1)  # type: ignore[operator, union-attr]
            return y + module(x)

        options = {"executor": "eager", "select": "all", "strict": True, "kernels": kernels}
        with torch.no_grad():
            found.append(torch.compile(run, backend="fp8", options=options)(x))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.5)  # a weight that is not rounded before it is cast
    with torch.no_grad():
        exact = x @ weight.T + x @ (0.9 * weight + 0.1 * other).T
    assert (found[0] - exact).norm() < 0.06 * exact.norm()


def test_other_recipes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe, expected in (("tensorwise", {"tensor"}), ("rowwise", {"row"})):
        graphs, _ = step(monkeypatch, 1, recipe=recipe)
        matmuls = [ScaledMM(n) for n in graphs["forward"].find_nodes(op="call_function", target=ops.scaled_mm)]
        assert {mm.granularity_b for mm in matmuls} == expected


@pytest.mark.parametrize("least", [1, 1 << 40])
def test_gradients_by_one_scale_beside_weights_by_rows(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass the scale is predicted, and known when the cast has been made: it stays a number."""
    monkeypatch.setattr(one_pass_casts, "LEAST", least)
    monkeypatch.setattr(one_pass, "REPAIRING", 8)
    recipe = {"base": "mixed", "grad_input": {"right": {"granularity": "row"}}, "grad_weight": None}
    graphs, found = step(monkeypatch, 1, recipe=recipe)
    one_pass_scales, others = set[str](), set[str]()
    for node in graphs["backward"].find_nodes(op="call_function", target=ops.scaled_mm):
        mm = ScaledMM(node)
        if mm.a.meta["val"].shape[0] == 96 and is_from_region(mm.a):  # a gradient of an input
            region, _ = spec_of(Getitem(mm.a).source)
            (one_pass_scales if is_one_pass(region) else others).add(mm.granularity_a)
    assert one_pass_scales == ({"tensor"} if least == 1 else set())
    assert least == 1 or "row" in others
    with monkeypatch.context() as patch:
        patch.setattr(combine_regions, "spread_scales", lambda _: None)
        _, expected = step(monkeypatch, 1, recipe=recipe)
    assert all(map(torch.equal, found, expected))


def test_a_scale_of_something_else_is_left() -> None:
    """Of two weights that one region casts, each by its own scale, as one payload would be; and of half of the rows."""
    scale, other = Value("constant", (), (2.0,)), Value("constant", (), (3.0,))
    load, quantize = Value("load", (), (0,)), Value("quantize", (0, 1), ("e4m3",))

    def part(n: int, by: Value) -> Part:
        stores = (Store(0, 2, 64, n * 32 * 64), *([] if n else [Store(1, 1)]))
        return Part(32, 64, (Input(n, "bfloat16", ((32, 64),), ((64, 1),)),), (load, by, quantize), stores)

    buffers = Buffer((64, 64), "float8_e4m3fn"), Buffer((1,), "float32")
    same = Region((part(0, scale), part(1, scale)), buffers)
    parts = spread_scales._parts(same, 0, 1, 64)
    assert parts is not None
    assert [p.stores[-1] for p in parts] == [
        Store(2, 1, offset=0, row_multiple=16),
        Store(2, 1, offset=32, row_multiple=16),
    ]
    assert spread_scales._parts(replace(same, parts=(part(0, scale), part(1, other))), 0, 1, 64) is None
    assert spread_scales._parts(replace(same, parts=(part(0, scale),)), 0, 1, 64) is None
