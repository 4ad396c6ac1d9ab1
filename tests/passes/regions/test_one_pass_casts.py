"""Which casts are made in one pass, what they then compute, and what becomes of them in Inductor's hands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formed import formed as formed_from
from torch import Tensor, fx, nn
from torch._inductor.fx_passes import reinplace

import fp8compile
from fp8compile import ops
from fp8compile.kernels.codegen.schedule import one_pass
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass, launches
from fp8compile.kernels.reference import markers
from fp8compile.passes.core.compilation import remove_dead
from fp8compile.passes.lower.kernel_rows import kernel_rows
from fp8compile.passes.lower.launch_nodes import LAUNCH
from fp8compile.passes.lower.lower_regions import lower_regions
from fp8compile.passes.regions import one_pass_casts
from fp8compile.passes.regions.region_graph import regions_of, spec_of

ROWS, COLS = 2048, 256


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass_casts, "LEAST", 1)
    monkeypatch.setattr(one_pass, "REPAIRING", 8)


def cast(x: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """Both layouts, by one scale."""
    scale = ops.scale(ops.amax(x, "tensor"), format)
    return ops.quantize(x, scale, format, "tensor"), ops.quantize(x, scale, format, "tensor", True), scale


formed = functools.partial(formed_from, in_one_pass=True)


def one_pass_regions(module: fx.GraphModule) -> int:
    return sum(is_one_pass(spec_of(node)[0]) for node in regions_of(module.graph))


def two(rows: int = ROWS, cols: int = COLS, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(rows, cols).bfloat16(), torch.randn(rows, cols).bfloat16()


def gelu_backward(g: Tensor, x: Tensor) -> Any:
    dx = torch.ops.aten.gelu_backward(g, x)
    return (*cast(dx), dx.sum(0))


def swiglu_backward(g: Tensor, gate: Tensor) -> Any:
    """Of two gradients with one scale, concatenated."""
    d_up = g * F.silu(gate)
    d_gate = g * torch.sigmoid(gate)
    scale = ops.scale(torch.maximum(ops.amax(d_gate, "tensor"), ops.amax(d_up, "tensor")), "e4m3")
    data = [ops.quantize(d, scale, "e4m3", "tensor") for d in (d_gate, d_up)]
    across = [ops.quantize(d, scale, "e4m3", "tensor", True) for d in (d_gate, d_up)]
    return torch.cat(data, 1), torch.cat(across, 0), scale


@pytest.mark.parametrize("function", [gelu_backward, swiglu_backward])
def test_a_gradient_is_computed_once(function: Callable[..., Any]) -> None:
    inputs = two()
    module = formed(function, *inputs)
    assert one_pass_regions(module) == 1
    whole = [r for node in regions_of(module.graph) for r in spec_of(node)[0].parts if r.rows == ROWS]
    assert len(whole) == 1
    data, transposed, scale, *sums = module(*inputs)
    _, _, own, *expected_sums = function(*inputs)
    assert own < scale <= 16 * own
    assert torch.log2(scale) % 1 == 0
    again = formed(function, *inputs, in_one_pass=False)
    assert one_pass_regions(again) == 0
    exact = again(*inputs)
    torch.testing.assert_close(exact[2], own, rtol=0.01, atol=0)  # which rounds to BF16 on its way
    assert torch.equal(data.view(torch.uint8), transposed.t().contiguous().view(torch.uint8))
    for actual, expected in zip((data, *sums), (exact[0].float() * own, *expected_sums), strict=True):
        noise = (actual.float() * (scale if actual is data else 1) - expected.float()).norm() / expected.float().norm()
        assert noise < (0.045 if actual is data else 0.01)  # two roundings to 3 bits: sqrt(2) · 2^-4 / sqrt(3) at most


def test_payloads_are_those_of_the_scale_that_is_stored() -> None:
    def run(g: Tensor, x: Tensor) -> Any:
        return cast(g * x)

    for growth in (1.0, 1e6):
        a, b = two()
        a[100] *= growth  # no row of the sample
        data, transposed, scale = formed(run, a, b)(a, b)
        x = a.float() * b.float()  # of which a kernel that stores it for the other would make BF16
        if growth > 1:
            assert torch.equal(scale, markers.scale(x.abs().amax(), "e4m3"))
        assert torch.equal(data.float(), markers.quantize(x.bfloat16(), scale, "e4m3", "tensor").float())
        assert torch.equal(transposed.float(), data.float().t())


def test_what_others_read_is_stored_all_the_same() -> None:
    def run(a: Tensor, b: Tensor) -> Any:
        x = a * b
        return (*cast(x), x.t() @ x, x.sum(0))

    a, b = two()
    module = formed(run, a, b)
    assert one_pass_regions(module) == 1
    data, _, scale, square, sums = module(a, b)
    x = (a * b).float()
    assert (data.float() * scale - x).norm() < 0.03 * x.norm()
    torch.testing.assert_close(square.float(), x.t() @ x, rtol=0.02, atol=2.0)
    torch.testing.assert_close(sums.float(), x.sum(0), rtol=0.02, atol=0.5)


def test_what_else_was_cast_while_the_amax_was_found_is_cast() -> None:
    def run(a: Tensor, b: Tensor, amax: Tensor) -> Any:
        scale = ops.scale(amax, "e4m3")
        return (*cast(a * b), ops.quantize(a + b, scale, "e4m3", "tensor", True), scale)

    a, b = two()
    module = formed(run, a, b, torch.tensor(8.0))
    assert one_pass_regions(module) == 1
    data, _, scale, other, other_scale = module(a, b, torch.tensor(8.0))
    x, y = (a * b).float(), (a + b).float()
    assert (data.float() * scale - x).norm() < 0.03 * x.norm()
    assert (other.float().t() * other_scale - y).norm() < 0.03 * y.norm()


def product(a: Tensor, b: Tensor) -> Any:
    return cast(a * b)


def with_dropout(a: Tensor, b: Tensor) -> Any:
    seed = torch.ops.prims.inductor_seed(torch.device("cpu"))
    return cast(a * torch.ops.prims.inductor_random(list(a.shape), seed, "rand") * b)


def whose_amax_is_read(a: Tensor, b: Tensor) -> Any:
    amax = ops.amax(a * b, "tensor")
    scale = ops.scale(amax, "e4m3")
    return ops.quantize(a * b, scale, "e4m3", "tensor"), scale, amax + 1


def by_rows(a: Tensor, b: Tensor) -> Any:
    x = a * b
    scale = ops.scale(ops.amax(x, "row"), "e4m3")
    return ops.quantize(x, scale, "e4m3", "row"), scale


def that_waits(a: Tensor, b: Tensor) -> Any:
    """The casts read a sum over all rows of what they cast."""
    x = a * b
    scale = ops.scale(ops.amax(x, "tensor"), "e4m3")
    y = x * x.sum(0)
    return ops.quantize(x, scale, "e4m3", "tensor"), ops.quantize(y, scale, "e4m3", "tensor"), scale


@pytest.mark.parametrize("function", [with_dropout, whose_amax_is_read, by_rows, that_waits])
def test_these_are_left(function: Callable[..., Any]) -> None:
    assert one_pass_regions(formed(product, *two())) == 1
    assert one_pass_regions(formed(function, *two())) == 0


def test_so_are_small_ones_and_those_of_sizes_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    assert one_pass_regions(formed(product, *two(), mode="symbolic")) == 0
    assert one_pass_regions(formed(product, *two(rows=64))) == 0  # no program of the repair would walk
    bytes_read = 2 * ROWS * COLS * 2
    monkeypatch.setattr(one_pass_casts, "LEAST", bytes_read)
    assert one_pass_regions(formed(product, *two())) == 1
    monkeypatch.setattr(one_pass_casts, "LEAST", 2 * bytes_read)
    assert one_pass_regions(formed(product, *two())) == 0


def test_rows_that_no_sample_counts_are_left() -> None:
    def batched(a: Tensor, b: Tensor) -> Any:
        return cast((a.transpose(1, 2) * b.transpose(1, 2)).reshape(-1, COLS))

    found = []
    for images, length in ((8, 256), (8, 250), (100, 17), (200, 12)):
        a, b = (torch.randn(images, COLS, length).bfloat16() for _ in range(2))
        found.append(one_pass_regions(formed(batched, a, b)))
    assert found == [1, 1, 1, 0]


def test_a_cast_of_as_many_programs_as_run_at_a_time_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four warps, a program has fewer tiles: there are more than 1024 of them."""

    def with_activation(g: Tensor, x: Tensor, amax: Tensor) -> Any:
        data = ops.quantize(F.gelu(x), ops.scale(amax, "e4m3"), "e4m3", "tensor", True)
        return (*gelu_backward(g, x), data)

    monkeypatch.setattr(one_pass, "REPAIRING", 264)
    a, b = (torch.empty(12608, 4096, dtype=torch.bfloat16) for _ in range(2))
    module = formed(with_activation, a, b, torch.tensor(8.0))
    assert one_pass_regions(module) == 1
    assert max(spec_of(node)[1].programs for node in regions_of(module.graph)) > 1024


def test_only_gradients_are_cast_so() -> None:
    """Activations and weights have outliers."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16()
    x = torch.randn(2048, 256, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for in_one_pass in (True, False):
        torch.compiler.reset()
        options = {"select": "all", "recipe": "tensorwise", "executor": "eager", "strict": True}
        run = torch.compile(model, backend="fp8", options={**options, "one_pass_casts": in_one_pass})
        run(x).sum().backward()
        kernels = [kernel for plan in fp8compile.last_compile().plans for kernel in plan.kernels]
        found.append({kernel.half for kernel in kernels if any("is_predicted" in o for o in kernel.operations)})
    assert found == [{"backward"}, set()]


def test_a_plan_has_both_kernels() -> None:
    """A repair, which seldom casts, moves nothing."""
    module = formed(gelu_backward, *two())
    rows = kernel_rows(module.graph, "backward")
    repairs = [row for row in rows if any("is_predicted" in operation for operation in row.operations)]
    firsts = [row for row in rows if "predicted_scale" in row.operations and row not in repairs]
    assert len(repairs) == len(firsts) == 1
    assert repairs[0].moved == 0 < firsts[0].moved
    assert len({row.name for row in rows}) == len(rows)


@pytest.mark.parametrize("function", [gelu_backward, swiglu_backward])
def test_nothing_is_copied_before_the_repair_writes(function: Callable[..., Any]) -> None:
    """Inductor writes in place where no one else has a view of the memory."""
    module = formed(function, *two())
    regions = [launches(*spec_of(node)) for node in regions_of(module.graph)]
    lower_regions(module.graph)
    remove_dead(module.graph)
    module.graph.lint()
    calls = [node for node in module.graph.nodes if node.meta.get(LAUNCH)]
    assert len(calls) == sum(map(len, regions))
    reinplace.reinplace_inplaceable_ops_core(module.graph)
    assert [list(call.kwargs["tensors_to_clone"]) for call in calls] == [[] for _ in calls]


def test_two_pairs_that_would_wait_for_each_other_are_not_both_joined() -> None:
    def crossed(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        x, y = a * b, c * d
        of_x, of_y = (ops.scale(ops.amax(z, "tensor"), "e4m3") for z in (x, y))
        pairs = ((x, of_x), (x * y.sum(0), of_x), (y, of_y), (y * x.sum(0), of_y))
        return (*(ops.quantize(z, s, "e4m3", "tensor") for z, s in pairs), of_x, of_y)

    inputs = (*two(), *two(seed=1))
    module = formed(crossed, *inputs)  # raised "the graph has a cycle"
    assert one_pass_regions(module) == 1
    of_x, *_, scale, _ = module(*inputs)
    x = (inputs[0] * inputs[1]).float()
    assert (of_x.float() * scale - x).norm() < 0.03 * x.norm()


def test_half_of_a_concatenation_is_not_taken_for_the_other() -> None:
    def half(a: Tensor, b: Tensor) -> Any:
        x = a * b
        both = torch.cat([x, a + b])
        scale = ops.scale(ops.amax(x, "tensor"), "e4m3")
        return ops.quantize(both[ROWS:] * b, scale, "e4m3", "tensor"), scale, both

    a, b = two()
    data, scale, _ = formed(half, a, b)(a, b)
    clamped = ((a + b) * b).float().clamp(-448 * scale, 448 * scale)
    assert (data.float() * scale - clamped).norm() < 0.06 * clamped.norm()  # was 1.0


def test_a_payload_is_not_handed_on_as_a_value() -> None:
    def restored(a: Tensor, b: Tensor, amax: Tensor) -> Any:
        known, y = ops.scale(amax, "e4m3"), a * b
        data = ops.quantize(a, known, "e4m3", "tensor")
        z = ops.dequantize(data, known, "tensor", torch.bfloat16) + y
        scale = ops.scale(ops.amax(y, "tensor"), "e4m3")
        return ops.quantize(y, scale, "e4m3", "tensor"), ops.quantize(z, scale, "e4m3", "tensor"), scale, data

    a, b = two()
    module = formed(restored, a, b, torch.tensor(8.0))
    of_y, _, scale, data = module(a, b, torch.tensor(8.0))  # raised: no promotion of FP8
    y = (a * b).float()
    assert (of_y.float() * scale - y).norm() < 0.03 * y.norm()
    assert (data.float() * 8 / 448 - a.float()).norm() < 0.03 * a.float().norm()


@pytest.mark.parametrize("rows", [8, 15])
def test_no_sample_has_no_rows(rows: int) -> None:
    def plain(a: Tensor, b: Tensor) -> Any:
        scale = ops.scale(ops.amax(a * b, "tensor"), "e4m3")
        return ops.quantize(a * b, scale, "e4m3", "tensor"), scale

    a, b = two(rows, 1 << 16)
    module = formed(plain, a, b)
    assert one_pass_regions(module) == 0
    module(a, b)  # raised: amax() of nothing
