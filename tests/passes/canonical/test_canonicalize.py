"""Canonicalizing: every way to write a matmul with a weight is converted, with the right values and gradients."""

from __future__ import annotations

import pytest
import torch
from joint import joint
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp8compile
from fp8compile.devices import Device
from fp8compile.options import Options
from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core.compilation import Compilation, aten
from fp8compile.plan.plan import Plan

EAGER = {"select": "all", "executor": "eager", "strict": True}
ROLES = ["grad_input", "grad_weight", "output"]


class Weighted(nn.Module):
    """A weight of some shape, and what is done with it."""

    def __init__(self, shape, forward, bias=None):
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5)
        self.b = None if bias is None else nn.Parameter(torch.randn(bias))
        self.call = forward

    def forward(self, x):
        return self.call(x, self.w) if self.b is None else self.call(x, self.w, self.b)


# name -> (shape of x, shape of w, how, matmuls expected of roles)
FORMS = {
    "linear": ((4, 16, 32), (48, 32), lambda x, w: nn.functional.linear(x, w)),
    "matmul": ((16, 32), (32, 48), lambda x, w: x @ w),
    "matmul of a batch": ((4, 16, 32), (32, 48), lambda x, w: x @ w),
    "matmul of a batch of batches": ((2, 3, 16, 32), (32, 48), lambda x, w: x @ w),
    "bmm with a batch of one": ((1, 16, 32), (1, 32, 48), torch.bmm),
    "bmm with a broadcast weight": ((4, 16, 32), (32, 48), lambda x, w: torch.bmm(x, w.expand(4, -1, -1))),
    "bmm with a weight for each batch": ((4, 16, 32), (4, 32, 48), torch.bmm),
    "weight on the left": ((32, 16), (48, 32), lambda x, w: w @ x),
    "einsum bsd,do": ((4, 16, 32), (32, 48), lambda x, w: torch.einsum("bsd,do->bso", x, w)),
    "einsum bsd,od": ((4, 16, 32), (48, 32), lambda x, w: torch.einsum("bsd,od->bso", x, w)),
    "einsum bsd,dhk": ((4, 16, 32), (32, 3, 16), lambda x, w: torch.einsum("bsd,dhk->bshk", x, w)),
    "einsum bshk,hkd": ((4, 16, 3, 16), (3, 16, 32), lambda x, w: torch.einsum("bshk,hkd->bsd", x, w)),
    "einsum ebd,edo (experts)": ((4, 16, 32), (4, 32, 48), lambda x, w: torch.einsum("ebd,edo->ebo", x, w)),
    "tensordot": ((4, 16, 32), (32, 48), lambda x, w: torch.tensordot(x, w, 1)),
    "transposed twice": ((16, 32), (32, 48), lambda x, w: x.t().t() @ w.t().t()),
    "1×1 convolution": ((2, 32, 4, 4), (48, 32, 1, 1), lambda x, w: nn.functional.conv2d(x, w)),
    "patch convolution": ((2, 4, 16, 16), (48, 4, 4, 4), lambda x, w: nn.functional.conv2d(x, w, stride=4)),
    "patch convolution, 1-d": ((2, 8, 64), (48, 8, 4), lambda x, w: nn.functional.conv1d(x, w, stride=4)),
    "patch convolution, 3-d": (
        (2, 2, 4, 8, 8),
        (32, 2, 2, 2, 4),
        lambda x, w: nn.functional.conv3d(x, w, stride=(2, 2, 4)),
    ),
}
WITH_BIAS = {
    "linear with bias": ((4, 16, 32), (48, 32), (48,), nn.functional.linear),
    "addmm": ((16, 32), (32, 48), (48,), lambda x, w, b: torch.addmm(b, x, w)),
    "addmm with a matrix": ((16, 32), (32, 48), (16, 48), lambda x, w, b: torch.addmm(b, x, w)),
    "addmm with a row": ((16, 32), (32, 48), (1, 48), lambda x, w, b: torch.addmm(b, x, w)),
    "addmm with a column": ((16, 32), (32, 48), (16, 1), lambda x, w, b: torch.addmm(b, x, w)),
    "baddbmm": ((4, 16, 32), (4, 32, 48), (4, 16, 48), lambda x, w, b: torch.baddbmm(b, x, w)),
    "baddbmm with a batch of one": ((1, 16, 32), (1, 32, 48), (1, 1, 48), lambda x, w, b: torch.baddbmm(b, x, w)),
    "baddbmm with a broadcast bias": ((4, 16, 32), (4, 32, 48), (48,), lambda x, w, b: torch.baddbmm(b, x, w)),
    "patch convolution with bias": (
        (2, 4, 16, 16),
        (48, 4, 4, 4),
        (48,),
        lambda x, w, b: nn.functional.conv2d(x, w, b, 4),
    ),
}


def sqnr(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    noise = (exact.double() - approximate.double()).norm()
    return float("inf") if noise == 0 else float(20 * torch.log10(exact.double().norm() / noise).detach())


def compare(
    model: nn.Module, x: torch.Tensor, recipe: str = "rowwise", bound: float = 20.0, traced: bool = False
) -> fp8compile.Plan:
    """Forward and gradients of the compiled model against the model itself; the plan. `traced`: of the passes on its
    graph of forward and backward alone.

    Every cast of normal data keeps 25 dB or more (31 measured; `test_reference.py`); two casts of a matmul are
    independent, so their noises add up to 3 dB less than one: 20 dB leaves room for the few elements here.
    """
    x.requires_grad_()
    wanted = model(x)
    gradient = torch.randn_like(wanted)
    exact = torch.autograd.grad(wanted, [*model.parameters(), x], gradient)
    if traced:
        graph = joint(model, x, select="all", recipe=recipe)
        plan = graph.run()
        out, *got = graph.results(gradient)
    else:
        out = torch.compile(model, backend="fp8", options={**EAGER, "recipe": recipe})(x)
        got = torch.autograd.grad(out, [*model.parameters(), x], gradient)
        plan = fp8compile.last_compile().plans[-1]
    assert out.shape == wanted.shape
    assert bound <= sqnr(wanted, out) < 60  # and it was quantized at all
    for e, g in zip(exact, got, strict=True):
        assert e.shape == g.shape
        assert sqnr(e, g) >= bound
    return plan


COMPILED = ("linear", "einsum bshk,hkd", "transposed twice", "patch convolution, 3-d", "addmm with a row", "baddbmm")


@pytest.mark.parametrize(("name", "recipe"), [(name, ("rowwise", "mixed")[i % 2]) for i, name in enumerate(FORMS)])
def test_every_form_is_converted_in_all_three_roles_with_the_right_values(name, recipe):
    shape, weight, call = FORMS[name]
    plan = compare(Weighted(weight, call), torch.randn(shape), recipe, traced=name not in COMPILED)
    assert sorted((m.role, m.decision) for m in plan.matmuls) == [(role, "fp8") for role in ROLES]


@pytest.mark.parametrize("name", WITH_BIAS)
def test_every_form_with_a_bias_is_converted_with_the_right_values(name):
    shape, weight, bias, call = WITH_BIAS[name]
    plan = compare(Weighted(weight, call, bias), torch.randn(shape), traced=name not in COMPILED)
    assert sorted((m.role, m.decision) for m in plan.matmuls) == [(role, "fp8") for role in ROLES]


def test_a_weight_on_the_left_of_a_batch_is_right():
    model = Weighted((48, 32), lambda x, w: w @ x)
    plan = compare(model, torch.randn(4, 32, 16))
    (row,) = [m for m in plan.matmuls if m.role == "output"]
    assert (row.decision, row.kind, row.m, row.n, row.k) == ("fp8", "mm", 64, 48, 32)  # one matmul over all batches
    assert {m.decision for m in plan.matmuls if m.role == "grad_input"} == {"fp8"}


def test_a_broadcast_weight_makes_one_matmul_of_a_batch():
    shape, weight, call = FORMS["bmm with a broadcast weight"]
    plan = compare(Weighted(weight, call), torch.randn(shape))
    sizes = {m.role: (m.kind, m.m, m.n, m.k, m.batch) for m in plan.matmuls}
    assert sizes == {
        "output": ("mm", 64, 48, 32, 1),
        "grad_input": ("mm", 64, 32, 48, 1),
        "grad_weight": ("mm", 32, 48, 64, 1),
    }


def test_a_weight_for_each_batch_stays_a_batch():
    shape, weight, call = FORMS["bmm with a weight for each batch"]
    plan = compare(Weighted(weight, call), torch.randn(shape))
    assert {(m.kind, m.batch) for m in plan.matmuls} == {("bmm", 4)}


def test_roles_follow_the_weight_where_it_stands_on_the_left():
    plan = compare(Weighted((48, 32), lambda x, w: w @ x), torch.randn(32, 16), recipe="mixed")
    rows = {m.role: (str(m.left), str(m.right)) for m in plan.matmuls}
    assert rows["output"] == ("e4m3 tensor", "e4m3 row")  # weight × activation: the row scale follows the activation


def test_two_linears_without_anything_in_between():
    compare(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 16)), torch.randn(16, 32), bound=15.0)


def test_two_convolutions_without_anything_in_between():
    model = nn.Sequential(nn.Conv2d(4, 16, 4, 4), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1))
    plan = compare(model, torch.randn(2, 4, 16, 16), bound=15.0)
    assert len(plan.converted) == 9


# --- the graph itself


def canonical(call, *shapes) -> fx.Graph:
    """The graph of `call`, canonicalized."""
    with FakeTensorMode():
        gm = make_fx(call)(*[torch.randn(s) for s in shapes])
    c = Compilation(gm.graph, Options(), Device("cpu", False), Plan())
    canonicalize.run(c)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    inputs = [torch.randn(s) for s in shapes]
    got, wanted = gm(*inputs), call(*inputs)
    for g, w in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, wanted)), strict=True):
        # FP32 sums of at most 256 products in another order
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-4)
    return gm.graph


def targets(graph: fx.Graph) -> list[str]:
    return [n.target._opname for n in graph.nodes if n.op == "call_function"]


def test_equal_views_become_one():
    graph = canonical(lambda x: (x.view(64, 32).sin(), x.view(64, 32).cos()), (4, 16, 32))
    assert targets(graph).count("view") == 1


def test_equal_views_by_different_ways_become_one():
    graph = canonical(lambda x: (x.view(64, 32).sin(), x.view(4, 512).view(64, 32).cos()), (4, 16, 32))
    assert targets(graph).count("view") == 1


def test_a_transpose_of_a_transpose_is_the_tensor_itself():
    graph = canonical(lambda x: x.permute(1, 0).permute(1, 0).sin(), (16, 32))
    assert targets(graph) == ["sin"]


def test_zeros_without_memory_get_some():
    """What forward-mode differentiation puts in place of a tangent that is not there."""
    with FakeTensorMode():
        x, zeros = torch.randn(16, 32), torch._efficientzerotensor((16, 32))
    graph = fx.Graph()
    given = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten._efficientzerotensor.default, ([16, 32],), {"device": "cpu"})
    view = graph.call_function(torch.ops.aten.view.default, (made, [512]))
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (given, made)), view))
    given.meta["val"], made.meta["val"], view.meta["val"] = x, zeros, zeros.view(512)
    canonicalize.run(Compilation(graph, Options(), Device("cpu", False), Plan()))
    assert targets(graph) == ["full", "view", "mul"]
    assert not any(n.meta["val"]._is_zerotensor() for n in (made, view))
    assert fx.GraphModule({}, graph)(torch.ones(16, 32))[1].tolist() == [0.0] * 512


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (x[:8].sin(), x[8:].cos()),  # same sizes and strides, another offset
        lambda x: (x.view(32, 16).sin(), x.permute(1, 0).cos()),  # same sizes, other strides
        lambda x: (x.view(32, 16).sin(), x.view(8, 64).cos()),
        lambda x: (x.view(32, 16).sin(), (x + 1).view(32, 16).cos()),  # another base
    ],
)
def test_different_views_stay_two(call):
    before = make_fx(call)(torch.randn(16, 32)).graph
    after = canonical(call, (16, 32))
    views = ("view", "slice", "permute", "transpose", "t")
    assert sum(t in views for t in targets(after)) == sum(t in views for t in targets(before))


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (lambda x, w: x @ w, ((0, 32), (32, 16))),
        (lambda x, w: x @ w, ((32, 16), (16, 0))),
        (lambda x, w: torch.addmm(w[0], x, w), ((0, 16), (16, 16))),
        (torch.bmm, ((0, 8, 32), (0, 32, 16))),
        (lambda x, w: torch.baddbmm(x @ w, x, w), ((2, 0, 32), (2, 32, 16))),
    ],
)
def test_a_matmul_whose_result_is_empty_reads_nothing(call, shapes):
    made = targets(canonical(call, *shapes))
    assert "full" in made
    assert not {"mm", "bmm", "addmm", "baddbmm"} & set(made)


def test_nothing_is_asked_of_sizes_that_only_the_data_knows():
    """A guard on one is an error."""

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            at = (x[:, 0] > 0).nonzero().squeeze(-1)
            return x.index_add(0, at, self.fc(x[at]))

    model, x = Chosen(), torch.randn(16, 32)
    options = {"executor": "eager", "select": "all", "strict": True}
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(model, backend="fp8", options=options, fullgraph=True)
        assert sqnr(model(x), run(x)) > 25


def test_a_matmul_over_nothing_stays():
    assert targets(canonical(lambda x, w: x @ w, (32, 0), (0, 16))) == ["mm"]  # zeros, of a size


def test_bmm_of_one_batch_becomes_mm():
    graph = canonical(torch.bmm, (1, 16, 32), (1, 32, 48))
    assert "mm" in targets(graph)
    assert "bmm" not in targets(graph)


def test_baddbmm_becomes_bmm_and_add():
    graph = canonical(torch.baddbmm, (4, 16, 48), (4, 16, 32), (4, 32, 48))
    assert [t for t in targets(graph) if t != "view"] == ["bmm", "add"]


def test_baddbmm_that_scales_its_terms_stays():
    graph = canonical(lambda b, x, w: torch.baddbmm(b, x, w, alpha=2), (4, 16, 48), (4, 16, 32), (4, 32, 48))
    assert targets(graph) == ["baddbmm"]


def test_bmm_with_a_broadcast_weight_becomes_mm_over_all_rows():
    graph = canonical(lambda x, w: torch.bmm(x, w.expand(4, 32, 48)), (4, 16, 32), (32, 48))
    (mm,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert list(mm.meta["val"].shape) == [64, 48]


def test_bmm_with_a_broadcast_weight_on_the_left_becomes_mm_over_all_rows():
    def call(x, w):  # x is contiguous as [batch, tokens, features], so its transpose is what the weight multiplies
        return torch.bmm(w.expand(4, 48, 32), x.transpose(1, 2))

    graph = canonical(call, (4, 16, 32), (48, 32))
    (mm,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert list(mm.meta["val"].shape) == [64, 48]


def test_bmm_whose_rows_are_not_one_matrix_stays():
    graph = canonical(lambda x, w: torch.bmm(x.transpose(0, 1), w.expand(4, 32, 48)), (16, 4, 32), (32, 48))
    assert "bmm" in targets(graph)


def test_the_gradient_of_a_broadcast_weight_becomes_mm():
    def call(x, dy):
        return torch.bmm(x.transpose(1, 2), dy).sum([0])

    graph = canonical(call, (4, 16, 32), (4, 16, 48))
    (mm,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert list(mm.meta["val"].shape) == [32, 48]
    assert "sum" not in targets(graph)


@pytest.mark.parametrize("dims", [[1], [0, 1]])
def test_other_sums_of_a_bmm_stay(dims):
    graph = canonical(lambda x, dy: torch.bmm(x.transpose(1, 2), dy).sum(dims), (4, 16, 32), (4, 16, 48))
    assert "sum" in targets(graph)
    assert "mm" not in targets(graph)


def test_a_bmm_that_is_used_beside_its_sum_stays():
    def call(x, dy):
        product = torch.bmm(x.transpose(1, 2), dy)
        return product.sum([0]), product

    assert "bmm" in targets(canonical(call, (4, 16, 32), (4, 16, 48)))


# --- sums of slices among zeros


def among_zeros(x, shape, dim, at):
    """`x` at index `at` of dimension `dim`, or in that slice; zeros elsewhere."""
    zeros = torch.full(shape, 0.0)
    if isinstance(at, int):
        return torch.select_scatter(zeros, x, dim, at)
    return torch.slice_scatter(zeros, x, dim, at.start, at.stop, at.step or 1)


# name -> (shape of the whole, dimension, places in the order in which they are added)
COVERED = {
    "indices": ((3, 8, 16), 0, (2, 1, 0)),
    "indices from the end": ((3, 8, 16), -2, (*range(-1, -6, -1), 0, 1, 2)),
    "halves": ((4, 8, 16), 2, (slice(8, 2**63 - 1), slice(0, 8))),
    "halves without bounds": ((4, 8, 16), -1, (slice(None, -8), slice(-8, None))),
    "an index and a slice": ((4, 9, 16), 1, (slice(1, 9), 0)),
    "unequal slices": ((4, 9, 16), 1, (slice(0, 2), slice(5, 9), slice(2, 5))),
    "a thousand indices": ((1100, 4), 0, tuple(range(1100))),
}
NOT_COVERED = {
    "a gap": ((3, 8, 16), 0, (2, 0)),
    "overlapping": ((4, 8, 16), 2, (slice(0, 9), slice(8, 16))),
    "overlapping, as long as the whole": ((4, 8, 16), 2, (slice(0, 12), slice(8, 12))),
    "one twice, another missing": ((2, 8), 0, (1, 1)),
    "every other": ((4, 8), 1, (slice(0, 8, 2), slice(1, 8, 2))),
}


def sizes_at(shape, dim, places):
    """The shape of what lies at each place."""
    x = torch.empty(shape)
    return [
        x.select(dim, p).shape if isinstance(p, int) else x.movedim(dim, 0)[p].movedim(0, dim).shape for p in places
    ]


def added(shape, dim, places, *given):
    total = among_zeros(given[0], shape, dim, places[0])
    for x, place in zip(given[1:], places[1:], strict=True):
        total = total + among_zeros(x, shape, dim, place)
    return total


@pytest.mark.parametrize("name", COVERED)
def test_slices_that_cover_a_tensor_are_concatenated(name):
    shape, dim, places = COVERED[name]
    graph = canonical(lambda *given: added(shape, dim, places, *given), *sizes_at(shape, dim, places))
    assert set(targets(graph)) <= {"unsqueeze", "cat"}
    assert targets(graph).count("cat") == 1


@pytest.mark.parametrize("name", NOT_COVERED)
def test_slices_that_do_not_cover_a_tensor_are_added(name):
    shape, dim, places = NOT_COVERED[name]
    graph = canonical(lambda *given: added(shape, dim, places, *given), *sizes_at(shape, dim, places))
    assert targets(graph).count("add") == len(places) - 1
    assert "cat" not in targets(graph)


@pytest.mark.parametrize("at", [slice(0, 2**63 - 1), slice(None, None), slice(0, 4)])
def test_a_slice_that_covers_a_tensor_is_all_of_it(at):
    """Whatever it was put into."""
    graph = canonical(lambda x, y: torch.slice_scatter(y, x, 0, at.start, at.stop), (4, 8), (4, 8))
    assert targets(graph) == []


@pytest.mark.parametrize("at", [slice(1, 4), slice(0, 4, 2)])
def test_a_slice_of_fewer_rows_is_put_into_others(at):
    def call(x, y):
        return torch.slice_scatter(y, x, 0, at.start, at.stop, at.step or 1)

    assert targets(canonical(call, (len(range(4)[at]), 8), (4, 8))) == ["slice_scatter"]


def test_a_slice_of_another_dtype_is_converted():
    def call(x, y):
        return torch.slice_scatter(y.double(), x, 0, 0, 4)

    assert "slice_scatter" in targets(canonical(call, (4, 8), (4, 8)))


def test_slices_added_from_both_sides_are_concatenated():
    def call(a, b, x, d):
        left = among_zeros(a, (4, 8), 0, 0) + among_zeros(b, (4, 8), 0, 2)
        return left + (among_zeros(x, (4, 8), 0, 1) + among_zeros(d, (4, 8), 0, 3))

    assert set(targets(canonical(call, *[(8,)] * 4))) == {"unsqueeze", "cat"}


def test_slices_of_two_dimensions_are_added():
    def call(row, columns):
        return among_zeros(row, (2, 2), 0, 0) + among_zeros(columns, (2, 2), 1, 1)

    assert "cat" not in targets(canonical(call, (2,), (2,)))


def test_slices_among_ones_are_added():
    def call(a, b):
        ones = torch.full((2, 8), 1.0)
        return torch.select_scatter(ones, a, 0, 0) + torch.select_scatter(ones, b, 0, 1)

    assert "cat" not in targets(canonical(call, (8,), (8,)))


def test_a_slice_that_is_read_elsewhere_is_added():
    def call(a, b):
        first = among_zeros(a, (2, 8), 0, 0)
        return first + among_zeros(b, (2, 8), 0, 1), first.sin()

    assert "cat" not in targets(canonical(call, (8,), (8,)))


def test_slices_that_are_subtracted_or_spread_stay():
    def subtracted(a, b):
        return torch.sub(among_zeros(a, (2, 8), 0, 0), among_zeros(b, (2, 8), 0, 1))

    def weighted(a, b):
        return torch.add(among_zeros(a, (2, 8), 0, 0), among_zeros(b, (2, 8), 0, 1), alpha=2)

    def broadcast(a, b):
        return among_zeros(a, (2, 8), 0, 0) + among_zeros(b, (4, 2, 8), 1, 1)

    def broadcast_along_it(a, b):
        return among_zeros(a, (2, 8), 0, 0) + among_zeros(b, (2, 2, 8), 0, 1)

    assert "cat" not in targets(canonical(subtracted, (8,), (8,)))
    assert "cat" not in targets(canonical(weighted, (8,), (8,)))
    assert "cat" not in targets(canonical(broadcast, (8,), (4, 8)))
    assert "cat" not in targets(canonical(broadcast_along_it, (8,), (2, 8)))


class Packed(nn.Module):
    """One projection whose parts are read by index, by slices, or by an index and a slice."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        y = self.project(x)
        if self.how == "by index":
            q, k, v = (y.unflatten(-1, (3, 32)).movedim(-2, 0)[i] for i in range(3))
        elif self.how == "by slices":
            q, k, v = y[..., :32], y[..., 32:64], y[..., 64:]
        else:
            y = y[..., :32]
            q, k, v = y[:, :1], y[:, 1:], y[:, :1] * 2
        return self.out(torch.tanh(q) * k + v)


@pytest.mark.parametrize("how", ["by index", "by slices", "by index and slice"])
def test_parts_of_a_projection_have_the_right_gradients(how):
    compare(Packed(how), torch.randn(4, 16, 32))
