"""grad_weight of experts in graphs and plans: its casts, who shares them, their costs, what is saved, broken rules."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts import GROUPS, Experts, ends
from joint import Joint, joint
from test_select import EAGER
from torch import Tensor, fx, nn

import fp8compile
from fp8compile import devices, ops
from fp8compile.errors import VerificationError
from fp8compile.kernels.reference.grouped_reference import padded_tokens
from fp8compile.passes.core.marker_views import Amax, GroupedCast, ScaledMM
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.core.verify import verify
from fp8compile.passes.core.verify_grouped import contracts_groups
from fp8compile.passes.core.verify_halves import verify_halves
from fp8compile.passes.matmul import grouped_matmuls, matmul_costs
from fp8compile.passes.save.min_cut import Halves
from fp8compile.passes.save.recompute_cost import find_far
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.recipe import Recipe
from fp8compile.torch_hooks import partitioner

SIZES = GROUPS["uneven"]


class Gated(nn.Module):
    """down(silu(gate(x)) · up(x)), as most mixtures have it: two weights read one input."""

    def __init__(self, experts: int = 4, width: int = 64, inner: int = 128) -> None:
        super().__init__()
        shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        for name, (n, k) in shapes.items():
            setattr(self, name, nn.Parameter((torch.randn(experts, n, k) / k**0.5).bfloat16()))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = (F.grouped_mm(x, weight.mT, offs=offs) for weight in (self.gate, self.up))
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)


class Fused(Gated):
    """gate and up are halves of one weight, as Transformers has them: their gradient is a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.cat([self.gate, self.up], 1).detach())
        del self.gate, self.up

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        gate, up = F.grouped_mm(x, self.gate_up.mT, offs=offs).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)


def traced(model: nn.Module, sizes: list[int] = SIZES, columns: int = 64, **options: Any) -> Joint:
    """The joint graph of `model` with its passes run."""
    x = torch.randn(96, columns).bfloat16()
    found = joint(model, x, ends(sizes), select="all", **options)
    found.run()
    return found


def casts_of(found: Joint) -> list[GroupedCast]:
    return [cast for node in found.compilation.graph.nodes if (cast := GroupedCast.of(node)) is not None]


def contractions_of(found: Joint) -> list[ScaledMM]:
    every = [mm for node in found.compilation.graph.nodes if (mm := ScaledMM.of(node)) is not None]
    return [mm for mm in every if mm.b.meta["val"].dim() == 2]


# --- casts


def test_gate_and_up_share_the_cast_of_their_input() -> None:
    found = traced(Gated())
    casts, mms = casts_of(found), contractions_of(found)
    assert len(mms) == 3
    assert len(casts) == 5  # x, the gradients of gate and up; silu(gate) · up, and the output's gradient
    assert len({mm.b for mm in mms}) == 2
    assert all(cast.format == "e4m3" for cast in casts)


@pytest.mark.parametrize(("model", "casts"), [(Gated, 5), (Fused, 4)])
def test_amaxes_of_tokens_are_those_that_the_casts_by_rows_have(model: type[nn.Module], casts: int) -> None:
    """No tensor is read for them; a recipe with scales of columns has casts that find their own."""
    found = joint(model(), torch.randn(96, 64).bfloat16().requires_grad_(), ends(SIZES), select="all")
    found.run()
    assert len(casts_of(found)) == casts
    for cast in casts_of(found):
        assert cast.amax is not None
        assert any(user.target is ops.scale for user in cast.amax.users)
        pieces = [Amax.of(node) for node in (cast.amax, *cast.amax.all_input_nodes)]
        assert {amax.x for amax in pieces if amax} in ({cast.x}, set(cast.x.all_input_nodes))
    assert [cast.amax for cast in casts_of(traced(model(), recipe="rowwise"))] == [None] * casts


@pytest.mark.parametrize("flipped", [False, True])
def test_each_weight_is_read_for_amaxes_once(flipped: bool) -> None:
    """By output; grad_input's scale of an expert is made of these."""
    found = joint(
        Experts(4, flipped=flipped).bfloat16(),
        torch.randn(96, 64).bfloat16().requires_grad_(),
        ends(SIZES),
        select="all",
    )
    found.run()
    amaxes = [amax for node in found.compilation.graph.nodes if (amax := Amax.of(node)) and amax.x.op == "placeholder"]
    read = Counter(amax.x.name for amax in amaxes)
    assert [read[f"parameters_{i}"] for i in (1, 2)] == [1, 1]
    for amax in amaxes:
        if "parameters" in amax.x.name:
            assert {user.target for user in amax.node.users} == {ops.scale, torch.ops.aten.amax.default}


@pytest.mark.parametrize("flipped", [False, True])
def test_where_groups_end_comes_from_the_gradients_cast(flipped: bool) -> None:
    """Backward makes it anyway; forward's would have to be kept."""
    found = traced(Experts(4, flipped=flipped).bfloat16())
    backward = {n for n in found.compilation.graph.nodes if "tangents" in str(n.target)}
    for node in found.compilation.graph.nodes:
        if any(i in backward for i in node.all_input_nodes):
            backward.add(node)
    mms = contractions_of(found)
    assert len(mms) == 2
    assert all(mm.offs in backward for mm in mms)


@pytest.mark.parametrize("flipped", [False, True])
def test_operands_that_lie_the_other_way_are_turned(flipped: bool) -> None:
    """Tokens side by side in memory, as a model may have them: the graph gives the same as of those that do not."""

    class Turned(Experts):
        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return super().forward(x.mT, offs)

    torch.manual_seed(1)
    model = Turned(4, flipped=flipped).bfloat16()
    x = torch.randn(96, 64).bfloat16()
    turned = joint(model, x.mT.contiguous(), ends(SIZES), select="all")
    turned.run()
    plain = Experts(4, flipped=flipped).bfloat16()
    plain.load_state_dict(model.state_dict())
    straight = joint(plain, x, ends(SIZES), select="all")
    straight.run()
    for a, b in zip(turned.results()[:3], straight.results()[:3], strict=True):
        assert torch.equal(a, b)


def test_options_of_the_recipe_reach_the_cast() -> None:
    rows = {"left": {"power_of_two": True}, "fast_accumulation": True}
    found = traced(Experts(4).bfloat16(), recipe={"base": "mixed", "grad_weight": rows})
    assert [cast.node.args[3] for cast in casts_of(found)].count(True) == 2  # gradients, which stand on the left
    assert all(mm.fast_accumulation for mm in contractions_of(found))


# --- values


@pytest.mark.parametrize("name", GROUPS)
def test_gradients_are_those_of_a_loop_over_experts(name: str) -> None:
    """In FP64, of the payloads that the graph has; no group reaches into another, and rows of nobody into none."""
    found = traced(Gated(len(GROUPS[name])), GROUPS[name])
    graph = found.compilation.graph
    mms = contractions_of(found)
    read = [node for mm in mms for node in (mm.node, mm.a, mm.scale_a, mm.b, mm.scale_b, mm.offs)]
    graph.output_node().args = (read,)
    *given, tangent = found.given
    with torch.no_grad():
        run = fx.Interpreter(fx.GraphModule(found.gm, graph)).run
        values = list(run(*given, tangent, enable_io_processing=False))
    for out, a, scale_a, b, scale_b, places in zip(*[iter(values)] * 6, strict=True):
        start = 0
        for e, end in enumerate(places.tolist()):
            left, right = a[:, start:end].double() * scale_a[e].double(), b[:, start:end].double() * scale_b[e].double()
            wanted, sums = left @ right.t(), left.abs() @ right.abs().t()
            assert (
                (out[e].double() - wanted).abs() <= 2.0**-8 * wanted.abs() + (end - start + 8) * 2.0**-24 * sums
            ).all()
            start = end


# --- costs


@pytest.mark.parametrize("recipe", ["mixed", "rowwise"])
def test_the_estimate_counts_padding_reads_and_a_product_for_each_expert(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amaxes of tokens are known from output and grad_input, those of columns are not."""
    reads = matmul_costs.READS_OF_GROUPS / (2 if recipe == "mixed" else 1)
    device = devices.TABLE["H200"]
    monkeypatch.setattr(devices, "describe", lambda _: device)
    for trial in ("why_it_fails", "why_contractions_fail"):
        monkeypatch.setattr(grouped_matmuls, trial, lambda device: "")
    plan = trained(Experts(4).bfloat16(), recipe=recipe)
    rows = [m for m in plan.matmuls if m.role == "grad_weight"]
    assert len(rows) == 2
    for row in rows:
        m, n, k = int(row.m), int(row.n), padded_tokens(int(row.k), 4)
        work = 2e-9 * m * n
        casts = (m + n) * k * (reads * 2 + 1) / (device.casts * 1e9)
        launches = 2 * reads * device.launch * 1e-3
        few = int(row.k) // 4 / grouped_matmuls.LONG  # tokens of an expert
        rate = device.fp8_row * device.filled(4) * few  # a tile for each expert
        alone = work * int(row.k) / device.bf16
        assert row.milliseconds_bf16 == pytest.approx(2 * alone)  # a start is no longer than the matmul
        assert row.milliseconds_fp8 == pytest.approx(work * k / rate + alone + casts + launches)


def test_reads_are_shared_with_those_that_contract_the_same_groups_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gate and up each casts x for half the bytes; output and grad_input read as much as without them."""
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["H200"])
    for trial in ("why_it_fails", "why_contractions_fail"):
        monkeypatch.setattr(grouped_matmuls, trial, lambda device: "")
    gated, alone = (trained(model) for model in (Gated(), Experts(4).bfloat16()))
    found = [m for m in gated.matmuls if m.role == "grad_weight" and (m.m, m.n) == (128, 64)]
    single = next(m for m in alone.matmuls if m.role == "grad_weight" and (m.m, m.n) == (128, 64))
    assert len(found) == 2
    assert found[0].milliseconds_fp8 == found[1].milliseconds_fp8 < (single.milliseconds_fp8 or 0)
    recipe = {"base": "mixed", "grad_weight": None}
    for before, after in zip(*(trained(Gated(), recipe=r).matmuls for r in (recipe, "mixed")), strict=True):
        assert before.role == "grad_weight" or before.milliseconds_fp8 == after.milliseconds_fp8


def grouped(role: str, sizes: tuple[int, int, int], groups: int) -> MatmulNode:
    """The record of a grouped matmul in a graph of its own."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("left", "right", "offs")]
    shapes = [(1, 1), (1, 1) if role == "grad_weight" else (1, 1, 1), (1,)]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    node = graph.call_function(torch.ops.aten._grouped_mm.default, tuple(given))
    return MatmulNode(node, "grouped", *sizes, groups=groups, role=role)


@pytest.mark.parametrize("groups", [1, 1023, 1024])
def test_more_groups_than_the_kernel_takes_stay(groups: int) -> None:
    matmul = grouped("grad_weight", (4096, 4096, 2**20), groups)
    casts = grouped_matmuls.casts_of(matmul, Recipe.named("mixed"))
    why = grouped_matmuls.why_not_grouped(matmul, casts, devices.describe(torch.device("cpu")))
    assert (why and why.text) == ("1024 groups: grouped FP8 units take 1023" if groups == 1024 else None)


@pytest.mark.parametrize(
    ("role", "sizes", "groups", "share"),
    [
        ("grad_weight", (1536, 2048, 131072), 128, 1 / 3),  # a group has 1024 tokens: one large size
        ("grad_weight", (2048, 768, 131072), 128, 1 / 3),
        ("grad_weight", (4096, 7168, 131072), 256, 512 / grouped_matmuls.LONG),  # two large sizes, and few tokens
        ("grad_weight", (1536, 2048, 131072), 64, 2048 / grouped_matmuls.LONG),
        ("grad_weight", (4096, 7168, 131072), 32, 1.0),
        ("grad_weight", (128, 1536, 131072), 128, 1024 / grouped_matmuls.LONG),  # small
        ("grad_input", (131072, 2048, 1536), 128, 1 / 3),
        ("grad_input", (32768, 4096, 28672), 8, 1.0),
        ("output", (131072, 1536, 2048), 128, 1.0),  # fast accumulation
    ],
)
def test_middling_groups_are_slow_without_fast_accumulation(role, sizes, groups, share) -> None:
    matmul = grouped(role, sizes, groups)
    exactly = Recipe.named("mixed").override(grad_input={"fast_accumulation": False})
    casts = grouped_matmuls.casts_of(matmul, exactly)
    assert casts is not None
    assert grouped_matmuls.share_of_rate(matmul, casts) == share
    fast = dataclasses.replace(casts, fast_accumulation=True)
    assert grouped_matmuls.share_of_rate(matmul, fast) == 1.0
    matmul.kind = "mm"
    assert grouped_matmuls.share_of_rate(matmul, casts) == 1.0


@pytest.mark.parametrize("recipe", ["mixed", "rowwise", "blockwise"])
def test_what_sums_over_weights_accumulates_fast_unless_a_recipe_says_no(recipe: str) -> None:
    fast = {}
    for role in ("output", "grad_input", "grad_weight"):
        matmul = grouped(role, (4096, 2048, 1024), 8)
        for how in (None, False, True):
            given = Recipe.named(recipe).override(**{role: {"fast_accumulation": how}})
            casts = grouped_matmuls.casts_of(matmul, given)
            assert casts is not None
            fast[role, how] = casts.fast_accumulation
            plain = grouped(role, (4096, 2048, 1024), 8)
            plain.kind = "mm"
            assert grouped_matmuls.casts_of(plain, given) == given.role(role)
    assert [fast[role, None] for role in ("output", "grad_input", "grad_weight")] == [True, True, False]
    assert all(fast[role, how] is how for role, how in fast if how is not None)


@pytest.mark.parametrize("recipe", ["mixed", "rowwise"])
def test_an_input_that_grad_weight_alone_casts_is_read_for_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For amaxes of tokens, too; those of columns are its own anyway."""
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["H200"])
    for trial in ("why_it_fails", "why_contractions_fail"):
        monkeypatch.setattr(grouped_matmuls, trial, lambda device: "")
    alone = {"base": recipe, "output": None, "grad_input": None}
    some, every = (trained(Experts(4).bfloat16(), recipe=each) for each in (alone, recipe))
    for before, after in zip(some.matmuls, every.matmuls, strict=True):
        if before.role == "grad_weight":
            assert before.milliseconds_fp8 is not None
            assert after.milliseconds_fp8 is not None
            longer = before.milliseconds_fp8 - after.milliseconds_fp8
            assert longer > 0 if recipe == "mixed" else longer == 0


def trained(model: nn.Module, rows: int = 96, **options: Any) -> Plan:
    """The plan of a training step of `model`."""
    x = torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)
    torch.compiler.reset()
    scale = rows // 96
    out = torch.compile(model, backend="fp8", options={**EAGER, **options})(x, ends([scale * n for n in SIZES]))
    out.float().square().mean().backward()
    return fp8compile.last_compile().plans[-1]


# --- what is saved


def test_backward_is_given_the_input_cast_in_place_of_the_input() -> None:
    plan = trained(Gated(), 1536)
    (row,) = [row for row in plan.saved if row.form == "float8_e4m3fn"]
    assert row.shape == (64, padded_tokens(1536, 4))
    assert (row.code, row.reason) == (Reason.PAYLOAD, "a payload that a matmul of backward reads")
    assert (row.before, row.bytes) == (1536 * 64 * 2, 64 * padded_tokens(1536, 4))
    assert not any(row.shape == (1536, 64) for row in plan.saved)
    beside = [row for row in plan.saved if row.form == "float32"]  # its scales; amaxes of experts, and of the product
    assert {(row.shape, row.bytes, row.before, row.code) for row in beside} == {
        ((4, 64, 1), 1024, 0, Reason.AMAX), ((4, 1, 1), 16, 0, Reason.AMAX), ((1536, 1), 6144, 0, Reason.AMAX)
    }  # fmt: skip
    table = plan.table("saved")
    assert "float8_e4m3fn[64, 1600]" in table
    assert "a payload that a matmul of backward reads" in table


def test_the_product_of_gate_and_up_is_cast_in_backward() -> None:
    """Which has both anyway; only its FP8 form would be kept on top."""
    plan = trained(Gated(), 1536)
    assert not any(row.shape == (128, padded_tokens(1536, 4)) for row in plan.saved)
    assert sum(row.shape == (1536, 128) for row in plan.saved) == 2


def test_an_input_that_something_else_keeps_is_cast_in_backward() -> None:
    class Twice(Gated):
        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return super().forward(x, offs) * x.sin().cos()

    plan = trained(Twice(), 1536)
    assert not any(row.form == "float8_e4m3fn" for row in plan.saved)


def test_a_payload_is_not_kept_in_place_of_the_sum_that_it_is_made_of() -> None:
    """Three reads of 2 bytes are six times a payload, and three times the sum."""
    graph, fake = fx.Graph(), torch.empty(1536, 64, dtype=torch.bfloat16, device="meta")
    a, b, c, offs = (graph.placeholder(name) for name in "abco")
    partial = graph.call_function(torch.ops.aten.add.Tensor, (a, b))
    total = graph.call_function(torch.ops.aten.add.Tensor, (partial, c))
    for node in (a, b, c, partial, total):
        node.meta["val"] = fake
    offs.meta["val"] = torch.empty(4, dtype=torch.int32, device="meta")
    cast = graph.call_function(ops.grouped_cast, (total, offs, "e4m3"))
    payload = graph.call_function(operator.getitem, (cast, 0))
    loss = graph.call_function(torch.ops.aten.clone.default, (payload,))
    cast.meta["val"] = ops.FAKES[ops.grouped_cast](fake, offs.meta["val"], "e4m3")
    payload.meta["val"] = loss.meta["val"] = cast.meta["val"][0]
    graph.output(loss)
    halves = Halves({a, b, c, offs}, {a, b, c, offs}, {loss}, set(), lambda node: True)
    assert find_far(graph, [a, b, c, offs], halves) == set()


# --- verification


def test_a_saved_payload_that_meets_another_scale_is_found() -> None:
    seen: list[Any] = []

    def halves(forward: fx.Graph, backward: fx.Graph, outputs: Any) -> None:
        verify_halves(forward, backward, outputs)
        mms = [mm for node in backward.nodes if (mm := ScaledMM.of(node)) is not None and contracts_groups(mm)]
        saved = next(mm for mm in mms if mm.b.op == "placeholder")
        own, inputs = saved.scale_b, backward.find_nodes(op="placeholder")
        others = [n for n in inputs if n is not own and same_sizes(n.meta["val"].shape, own.meta["val"].shape)]
        saved.node.update_arg(4, others[0])
        with pytest.raises(VerificationError, match=f"%{saved.b.name} was not made with %{others[0].name}") as error:
            verify_halves(forward, backward, outputs)
        seen.append(error)
        saved.node.update_arg(4, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "verify_halves", halves)
        trained(Gated(), 1536, recipe="rowwise")
    assert seen


def broken(change: Any, rule: str) -> None:
    """`change(marker, marker, graph)` of the graph of two experts layers breaks this rule."""
    found = traced(Experts(4).bfloat16())
    first, second = contractions_of(found)
    verify(found.compilation.graph, "test")
    change(first, second, found.compilation.graph)
    with pytest.raises(VerificationError, match=rule):
        verify(found.compilation.graph, "test")


def test_another_casts_scale_is_found() -> None:
    broken(lambda mm, other, _: other.node.update_arg(1, mm.scale_b), r"%getitem_\d+ was not made with %getitem_\d+")


def test_scales_of_rows_without_groups_are_found() -> None:
    def change(mm: ScaledMM, _: ScaledMM, graph: fx.Graph) -> None:
        with graph.inserting_before(mm.node):
            first = graph.call_function(torch.ops.aten.select.int, (mm.scale_a, 0, 0))
        first.meta["val"] = torch.ops.aten.select.int(mm.scale_a.meta["val"], 0, 0)
        mm.node.update_arg(1, first)

    broken(change, r"has shape \[\d+, 1\], rows of groups of %getitem_?\d* need \[4, \d+, 1\]")


def test_other_granularities_are_found() -> None:
    broken(lambda mm, other, graph: mm.node.update_arg(2, "tensor"), "its groups have scales of row and tensor")


def test_groups_that_end_elsewhere_are_found() -> None:
    def change(mm: ScaledMM, _: ScaledMM, graph: fx.Graph) -> None:
        cast = mm.b.all_input_nodes[0]
        with graph.inserting_before(cast):
            other = graph.call_function(torch.ops.aten.clone.default, (cast.args[1],))
        other.meta["val"] = cast.args[1].meta["val"].clone()  # type: ignore[union-attr]
        cast.update_arg(1, other)

    broken(change, "contracts groups that end at %")


def test_a_payload_that_is_read_without_its_scales_is_found() -> None:
    def change(mm: ScaledMM, _: ScaledMM, graph: fx.Graph) -> None:
        with graph.inserting_after(mm.a):
            graph.call_function(torch.ops.aten.abs.default, (mm.a,)).meta["val"] = mm.a.meta["val"]

    broken(change, "FP8 data is read without its scale by %abs")
