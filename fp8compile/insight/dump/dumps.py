"""Dumps: everything about a compilation in one folder, written as it happens, so that a failure leaves its traces.

    DUMP/index.txt, index.json      what is here; versions; what failed, where and why
    DUMP/graph0/plan.txt, plan.json the decisions
    DUMP/graph0/07_joint_assign_scales.txt, .py     each stage's graph as text, and as code that runs
    DUMP/graph0/09_forward_inductor_code.py         what Inductor made of a half
    DUMP/graph0/memory.json         bytes alive over time, as compiled and as torch would have cut the graph in BF16
    DUMP/kernels/NAME.py            generated kernels: `python DUMP/kernels/NAME.py` checks and times one

One folder graphN for each call of the backend. Compile caches are left aside while dumping: on a hit no pass runs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fp8compile import environment
from fp8compile.errors import OptionError
from fp8compile.insight.dump.graph_files import write_graph
from fp8compile.insight.dump.memory import Timeline
from fp8compile.insight.explanation import Explanation
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule.one_pass import launches
from fp8compile.option_values import read_option
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.passes.regions.region_graph import regions_of, spec_of
from fp8compile.plan.plan import Plan
from fp8compile.torch_hooks.calls.user_frame import warn_user

HALVES = ("joint", "optimizer", "weights", "inference", "forward", "backward")  # as a reader meets them
_lock = threading.Lock()  # torch compiles backward on another thread


class Dump:
    """The folder of one call of the backend."""

    def __init__(self, folder: str, options: object):
        self.root = Path(folder)
        self.path = _fresh(self.root)
        self.index: dict[str, Any] = {"options": str(options), "stages": [], "code": [], "kernels": [], "failures": []}
        self.timelines: dict[str, Any] = {}
        self._write_index()

    def observer(self, half: str, graph: fx.Graph) -> Callable[[str, str], None]:
        """Return what the pipelines call after each step on `graph`, which stays the same object."""
        return lambda stage, text: self.stage(half, stage, graph, text)

    def stage(self, half: str, name: str, graph: fx.Graph, text: str | None = None) -> None:
        """Keep `graph` as it is now, as text and as code, and the kernels of its regions."""
        with _lock:
            stem = f"{self._number():02d}_{half}_{name}"
            (self.path / f"{stem}.txt").write_text(text if text is not None else graph_text(graph))
            title = f"The {half} graph of {self.path.name} after {name}."
            try:
                why = write_graph(graph, self.path / f"{stem}.py", title)
            except Exception as error:  # a dump must never be what breaks a compilation
                why = f"{type(error).__name__}: {error}"
            self.index["stages"].append({"half": half, "name": name, "file": stem, "text_only": why})
            if name == "combine_regions":
                self._kernels(half, graph)
            self._write_index()

    def _number(self) -> int:
        return len(self.index["stages"]) + len(self.index["code"])

    def _kernels(self, half: str, graph: fx.Graph) -> None:
        for node in regions_of(graph):
            for kernel in launches(*spec_of(node)):
                name = generated.kernel_name(kernel.region, kernel.schedule)
                source = generated.file_source(kernel.region, kernel.schedule)
                generated.write_atomically(self.root / "kernels" / f"{name}.py", source)
                self.index["kernels"].append({"half": half, "name": name})

    def code(self, half: str, source: str) -> None:
        """Keep what Inductor made of a half."""
        if source:
            with _lock:
                name = f"{self._number():02d}_{half}_inductor_code.py"
                (self.path / name).write_text(source)
                self.index["code"].append({"half": half, "file": name})
                self._write_index()

    def plans(self, plans: Sequence[Plan]) -> None:
        """Keep the decisions, as far as they have been made."""
        with _lock:
            explanation = Explanation(list(plans))
            (self.path / "plan.json").write_text(explanation.to_json())
            (self.path / "plan.txt").write_text(explanation.full_text())

    def memory(self, kind: str, half: str, timeline: Timeline) -> None:
        """Keep a timeline; kind: "compiled" or "bf16"."""
        with _lock:
            self.timelines.setdefault(kind, {})[half] = timeline.to_json()
            (self.path / "memory.json").write_text(json.dumps(self.timelines))

    def failed(self, half: str, error: Exception, graph: fx.Graph, step: str) -> None:
        """Keep what failed in `step`, and the graph as that left it."""
        self.stage(half, f"{step}_failed", graph, _text(graph))
        with _lock:
            name = f"failure{len(self.index['failures'])}.txt"
            trace = "".join(traceback.format_exception(error))
            (self.path / name).write_text(f"{step}, on the {half} graph:\n\n{trace}")
            why = f"{type(error).__name__}: {error}"
            self.index["failures"].append({"half": half, "step": step, "why": why, "file": name})
            self._write_index()

    def _write_index(self) -> None:
        generated.write_atomically(self.path / "graph.json", json.dumps(self.index, indent=1))
        write_index(self.root)


def _text(graph: fx.Graph) -> str:
    try:
        return graph_text(graph)
    except Exception as error:  # a graph that a pass left half-way may be anything
        return f"this graph cannot be shown: {type(error).__name__}: {error}\n"


def _fresh(root: Path) -> Path:
    """Return a new folder graphN; several processes may ask at a time."""
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.glob("graph*")))
    while True:
        with contextlib.suppress(FileExistsError):
            (root / f"graph{number}").mkdir()
            return root / f"graph{number}"
        number += 1


# ---- the index ------------------------------------------------------------------------------------------------------


def graphs(root: Path) -> dict[str, dict[str, Any]]:
    """Return the index of each graph of a dump, by the name of its folder, in order."""
    folders = sorted(root.glob("graph*/graph.json"), key=lambda f: int(f.parent.name.removeprefix("graph")))
    return {file.parent.name: json.loads(file.read_text()) for file in folders}


def write_index(root: Path) -> None:
    """Write index.json and index.txt of a dump from what its graphs have written."""
    found = graphs(root)
    generated.write_atomically(root / "index.json", json.dumps({"versions": versions(), "graphs": found}, indent=1))
    lines = [", ".join(f"{name} {version}" for name, version in versions().items()), ""]
    for name, index in found.items():
        lines += [*_listed(name, index), ""]
    generated.write_atomically(root / "index.txt", "\n".join(lines).rstrip() + "\n")


def _listed(name: str, index: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: {index['options']}"
    for failure in index["failures"]:
        why = failure["why"].splitlines()[0]
        yield f"  FAILED in {failure['step']} ({failure['half']}): {why}  → {failure['file']}"
    yield "  plan.txt  plan.json"
    yield "  graphs, in the order of the passes"
    for stage in sorted(index["stages"], key=_place):  # torch's threads write the halves as they come
        why = f"  (text only: {stage['text_only']})" if stage["text_only"] else "  .py"
        yield f"    {stage['file']}.txt{why}"
    if counts := Counter((kernel["half"], kernel["name"]) for kernel in index["kernels"]):
        yield "  kernels"
    for (half, kernel), count in sorted(counts.items(), key=lambda item: (HALVES.index(item[0][0]), item[0][1])):
        yield f"    ../kernels/{kernel}.py  {half}" + (f" ×{count}" if count > 1 else "")
    if index["code"]:
        yield "  Inductor's code"
    for code in sorted(index["code"], key=lambda code: HALVES.index(code["half"])):
        yield f"    {code['file']}"


def _place(stage: dict[str, Any]) -> tuple[int, bool]:
    """Return a key that sorts stages half by half, in the order of writing; what torch would have made comes last."""
    return HALVES.index(stage["half"]), stage["name"] == "bf16"


def versions() -> dict[str, str]:
    """Return the versions of everything that takes part."""
    found = {"torch": str(torch.__version__), "Python": platform.python_version()}
    for package in ("fp8compile", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# ---- starting -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def dump(path: str | Path) -> Iterator[Path]:
    """Dump everything that is compiled with backend="fp8" in this context into the folder `path`.

    A graph that this process has compiled before is not compiled again: call torch.compiler.reset() first, or let
    `explain(model, …, options={"dump": path})` compile it aside. Warns if nothing was compiled. Raises `OptionError`
    where no folder can be made.
    """
    if path is None:
        raise OptionError("dump: give the path of a folder, not None")
    root = Path(read_option("dump", path))
    before, environment.folder = environment.folder, str(root)
    count = len(list(root.glob("graph*")))
    try:
        yield root
    finally:
        environment.folder = before
    if len(list(root.glob("graph*"))) == count:
        warn_user("fp8: nothing was compiled while dumping; torch.compiler.reset() forgets what was compiled before")
