"""The pipeline has every pass of every stage, and each stage verifies what its passes do."""

from __future__ import annotations

import importlib
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import add_pass
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import devices
from fp8compile.backend import fp8
from fp8compile.errors import Fp8Warning, VerificationError
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.core.stages import DynamoGraph, HalfGraph, OptimizerGraph, Stage, StageGraph
from fp8compile.passes.save.min_cut import Halves
from fp8compile.passes.save.save_as_fp8 import Cut
from fp8compile.plan.plan import Plan

PASSES = Path(__file__).parents[2] / "passes"
GIVEN = {
    Stage.DYNAMO: DynamoGraph,
    Stage.JOINT: Compilation,
    Stage.CUT: Cut,
    Stage.EARLY_HALF: HalfGraph,
    Stage.HALF: HalfGraph,
    Stage.LATE_HALF: HalfGraph,
    Stage.OPTIMIZER: OptimizerGraph,
}


def test_every_file_with_a_pass_is_in_the_pipeline() -> None:
    modules = [f"fp8compile.passes.{file.parent.name}.{file.stem}" for file in PASSES.glob("*/*.py")]
    found = {name for name in modules if "run" in vars(importlib.import_module(name))}
    assert found == {step.run.__module__ for step in pipeline.PIPELINE}


def test_names_are_unique_and_every_stage_has_passes_and_rules() -> None:
    assert len({step.name for step in pipeline.PIPELINE}) == len(pipeline.PIPELINE)
    assert {step.stage for step in pipeline.PIPELINE} == set(Stage) == set(pipeline.RULES)
    assert all(step.why for step in pipeline.PIPELINE)


@pytest.mark.parametrize("step", pipeline.PIPELINE, ids=lambda step: step.name)
def test_a_pass_takes_what_its_stage_gives(step: pipeline.Pass) -> None:
    hints = typing.get_type_hints(step.run)
    assert hints == {"c": GIVEN[step.stage], "return": type(None)}


# ---- verifying ------------------------------------------------------------------------------------------------------


def return_more(c: StageGraph) -> None:
    """Break what every stage must keep: let the graph return one of its inputs as well."""
    returned: list[fx.Node] = []
    fx.map_arg(c.graph.output_node().args, returned.append)
    first = next(iter(c.graph.find_nodes(op="placeholder")), None) or next(iter(c.graph.find_nodes(op="get_attr")))
    c.graph.output_node().args = ((*returned, first),)


def lose_an_input(c: StageGraph) -> None:
    """Break the form of a graph: erase a node by force that others read."""
    node = next(n for n in c.graph.nodes if n.op == "call_function" and n.users)
    node._remove_from_list()


def graph_at(stage: Stage) -> StageGraph:
    """Return a small graph at a stage."""
    gm = make_fx(lambda x, y: (x * 2 + y,), tracing_mode="fake")(torch.ones(4, 16), torch.ones(4, 16))
    options, device = Options.parse({}), devices.describe(torch.device("cpu"))
    if stage is Stage.DYNAMO:
        return DynamoGraph(gm.graph, options, gm, ())
    if stage is Stage.JOINT:
        return Compilation(gm.graph, options, device, Plan())
    if stage is Stage.CUT:
        halves = Halves(set(), set(), set(), set(), lambda _: False)
        return Cut(gm.graph, options, device, Plan(), halves=halves, saved=[])
    if stage is Stage.OPTIMIZER:
        return OptimizerGraph(gm.graph, options, None)
    return HalfGraph(gm.graph, options, "backward", "inductor", stage=stage)


def test_a_pass_has_the_name_of_its_file() -> None:
    assert [p.name for p in pipeline.PIPELINE] == [p.run.__module__.rsplit(".")[-1] for p in pipeline.PIPELINE]


@pytest.mark.parametrize("stage", Stage)
def test_a_graph_that_nothing_concerns_passes(stage: Stage) -> None:
    seen: list[str] = []
    pipeline.run_stage(c := graph_at(stage), lambda name, _: seen.append(name))
    steps = [step.name for step in pipeline.passes_for(c) if step.when(c)]
    assert [name for name in seen if name != "input"] == steps


@pytest.mark.parametrize(("breaks", "message"), [(return_more, "output"), (lose_an_input, "malformed graph")])
@pytest.mark.parametrize("stage", Stage)
def test_a_stage_names_the_pass_that_breaks_a_rule(
    stage: Stage, breaks: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_pass(monkeypatch, stage, "breaks", breaks)
    c = graph_at(stage)
    with pytest.raises(VerificationError, match=f"^{c.name} graph after breaks: .*{message}"):
        pipeline.run_stage(c)
    assert c.running == "breaks"


def train(model: nn.Module, **options: object) -> None:
    torch.compiler.reset()
    options = {"select": "all", "executor": "eager", "save_min_bytes": 1, **options}
    torch.compile(model, backend="fp8", options=options)(torch.randn(32, 64).bfloat16()).square().sum().backward()


@pytest.mark.parametrize(
    ("stage", "graph"),
    [(Stage.DYNAMO, "dynamo"), (Stage.JOINT, "joint"), (Stage.CUT, "cut"), (Stage.HALF, "forward")],
)
def test_what_compiles_a_model_verifies(stage: Stage, graph: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add_pass(monkeypatch, stage, "breaks", return_more)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    with pytest.raises(Exception, match=f"{graph} graph after breaks: output"):
        train(model, strict=True)


def as_a_whole(gm: fx.GraphModule, inputs: Any) -> Any:
    """The backend, for a step in one graph of all parameters: torch enters contexts of named backends alone."""
    return fp8(gm, inputs, options={"executor": "eager"})


def test_what_compiles_an_optimizer_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    add_pass(monkeypatch, Stage.OPTIMIZER, "breaks", return_more)
    parameter = nn.Parameter(torch.randn(64, 128))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter])
    with pytest.warns(Fp8Warning, match="optimizer graph after breaks: output"):
        torch.compile(optimizer.step, backend=as_a_whole)()
    assert not parameter.isnan().any()
