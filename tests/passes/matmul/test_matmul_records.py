"""Records of matmuls follow the graph, and rows are made of them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import devices
from fp8compile.options import Options
from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core import matmul_node
from fp8compile.passes.core.compilation import Compilation, Input, aten
from fp8compile.passes.core.replace import replace_value
from fp8compile.passes.matmul import assign_scales, merge_matmuls, quantize_matmuls, select_matmuls
from fp8compile.passes.pipeline import PIPELINE, run_stage
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import FP8


def compilation() -> Compilation:
    """x @ Wᵀ three times: two that read one x, and one that reads another tensor."""
    with FakeTensorMode():
        x, y, *weights = (torch.empty(64, 64, dtype=torch.bfloat16) for _ in range(5))
        graph = make_fx(lambda x, y, a, b, c: (x @ a.t(), y @ c.t(), x @ b.t()))(x, y, *weights).graph
    named = graph.find_nodes(op="placeholder")
    c = Compilation(
        graph, Options.parse({"select": "all"}), devices.Device("test", False, emulated=True), Plan("inference")
    )
    c.inputs = {node.name: Input(i > 1, name=f"weight{i}") for i, node in enumerate(named)}
    canonicalize.run(c)
    select_matmuls.run(c)
    return c


def names(c: Compilation) -> list[str]:
    return [row.node for row in c.matmuls.rows()]


def test_a_record_follows_what_takes_the_place_of_its_node_and_its_row_keeps_its_name():
    c = compilation()
    assert names(c) == ["mm", "mm_1", "mm_2"]
    (record,) = c.matmuls.at(old := next(iter(c.matmuls)).node)
    new = c.emit(aten.clone.default, old, like=old, before=old.next)
    left = record.left
    same = c.emit(aten.mm.default, left, record.right, like=old, before=old)
    replace_value(c, old, same)
    assert new.all_input_nodes == [same]
    assert (record.node, record.left) == (same, left)
    assert (c.matmuls.at(same), c.matmuls.at(old)) == ((record,), ())
    assert names(c) == ["mm", "mm_1", "mm_2"]


def test_a_merged_record_stands_where_its_first_member_stood():
    c = compilation()
    assign_scales.run(c)
    first, other, last = c.matmuls
    merge_matmuls.run(c)
    merged, still = c.matmuls
    assert still is other
    assert merged.merged == (first.path, last.path)
    assert merged.n == first.n + last.n
    assert merged.layer is merged
    assert c.matmuls.at(merged.node) == (merged,)
    assert not [m for m in (first, last) if m in c.matmuls.at(m.node)]
    quantize_matmuls.run(c)
    assert names(c) == [m.node.name for m in c.matmuls]
    assert {row.decision for row in c.matmuls.rows()} == {FP8}


def test_the_plan_has_its_rows_where_a_pass_fails(monkeypatch: pytest.MonkeyPatch):
    def fail(c: Compilation) -> None:
        assert not c.plan.matmuls  # rows are made at the end
        raise ArithmeticError

    monkeypatch.setattr("fp8compile.passes.matmul.share_casts.unify", fail)
    c = compilation()
    assert any(step.name == "share_casts" for step in PIPELINE)
    with pytest.raises(ArithmeticError):
        run_stage(c)
    assert [row.decision for row in c.plan.matmuls] == [FP8] * len(c.matmuls)


def test_a_convolutions_backward_is_two_matmuls_of_one_node():
    with FakeTensorMode():
        x, w, dy = (torch.empty(shape) for shape in ((2, 4, 8, 8), (16, 4, 2, 2), (2, 16, 4, 4)))
        graph = make_fx(
            lambda dy, x, w: aten.convolution_backward(
                dy, x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
            )
        )(dy, x, w).graph
    from fp8compile.passes.matmul.find_matmuls import matmuls_of

    node = next(n for n in graph.nodes if n.target is aten.convolution_backward.default)
    found = matmuls_of(node)
    given, images, weight = graph.find_nodes(op="placeholder")
    assert [m.name for m in found] == [f"{node.name}.grad_input", f"{node.name}.grad_weight"]
    assert [m.pair for m in found] == [(given, weight), (given, images)]
    matmuls = matmul_node.Matmuls(found)
    assert matmuls.at(node) == tuple(found)
    matmuls.move(found[0], images)
    assert matmuls.at(node) == (found[1],)
    assert found[0].name == images.name
