"""Dumps: everything is there, runs, is the same each time, and says where a compilation failed."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import ZOO
from pipelines import names_of, replace_pass
from ranks import printed_by
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8compile
from fp8compile import environment
from fp8compile.errors import Fp8Error, Fp8Warning, OptionError
from fp8compile.insight.dump import stages
from fp8compile.insight.dump.memory import timeline
from fp8compile.passes.core.compilation import Compilation, aten
from fp8compile.passes.core.stages import HalfGraph, Stage
from fp8compile.plan.plan import Plan
from fp8compile.torch_hooks import inner_compiler

ALL = {"select": "all", "executor": "eager"}
JOINT = ["input", *names_of(Stage.JOINT)]


def mlp(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48)).to(dtype)
    return model, torch.randn(16, 32).to(dtype)


def linear() -> tuple[nn.Module, torch.Tensor]:
    """A model of which g++ has little to compile, and the same for every test."""
    torch.manual_seed(0)
    return nn.Linear(32, 48).bfloat16(), torch.randn(16, 32).bfloat16()


def dumped(folder: Path, dtype: torch.dtype = torch.bfloat16, **options: Any) -> dict[str, Any]:
    """Train one step, dumping; the index."""
    model, x = mlp(dtype)
    torch.compiler.reset()
    torch.compile(model, backend="fp8", options={**ALL, "dump": folder, **options})(x).float().sum().backward()
    return json.loads((folder / "index.json").read_text())


class Made(NamedTuple):
    """A dump that tests read, its index, and the plans of what was compiled."""

    folder: Path
    index: dict[str, Any]
    plans: list[Plan]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("dump")
    return Made(folder, dumped(folder), list(fp8compile.last_compile().plans))


class ByInductor(NamedTuple):
    """A dump of what Inductor has compiled before, and what both compilations counted of its caches."""

    folder: Path
    first: list[str]
    dumping: list[str]


@pytest.fixture(scope="module")
def by_inductor(tmp_path_factory: pytest.TempPathFactory) -> ByInductor:
    folder, caches = tmp_path_factory.mktemp("inductor"), []
    model, x = linear()
    for options in ({}, {"dump": folder}):
        counters.clear()
        torch.compiler.reset()
        step = torch.compile(model, backend="fp8", options={"select": "all", "executor": "inductor", **options})
        step(x).sum().backward()
        names = [*counters["aot_autograd"], *counters["inductor"]]
        caches.append([name for name in names if "cache" in name and "bypass" not in name])
    return ByInductor(folder, *caches)


def names(index: dict[str, Any], half: str) -> list[str]:
    return [s["name"] for s in index["graphs"]["graph0"]["stages"] if s["half"] == half]


# ---- what is there --------------------------------------------------------------------------------------------------


def test_every_stage_is_there_in_order(made: Made):
    folder, index, _ = made
    assert names(index, "joint") == JOINT
    for half in ("forward", "backward"):
        assert names(index, half) == ["bf16", "cut", "form_regions", "combine_regions"]
    listing = (folder / "index.txt").read_text()
    for stage in index["graphs"]["graph0"]["stages"]:
        assert (folder / "graph0" / f"{stage['file']}.txt").read_text().count("\n") > 3
        assert f"  {stage['file']}.txt  .py" in listing
        assert stage["text_only"] == ""
    assert "graph0: recipe=mixed, select='all', executor='eager'" in listing
    assert "FAILED" not in listing


def test_the_index_is_in_a_reader_s_order(by_inductor: ByInductor):
    """Plan, graphs as the passes made them, kernels, code: however the halves came."""
    lines = (by_inductor.folder / "index.txt").read_text().splitlines()
    places = [lines.index(f"  {title}") for title in ("plan.txt  plan.json", "graphs, in the order of the passes")]
    places += [lines.index("  Inductor's code")]
    assert places == sorted(places)
    halves = ["cut", "lower_markers", "bf16"]
    stems = [line.split(".txt")[0].strip()[3:] for line in lines[places[1] + 1 : places[2]]]
    assert stems == [f"joint_{n}" for n in JOINT] + [f"{h}_{n}" for h in ("forward", "backward") for n in halves]
    code = [line.split("_", 1)[1] for line in lines[places[2] + 1 :]]
    assert code == ["forward_inductor_code.py", "backward_inductor_code.py"]


def test_kernels_are_listed_with_the_graph_that_runs_them(made: Made):
    folder, index, _ = made
    lines = (folder / "index.txt").read_text().splitlines()
    listed = [line.split() for line in lines[lines.index("  kernels") + 1 :]]
    assert [half for _, half, *_ in listed] == sorted((half for _, half, *_ in listed), reverse=True)
    files = {(folder / "graph0" / file).resolve() for file, *_ in listed}
    assert files == set((folder / "kernels").resolve().glob("*.py"))
    assert len(index["graphs"]["graph0"]["kernels"]) == sum(int((n or ["×1"])[0][1:]) for _, _, *n in listed)


@pytest.mark.parametrize("step", [name for name in names_of(Stage.OPTIMIZER) if name != "skip_overflow"])
def test_a_failing_pass_of_an_optimizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    def fails(*_: Any) -> None:
        raise RuntimeError("on purpose")

    replace_pass(monkeypatch, step, fails)
    parameter = torch.nn.Parameter(torch.randn(64, 128))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    with pytest.warns(Fp8Warning, match="run operator by operator"):
        torch.compile(optimizer.step, backend="fp8", options={"executor": "eager", "dump": tmp_path})()
    (graph,) = json.loads((tmp_path / "index.json").read_text())["graphs"].values()
    assert [f["step"] for f in graph["failures"]] == [step]
    assert graph["stages"][-1]["name"] == f"{step}_failed"


def test_the_plan_is_the_plan(made: Made):
    folder, _, (plan,) = made
    assert fp8compile.Explanation.from_json((folder / "graph0/plan.json").read_text()).plans == [plan]
    assert (folder / "graph0/plan.txt").read_text() == fp8compile.Explanation([plan]).full_text()
    files = sorted(f.stem for f in (folder / "kernels").glob("*.py"))
    assert files == sorted({kernel.name for kernel in plan.kernels})


def test_the_same_model_gives_the_same_text(made: Made, tmp_path: Path):
    dumped(tmp_path)
    files = {path.relative_to(made.folder) for path in made.folder.rglob("*") if path.is_file()}
    assert files == {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    for file in sorted(files):
        assert (made.folder / file).read_bytes() == (tmp_path / file).read_bytes(), file


def test_explain_dumps_a_model_that_is_compiled_already(tmp_path: Path):
    model, x = mlp()
    compiled = torch.compile(model, backend="fp8", options=ALL)
    compiled(x).sum().backward()
    fp8compile.explain(compiled, x, options={**ALL, "dump": tmp_path})
    assert len(stages.stages(tmp_path)) == len(JOINT) + 8
    case = ZOO["graph_break"]()
    fp8compile.explain(case.model, loss=case.loss, options={**ALL, "dump": tmp_path}, **case.inputs)
    assert len({stage.name.split("/")[0] for stage in stages.stages(tmp_path)}) >= 3


# ---- what runs ------------------------------------------------------------------------------------------------------


def test_dumped_graphs_run_and_compute_what_the_model_does(tmp_path: Path):
    dumped(tmp_path, torch.float32, kernels="inductor")
    model, x = mlp(torch.float32)
    seed = torch.randn(16, 48)
    model(x).backward(seed)
    known = {tuple(t.shape): t.detach() for t in (*model.parameters(), x)}
    known[16, 48] = seed
    expected = {tuple(p.shape): p.grad for p in model.parameters()}
    for name, least in (("*_joint_input", 100.0), ("*_joint_share_casts", 20.0)):
        (file,) = tmp_path.glob(f"graph0/{name}.py")
        graph = fp8compile.load_graph(file)
        assert isinstance(graph, fx.GraphModule)
        shapes = [tuple(t.shape) for t in fp8compile.example_inputs(file)]
        gradients = [g for g in graph(*(known[shape] for shape in shapes))[1:] if g is not None]
        assert len(gradients) == 4
        for g in gradients:
            e = expected[tuple(g.shape)]
            assert 20 * torch.log10(e.norm() / (g - e).norm()) > least  # dB: FP32 itself, and FP8 with its casts


def run_alone(*files: str) -> None:
    """Run files one after the other as scripts: a graph ends by itself, a kernel with a status."""
    try:
        for file in files:
            runpy.run_path(file, run_name="__main__")
    except SystemExit as ended:
        print("status", ended.code or 0)


def test_a_dumped_file_runs_by_itself(made: Made):
    """In a copy of a process that has imported torch and fp8compile, and knows nothing of what was dumped."""
    graph = next((made.folder / "graph0").glob("*_forward_combine_regions.py"))
    kernel = min((made.folder / "kernels").glob("*.py"))
    assert "import fp8compile" in graph.read_text()
    printed = printed_by(run_alone, str(graph), str(kernel))
    assert "output 0: bfloat16[16, 48], norm" in printed
    assert f"status {0 if torch.cuda.is_available() else 2}" in printed
    assert ("ok" if torch.cuda.is_available() else "needs a GPU") in printed


def test_constants_are_written_beside_the_graph(tmp_path: Path):
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.tensor([[2.0, 0.0], [0.0, 3.0]])

    x = torch.tensor([[1.0, 1.0]])
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        fp8compile.explain(Model(), x, options={**ALL, "dump": tmp_path})
    file = tmp_path / "graph0/00_joint_input.py"
    assert fp8compile.load_graph(file)(x)[0].tolist() == [[2.0, 3.0]]
    with pytest.raises(Fp8Error, match="no graph of a dump that runs"):
        fp8compile.load_graph(tmp_path / "graph0/plan.txt")


# ---- warm caches, environment, context ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_warm_cache_is_dumped_too(by_inductor: ByInductor):
    assert {name.split("_")[0] for name in by_inductor.first} == {"autograd", "fxgraph"}
    assert by_inductor.dumping == []  # neither asked nor fed
    (graph,) = json.loads((by_inductor.folder / "index.json").read_text())["graphs"].values()
    stages_of = {half: [s["name"] for s in graph["stages"] if s["half"] == half] for half in ("joint", "backward")}
    assert stages_of == {"joint": JOINT, "backward": ["bf16", "cut", "lower_markers"]}
    assert [code["half"] for code in graph["code"]] == ["forward", "backward"]
    for code in graph["code"]:
        assert "def call" in (by_inductor.folder / "graph0" / code["file"]).read_text()


def test_the_context_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, x = mlp()
    compiled = torch.compile(model, backend="fp8", options=ALL)
    with fp8compile.dump(tmp_path / "a") as folder:
        compiled(x)
    assert len(stages.stages(folder)) >= len(JOINT)
    with pytest.warns(Fp8Warning, match="nothing was compiled while dumping"), fp8compile.dump(tmp_path / "b"):
        compiled(x)
    with pytest.raises(Fp8Error, match="is no dump"):
        stages.stages(tmp_path / "b")
    with pytest.raises(OptionError, match="the path of a folder"):
        fp8compile.Options.parse({"dump": 3})
    with monkeypatch.context() as patch:
        patch.setenv("FP8COMPILE_DUMP", str(tmp_path))
        importlib.reload(environment)  # it is read on import
        found = [str(fp8compile.Options.parse(options).dump) for options in ({}, {"dump": "x"})]
    importlib.reload(environment)
    assert found == [str(tmp_path), str(Path("x").absolute())]
    assert fp8compile.Options.parse({}).dump is None


# ---- failures -------------------------------------------------------------------------------------------------------


def _breaks(c: Compilation) -> None:
    for node in c.graph.nodes:
        if node.target is aten.addmm.default:
            node.args = node.args[::-1]
            break
    raise NotImplementedError("no such operator")


@pytest.mark.parametrize("strict", [False, True])
def test_a_failed_pass_says_where_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strict: bool):
    broken = JOINT.index("merge_matmuls")
    replace_pass(monkeypatch, "merge_matmuls", _breaks)
    with (
        pytest.raises(Exception, match="no such operator") if strict else pytest.warns(Fp8Warning, match="without FP8")
    ):
        dumped(tmp_path, strict=strict)
    index = json.loads((tmp_path / "index.json").read_text())
    assert names(index, "joint") == [*JOINT[:broken], "merge_matmuls_failed"]
    (failure,) = index["graphs"]["graph0"]["failures"]
    assert (failure["half"], failure["step"]) == ("joint", "merge_matmuls")
    trace = (tmp_path / "graph0" / failure["file"]).read_text()
    assert "Traceback" in trace
    assert "no such operator" in trace
    (plan,) = stages.explanation(tmp_path).plans
    assert plan.failure == "NotImplementedError: no such operator"
    assert [str(m.left) for m in plan.matmuls if m.role == "output"] == ["e4m3 row"] * 2
    assert {m.reason for m in plan.matmuls} == {"a pass failed; FP8 was decided: every matmul that can run"}
    assert "NOTHING: 0 of 5 matmuls" in (tmp_path / "graph0/plan.txt").read_text()
    listing = (tmp_path / "index.txt").read_text()
    assert "FAILED in merge_matmuls (joint): NotImplementedError: no such operator  → failure0.txt" in listing
    assert "addmm(" in stages.diff(tmp_path, "assign_scales", "merge_matmuls_failed")


def test_failures_after_the_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(c: HalfGraph) -> None:
        raise RuntimeError("on purpose")

    replace_pass(monkeypatch, "combine_regions", fails)
    with pytest.warns(Fp8Warning, match="without generated kernels"):
        index = dumped(tmp_path)
    assert names(index, "forward") == ["bf16", "cut", "form_regions", "combine_regions_failed"]
    assert [f["step"] for f in index["graphs"]["graph0"]["failures"]] == ["combine_regions"] * 2


def test_a_failure_of_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(inner_compiler, "compile_fx_inner", fails)
    with pytest.raises(Exception, match="no compiler"):
        dumped(tmp_path, executor="inductor")
    assert "FAILED in inductor (forward): RuntimeError: no compiler" in (tmp_path / "index.txt").read_text()


def test_a_failure_of_inductor_in_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Forward has its plan by then: that says what became of backward."""
    inner = inner_compiler.compile_fx_inner

    def fails(*args: Any, **settings: Any) -> Any:
        if settings.get("is_backward"):
            raise RuntimeError("no compiler")
        return inner(*args, **settings)

    monkeypatch.setattr(inner_compiler, "compile_fx_inner", fails)
    model, x = linear()
    step = torch.compile(model, backend="fp8", options={**ALL, "executor": "inductor", "dump": tmp_path})
    with pytest.raises(Exception, match="no compiler"):
        step(x).sum().backward()
    assert "FAILED    backward graph: Inductor did not compile it: RuntimeError: no compiler" in str(
        fp8compile.last_compile()
    )


# ---- differences ----------------------------------------------------------------------------------------------------


def test_the_difference_of_two_stages(made: Made):
    folder = made.folder
    text = fp8compile.diff(str(folder), "input", "graph0/joint/share_casts")
    assert text.startswith("--- graph0/joint/input\n+++ graph0/joint/share_casts\n")
    assert "-%addmm: bf16[16, 64] = addmm(" in text
    assert "fp8.scaled_mm(" in text
    assert stages.diff(folder, "select_matmuls", "assign_scales") == ""
    (file,) = folder.glob("graph0/*_joint_quantize_matmuls.txt")
    assert stages.find(folder, file.name).name == "graph0/joint/quantize_matmuls"
    with pytest.raises(OptionError, match="Did you mean 'graph0/joint/share_casts'"):
        fp8compile.diff(folder, "input", "joint/share_cast")
    with pytest.raises(Fp8Error, match="is no dump"):
        fp8compile.diff(folder / "elsewhere", "input", "share_casts")
    assert len(fp8compile.diff(folder, "input", "share_casts", context=0)) < len(text)


# ---- memory ---------------------------------------------------------------------------------------------------------


class _Measured(fx.Interpreter):
    """Bytes of distinct storages that are alive after each call, as they really are."""

    def __init__(self, module: fx.GraphModule, ignored: set[int]):
        super().__init__(module, garbage_collect_values=True)
        self.ignored, self.alive = ignored, []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            values = [result, *(v for v in self.env.values() if isinstance(v, torch.Tensor))]
            storages = {v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in values}
            self.alive.append(sum(size for where, size in storages.items() if where not in self.ignored))
        return result


def test_memory_over_time_is_what_a_run_takes():
    def f(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.mm(x, w.t())
        z = y.relu().view(-1)
        return z.exp(), y.sum(0)

    w, x = torch.randn(8, 4), torch.randn(16, 4)
    with FakeTensorMode() as mode:
        gm = torch.fx.experimental.proxy_tensor.make_fx(f, tracing_mode="fake")(w, x)
    assert mode is not None
    static = {next(iter(gm.graph.find_nodes(op="placeholder"))).name}
    measured = _Measured(gm, {w.untyped_storage().data_ptr()})
    measured.run(w, x)
    found = timeline(gm.graph, static)
    assert list(found.alive) == measured.alive
    assert found.start == x.nbytes
    assert found.peak == max(measured.alive)


def test_a_dump_compares_memory_with_bf16(made: Made):
    folder = made.folder
    memory = json.loads((folder / "graph0/memory.json").read_text())
    for kind in ("bf16", "compiled"):
        for half in ("forward", "backward"):
            line = memory[kind][half]
            assert len(line["names"]) == len(line["alive"]) > 5
            assert line["peak"] == max(line["start"], *line["alive"])
    # backward starts with what it is given, parameters apart: weights are 64×32 and 48×64, biases 64 and 48
    for kind, name in (("bf16", "backward_bf16"), ("compiled", "backward_cut")):
        (file,) = (folder / "graph0").glob(f"*_{name}.py")
        given = [x for x in fp8compile.example_inputs(file) if tuple(x.shape) not in ((64, 32), (48, 64), (64,), (48,))]
        assert memory[kind]["backward"]["start"] == sum(x.nbytes for x in given)
