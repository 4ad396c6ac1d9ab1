"""Grouped matmuls in a graph and its plan: roles, casts, every reason, the cost model, edits, verification."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from experts import GROUPS, Experts, ends
from test_select import DEVICE, EAGER, module, reasons
from torch import Tensor, fx, nn
from torch._inductor.inductor_prims import force_stride_order
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp8compile
from fp8compile import devices, ops
from fp8compile.errors import VerificationError
from fp8compile.options import Options
from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core import library_seconds
from fp8compile.passes.core.compilation import Compilation, Input
from fp8compile.passes.core.verify import verify
from fp8compile.passes.lower.keep_strides import keep_strides
from fp8compile.passes.matmul import find_matmuls, grouped_matmuls, quantize_matmuls, select_matmuls
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import Matmul
from fp8compile.recipe import ROLES

ALL = "every matmul that can run"
SIZES = GROUPS["empty"]


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are rows of a table here, and tensors on a CPU: there is no kernel to try."""
    monkeypatch.setattr(grouped_matmuls, "why_it_fails", lambda device: "")
    monkeypatch.setattr(grouped_matmuls, "why_contractions_fail", lambda device: "")


def run(model: nn.Module, sizes: list[int] = SIZES, **options: Any) -> Plan:
    """The plan of a training step of `model`, whose input of 96 tokens needs its gradient."""
    x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
    out = torch.compile(model, backend="fp8", options={**EAGER, **options})(x, ends(sizes))
    out.float().square().mean().backward()
    return fp8compile.last_compile().plans[-1]


# --- roles and casts


@pytest.mark.parametrize("flipped", [False, True])
def test_each_of_the_six_matmuls_of_two_experts_layers_has_its_role(flipped):
    plan = run(Experts(4, flipped=flipped))
    sizes = {(m.role, m.m, m.n, m.k) for m in plan.matmuls}
    weight = [(64, 128), (128, 64)] if flipped else [(128, 64), (64, 128)]  # that of up, and that of down
    assert sizes == {
        ("output", 96, 128, 64), ("output", 96, 64, 128), ("grad_input", 96, 128, 64), ("grad_input", 96, 64, 128),
        *(("grad_weight", *rows_and_columns, 96) for rows_and_columns in weight),
    }  # fmt: skip
    assert {(m.kind, m.groups, m.batch, m.dtype) for m in plan.matmuls} == {("grouped", 4, 1, "bfloat16")}


@pytest.mark.parametrize(
    ("recipe", "flipped"),
    [("mixed", False), ("tensorwise", True), ("rowwise", False), ("rowwise_with_gw_hp", True), ("blockwise", False)],
)
def test_every_recipe_means_rows(recipe, flipped):
    """Those with one scale a tensor have one an expert, where that needs no further read."""
    plan = run(Experts(4, flipped=flipped), recipe=recipe)
    one = "tensor" if recipe in ("mixed", "tensorwise") else "row"
    casts = {"output": ("row", "row"), "grad_input": ("row", one), "grad_weight": (one, one)}
    same = {"mixed": ["grad_weight"], "rowwise": ROLES, "rowwise_with_gw_hp": ROLES}.get(recipe, [])
    wanted = {
        (role, *(f"e4m3 {cast}" for cast in pair)): ALL if role in same else f"{ALL}; grouped FP8 takes other casts"
        for role, pair in casts.items()
        if (recipe, role) != ("rowwise_with_gw_hp", "grad_weight")
    }
    assert {(m.role, str(m.left), str(m.right)): m.reason for m in plan.converted} == wanted
    if recipe == "rowwise_with_gw_hp":
        assert reasons(plan, role="grad_weight") == {"recipe 'rowwise_with_gw_hp' keeps grad_weight in BF16"}


@pytest.mark.parametrize("left", ["row", "tensor"])
@pytest.mark.parametrize("right", ["row", "tensor"])
@pytest.mark.parametrize("role", ROLES)
def test_each_operand_has_the_scales_that_a_recipe_gives_it_if_it_can(role, left, right):
    casts = {"left": {"granularity": left}, "right": {"granularity": right}}
    plan = run(Experts(4), recipe={"base": "rowwise", role: casts})
    found = {m.role: (m.left.granularity, m.right.granularity) for m in plan.converted if m.left and m.right}
    able = {"output": ("row", "row"), "grad_input": ("row", right), "grad_weight": (left, right)}
    assert found == {each: able[role] if each == role else ("row", "row") for each in ROLES}


def test_what_a_recipe_says_beside_granularities_holds():
    rows = {"left": {"power_of_two": True, "delayed": {"history": 4}}, "fast_accumulation": False}
    plan = run(
        Experts(4), recipe={"base": "mixed", "output": rows | {"left": {"granularity": "tensor", **rows["left"]}}}
    )
    (up, down) = [m for m in plan.converted if m.role == "output"]
    assert str(up.left) == str(down.left) == "e4m3 row^2"
    assert not up.fast_accumulation


def test_the_graph_holds_one_marker_with_its_groups():
    plan = run(Experts(4))
    assert all(m.node.startswith("scaled_mm") for m in plan.converted)


# --- refusals, each with its reason


@pytest.mark.parametrize("name", ["B200", "L40S", "RTX 4090"])
def test_a_device_without_grouped_fp8_says_so(monkeypatch, name):
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE[name])
    model = module(
        lambda self, x, offs: self.fc(self.experts(x, offs)), experts=Experts(4), fc=nn.Linear(64, 64).bfloat16()
    )
    plan = run(model)
    assert reasons(plan, role="output") == {f"{name} has no grouped FP8 matmul", ALL}
    assert {m.kind for m in plan.converted} == {"mm", "addmm"}


@pytest.mark.parametrize("name", ["H100", "H200", "H20"])
def test_hopper_has_it(monkeypatch, name):
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE[name])
    assert {m.role for m in run(Experts(4)).converted} == {"output", "grad_input", "grad_weight"}


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
def test_a_kernel_that_was_tried_and_failed_is_not_used(monkeypatch):
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["H200"])
    monkeypatch.setattr(grouped_matmuls, "why_it_fails", lambda device: f"it fails on {device}")
    monkeypatch.setattr(grouped_matmuls, "why_contractions_fail", lambda device: f"it stops {device}")
    plan = run(Experts(4))
    assert not plan.converted
    assert {(m.role == "grad_weight", m.reason) for m in plan.matmuls} == {
        (False, "it fails on cpu"), (True, "it stops cpu")
    }  # fmt: skip


def test_a_kernel_that_fails_in_one_form_is_used_in_the_other(monkeypatch):
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["H200"])
    monkeypatch.setattr(grouped_matmuls, "why_contractions_fail", lambda device: "it is wrong")
    assert {m.role for m in run(Experts(4)).converted} == {"output", "grad_input"}


@pytest.mark.parametrize("experts", [1023, 1024])
def test_more_groups_than_the_kernel_takes(experts):
    (row,) = decide(2**20, 4096, 4096, experts, select="all")
    assert row.decision == ("fp8" if experts == 1023 else "bf16")
    assert experts == 1023 or row.reason == "1024 groups: grouped FP8 units take 1023"


def test_a_skipped_module_stays():
    model = module(lambda self, x, offs: self.b(self.a(x, offs), offs), a=Experts(4), b=Experts(4))
    plan = run(model, skip=["b"])
    assert reasons(plan, "b") == {"skip='b'"}
    converted = {m.role for m in plan.matmuls if m.path == "a" and m.decision == "fp8"}
    assert converted == {"output", "grad_input", "grad_weight"}


def test_operations_count_it_as_linear():
    plan = run(Experts(4), operations=["batched"])
    assert "operations=batched: this one is linear" in reasons(plan)


def test_groups_of_columns_are_no_rows():
    """3-D × 2-D, which no mixture has, and 3-D × 3-D, which is a batch."""

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        columns = torch._grouped_mm(self.w, self.fc(x).mT, offs=offs)
        return torch._grouped_mm(self.w, self.w.mT).square().sum() + columns.square().sum()

    model = module(forward, fc=nn.Linear(64, 64).bfloat16(), w=nn.Parameter(torch.randn(4, 32, 64).bfloat16()))
    plan = run(model)
    why = "grouped matmul whose rows are not what is grouped: left as it is"
    assert why in reasons(plan, role="other")
    assert {m.kind for m in plan.converted if m.role == "output"} == {"addmm"}


def test_transformers_loop_over_experts_says_what_it_is():
    import transformers.integrations.moe  # noqa: F401  (it registers the operator)

    model = module(
        lambda self, x, offs: torch.ops.transformers.grouped_mm_fallback(self.fc(x), self.w, offs),
        fc=nn.Linear(64, 64).bfloat16(),
        w=nn.Parameter(torch.randn(4, 64, 32).bfloat16()),
    )
    assert reasons(run(model), role="other") == {"loop over experts, whose weights are not BF16: left as it is"}


# --- the cost model


def decide(
    tokens: int, n: int, k: int, experts: int, recipe: str = "mixed", select: str = "profitable"
) -> list[Matmul]:
    """The plan's rows for BF16 tokens [tokens, k] and weights [experts, n, k], of which nothing is allocated."""
    with FakeTensorMode():
        shapes = ((tokens, k), torch.bfloat16), ((experts, n, k), torch.bfloat16), ((experts,), torch.int32)
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        graph = make_fx(lambda x, w, offs: torch._grouped_mm(x, w.mT, offs=offs))(*inputs).graph
    x, w, offs = (node.name for node in graph.find_nodes(op="placeholder"))
    device = dataclasses.replace(DEVICE, grouped=True)
    c = Compilation(graph, Options.parse({"recipe": recipe, "select": select}), device, Plan())
    c.inputs = {x: Input(False), w: Input(True, "w"), offs: Input(False)}
    canonicalize.run(c)
    select_matmuls.run(c)
    return c.matmuls.rows()


def test_the_estimate_counts_every_token_once_and_every_experts_weight():
    tokens, n, k, experts = 16384, 14336, 4096, 8
    (row,) = decide(tokens, n, k, experts)
    casts = (tokens + experts * n) * k * (2 + 1)  # rows: one read in BF16, one write in FP8
    work = 2 * tokens * n * k
    assert row.milliseconds_bf16 == pytest.approx(work / (DEVICE.bf16 * 1e12) * 1e3)
    launches = 2 * DEVICE.launch * 1e-3
    fp8 = work / (DEVICE.fp8_row * 1e12) * 1e3 + casts / (DEVICE.casts * 1e12) * 1e3 + launches
    assert row.milliseconds_fp8 == pytest.approx(fp8)


@pytest.mark.parametrize("recipe", ["mixed", "tensorwise", "blockwise"])
def test_the_rate_is_that_of_rows_whatever_the_recipe(recipe):
    assert decide(65536, 4096, 4096, 8, recipe=recipe) == [
        dataclasses.replace(
            decide(65536, 4096, 4096, 8, recipe="rowwise")[0], reason=reason(recipe), remarks=(Reason.ROWS_ALONE,)
        )
    ]


def reason(recipe: str) -> str:
    return "faster by the cost model" + ("" if recipe == "rowwise" else "; grouped FP8 takes other casts")


def test_few_tokens_for_many_weights_do_not_pay():
    assert [decide(tokens, 4096, 4096, 64)[0].decision for tokens in (2**12, 2**20)] == ["bf16", "fp8"]
    (row,) = decide(2**12, 4096, 4096, 64)
    assert row.reason == "too small: casts would cost more than the FP8 matmul saves"


def test_sizes_that_are_no_multiples_of_16_may_not_pay():
    (row,) = decide(512, 1000, 1048, 4)
    assert row.reason == "N = 1000 and K = 1048: not a multiple of 16, and padding does not pay"


def test_a_budget_counts_operations_of_a_token_once():
    shapes = ((96, 64), (4, 64, 32), (4,))
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in "xwo"]
    for node, shape in zip(nodes, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    call = graph.call_function(find_matmuls.GROUPED_MM, tuple(nodes))
    assert library_seconds._operations(call) == 2 * 96 * 64 * 32
    marker = graph.call_function(ops.scaled_mm, (nodes[0], nodes[2], "row", nodes[1], nodes[2], "row", None))
    nodes[1].meta["val"] = torch.empty(4, 32, 64, device="meta")
    assert library_seconds._operations(marker) == 2 * 96 * 64 * 32


# --- text, JSON, edits


def test_the_plan_says_how_many_groups():
    plan = run(Experts(4))
    text = str(plan) + plan.table("matmuls")
    assert "96×128×64 in 4  fp8   e4m3 row × e4m3 row        every matmul that can run; grouped FP8 takes" in text
    assert "128×64×96 in 4  fp8   e4m3 tensor × e4m3 tensor  every matmul that can run; K of each group" in text
    assert "FP8       6 of 6 matmuls, 100.0% of" in text


def test_json_keeps_groups_and_reads_plans_that_have_none():
    plan = run(Experts(4))
    assert Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    for row in data["matmuls"]:
        del row["groups"]
    assert {m.groups for m in Plan.from_json(json.dumps(data)).matmuls} == {1}


def test_an_edited_plan_is_carried_out():
    plan = run(Experts(4))
    rows = [dataclasses.replace(m, decision="bf16") if m.role == "grad_input" else m for m in plan.matmuls]
    torch.compiler.reset()
    again = run(Experts(4), plan=dataclasses.replace(plan, matmuls=rows))
    assert {m.role for m in again.converted} == {"output", "grad_weight"}
    assert reasons(again, role="grad_input") == {"the plan says so"}


@pytest.mark.parametrize(
    ("role", "casts", "why"),
    [
        (
            "grad_input",
            {"left": "tensor", "right": "tensor"},
            "grouped FP8 units take E4M3 by rows, weights also with one scale an expert, not e4m3 tensor",
        ),
        (
            "output",
            {"left": "tensor", "right": "tensor"},
            "grouped FP8 units take E4M3 by rows, not e4m3 tensor × e4m3 t",
        ),
        (
            "output",
            {"left": "row", "right": "tensor"},
            "grouped FP8 units take E4M3 by rows, not e4m3 row × e4m3 tensor",
        ),
        (
            "grad_weight",
            {"left": "group(128)", "right": "group(128)"},
            "grouped FP8 units take E4M3 by rows, or with one scale an expert, not e4m3 group",
        ),
        (
            "grad_weight",
            {"left": ("e5m2", "tensor"), "right": "tensor"},
            "grouped FP8 units take E4M3 by rows, or with one scale an expert, not e5m2 tensor × e4m3 tensor",
        ),
        (
            "grad_weight",
            {"left": "tensor", "right": ("e4m3", "tensor", False, 4)},
            r"grouped FP8 units take E4M3 by rows, or with one scale an expert, not .* × e4m3 tensor delayed\(4",
        ),
    ],
)
def test_a_plan_that_wants_what_no_unit_can_do_is_refused(role, casts, why):
    plan = run(Experts(4))
    given = {side: ("e4m3", how) if isinstance(how, str) else how for side, how in casts.items()}
    operands = {side: fp8compile.plan.rows.Operand(*how) for side, how in given.items()}
    rows = [dataclasses.replace(m, decision="fp8", **operands) if m.role == role else m for m in plan.matmuls]
    torch.compiler.reset()
    with pytest.raises(Exception, match=f"the plan wants .*{role} in FP8, which cannot be: {why}"):
        run(Experts(4), plan=dataclasses.replace(plan, matmuls=rows))


# --- verification


def rewritten() -> Compilation:
    """A compilation whose one grouped matmul has become a marker."""
    with FakeTensorMode():
        inputs = (
            torch.empty(96, 64, dtype=torch.bfloat16), torch.empty(4, 32, 64, dtype=torch.bfloat16),
            torch.empty(4, dtype=torch.int32), torch.empty(5, dtype=torch.int32), torch.empty(4, dtype=torch.int64),
        )  # fmt: skip
        graph = make_fx(lambda x, w, offs, *_: torch._grouped_mm(x, w.mT, offs=offs))(*inputs).graph
    x, w, *others = (node.name for node in graph.find_nodes(op="placeholder"))
    c = Compilation(graph, Options.parse({"select": "all"}), dataclasses.replace(DEVICE, grouped=True), Plan())
    c.inputs = {x: Input(False), w: Input(True, "w"), **{o: Input(False) for o in others}}
    from fp8compile.passes.matmul import assign_scales

    for step in (canonicalize, select_matmuls, assign_scales, quantize_matmuls):
        step.run(c)
    c.graph.eliminate_dead_code()
    verify(c.graph, "test")
    return c


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({9: 3}, r"groups \[5\] of \[96, 64\] for \[4, 32, 64\]"),
        ({9: 4}, "its groups end at torch.int64 numbers, not int32"),
    ],
)
def test_broken_groups_are_found(change, rule):
    c = rewritten()
    marker = next(n for n in c.graph.nodes if n.target is ops.scaled_mm)
    inputs = c.graph.find_nodes(op="placeholder")
    for argument, which in change.items():
        marker.update_arg(argument, inputs[which])
    with pytest.raises(VerificationError, match=rule):
        verify(c.graph, "test")


def test_scales_that_are_not_of_rows_are_found():
    c = rewritten()
    marker = next(n for n in c.graph.nodes if n.target is ops.scaled_mm)
    quantize = marker.args[3]
    amax = quantize.args[1].args[0]
    for node, argument in ((amax, 1), (quantize, 3), (marker, 5)):
        node.update_arg(argument, "tensor")
    from fp8compile.passes.core.compilation import update_value

    update_value(amax)
    update_value(quantize.args[1])
    with pytest.raises(VerificationError, match="its groups have scales of row and tensor, not of rows"):
        verify(c.graph, "test")


# --- layouts


def test_groups_that_are_contracted_are_read_as_they_lie() -> None:
    """Tokens side by side in memory would have to be multiples of 16 bytes in each group, or the kernel stops."""
    graph = fx.Graph()
    with FakeTensorMode():
        tokens, gradient, offs = torch.empty(96, 64), torch.empty(96, 32), torch.empty(4, dtype=torch.int32)
        given = [graph.placeholder(name) for name in ("tokens", "gradient", "offs")]
        for node, fake in zip(given, (tokens, gradient, offs), strict=True):
            node.meta["val"] = fake
        silu = graph.call_function(torch.ops.aten.silu.default, (given[0],))
        across = graph.call_function(torch.ops.aten.permute.default, (silu, [1, 0]))
        silu.meta["val"], across.meta["val"] = tokens, tokens.t()
    product = graph.call_function(torch.ops.aten._grouped_mm.default, (across, given[1], given[2]))
    graph.output(product)
    keep_strides(graph)
    kept = product.args[0]
    assert isinstance(kept, fx.Node)
    assert kept.target is force_stride_order
    assert kept.args == (across, (1, 64))
