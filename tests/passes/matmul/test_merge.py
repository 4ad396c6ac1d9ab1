"""Merging matmuls: the values are those of the separate matmuls, and what must stay separate does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipelines import drop_pass, look_after_stage
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import devices
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.core.stages import Stage
from fp8compile.passes.matmul import matmul_costs
from fp8compile.passes.matmul.merge_matmuls import common_path

EAGER = {"select": "all", "executor": "eager", "strict": True}
graphs: list = []


@pytest.fixture(autouse=True)
def _recorded(monkeypatch):
    """Keep every graph that left the pipeline."""
    graphs.clear()
    look_after_stage(monkeypatch, Stage.JOINT, lambda c: graphs.append(c.graph))


class Projections(nn.Module):
    """One activation, several linears, whose outputs are multiplied pairwise and summed."""

    def __init__(self, k: int = 32, sizes=(32, 32, 32), bias=(False, False, False)):
        super().__init__()
        names = "qkvwxyz"[: len(sizes)]
        self.names = names
        for name, n, b in zip(names, sizes, bias, strict=True):
            self.add_module(name, nn.Linear(k, n, bias=b))

    def forward(self, x):
        return tuple(getattr(self, name)(x).tanh() for name in self.names)


class SwiGLU(nn.Module):
    def __init__(self, width: int = 32, inner: int = 48):
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def run(model: nn.Module, x: torch.Tensor, recipe="rowwise", **options):
    """(outputs, gradients of x and of the parameters, plan) of the compiled model."""
    torch.compiler.reset()
    x = x.detach().clone().requires_grad_()
    outputs = torch.compile(model, backend="fp8", options={**EAGER, "recipe": recipe, **options})(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outputs]
    gradients = torch.autograd.grad(outputs, [x, *model.parameters()], weights)
    return [o.detach() for o in outputs], list(gradients), fp8compile.last_compile()


def run_unmerged(monkeypatch, model: nn.Module, x: torch.Tensor, recipe="rowwise"):
    with monkeypatch.context() as patch:
        drop_pass(patch, "merge_matmuls")
        outputs, gradients, plan = run(model, x, recipe)
    assert not any(m.merged for m in plan.matmuls)
    return outputs, gradients


def merged(plan, role: str) -> list[tuple[str, ...]]:
    return [m.merged for m in plan.matmuls if m.role == role and m.merged]


def assert_payloads_are_concatenated(graph):
    """And nothing in high precision but biases and scales, which have 96 numbers at most."""
    large = [n.meta["val"] for n in graph.find_nodes(op="call_function", target=aten.cat.default)]
    assert {str(v.dtype) for v in large if v.numel() > 96} == {"torch.float8_e4m3fn"}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# --- values


@pytest.mark.parametrize(
    ("sizes", "shape", "bias", "dtype"),
    [((32, 16, 48), (4, 8, 32), False, torch.float32), ((16, 16), (16, 32), True, torch.bfloat16)],
)
def test_with_row_scales_forward_is_bitwise_that_of_separate_matmuls(monkeypatch, sizes, shape, bias, dtype):
    model, x = Projections(sizes=sizes, bias=(bias,) * len(sizes)).to(dtype), torch.randn(shape, dtype=dtype)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x)
    outputs, gradients, plan = run(model, x)
    names = tuple("qkv"[: len(sizes)])
    assert merged(plan, "output") == merged(plan, "grad_input") == merged(plan, "grad_weight") == [names]
    assert_payloads_are_concatenated(graphs[-1])
    for got, wanted in zip(outputs, separate, strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(gradients[1:], separate_gradients[1:], strict=True):
        assert torch.equal(got, wanted)  # a row of grad_weight has the scale it had alone
    # grad_input: one row scale over the concatenated gradients instead of three: a cast's error (2^-4 at worst, 2^-5
    # in the mean) differs in each of the two operands
    assert relative(gradients[0], separate_gradients[0]) < 2**-4


@pytest.mark.parametrize(
    ("bias", "recipe"),
    [((True, False, True), "mixed"), ((True,) * 3, "tensorwise")],
)
def test_merged_projections_compute_what_separate_ones_do(monkeypatch, bias, recipe):
    model, x = Projections(bias=bias), torch.randn(4, 8, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x, recipe)
    outputs, gradients, plan = run(model, x, recipe)
    assert merged(plan, "output") == [("q", "k", "v")]
    if recipe == "mixed":
        assert_payloads_are_concatenated(graphs[-1])
    # tensor scales of merged operands are shared: errors of casts differ, by 2^-4 at worst (E4M3), 2^-3 (E5M2)
    bound = 2**-3 if recipe == "tensorwise" else 2**-4
    for got, wanted in zip(outputs + gradients, separate + separate_gradients, strict=True):
        assert got.shape == wanted.shape
        assert relative(got, wanted) < bound


def test_a_merged_tensor_scale_is_that_of_the_largest_weight():
    model, x = Projections(sizes=(32, 32), bias=(True, True)), torch.randn(16, 32)
    with torch.no_grad():
        model.k.weight *= 8
    (q, k), _, plan = run(model, x, "mixed")
    assert [str(m.right) for m in plan.matmuls if m.role == "output"] == ["e4m3 tensor"]

    def fake(t, amax):
        s = amax.float() / 448.0
        return (t / s).to(torch.float8_e4m3fn).double() * s.double()

    rows = fake(x, x.abs().amax(1, keepdim=True))
    for got, linear in ((q, model.q), (k, model.k)):
        weight = fake(linear.weight.detach(), model.k.weight.detach().abs().max())
        wanted = torch.tanh(rows @ weight.T + linear.bias.detach().double())
        # FP32 sums of 32 products below 8: 32·2^-24·8, under tanh
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("recipe", "smaller"), [("mixed", 1e-3), ("rowwise", 1e-7), ("tensorwise", 1e-5)])
def test_a_member_may_have_far_smaller_gradients(recipe, smaller):
    """As an auxiliary head has. Beyond that a shared tensor scale rounds them to zero."""
    model, x = Projections(sizes=(64, 64), bias=(True, True)), torch.randn(256, 32)
    compiled = torch.compile(model, backend="fp8", options={**EAGER, "recipe": recipe, "save": {"*": "bf16"}})
    found = []
    for call in (model, compiled):
        model.zero_grad()
        q, k = call(x)
        (q.square().mean() + smaller * k.square().mean()).backward()
        found.append(model.k.weight.grad)
    assert merged(fp8compile.last_compile().plans[0], "grad_weight") == [("q", "k")]
    assert relative(found[1], found[0]) < 2**-4


@pytest.mark.parametrize("recipe", ["mixed", "rowwise"])
def test_gate_and_up_become_one_matmul(monkeypatch, recipe):
    model, x = SwiGLU(), torch.randn(4, 8, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x, recipe)
    outputs, gradients, plan = run(model, x, recipe)
    for role in ("output", "grad_input", "grad_weight"):
        assert merged(plan, role) == [("gate", "up")]
    for got, wanted in zip(outputs + gradients, separate + separate_gradients, strict=True):
        assert relative(got, wanted) < 2**-4  # as above
    if recipe == "rowwise":
        assert torch.equal(outputs[0], separate[0])


def test_other_terms_of_a_sum_of_gradients_stay(monkeypatch):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = SwiGLU()

        def forward(self, x):
            return x + self.inner(x) + x.sin() * 100

    model, x = Residual(), torch.randn(4, 8, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x)
    outputs, gradients, plan = run(model, x)
    assert merged(plan, "grad_input") == [("inner.gate", "inner.up")]
    assert torch.equal(outputs[0], separate[0])
    # the gradient of 100·sin x is far larger than that of the matmuls; nothing of it may get lost
    assert relative(gradients[0], separate_gradients[0]) < 1e-3


def test_a_group_that_reads_what_another_group_made(monkeypatch):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Linears("ab"), Linears("cd")

        def forward(self, x):
            a, b = self.first(x)
            return (b, *self.second(a))

    class Linears(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.names = names
            for name in names:
                self.add_module(name, nn.Linear(32, 32))

        def forward(self, x):
            return tuple(getattr(self, n)(x) for n in self.names)

    model, x = Two(), torch.randn(16, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x)
    outputs, gradients, plan = run(model, x)
    assert merged(plan, "output") == [("first.a", "first.b"), ("second.c", "second.d")]
    for got, wanted in zip(outputs, separate, strict=True):
        assert torch.equal(got, wanted)
    for got, wanted in zip(gradients, separate_gradients, strict=True):
        assert relative(got, wanted) < 2**-3  # two casts that differ, one after the other


# --- the plan and the graph


def test_the_plan_has_one_row_in_the_place_of_its_members(monkeypatch):
    """Its estimated times are those of all of them, by one that knows each: the report adds rows up."""
    asked: dict[str, list[tuple[float, float]]] = {}
    plain = matmul_costs.Costs.milliseconds

    def milliseconds(self, site, role):
        asked.setdefault(site.role, []).append(plain(self, site, role))
        return asked[site.role][-1]

    monkeypatch.setattr(devices, "describe", lambda device: replace(devices.TABLE["H200"], emulated=True))
    monkeypatch.setattr(matmul_costs.Costs, "milliseconds", milliseconds)
    _, _, plan = run(Projections(sizes=(32, 16, 48)), torch.randn(16, 32), select="all")
    rows = {m.role: (m.path, m.kind, m.m, m.n, m.k, m.merged) for m in plan.matmuls}
    assert len(plan.matmuls) == 3
    assert rows == {
        "output": ("(q+k+v)", "mm", 16, 96, 32, ("q", "k", "v")),
        "grad_input": ("(q+k+v)", "mm", 16, 32, 96, ("q", "k", "v")),
        "grad_weight": ("(q+k+v)", "mm", 96, 32, 16, ("q", "k", "v")),
    }
    for row in plan.matmuls:
        bf16, fp8 = zip(*asked[row.role], strict=True)
        assert len(bf16) == 3
        assert (row.milliseconds_bf16, row.milliseconds_fp8) == pytest.approx((sum(bf16), sum(fp8)))


@pytest.mark.parametrize(
    ("paths", "common"),
    [
        (["layers.0.q", "layers.0.k"], "layers.0.(q+k)"),
        (["q", "k", "v"], "(q+k+v)"),
        (["layers.0.attn.q", "layers.0.mlp.up"], "layers.0.(attn.q+mlp.up)"),
        (["a.q", "a.q"], "a.(q)"),
        (["a", "a.b"], "(a+a.b)"),
    ],
)
def test_the_common_path_of_merged_matmuls(paths, common):
    assert common_path(paths) == common


# --- what must stay separate


def assert_separate(plan, *roles: str) -> None:
    for role in roles or ("output", "grad_input", "grad_weight"):
        assert merged(plan, role) == []


def module(forward, **children) -> nn.Module:
    made = type("Model", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def two(**options) -> dict[str, nn.Module]:
    return {"a": nn.Linear(32, 32, **options), "b": nn.Linear(32, 32, **options)}


def test_matmuls_of_different_activations_stay_separate():
    _, _, plan = run(module(lambda self, x: self.a(x) + self.b(x + 1), **two()), torch.randn(16, 32))
    assert_separate(plan)


def test_matmuls_of_different_checkpointed_regions_stay_separate(monkeypatch):
    model = module(
        lambda self, x: checkpoint(lambda y: self.a(y).tanh(), x, use_reentrant=False) + self.b(x).tanh(), **two()
    )
    x = torch.randn(16, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x)
    outputs, gradients, plan = run(model, x)
    assert_separate(plan, "output")
    assert torch.equal(outputs[0], separate[0])
    for got, wanted in zip(gradients, separate_gradients, strict=True):
        assert relative(got, wanted) < 2**-4


def test_matmuls_of_one_checkpointed_region_are_merged():
    model = module(
        lambda self, x: checkpoint(lambda y: self.a(y).tanh() * self.b(y).tanh(), x, use_reentrant=False), **two()
    )
    _, _, plan = run(model, torch.randn(16, 32))
    assert merged(plan, "output") == [("a", "b")]


def test_one_weight_used_twice_stays_separate():
    model = module(lambda self, x: self.a(x).sin() + self.a(x).cos(), a=nn.Linear(32, 32))
    _, _, plan = run(model, torch.randn(16, 32))
    assert_separate(plan)
    assert {m.decision for m in plan.matmuls} == {"fp8"}


@pytest.mark.parametrize("n", [8, 24])
def test_parts_that_need_padding_stay_separate(monkeypatch, n):
    model, x = Projections(sizes=(32, n), bias=(True, True)), torch.randn(16, 32)
    separate, _ = run_unmerged(monkeypatch, model, x)
    outputs, _, plan = run(model, x)
    assert_separate(plan)
    assert torch.equal(outputs[1], separate[1])


@pytest.mark.parametrize(("n", "becomes_one"), [(64, False), (128, True)])
def test_parts_that_end_inside_a_block_stay_separate(n, becomes_one):
    model = Projections(k=128, sizes=(n, n), bias=(False, False))
    _, _, plan = run(model, torch.randn(128, 128), "blockwise")
    assert merged(plan, "output") == ([("q", "k")] if becomes_one else [])


def test_a_skipped_matmul_is_not_merged():
    _, _, plan = run(Projections(), torch.randn(16, 32), skip=["k"])
    assert merged(plan, "output") == [("q", "v")]
    assert {m.decision for m in plan.matmuls if m.path == "k"} == {"bf16"}


def test_a_matrix_of_biases_stays_separate():
    model = module(
        lambda self, x: torch.addmm(self.c, x, self.a) + torch.addmm(self.d, x, self.b),
        a=nn.Parameter(torch.randn(32, 32)),
        b=nn.Parameter(torch.randn(32, 32)),
        c=nn.Parameter(torch.randn(16, 32)),
        d=nn.Parameter(torch.randn(16, 32)),
    )
    _, _, plan = run(model, torch.randn(16, 32))
    assert_separate(plan, "output")


def test_different_dtypes_stay_separate():
    model = module(
        lambda self, x: self.a(x).float() + self.b(x.float()), a=nn.Linear(32, 32).bfloat16(), b=nn.Linear(32, 32)
    )
    _, _, plan = run(model, torch.randn(16, 32, dtype=torch.bfloat16))
    assert_separate(plan)


def test_a_missing_gradient_keeps_the_other_gradients_separate():
    model = module(lambda self, x: self.a(x).tanh() * self.b(x.detach()).tanh(), **two())
    _, _, plan = run(model, torch.randn(16, 32))
    assert merged(plan, "output") == merged(plan, "grad_weight") == [("a", "b")]
    assert_separate(plan, "grad_input")
    assert [m.path for m in plan.matmuls if m.role == "grad_input"] == ["a"]


class Doubled(torch.autograd.Function):
    """x itself, whose gradient is doubled."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_gradients_that_are_not_terms_of_one_sum_stay_separate(monkeypatch):
    model = module(lambda self, x: self.a(x).tanh() * self.b(Doubled.apply(x)).tanh(), **two())
    x = torch.randn(16, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x)
    outputs, gradients, plan = run(model, x)
    assert merged(plan, "output") == [("a", "b")]
    assert_separate(plan, "grad_input")
    assert torch.equal(outputs[0], separate[0])
    assert torch.equal(gradients[0], separate_gradients[0])


def test_an_output_that_is_also_needed_by_itself_is_given_out_contiguous_values(monkeypatch):
    """A user's view of a merged part must see the part's own layout."""
    model = module(lambda self, x: (self.a(x).view(-1).sin(), self.b(x)), **two())
    x = torch.randn(16, 32)
    separate, separate_gradients = run_unmerged(monkeypatch, model, x)
    outputs, gradients, _ = run(model, x)
    for got, wanted in zip(outputs, separate, strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()
    assert relative(gradients[0], separate_gradients[0]) < 2**-4
