"""Report: one self-contained page of a dump, without network: summary, model tree, memory, tables, kernels, graphs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8compile.errors import Fp8Error
from fp8compile.insight.dump import stages
from fp8compile.insight.dump.dumps import graphs, versions
from fp8compile.insight.dump.layout import drawing
from fp8compile.insight.explanation import Explanation
from fp8compile.insight.tables.optimizer_text import others, settings
from fp8compile.insight.tables.summary import summary, title
from fp8compile.insight.tables.totals import totals
from fp8compile.plan.from_json import read_plans
from fp8compile.plan.json_rows import an_object, parsed, require

HERE = Path(__file__).parent
LOWERED = ("lower_regions", "lower_markers")  # what Inductor gets: markers and regions say more


def write_report(dump: Path, output: Path) -> Path:
    """Write the page of `dump` to `output`; returns it. Raises `Fp8Error` where `dump` is no dump, or
    `output` a folder."""
    if output.is_dir():
        raise Fp8Error(f"{output} is a folder: the page is a file, such as {output / 'report.html'}")
    text = json.dumps(report_data(dump), separators=(",", ":")).replace("</", "<\\/")
    page = _part("page.html")
    for name, content in (("page.css", _part("page.css")), ("page.js", _part("page.js")), ("data", text)):
        page = page.replace(f"/*{name}*/", content)
    output.write_text(page)
    return output


def _part(name: str) -> str:
    return (HERE / name).read_text()


def report_data(dump: Path) -> dict[str, Any]:
    """Return everything that the page shows, as plain data."""
    known = stages.stages(dump)
    found = graphs(dump)
    everything = stages.explanation(dump)
    return {
        "title": dump.resolve().name,
        "versions": versions(),
        "summary": summary(everything.totals),
        "totals": {**asdict(everything.totals), "share": everything.totals.share},
        "graphs": [_graph(dump, name, index, known) for name, index in found.items()],
        "sources": {f.stem: f.read_text() for f in sorted((dump / "kernels").glob("*.py"))},
        "statistics": _measured(dump / "statistics.json"),
    }


def _measured(file: Path) -> list[dict[str, Any]]:
    """Return the rows of saved statistics, if there are any."""
    if not file.exists():
        return []
    data = an_object(parsed(file.read_text(), str(file)), str(file))
    require(data, ("rows",), str(file))
    return data["rows"]


def _graph(dump: Path, name: str, index: dict[str, Any], known: list[stages.Stage]) -> dict[str, Any]:
    folder = dump / name
    plan, memory = folder / "plan.json", folder / "memory.json"
    explanation = Explanation(read_plans(plan)) if plan.exists() else Explanation([])
    drawn = _drawn([s for s in known if s.name.startswith(f"{name}/")])
    return {
        "name": name,
        "title": ", ".join(map(title, explanation.plans)),
        "options": index["options"],
        "failures": [{**f, "trace": (folder / f["file"]).read_text()} for f in index["failures"]],
        "summary": summary(totals(explanation.plans)),
        "matmuls": explanation.rows("matmuls"),
        "saved": explanation.rows("saved"),
        "kernels": explanation.rows("kernels"),
        "groups": [
            {**asdict(g), "settings": settings(g), "others": "; ".join(others(g))}
            for plan in explanation.plans
            for g in plan.groups
        ],
        "states": explanation.rows("states"),
        "updates": explanation.rows("updates"),
        "memory": json.loads(memory.read_text()) if memory.exists() else None,
        "drawings": [{"name": s.name.removeprefix(f"{name}/"), **drawing(s.text)} for s in drawn],
    }


def _drawn(own: list[stages.Stage]) -> list[stages.Stage]:
    """Return the joint graph's first and last stage, and each half's last stage before it was lowered."""
    last: dict[str, stages.Stage] = {}
    for stage in own:
        _, half, name = stage.name.split("/")
        if name == "input":
            last["before"] = stage
        elif name not in (*LOWERED, "bf16"):
            last[half] = stage
    return list(last.values())
