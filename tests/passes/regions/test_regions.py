"""Which nodes end up in which region: small graphs written by hand, with the reasons of what is left.

Each graph also runs before and after, so that what is said about its regions is said of regions that are right.
"""

from __future__ import annotations

import copy
import itertools
import operator
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import interpreter
import pytest
import torch
from fake_quantized import sqnr
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile import ops
from fp8compile.formats import FP8_DTYPES
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.spec.region import Region
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import aten, update_value
from fp8compile.passes.regions import combine_regions as combine
from fp8compile.passes.regions import sum_pieces
from fp8compile.passes.regions.combine_regions import combine_regions
from fp8compile.passes.regions.form_regions import form_regions
from fp8compile.passes.regions.region_graph import regions_of, spec_of

R, C = 32, 64
# FP32 graphs: sums in another order are 2^-20 off or less, 120 dB, and statistics of statistics a little more. A
# payload differs where that crosses the middle between two codes: one element in 2^16 by 2^-4, 70 dB; 50 leaves room.
FLOAT, PAYLOAD = 80.0, 50.0


def noise(*shape: int, seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cast(x: Tensor, granularity: str = "row", transpose: bool = False, fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    """(data, scale) by the markers."""
    scale = ops.scale(ops.amax(x, granularity, transpose), fmt)
    return ops.quantize(x, scale, fmt, granularity, transpose), scale


class Formed:
    """A function as a graph with regions, which has been compared with the graph without.

    `reshapes`: views are what Inductor makes of them before it asks for regions.
    """

    def __init__(self, function: Callable[..., Any], *inputs: Tensor, reshapes: bool = False) -> None:
        module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
        module.graph.eliminate_dead_code()
        if reshapes:
            view_to_reshape(module)
        plain = copy.deepcopy(module)
        self.graph: fx.Graph = module.graph
        self.reasons = form_regions(module.graph)
        module.graph.lint()
        combine_regions(module.graph)
        module.graph.lint()
        module.recompile()
        self.compare(plain, module, inputs)

    def compare(self, plain: fx.GraphModule, module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> None:
        ours, theirs = ([x.clone() for x in inputs] for _ in range(2))
        expected, actual = plain(*theirs), module(*ours)
        for n, (a, b) in enumerate(zip([*expected, *theirs], [*actual, *ours], strict=True)):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            least = PAYLOAD if a.dtype in FP8_DTYPES else FLOAT
            assert torch.equal(a, b) or sqnr(a.float(), b.float()) > least, f"result {n}"

    @property
    def regions(self) -> list[Region]:
        return [spec_of(node)[0] for node in regions_of(self.graph)]

    def operators(self) -> list[set[str]]:
        """The operations of each region, without loads."""
        return [{v.op for p in r.parts for v in p.values} - {"load", "constant"} for r in self.regions]

    def left(self) -> list[str]:
        """What still is a cast, by operator."""
        return sorted(str(n.target).split(".")[1] for n in self.graph.nodes if n.target in ops.CASTS)


# ---- what is in a region --------------------------------------------------------------------------------------------


def test_a_cast_takes_what_is_computed_before_it() -> None:
    formed = Formed(lambda x, w: cast(torch.tanh(x) * w), noise(R, C), noise(C))
    assert formed.operators() == [{"tanh", "mul", "row_amax", "scale", "quantize"}]
    (region,) = formed.regions
    assert [b.dtype for b in region.buffers] == ["float8_e4m3fn", "float32"]
    assert [i.extent for i in region.parts[0].inputs] == [(1, 1), (0, 1)]
    assert formed.left() == formed.reasons == []


def test_a_norm_and_its_cast_are_one_region_with_what_others_read() -> None:
    def norm(x: Tensor) -> Any:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return *cast(x * rstd), rstd

    (region,) = Formed(norm, noise(R, C)).regions
    assert [b.shape for b in region.buffers] == [(R, C), (R, 1), (R, 1)]


def test_two_layouts_of_one_tensor_are_one_region() -> None:
    def run(x: Tensor) -> Any:
        y = torch.sin(x)
        scale = ops.scale(ops.amax(y, "tensor"), "e4m3")
        return *(ops.quantize(y, scale, "e4m3", "tensor", t) for t in (False, True)), scale

    formed = Formed(run, noise(R, C))
    assert formed.operators() == [{"sin", "all_amax"}, {"sin", "load_max", "scale", "quantize"}]
    (part,) = formed.regions[1].parts
    assert [s.transposed for s in part.stores if s.lead != 1] == [False, True]


def test_what_reads_nothing_in_common_is_in_regions_of_their_own() -> None:
    assert len(Formed(lambda x, y: (*cast(x), *cast(y)), noise(R, C), noise(R, C, seed=3)).regions) == 2
    assert len(Formed(lambda x, y: (*cast(x + y), *cast(x - y)), noise(R, C), noise(R, C, seed=3)).regions) == 1


def modulated(x: Tensor, shift: Tensor, factor: Tensor) -> Any:
    """A norm scaled and shifted by what each image has, cast in both layouts, and summed down the rows."""
    each = [y[:, None].expand(-1, x.shape[1], -1) for y in (shift, factor)]
    y = torch.layer_norm(x, x.shape[-1:]) * (1 + each[1]) + each[0]
    rows = y.flatten(0, 1)
    return *cast(rows), *cast(rows, "tensor", transpose=True), rows.sum(0)


@pytest.mark.parametrize("length", [8, 64, 128, 256, 1024, 192])
def test_what_an_image_has_for_all_its_rows_makes_no_tiles_of_all_its_rows(length: int) -> None:
    """A tile holds whole groups of scales; 1024 rows that share a shift are none."""
    batch, wide = 1024 // length, 8 * C
    formed = Formed(modulated, noise(batch, length, wide), noise(batch, wide, seed=3), noise(batch, wide, seed=4))
    assert formed.left() == formed.reasons == []
    for region in formed.regions:
        assert all(t.block_rows * t.block_cols <= 16384 for t in choose_schedule.choose(region).tilings)


@pytest.mark.parametrize("columns", [128, 768, 4096, 14336])
@pytest.mark.parametrize("granularity", ["tensor", "row", "group(16)", "group(128)", "block(128)"])
def test_programs_hold_what_registers_can_at_real_sizes(granularity: str, columns: int) -> None:
    """More elements a thread, and a kernel takes minutes to compile, and longer than it is worth to run."""

    def norm(x: Tensor) -> Tensor:
        return torch.layer_norm(x, x.shape[-1:])

    def run(before: Callable[..., Tensor], layout: tuple[bool, ...], x: Tensor) -> Any:
        return [y for t in layout for y in cast(before(x), granularity, t)]

    layouts = [(False,), (True,), (False, True)] if granularity != "row" else [(False,)]
    for layout, before in itertools.product(layouts, (torch.sin, norm)):
        with FakeTensorMode():
            x = torch.empty(4096, columns)
            graph = make_fx(partial(run, before, layout), decomposition_table=select_decomp_table())(x).graph
            graph.eliminate_dead_code()
            form_regions(graph)
            combine_regions(graph)
        regions = [spec_of(node)[0] for node in regions_of(graph)]
        assert regions
        most = max(choose_schedule.choose(region).elements_a_thread for region in regions)
        assert most <= 128, (layout, before)


def test_groups_that_no_program_can_hold_are_left() -> None:
    formed = Formed(lambda x: cast(x, "group(4096)", transpose=True), noise(4096, C))
    assert formed.regions == []
    assert formed.left() == ["amax", "quantize", "scale"]
    assert any("too large for a program" in why for why in formed.reasons)


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu runs kernels compiled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("length", [16, 192, 256])
def test_kernels_read_what_an_image_has(length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    interpreter.prepare()
    batch = 768 // length
    formed = Formed(modulated, noise(batch, length, C), noise(batch, C, seed=3), noise(batch, C, seed=4))
    for region in formed.regions:
        schedule = choose_schedule.choose(region)
        kernel = generated.kernel_of(region, schedule, "interpreter")
        inputs = check_kernel.random_inputs(region, [], 5, "cpu")
        assert check_kernel.check(kernel, region, schedule, inputs, []) == []


def test_statistics_of_a_transposed_payload_come_from_another_region() -> None:
    def run(x: Tensor, s: Tensor) -> Any:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return *cast(y), ops.quantize(y, s, "e4m3", "tensor", True)

    formed = Formed(run, noise(R, C), noise(1).abs()[0])
    transposed = [any(s.transposed for p in region.parts for s in p.stores) for region in formed.regions]
    reducing = ["row_sum" in operators for operators in formed.operators()]
    assert sorted(zip(transposed, reducing, strict=True)) == [(False, True), (True, False)]


def test_column_sums_are_made_where_their_tensor_is_cast() -> None:
    formed = Formed(lambda g: (*cast(g * 2), (g * 2).sum(0)), noise(R, C))
    (operators,) = formed.operators()
    assert {"col_sum", "quantize"} <= operators


def test_sums_over_each_image_are_made_there_too() -> None:
    """What was added to all rows of an image, or multiplied with them, has such a sum for its gradient."""

    def run(g: Tensor, x: Tensor, s: Tensor) -> Any:
        y = g * (1 + s)[:, None]
        return *cast(y.flatten(0, 1)), g.sum(1), (g * x).sum(1, keepdim=True), y.sum([0, 1])

    formed = Formed(run, noise(3, 256, C), noise(3, 256, C, seed=3), noise(3, C, seed=4))
    region, finish = formed.regions
    assert [v.params for v in region.parts[0].values if v.op == "col_sum"] == [(3,), (3,), ()]
    assert sorted(b.shape for b in finish.buffers) == [(C,), (3 * C,), (3 * C,)]
    assert not any(b.shape[0] == 3 * 256 and b.dtype == "float32" and b.shape[-1] == C for b in region.buffers)


@pytest.mark.parametrize(("length", "bands"), [(64, [2]), (128, [2, 4]), (200, [])])
def test_one_height_of_bands_a_kernel(length: int, bands: list[int]) -> None:
    """Sums over other bands, and over rows that do not fill tiles, are left to Inductor, with the same values."""

    def run(g: Tensor) -> Any:
        return *cast(g.flatten(0, 1)), g.view(2, -1, C).sum(1), g.sum(1)

    formed = Formed(run, noise(4, length, C))
    found = [v.params[0] for v in formed.regions[0].parts[0].values if v.op == "col_sum"]
    assert found == bands[:1]


def test_what_nothing_is_cast_of_is_left() -> None:
    formed = Formed(lambda x: (torch.sin(x) * 2, x.sum(0)), noise(R, C))
    assert formed.regions == formed.reasons == []


@pytest.mark.parametrize(("columns", "regions"), [(64, 1), (20000, 0)])
def test_column_sums_next_to_a_reduction_of_rows_that_no_program_holds_are_left(columns: int, regions: int) -> None:
    """Of log-softmax's backward: rows of logits are as long as the vocabulary."""

    def run(dy: Tensor, y: Tensor) -> Any:
        dx = dy - y.exp() * dy.sum(-1, keepdim=True)
        return dx @ dx.t(), dx.sum(0)

    logits = torch.log_softmax(noise(R, columns), -1)
    assert len(Formed(run, noise(R, columns, seed=3), logits).regions) == regions


def test_a_matmul_is_a_border() -> None:
    formed = Formed(lambda x, w: (*cast(torch.sin(x)), *cast(torch.cos(torch.sin(x) @ w))), noise(R, C), noise(C, C))
    assert sorted(map(sorted, formed.operators())) == [
        ["cos", "quantize", "row_amax", "scale"],
        ["quantize", "row_amax", "scale", "sin"],
    ]
    first = next(r for r, o in zip(formed.regions, formed.operators(), strict=True) if "sin" in o)
    assert "float32" in [first.buffers[s.buffer].dtype for s in first.parts[0].stores if s.lead == C]  # for the matmul


def sums_left(formed: Formed) -> list[fx.Node]:
    """Sums of what a region stored."""
    found = formed.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    return [node for node in found if any(i.target is operator.getitem for i in node.all_input_nodes)]


@pytest.mark.parametrize("reshapes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_column_sums_that_leave_are_put_together_by_one_region(dtype: torch.dtype, reshapes: bool) -> None:
    def run(x: Tensor, y: Tensor) -> Any:
        first, second, third = x.sum(0).view(1, -1), (x * x).sum(0, keepdim=True), y.sum(0).view(8, -1)
        return *cast(x), *cast(y), first.to(dtype).view(-1), second.to(dtype).squeeze(0), third.to(dtype).view(4, -1)

    formed = Formed(run, noise(512, C), noise(1024, 2 * C, seed=3), reshapes=reshapes)
    assert not sums_left(formed)
    *_, finish = formed.regions
    assert sorted(b.shape for b in finish.buffers) == [(C,), (C,), (2 * C,)]
    assert {b.dtype for b in finish.buffers} == {str(dtype).removeprefix("torch.")}
    assert len(formed.regions) == 3


def test_column_sums_that_are_read_are_put_together_kernel_by_kernel() -> None:
    def run(x: Tensor, y: Tensor) -> Any:
        sums = [x.sum(0), (x * x).sum(0), y.sum(0), (y * y).sum(0)]
        return *cast(x), *cast(y), *(s @ x.mT for s in sums)

    formed = Formed(run, noise(512, C), noise(512, C, seed=3))
    assert not sums_left(formed)
    assert [len(r.buffers) for r in formed.regions if sum_pieces.adds_pieces(r)] == [2, 2]


def test_a_column_sum_is_rounded_where_it_is_and_as_often() -> None:
    """What reads a sum before it is rounded gets it so; what rounds twice does."""

    def run(x: Tensor) -> Any:
        s = x.sum(0)
        return *cast(x), s, s.bfloat16(), (x * 2).sum(0).bfloat16().float(), (x * 3).sum(0).half().bfloat16()

    formed = Formed(run, noise(512, C))
    assert not sums_left(formed)
    dtypes = [b.dtype for r in formed.regions if sum_pieces.adds_pieces(r) for b in r.buffers]
    assert sorted(dtypes) == ["bfloat16", "float16", "float32"]


def test_pieces_that_are_kept_for_one_launch_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: Tensor) -> Any:
        return *cast(x), *((x * n).sum(0) for n in range(1, 7))

    def parts() -> list[Any]:
        return [r.parts for r in Formed(run, noise(512, C)).regions if sum_pieces.adds_pieces(r)]

    (together,) = parts()
    monkeypatch.setattr(combine, "LARGE", 2 * 4 * together[0].rows * together[0].cols)
    assert [len(some) for some in parts()] == [2, 2, 2]


@pytest.mark.skipif(not interpreter.INTERPRETED, reason="tests/gpu runs kernels compiled")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's
@pytest.mark.parametrize("length", [128, 384])
def test_kernels_put_sums_together(length: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    interpreter.prepare()

    def run(g: Tensor) -> Any:
        return *cast(g.flatten(0, 1)), g.sum([0, 1]).bfloat16(), (g * g).sum(1)

    formed = Formed(run, noise(1536 // length, length, 72))
    (region,) = [r for r in formed.regions if sum_pieces.adds_pieces(r)]
    schedule = choose_schedule.choose(region)
    assert all(t.block_rows == 32 for t in schedule.tilings)
    inputs = check_kernel.random_inputs(region, [], 5, "cpu")
    assert check_kernel.check(generated.kernel_of(region, schedule, "interpreter"), region, schedule, inputs, []) == []


# ---- amaxes and concatenations --------------------------------------------------------------------------------------


def test_pieces_of_an_amax_are_read_by_the_region_that_needs_it() -> None:
    first, second = Formed(lambda x: cast(x, "tensor"), noise(R, C)).regions
    assert first.buffers[0].shape == ("programs0",)
    assert "load_max" in {v.op for v in second.parts[0].values}


def test_an_amax_that_others_read_is_finished_by_a_region() -> None:
    formed = Formed(lambda x: (ops.scale(ops.amax(x, "tensor"), "e4m3"), ops.amax(x.sin(), "tensor")), noise(R, C))
    assert formed.left() == []
    finish = formed.regions[-1]
    assert [p.rows for p in finish.parts] == [1] * len(finish.parts)
    assert len(finish.parts) == 2  # both amaxes leave the graph: one launch


def test_parts_of_a_concatenation_fill_one_buffer() -> None:
    def run(a: Tensor, b: Tensor) -> Any:
        (qa, sa), (qb, sb) = cast(a), cast(b)
        return torch.cat([qa, qb]), torch.cat([sa, sb])

    formed = Formed(run, noise(R, C), noise(2 * R, C, seed=3))
    (region,) = formed.regions
    assert [p.rows for p in region.parts] == [R, 2 * R]
    assert sorted(b.shape for b in region.buffers) == [(3 * R, 1), (3 * R, C)]
    assert not formed.graph.find_nodes(op="call_function", target=aten.cat.default)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_concatenated_payloads_of_either_layout(transpose: bool, dim: int) -> None:
    def run(a: Tensor, b: Tensor, s: Tensor) -> Any:
        return (torch.cat([ops.quantize(x, s, "e4m3", "tensor", transpose) for x in (a, b)], dim),)

    formed = Formed(run, noise(R, C), noise(R, C, seed=3), noise(1).abs()[0])
    (region,) = formed.regions
    wide = (2 * C, R) if transpose else (2 * R, C)
    narrow = (C, 2 * R) if transpose else (R, 2 * C)
    assert [b.shape for b in region.buffers] == [wide if dim == 0 else narrow]


def test_halves_of_a_row_have_one_scale_and_are_made_in_place() -> None:
    """The gradients of a gated activation: as values and as codes, with the scale of whole rows."""

    def run(g: Tensor, gate: Tensor, up: Tensor) -> Any:
        halves = g * torch.cos(gate) * up, g * torch.sin(gate)
        scale = ops.scale(torch.maximum(*(ops.amax(x, "row") for x in halves)), "e4m3")
        codes = [ops.quantize(x, scale, "e4m3", "row") for x in halves]
        return torch.cat(halves, 1), torch.cat(codes, 1), scale

    formed = Formed(run, noise(R, C), noise(R, C, seed=3), noise(R, C, seed=4))
    (region,) = formed.regions
    assert sorted(b.shape for b in region.buffers) == [(R, 1), (R, 2 * C), (R, 2 * C)]
    assert formed.left() == []
    assert not formed.graph.find_nodes(op="call_function", target=aten.cat.default)


@pytest.mark.parametrize(("computed", "stored"), [(False, []), (True, [(R, C)])])
def test_what_is_loaded_is_not_stored_in_a_wider_dtype(computed: bool, stored: list[tuple[int, int]]) -> None:
    """Who needs it reads what is loaded; what is computed is stored."""

    def run(x: Tensor, rows: Tensor, other: Tensor) -> Any:
        wide = torch.sin(x.float()) if computed else x.float()
        return *cast(wide * rows), (wide * other).sum(1)

    (region,) = Formed(run, noise(R, C).bfloat16(), noise(R, 1), noise(R, C, seed=3)).regions
    assert [b.shape for b in region.buffers] == [(R, C), (R, 1), *stored]


def test_a_part_that_somebody_else_reads_is_copied() -> None:
    def run(a: Tensor, b: Tensor) -> Any:
        qa, qb = cast(a)[0], cast(b)[0]
        return torch.cat([qa, qb]), qa

    formed = Formed(run, noise(R, C), noise(R, C, seed=3))
    assert formed.graph.find_nodes(op="call_function", target=aten.cat.default)


# ---- order ----------------------------------------------------------------------------------------------------------


def test_a_region_reads_an_input_before_it_is_overwritten() -> None:
    """Where what reads the region's results, and so the region, stands behind."""

    def run(x: Tensor, state: Tensor) -> Any:
        payload, scale = cast(x.sin() + state)
        state.copy_(x.mean(0))
        return payload, scale.flatten().sort()[0]

    formed = Formed(run, noise(R, C), noise(C))  # compares results, and what is left in the inputs
    (region,) = regions_of(formed.graph)
    (written,) = formed.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert written.args[0] in region.all_input_nodes
    assert region < written


def test_a_value_that_is_equal_to_a_stored_maximum_is_still_equal() -> None:
    """In BF16 the maximum is rounded as it is stored; the elements, computed again, must be compared as rounded."""

    def run(x: Tensor, largest: Tensor) -> Any:
        y = torch.sin(x) * 1.3
        hit = (y == largest).to(torch.bfloat16)
        return cast(hit)

    x = noise(R, C, dtype=torch.bfloat16)
    largest = (torch.sin(x) * 1.3).amax(-1, keepdim=True)
    formed = Formed(run, x, largest)
    assert "eq" in formed.operators()[0]


BOOLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b,
    "sum": lambda a, b: a + b,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "choice": lambda a, b: torch.where(a, b, ~b),
    "number": lambda a, b: a * True,
    "comparison": lambda a, b: a > b,
}


@pytest.mark.parametrize("name", BOOLS)
def test_what_is_computed_of_bools_is_bool(name: str) -> None:
    """A mask times a mask is a mask: it chooses, it is part of other masks, and it is stored as one."""

    def run(x: Tensor, y: Tensor) -> Any:
        made = BOOLS[name](x > 0, y > 0)
        chosen = torch.where(made, x, y * 2)
        return *cast(chosen), *cast(torch.where(made & (x < 1), y, x)), made

    formed = Formed(run, noise(R, C), noise(R, C, seed=3))  # compares the results
    assert formed.regions
    assert formed.left() == formed.reasons == []


def test_a_sink_that_waits_for_another_has_a_region_of_its_own() -> None:
    """A norm over each head loads its statistics, which are made of the first region's result."""

    def run(x: Tensor, w: Tensor) -> Any:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        heads = (y + x).view(R, 4, C // 4)
        z = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-5)
        return y @ w, *cast(z.view(R, C)), *cast(y - x)

    formed = Formed(run, noise(R, C), noise(C, C))
    assert formed.left() == formed.reasons == []
    assert len(formed.regions) >= 2


def test_a_value_that_two_iteration_spaces_compute_is_stored_by_one() -> None:
    def run(x: Tensor, column: Tensor) -> Any:
        y = x - column
        return *cast(y.t().contiguous()), y, ops.amax(x, "tensor")

    formed = Formed(run, noise(R, C), noise(R, 1))
    assert [b.shape for r in formed.regions for b in r.buffers].count((R, C)) == 1


def test_symbolic_rows_of_groups_need_only_the_sizes_that_are_used() -> None:
    """Batches and rows are one index; what computes each of them is no argument."""

    def build(rows: Any) -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = rows
        amax = graph.call_function(ops.amax, (x, "group(16)"))
        scale = graph.call_function(ops.scale, (amax, "e4m3"))
        payload = graph.call_function(ops.quantize, (x, scale, "e4m3", "group(16)"))
        for node in (amax, scale, payload):
            update_value(node)
        graph.output((payload, scale))
        return graph

    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.DYNAMIC, DimDynamic.STATIC])
    graph = build(mode.from_tensor(noise(3, R, C), symbolic_context=dynamic, source=ConstantSource("x")))
    assert form_regions(graph) == []
    (region,) = (spec_of(node)[0] for node in regions_of(graph))
    assert [len(node.args[1]) for node in regions_of(graph)] == [len(region.sizes)]
    assert not any(n.target in ops.CASTS for n in graph.nodes)


# ---- what is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "group": (lambda x: cast(x, "group(128)"), (R, 192), "group(128) does not divide [32, 192]"),
    "block": (lambda x: cast(x, "block(128)"), (128, 192), "block(128) does not divide [128, 192]"),
    "size": (lambda x: cast(x, "group(24)"), (R, 48), "groups of 24, which is no power of two"),
    "batch": (
        lambda x: (ops.quantize(x, ops.scale(ops.amax(x, "tensor"), "e4m3"), "e4m3", "tensor", True),),
        (2, R, C),
        "a batch is transposed matrix by matrix",
    ),
    "padded_batch": (
        lambda x: (ops.quantize(x, ops.scale(ops.amax(x, "tensor"), "e4m3"), "e4m3", "tensor", False, 16, 16),),
        (2, 7, 9),
        "a batch is filled up matrix by matrix",
    ),
    "columns": (lambda x: (ops.amax(x, "row", True, 16, 16),), (7, 9), "amaxes of columns, filled up"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_cast_has_its_reason(name: str) -> None:
    function, shape, why = REFUSED[name]
    formed = Formed(function, noise(*shape))
    assert [reason.partition(": ")[2] for reason in formed.reasons] == [why]
    assert formed.left()


def test_a_long_chain_is_cut() -> None:
    """Regions are built by recursion, which Python allows only so deep."""

    def chain(x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(150):
            x = (x + 0.01) * 0.99
        return cast(x)

    formed = Formed(chain, noise(R, C))
    assert formed.reasons == []
    assert "quantize" not in formed.left()


def test_an_empty_tensor_is_refused() -> None:
    graph = make_fx(lambda x: cast(x), tracing_mode="fake")(noise(0, C)).graph
    assert [reason.partition(": ")[2] for reason in form_regions(graph)] == ["it is empty"]


def test_a_number_on_another_device_is_no_input_of_a_kernel() -> None:
    """Eager PyTorch multiplies a CUDA tensor by a number that lies on the CPU; a kernel cannot read it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in ("x", "number")]
        for node, device in zip(nodes, ("meta", "cpu"), strict=True):
            node.meta["val"] = torch.empty((R, C) if device == "meta" else (), device=device)
        product = graph.call_function(aten.mul.Tensor, tuple(nodes))
        product.meta["val"] = nodes[0].meta["val"]
        assert not fusible.is_pointwise(product)
        product.args = (nodes[0], 2.0)
        assert fusible.is_pointwise(product)


# ---- random graphs --------------------------------------------------------------------------------------------------

SEEDS = range(60)


def draw(seed: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """A random function of three tensors, a row, a column and a weight, full of casts."""
    generator = random.Random(seed)
    rows, cols = generator.choice([(32, 64), (48, 32), (16, 128), (64, 128), (8, 16), (13, 48)])
    inputs = [noise(rows, cols, seed=3 * seed + n) for n in range(3)]
    inputs += [noise(cols), noise(rows, 1), noise(cols, cols) / cols**0.5]

    def function(*tensors: Tensor) -> list[Tensor]:
        return _Program(random.Random(seed + 1), tensors).run()

    return function, inputs


class _Program:
    """Steps that make tensors of each other (`values`) and leave casts and sums behind (`results`)."""

    def __init__(self, generator: random.Random, tensors: tuple[Tensor, ...]) -> None:
        *values, self.row, self.column, self.weight = tensors
        self.generator, self.values, self.results = generator, list(values), []

    def run(self) -> list[Tensor]:
        steps = [name for name in dir(self) if name.startswith(("value_", "result_"))]
        for _ in range(self.generator.randint(4, 14)):
            name = self.generator.choice(steps)
            made = getattr(self, name)(self.pick())
            if name.startswith("value_"):
                self.values.append(made)
            else:
                self.results += made
        return [*self.results, self.values[-1]]

    def pick(self) -> Tensor:
        return self.generator.choice(self.values[-5:])

    def value_sum(self, x: Tensor) -> Tensor:
        return x + self.pick()

    def value_gate(self, x: Tensor) -> Tensor:
        return x * self.pick().sigmoid() * self.row

    def value_gelu(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x - self.column)

    def value_norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    def value_heads(self, x: Tensor) -> Tensor:
        return self.value_norm(x.view(x.shape[0], 4, -1)).view(x.shape)

    def value_masked(self, x: Tensor) -> Tensor:
        y = self.pick()
        mask = self.generator.choice(list(BOOLS.values()))(x > 0, y > self.row)
        return torch.where(mask, x, y) * mask

    def value_matmul(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def value_centred(self, x: Tensor) -> Tensor:
        return x - x.sum(0) / x.shape[0]

    def result_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        return cast(x)

    def result_columns(self, x: Tensor) -> tuple[Tensor, ...]:
        return cast(x, "row", True)

    def result_tensor(self, x: Tensor) -> tuple[Tensor, ...]:
        return cast(x, "tensor", self.generator.random() < 0.5, self.generator.choice(("e4m3", "e5m2")))

    def result_groups(self, x: Tensor) -> tuple[Tensor, ...]:
        return cast(x, "group(16)")

    def result_both(self, x: Tensor) -> tuple[Tensor, ...]:
        amax = ops.amax(x, "row")
        rows, whole = (ops.scale(a, "e4m3") for a in (amax, ops.amax(amax, "tensor")))
        return ops.quantize(x, rows, "e4m3", "row"), ops.quantize(x, whole, "e4m3", "tensor", True), rows, whole

    def result_permuted(self, x: Tensor) -> tuple[Tensor, ...]:
        return cast(x.t().contiguous())

    def result_concatenated(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.pick()
        scale = ops.scale(torch.maximum(ops.amax(x, "tensor"), ops.amax(y, "tensor")), "e4m3")
        parts = [ops.quantize(t, scale, "e4m3", "tensor") for t in (x, y)]
        return torch.cat(parts, self.generator.choice((0, 1))), scale

    def result_sum(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(0), x


@pytest.mark.parametrize("first", range(0, len(SEEDS), 10))
def test_random_graphs_compute_the_same_with_regions(first: int) -> None:
    for seed in SEEDS[first : first + 10]:
        function, inputs = draw(seed)
        formed = Formed(function, *inputs)
        assert formed.reasons == [], f"seed {seed}"
        assert "quantize" not in formed.left(), f"seed {seed}"
