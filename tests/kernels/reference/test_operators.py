"""The marker operators: their fakes promise what the real ones give, and their lowering is the same function."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import ops
from fp8compile.kernels.reference import markers
from fp8compile.passes.lower.lower_markers import lower_markers

GRANULARITIES = ("tensor", "row", "group(32)", "group(128)", "block(128)")
LAYOUTS = ((False, 1, 1), (True, 1, 1), (False, 16, 128), (True, 16, 128))
INPUTS = {
    "matrix": lambda: torch.randn(21, 140),
    "transposed": lambda: torch.randn(140, 21).t(),
    "batch": lambda: torch.randn(2, 21, 140),
    "permuted batch": lambda: torch.randn(21, 2, 140).transpose(0, 1),
    "slice": lambda: torch.randn(21, 200)[:, 10:150],
}


def operands(granularity_a: str = "row", granularity_b: str = "tensor"):
    a, b = torch.randn(21, 256), torch.randn(32, 256)
    made = []
    for x, granularity in ((a, granularity_a), (b, granularity_b)):
        scale = ops.scale(ops.amax(x, granularity), "e4m3")
        made += [ops.quantize(x, scale, "e4m3", granularity), scale, granularity]
    return tuple(made)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integers), b.view(integers))


def check(operator, *args) -> None:
    tests = ["test_faketensor"]
    if all(x.element_size() > 1 for x in args if isinstance(x, torch.Tensor)):
        tests.append("test_schema")  # it compares its inputs by allclose, which FP8 has not
    torch.library.opcheck(operator, args, test_utils=tests)


# --- fakes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_fake_amax_promises_what_the_real_one_gives(granularity, name, layout):
    check(ops.amax, INPUTS[name](), granularity, *layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_fake_quantize_promises_what_the_real_one_gives(granularity, name, layout):
    x = INPUTS[name]()
    scale = ops.scale(ops.amax(x, granularity, *layout), "e5m2")
    check(ops.quantize, x, scale, "e5m2", granularity, *layout)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_fake_scale_promises_what_the_real_one_gives(power_of_two):
    check(ops.scale, torch.rand(21, 1), "e4m3", power_of_two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_fake_dequantize_promises_what_the_real_one_gives(dtype):
    data, scale, granularity, *_ = operands("group(128)")
    check(ops.dequantize, data, scale, granularity, dtype)


@pytest.mark.parametrize("pair", [("row", "tensor"), ("tensor", "tensor"), ("group(128)", "block(128)")], ids="×".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fake_scaled_mm_promises_what_the_real_one_gives(dtype, pair):
    check(ops.scaled_mm, *operands(*pair), None, dtype)
    check(ops.scaled_mm, *operands(*pair), torch.randn(32, dtype=dtype), dtype, True)


def test_the_fake_delayed_scale_promises_what_the_real_one_gives():
    amax = torch.tensor(3.0)
    with FakeTensorMode() as mode:
        fake = ops.delayed_scale(mode.from_tensor(amax), "key", "e4m3", 4, 0)
    real = ops.delayed_scale(amax, "key", "e4m3", 4, 0)
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("transpose", [False, True])
def test_data_is_contiguous_along_the_contracted_dimension(name, transpose):
    x = INPUTS[name]()
    data = ops.quantize(x, torch.tensor(1.0), "e4m3", "tensor", transpose)
    assert data.is_contiguous()
    assert data.shape == (x.transpose(-1, -2) if transpose else x).shape


@pytest.mark.parametrize("side", [0, 3])
def test_scaled_mm_refuses_data_that_a_gpu_could_not_read(side):
    args = list(operands("tensor", "tensor"))
    args[side] = args[side].t().contiguous().t()
    with pytest.raises(RuntimeError, match="needs contiguous data, got strides"):
        ops.scaled_mm(*args, None, torch.bfloat16)


def test_every_operator_demands_contiguous_strides():
    for operator in ops.MARKERS:
        assert torch.Tag.needs_contiguous_strides in operator.tags


# --- symbolic sizes


def whole_cast(x: torch.Tensor, granularity: str, layout: tuple[bool, int, int]):
    """Every cast marker once: (data, scale, dequantized data)."""
    scale = ops.scale(ops.amax(x, granularity, *layout), "e4m3")
    data = ops.quantize(x, scale, "e4m3", granularity, *layout)
    return data, scale, ops.dequantize(data, scale, granularity, torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_symbolic_graph_serves_every_size(granularity, layout):
    traced = make_fx(lambda x: whole_cast(x, granularity, layout), tracing_mode="symbolic")(torch.randn(21, 140))
    for shape in ((21, 140), (16, 128), (5, 300)):
        x = torch.randn(shape)
        for got, wanted in zip(traced(x), whole_cast(x, granularity, layout), strict=True):
            assert same_bits(got, wanted)


def test_a_symbolic_fake_keeps_its_symbols():
    traced = make_fx(lambda x: whole_cast(x, "row", (True, 16, 1)), tracing_mode="symbolic")(torch.randn(21, 140))
    (quantize,) = (n for n in traced.graph.nodes if n.target is ops.quantize)
    x = next(iter(traced.graph.nodes)).meta["val"]
    rows, cols = quantize.meta["val"].shape
    assert cols == x.shape[0]
    assert str(x.shape[1]) in str(rows)  # the columns of x, rounded up to 16


# --- lowering


def lowered(call, *inputs: torch.Tensor) -> fx.GraphModule:
    traced = make_fx(call, tracing_mode="fake")(*inputs)
    lower_markers(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced


@pytest.mark.parametrize(
    ("granularity", "name", "layout"),
    [  # half of all: with each other, all pairs of two
        (granularity, name, layout)
        for (i, granularity), (j, name), (k, layout) in itertools.product(
            *map(enumerate, (GRANULARITIES, INPUTS, LAYOUTS))
        )
        if (i + j + k) % 2 == 0
    ],
)
def test_lowered_casts_are_bitwise_the_operators(granularity, name, layout):
    x = INPUTS[name]()
    graph = lowered(lambda x: whole_cast(x, granularity, layout), x)
    assert not [n for n in graph.graph.nodes if n.target in ops.CASTS]
    for got, wanted in zip(graph(x), whole_cast(x, granularity, layout), strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lowered_casts_are_bitwise_the_operators_at_the_extremes(dtype, format):
    top, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    rows = [[top, -top, 1.0], [tiny, -tiny, tiny / 4], [0.0, -0.0, 0.0], [float("inf"), 1.0, 2.0], [float("nan"), 1, 2]]
    x = torch.tensor(rows, dtype=dtype)

    def cast(x):
        scale = ops.scale(ops.amax(x, "row"), format, True)
        return ops.quantize(x, scale, format, "row"), scale

    for got, wanted in zip(lowered(cast, x)(x), cast(x), strict=True):
        assert same_bits(got, wanted)


def test_lowering_leaves_the_matmul_and_the_history():
    def call(a, b):
        sa = ops.delayed_scale(ops.amax(a, "tensor"), "key", "e4m3", 2, 0)
        sb = ops.scale(ops.amax(b, "tensor"), "e4m3")
        qa, qb = ops.quantize(a, sa, "e4m3", "tensor"), ops.quantize(b, sb, "e4m3", "tensor")
        return ops.scaled_mm(qa, sa, "tensor", qb, sb, "tensor", None, torch.float32)

    graph = lowered(call, torch.randn(16, 32), torch.randn(16, 32)).graph
    assert [n.target for n in graph.nodes if n.target in ops.MARKERS] == [ops.delayed_scale, ops.scaled_mm]


def test_operators_on_a_cpu_are_their_references():
    x = torch.randn(21, 140)
    scale = markers.scale(markers.amax(x, "row"), "e4m3")
    assert same_bits(ops.scale(ops.amax(x, "row"), "e4m3"), scale)
    assert same_bits(ops.quantize(x, scale, "e4m3", "row"), markers.quantize(x, scale, "e4m3", "row"))
    args = operands()
    assert same_bits(ops.scaled_mm(*args, None, torch.bfloat16), markers.scaled_mm(*args, None, torch.bfloat16))
