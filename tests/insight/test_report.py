"""The report: its data are those of the dump, its page needs nothing else, and works in a browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from models import ZOO

import fp8compile
from fp8compile.errors import Fp8Error
from fp8compile.insight.command_line import main
from fp8compile.insight.dump import layout, stages
from fp8compile.insight.dump.report import report_data, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# Runs before the page: errors must be seen. Runs after it: what a person would do.
BEFORE = """<script>window.seen = {errors: []};
window.onerror = text => { seen.errors.push(String(text)); };
console.error = console.warn = (...words) => { seen.errors.push(words.join(" ")); };
</script>"""
AFTER = """<script>
const shown = selector => [...document.querySelectorAll(selector)].filter(x => x.checkVisibility());
const texts = selector => shown(selector).map(x => x.textContent);
const type = text => { $("search").value = text; $("search").dispatchEvent(new Event("input")); };
seen.requests = performance.getEntriesByType("resource").map(x => x.name);
seen.cards = texts(".card b");
seen.lines = texts("#lines")[0];
seen.rows = shown("#matmuls tbody tr").length;
seen.open = shown("#tree .leaf").length;
$("expand").click(); seen.expanded = shown("#tree .leaf").length;
$("collapse").click(); seen.collapsed = shown("#tree .leaf").length;
type("lm_head"); seen.found = texts("#matmuls tbody tr td:first-child"); seen.leaves = texts("#tree .leaf small");
type("no such thing"); seen.nothing = shown("#matmuls tbody tr").length;
type("");
const header = [...document.querySelectorAll("#matmuls th")].find(x => x.textContent === "MFLOP");
header.click(); seen.up = texts("#matmuls tbody tr td:nth-child(9)").map(Number);
header.click(); seen.down = texts("#matmuls tbody tr td:nth-child(9)").map(Number);
type("grad_weight"); header.click(); seen.sorted_and_found = texts("#matmuls tbody tr td:nth-child(2)");
type("");
document.querySelector("#kerneltable tbody tr").click(); seen.source = texts("#source pre")[0];
seen.line = document.querySelectorAll("#timeline polyline").length;
seen.peaks = texts("#timeline text").filter(x => x.includes("peak"));
const drawn = () => document.querySelectorAll("#canvas g.node").length;
seen.drawings = [...$("drawing").options].map((option, i) => {
  $("drawing").selectedIndex = i; $("drawing").onchange(); return [option.text, drawn()]; });
const box = () => document.querySelector("#canvas svg").getAttribute("viewBox").split(" ").map(Number);
seen.before = box();
const wheel = new WheelEvent("wheel", {deltaY: -100, clientX: 300, clientY: 300});
document.querySelector("#canvas svg").dispatchEvent(wheel);
seen.zoomed = box(); $("fit").click(); seen.fitted = box();
type("scaled_mm"); $("drawing").selectedIndex = 1; $("drawing").onchange();
seen.marked = document.querySelectorAll("#canvas rect.found").length;
finish();
</script>"""
AFTER_OPTIMIZER = """<script>
seen.texts = Object.fromEntries(["grouptable", "statetable", "updatetable"].map(
  id => [id, [...document.querySelectorAll(`#${id} tbody tr`)].map(x => [...x.children].map(c => c.textContent))]));
seen.cards = [...document.querySelectorAll(".card")].map(x => x.textContent);
finish();
</script>"""
AFTER_FAILURE = """<script>
seen.failure = document.querySelector(".failure").textContent;
seen.drawings = [...$("drawing").options].map(option => option.text);
seen.nodes = document.querySelectorAll("#canvas g.node").length;
seen.rows = document.querySelectorAll("#matmuls tbody tr").length;
finish();
</script>"""
FINISH = """<script>
const finish = () => document.body.append(
  Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
</script>"""


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen2, dumped, with statistics beside it."""
    folder = tmp_path_factory.mktemp("dump")
    case = ZOO["qwen2"]()
    options = {"select": "all", "dump": folder}
    fp8compile.explain(case.model, loss=case.loss, options=options, **case.inputs)
    row = {
        "path": "layers.0.</script>",
        "role": "output",
        "side": "left",
        "cast": "e4m3 row",
        "sqnr": 31.5,
        "amax": 2.0,
    }
    statistics = {"rows": [{**row, "saturated": 0.0, "underflown": 0.001, "steps": 3}]}
    (folder / "statistics.json").write_text(json.dumps(statistics))
    return folder


def test_data_are_those_of_the_dump(dump: Path):
    data = report_data(dump)
    explanation = stages.explanation(dump)
    (graph,) = data["graphs"]
    assert graph["matmuls"] == explanation.rows()
    assert graph["kernels"] == explanation.rows("kernels")
    assert set(data["sources"]) == {row["name"] for row in graph["kernels"]}
    assert data["totals"]["share"] == explanation.totals.share
    assert graph["memory"]["bf16"]["forward"]["peak"] > 0
    assert [d["name"] for d in graph["drawings"]] == [
        "joint/input", "joint/cast_before_gather", "forward/combine_regions", "backward/combine_regions",
    ]  # fmt: skip


def test_a_drawing_has_the_graph_s_nodes_and_edges():
    text = (
        "%x: f32[4, 8] = placeholder\n%w: f32[8, 8] = placeholder\n%late: f32[8] = placeholder\n"
        "%t: f32[8, 8] = permute(%w, [1, 0])\n%y: f32[4, 8] = mm(%x, %t)\n%z: f32[4, 8] = add.Tensor(%y, %late)\n"
        "%r: (f32[4], f32[4]) = fp8.region([%z, %y], [], spec, schedule)\n%r0: f32[4] = %r[0]\nreturn [%r0]\n"
    )
    drawn = layout.drawing(text)
    names = [n["name"] for n in drawn["nodes"]]
    assert names == ["x", "w", "late", "y", "z", "r"]  # views and tuple elements are what they show
    edges = {(names[a], names[b]) for a, b in drawn["edges"]}
    assert edges == {("x", "y"), ("w", "y"), ("y", "z"), ("late", "z"), ("z", "r"), ("y", "r")}
    depth = {n["name"]: n["y"] for n in drawn["nodes"]}
    assert depth == {"x": 0, "w": 0, "y": 1, "late": 1, "z": 2, "r": 3}
    assert [n["kind"] for n in drawn["nodes"]] == ["input", "input", "input", "matmul", "other", "region"]


def test_nodes_of_a_drawing_do_not_overlap(dump: Path):
    text = stages.find(dump, "joint/share_casts").text
    drawn = layout.drawing(text)
    graph, left_out = layout.parse(text)
    assert nx.is_directed_acyclic_graph(graph)
    assert left_out == drawn["left_out"] == 0
    assert text.count("fp8.scaled_mm(") == sum(n["kind"] == "fp8" for n in drawn["nodes"]) == 24
    assert all(drawn["nodes"][a]["y"] < drawn["nodes"][b]["y"] for a, b in drawn["edges"])
    layers: dict[int, list[float]] = {}
    for node in drawn["nodes"]:
        layers.setdefault(node["y"], []).append(node["x"])
    assert all(b - a > 0.98 for xs in layers.values() for a, b in zip(sorted(xs), sorted(xs)[1:], strict=False))


def test_a_long_graph_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "LIMIT", 3)
    drawn = layout.drawing("".join(f"%n{i}: f32[] = sin(%n{i - 1})\n" for i in range(5)))
    assert (len(drawn["nodes"]), drawn["left_out"]) == (3, 2)


def test_the_page_is_one_file(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(dump), "-o", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    links = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    outside = [link for link in links if not link.startswith(("#", "data:"))]
    assert outside == []
    assert page.count("</script>") == 2  # what a model is called cannot end the script
    assert "layers.0.<\\/script>" in page
    with pytest.raises(Fp8Error, match="is no dump"):
        write_report(tmp_path, tmp_path / "other.html")


def in_browser(page: str, folder: Path, after: str = AFTER) -> dict[str, Any]:
    """What the script `after` saw of `page`."""
    file = folder / "tried.html"
    file.write_text(page.replace("<head>", f"<head>{BEFORE}").replace("</body>", f"{FINISH}{after}</body>"))
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--window-size=1400,1000",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_works_in_a_browser(dump: Path, tmp_path: Path):
    seen = in_browser(write_report(dump, tmp_path / "report.html").read_text(), tmp_path)
    explanation = stages.explanation(dump)
    rows = explanation.rows()
    assert seen["errors"] == []
    assert seen["requests"] == []
    assert seen["cards"][0] == f"{100 * explanation.totals.share:.1f} %"
    assert "3× the output head (lm_head=True converts it)" in seen["lines"]
    assert seen["rows"] == len(rows) == 27
    # the tree: only the head is open at first; each of two layers has four modules
    assert (seen["open"], seen["expanded"], seen["collapsed"]) == (1, 9, 0)
    assert seen["found"] == ["lm_head"] * 3
    assert seen["leaves"] == [next(r["source"] for r in rows if r["path"] == "lm_head")]
    assert seen["nothing"] == 0
    expected = sorted(float(f"{r['flops'] / 1e6:.3g}") for r in rows)
    assert seen["up"] == pytest.approx(expected)
    assert seen["down"] == pytest.approx(expected[::-1])
    assert seen["sorted_and_found"] == ["grad_weight"] * 9
    assert "generated by fp8compile" in seen["source"]
    assert seen["line"] == 2
    assert seen["peaks"][0].startswith("BF16: peak")
    assert dict(seen["drawings"]) == {d["name"]: len(d["nodes"]) for d in report_data(dump)["graphs"][0]["drawings"]}
    assert seen["zoomed"][2] == pytest.approx(seen["before"][2] / 1.15)
    assert seen["fitted"][2] > seen["zoomed"][2]
    assert seen["marked"] == 24


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_of_a_failure_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from fp8compile.passes.matmul import share_casts

    def fails(*_: Any) -> None:
        raise RuntimeError("on <b>purpose</b>")

    monkeypatch.setattr(share_casts, "_unify", fails)
    options = {"select": "all", "dump": tmp_path / "dump"}
    with pytest.warns(fp8compile.Fp8Warning, match="compiled without FP8"):
        fp8compile.explain(torch.nn.Linear(32, 32), torch.randn(16, 32), options=options)
    page = write_report(tmp_path / "dump", tmp_path / "report.html").read_text()
    seen = in_browser(page, tmp_path, AFTER_FAILURE)
    assert seen["errors"] == []
    assert seen["failure"].startswith("Failed in share_casts (joint): RuntimeError: on <b>purpose</b>")
    assert seen["drawings"][:2] == ["joint/input", "joint/share_casts_failed"]
    assert seen["nodes"] > 4
    assert seen["rows"] == 2


def test_the_page_has_an_optimizer_s_groups_states_and_updates(tmp_path: Path):
    parameters = [torch.nn.Parameter(torch.randn(n, 128)) for n in (64, 64, 1)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    explanation = fp8compile.explain(optimizer.step, options={"dump": tmp_path / "dump"})
    (graph,) = report_data(tmp_path / "dump")["graphs"]
    assert graph["title"] == "optimizer"
    assert graph["states"] == explanation.rows("states")
    assert graph["updates"] == explanation.rows("updates")
    assert [g["settings"].split(", e")[0] for g in graph["groups"]] == [
        "lr 0.001, betas (0.9, 0.999), weight_decay 0.1", "lr 0.001, betas (0.9, 0.999), weight_decay 0",
    ]  # fmt: skip
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    page = write_report(tmp_path / "dump", tmp_path / "report.html").read_text()
    seen = in_browser(page, tmp_path, AFTER_OPTIMIZER)
    assert seen["errors"] == []
    assert [row[:6] for row in seen["texts"]["grouptable"]] == [
        ["0", "2", "16384", "2", "128.00 KiB", "34.00 KiB"], ["1", "1", "128", "0", "1.00 KiB", "1.00 KiB"],
    ]  # fmt: skip
    assert [row[1] for row in seen["texts"]["statetable"]] == ["exp_avg", "exp_avg_sq"] * 3
    assert [row[0] for row in seen["texts"]["updatetable"]] == ["1", "2"]
    assert any("optimizer states, of 129.00 KiB: 4 of 6 in 8 bits" in card for card in seen["cards"])
