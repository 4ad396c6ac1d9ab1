"""Verification after the cut: a valid graph passes; each rule, broken once, is named with the stage and the node."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import add_pass, look_after
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import ops
from fp8compile.errors import VerificationError
from fp8compile.kernels.check.coverage import unwritten
from fp8compile.kernels.codegen.schedule.choose_schedule import choose
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.passes.core.compilation import aten, attach_views
from fp8compile.passes.core.stages import HalfGraph, Stage
from fp8compile.passes.core.verify_halves import verify_halves
from fp8compile.passes.lower import verify_kernels as verify_kernels_module
from fp8compile.passes.lower.lower_regions import lower_regions
from fp8compile.passes.lower.verify_kernels import late_read, outputs_of, verify_kernels
from fp8compile.passes.optimizer.verify_optimizer import verify_optimizer, written_inputs
from fp8compile.passes.regions.region_graph import regions_of, spec_of
from fp8compile.torch_hooks import partitioner

D = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclasses.dataclass
class Seen:
    """Graphs of a compilation as they were verified: both halves after the cut, and each half when regions stand."""

    halves: tuple[fx.Graph, fx.Graph, Any] | None = None
    regions: list[tuple[fx.Graph, Any]] = dataclasses.field(default_factory=list)


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph(graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy


@pytest.fixture(scope="module")
def compilation() -> Seen:
    found = Seen()

    def halves(forward: fx.Graph, backward: fx.Graph, outputs: Any) -> None:
        found.halves = copied(forward), copied(backward), outputs
        verify_halves(forward, backward, outputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioner, "verify_halves", halves)
        look_after(patch, "combine_regions", lambda c: found.regions.append((copied(c.graph), None)))
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block()).bfloat16()
        options = {"select": "all", "executor": "eager", "strict": True, "kernels": "generated", "save_min_bytes": 1}
        torch.compile(model, backend="fp8", options=options)(torch.randn(48, D).bfloat16()).sum().backward()
    return found


@pytest.fixture
def seen(compilation: Seen) -> Seen:
    """Copies, which a test may change."""
    assert compilation.halves is not None
    forward, backward, outputs = compilation.halves
    found = Seen((copied(forward), copied(backward), outputs))
    for graph, _ in compilation.regions:
        copy = copied(graph)
        attach_views(copy)
        found.regions.append((copy, outputs_of(copy)))
    return found


def refused(call: Callable[..., None], *args: Any, message: str) -> None:
    with pytest.raises(VerificationError, match=re.escape(message)):
        call(*args)


def kernels(graph: fx.Graph, outputs: Any, message: str) -> None:
    refused(verify_kernels, graph, "some_step", outputs, message=message)


def changed(node: fx.Node, change: Callable[[Region], Region]) -> None:
    """Give a region another spec, in the same tiles."""
    region, _ = spec_of(node)
    node.args = (*node.args[:2], change(region).to_json(), node.args[3])


# --- halves


def test_valid_halves_pass(seen: Seen) -> None:
    assert seen.halves is not None
    verify_halves(*seen.halves)
    assert len(seen.regions) == 2


def test_a_saved_payload_read_with_another_scale(seen: Seen) -> None:
    assert seen.halves is not None
    forward, backward, outputs = seen.halves
    reads = backward.find_nodes(op="call_function", target=ops.dequantize)
    scales = [n.args[1] for n in reads]
    other = next(s for s in scales if s is not scales[0] and s.meta["val"].shape == scales[0].meta["val"].shape)
    reads[0].update_arg(1, other)
    refused(verify_halves, forward, backward, outputs, message=f"is read with %{other.name}")


def test_backward_gets_what_forward_does_not_return(seen: Seen) -> None:
    assert seen.halves is not None
    forward, backward, outputs = seen.halves
    saved = next(n for n in backward.find_nodes(op="placeholder") if "tangents" not in str(n.target))
    saved.name = "unheard_of"
    refused(verify_halves, forward, backward, outputs, message="%unheard_of of backward: forward does not return it")


def test_forward_returns_something_else(seen: Seen) -> None:
    assert seen.halves is not None
    forward, backward, _ = seen.halves
    refused(
        verify_halves, forward, backward, [("torch.float64", ["1"])], message="outputs changed from [('torch.float64'"
    )


# --- regions


def test_padding_that_is_not_written(seen: Seen) -> None:
    """As stores of one row or column once were."""
    graph, outputs = seen.regions[1]
    node = next(n for n in regions_of(graph) if any(s.transposed for p in spec_of(n)[0].parts for s in p.stores))

    def without_last_rows(region: Region) -> Region:
        return dataclasses.replace(region, parts=tuple(dataclasses.replace(p, rows=p.rows - 1) for p in region.parts))  # type: ignore[operator]

    changed(node, without_last_rows)
    kernels(graph, outputs, "elements are written")


def test_a_region_that_reads_beyond_its_tensor(seen: Seen) -> None:
    graph, outputs = seen.regions[0]

    def further(region: Region) -> Region:
        part, *others = region.parts
        inputs = tuple(dataclasses.replace(i, offset=i.offset + 10**6) for i in part.inputs)
        return dataclasses.replace(region, parts=(dataclasses.replace(part, inputs=inputs), *others))

    changed(regions_of(graph)[0], further)
    kernels(graph, outputs, "reads element")


def test_a_region_whose_tensor_lies_otherwise(seen: Seen) -> None:
    graph, outputs = seen.regions[0]
    node = regions_of(graph)[0]
    changed(node, lambda r: dataclasses.replace(r, strides=tuple((*s[:-1], 7) for s in r.strides)))
    kernels(graph, outputs, "its spec was made for")


def test_a_region_that_reads_another_dtype(seen: Seen) -> None:
    graph, outputs = seen.regions[0]

    def halved(region: Region) -> Region:
        def part(p: Part) -> Part:
            return dataclasses.replace(p, inputs=tuple(dataclasses.replace(i, dtype="float16") for i in p.inputs))

        return dataclasses.replace(region, parts=tuple(map(part, region.parts)))

    changed(regions_of(graph)[0], halved)
    kernels(graph, outputs, "its spec reads float16")


def test_a_region_that_reads_codes_without_their_scale(seen: Seen) -> None:
    graph, outputs = seen.regions[1]

    def unscaled(region: Region) -> Region:
        def part(p: Part) -> Part:
            codes = {i for i, v in enumerate(p.values) if v.op == "load" and "float8" in p.inputs[v.params[0]].dtype}
            values = tuple(dataclasses.replace(v, op="add") if codes & set(v.args) else v for v in p.values)
            return dataclasses.replace(p, values=values)

        return dataclasses.replace(region, parts=tuple(map(part, region.parts)))

    for node in regions_of(graph):
        changed(node, unscaled)
    kernels(graph, outputs, "without a scale")


def test_an_output_that_lies_otherwise(seen: Seen) -> None:
    graph, outputs = seen.regions[0]
    n = next(n for n, o in enumerate(outputs) if o is not None and len(o[2]) == 2)
    dtype, shape, strides, owner = outputs[n]
    kernels(graph, [*outputs[:n], (dtype, shape, strides[::-1], owner), *outputs[n + 1 :]], f"output {n} changed from")


def test_an_output_that_becomes_a_view_of_an_input(seen: Seen) -> None:
    graph, outputs = seen.regions[0]
    n = next(n for n, o in enumerate(outputs) if o is not None and o[3])
    dtype, shape, strides, _ = outputs[n]
    kernels(graph, [*outputs[:n], (dtype, shape, strides, ""), *outputs[n + 1 :]], f"output {n} changed from")


def test_two_launches_share_a_buffer(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, outputs = seen.regions[0]
    monkeypatch.setattr("fp8compile.passes.lower.lower_regions._kernel", lambda *_: object())
    lower_regions(graph)
    attach_views(graph)
    verify_kernels(graph, "some_step", outputs)
    launch = next(n for n in graph.nodes if n.meta.get("fp8_launch"))
    buffer = launch.kwargs["kwargs"][launch.kwargs["tensors_to_clone"][0]]
    with graph.inserting_before(launch.next):
        view = graph.call_function(aten.view.default, (buffer, list(buffer.meta["val"].shape)))
    view.meta["val"] = buffer.meta["val"]
    kernels(graph, outputs, f"shares its buffer %{buffer.name}")


def test_every_step_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[str] = []
    monkeypatch.setattr(verify_kernels_module, "verify_kernels", lambda graph, stage, *_: stages.append(stage))
    options = {"select": "all", "executor": "eager", "strict": True}
    model = nn.Linear(D, D).bfloat16()
    torch.compile(model, backend="fp8", options=options)(torch.randn(32, D).bfloat16()).sum().backward()
    assert stages == ["form_regions", "combine_regions"] * 2
    stages.clear()
    torch.compiler.reset()
    run = torch.compile(model, backend="fp8", options={**options, "verify": False})
    run(torch.randn(32, D).bfloat16()).sum().backward()
    assert stages == []


def test_a_broken_step_is_a_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks a rule never becomes a wrong number."""

    def breaks(c: HalfGraph) -> None:
        for node in regions_of(c.graph):
            region, _ = spec_of(node)
            stores = [s for p in region.parts for s in p.stores]
            if stores:
                changed(node, lambda r: dataclasses.replace(r, strides=tuple((*s[:-1], 7) for s in r.strides)))

    add_pass(monkeypatch, Stage.HALF, "breaks", breaks)
    x = torch.randn(32, D).bfloat16()
    model = Block().bfloat16()
    run = torch.compile(model, backend="fp8", options={"select": "all", "executor": "eager"})
    with pytest.warns(match="after breaks: %region.*its spec was made for"):
        y = run(x)
    assert (y - model(x)).norm() < 0.1 * y.norm()


# --- coverage of buffers

ELEMENTS = (Input(0, "float32", ((3, 5),), ((5, 1),)),)
LOADED = (Value("load", (), (0,)),)


def region_of(stores: tuple[Store, ...], *buffers: Buffer) -> Region:
    return Region((Part(3, 5, ELEMENTS, LOADED, stores),), buffers)


def why_not(region: Region) -> str:
    return unwritten(region, choose(region), {})


@pytest.mark.parametrize(
    ("store", "shape"),
    [
        (Store(0, 0, 5), (3, 5)),
        (Store(0, 0, 3, transposed=True), (5, 3)),
        (Store(0, 0, 16, row_multiple=16, col_multiple=16), ((3, 16), 16)),
        (Store(0, 0, 16, transposed=True, row_multiple=16), (5, (3, 16))),
    ],
)
def test_a_store_fills_its_buffer(store: Store, shape: tuple[Any, ...]) -> None:
    assert why_not(region_of((store,), Buffer(shape, "float32"))) == ""


@pytest.mark.parametrize(
    ("stores", "shape", "why"),
    [
        ((Store(0, 0, 16),), (3, 16), "15 of 48 elements are written"),
        ((Store(0, 0, 5),), (16, 5), "15 of 80 elements are written"),
        ((Store(0, 0, 5),), (2, 5), "element 14 of 10 is written"),
        ((Store(0, 0, 4),), (3, 5), "rows of 5 elements lie 4 apart"),
        ((Store(0, 0, 10), Store(0, 0, 10, 4)), (3, 10), "two stores overlap"),
        ((Store(0, 0, 10), Store(0, 0, 10, 5)), (3, 10), ""),
        ((Store(0, 0, 5), Store(0, 0, 5, 15)), (6, 5), ""),
        ((Store(0, 0, 5), Store(0, 0, 5, 10)), (6, 5), "two stores overlap"),
    ],
)
def test_stores_that_leave_elements_out(stores: tuple[Store, ...], shape: tuple[int, ...], why: str) -> None:
    found = why_not(region_of(stores, Buffer(shape, "float32")))
    assert found == (f"buffer 0 {list(shape)}: {why}" if why else "")


def test_the_only_row_has_its_padding() -> None:
    """A value of one row does not vary along rows; its store fills all rows there are all the same."""
    part = Part(1, 5, (Input(0, "float32", (), ((5, 1),)),), LOADED, (Store(0, 0, 5, row_multiple=16),))
    region = Region((part,), (Buffer(((1, 16), 5), "float32"),))
    assert why_not(region) == ""


# --- memory


def traced(call: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    return make_fx(call, tracing_mode="fake")(*inputs).graph


def test_an_input_read_after_it_was_overwritten() -> None:
    def late(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(y)
        return x + 1

    graph = traced(late, torch.zeros(3), torch.zeros(3))
    (copy,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert late_read(graph) == ""  # it reads what the copy returns
    add.update_arg(0, copy.args[0])
    assert late_read(graph) == f"%{add.name} reads %{copy.args[0].name} after %{copy.name} has overwritten it"


# --- optimizers


def test_an_optimizer_that_loses_a_write() -> None:
    def step(p: Tensor, g: Tensor) -> Tensor:
        return p.copy_(p - g)

    graph = traced(step, torch.zeros(3), torch.zeros(3))
    written = written_inputs(graph)
    (copy,) = graph.find_nodes(op="call_function", target=aten.copy_.default)
    verify_optimizer(graph, "some_pass", [("torch.float32", ["3"])], written, set())
    copy.replace_all_uses_with(copy.args[1])
    graph.erase_node(copy)
    refused(
        verify_optimizer, graph, "some_pass", [("torch.float32", ["3"])], written, set(),
        message=f"after some_pass: the graph no longer writes {min(written)}",
    )  # fmt: skip


def test_strides_are_compared_as_of_tensors_with_elements() -> None:
    """A stride is 32 · Max(1, n) where torch made it, and 32 · n in a region's buffer."""
    graph = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.randn(3, 5)).graph
    length = next(iter(graph.nodes)).meta["val"].shape[1]
    stride = 32 * torch.sym_max(1, length // 2)
    assert "Max" in str(stride)
    assert verify_kernels_module._text(stride) == str(32 * (length // 2))
    assert verify_kernels_module._text(torch.sym_max(2, length // 2)) != str(length // 2)
    assert verify_kernels_module._text(7) == "7"
