"""Stages of a dump: found by name, and compared."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from fp8compile.errors import Fp8Error, unknown_name
from fp8compile.insight.dump.dumps import graphs
from fp8compile.insight.explanation import Explanation
from fp8compile.plan.from_json import read_plans


@dataclass(frozen=True)
class Stage:
    """A stage of a graph in a dump. name: "graph0/joint/share_casts", as `find` takes it."""

    name: str
    file: Path
    runs: bool

    @property
    def text(self) -> str:
        """The graph."""
        return self.file.with_suffix(".txt").read_text()


def stages(root: Path) -> list[Stage]:
    """Return all stages of a dump, in the order in which they were written. Raises `Fp8Error` for another folder."""
    found = graphs(root)
    if not found:
        raise Fp8Error(f"{root} is no dump: it has no graph folders. options={{'dump': {str(root)!r}}} writes one.")
    return [
        Stage(f"{graph}/{s['half']}/{s['name']}", root / graph / f"{s['file']}.txt", not s["text_only"])
        for graph, index in found.items()
        for s in index["stages"]
    ]


def find(root: Path, name: str) -> Stage:
    """Return the stage with this name, or whose name ends with it; the first one where several do."""
    known = stages(root)
    for stage in known:
        if stage.name == name or stage.name.endswith(f"/{name}") or stage.file.stem == Path(name).stem:
            return stage
    raise unknown_name("stage", name, [s.name for s in known])


def diff(root: str | Path, before: str, after: str, context: int = 3) -> str:
    """Return what changed between two stages of the dump in the folder `root`: their texts' unified difference.

    before, after: stages as `fp8compile diff FOLDER` lists them, or ends of their names: "graph0/joint/input",
    "share_casts"; of several graphs the first one with such a stage. context: lines around each change.
    Returns lines as `diff -u` has them; "" if the texts are equal. Raises `Fp8Error` for a folder that is no dump,
    `OptionError` for a stage that it has not.
    """
    a, b = (find(Path(root), name) for name in (before, after))
    lines = difflib.unified_diff(a.text.splitlines(), b.text.splitlines(), a.name, b.name, lineterm="", n=context)
    return "".join(f"{line}\n" for line in lines)


def explanation(root: Path) -> Explanation:
    """Return the plans of all graphs of a dump."""
    files = [root / name / "plan.json" for name in dict.fromkeys(s.name.split("/")[0] for s in stages(root))]
    return Explanation([plan for f in files if f.exists() for plan in read_plans(f)])
