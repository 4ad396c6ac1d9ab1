"""How benchmarks are run: processes, time, files, tables, pictures."""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import processes, runs
from benchmarks.harness.columns import Row, figure, markdown, ratio, text_line
from benchmarks.harness.peers import LeftOutError
from benchmarks.harness.processes import Case, Clock, FailedError
from benchmarks.harness.runs import Benchmark

MS = {"right away": 2.0, "twice": 1.0}


def behave(case: Case) -> dict[str, Any]:
    """A system that does what its name says."""
    if case.system == "dies":
        os._exit(3)
    if case.system == "hangs":
        time.sleep(60)
    if case.system == "fails":
        raise ValueError("no such thing\nat all")
    if case.system == "is left out":
        raise LeftOutError("it is not installed")
    caches = [os.environ[name] for name in processes.CACHES]
    return {"ms": MS.get(case.system, 0.0), "mib": 3, "caches": caches, "files": os.listdir(caches[0])}


@dataclass(frozen=True)
class Crowded:
    """A system that is timed for a moment; one that has no memory the first time, and one that is there until this one
    has begun again: it is beside others, however busy the machine is."""

    folder: Path

    def __call__(self, case: Case) -> dict[str, Any]:
        first, again = self.folder / "first", self.folder / "again"
        if case.system == "has no memory":
            if not first.exists():
                first.touch()
                raise torch.OutOfMemoryError("CUDA out of memory")
            again.touch()
        give_up = time.monotonic() + 100
        while case.system == "twice" and not again.exists():
            assert time.monotonic() < give_up, "what had no memory has not begun again"
            time.sleep(0.01)
        figures = behave(case)
        with case.alone():
            start = time.monotonic()
            time.sleep(0.5)
            return figures | {"alone": (start, time.monotonic())}


def in_warm_caches(case: Case) -> dict[str, Any]:
    assert case.warm
    return {"warm": os.environ["TORCHINDUCTOR_CACHE_DIR"]}


def about_nothing(case: Case) -> dict[str, Any]:
    return {"device": "none"}


def no_gpu(case: Case) -> dict[str, Any]:
    raise RuntimeError("none here")


BENCHMARK = Benchmark(
    "waiting",
    {model: ["right away", "twice", "is left out", "fails", "hangs"] for model in ("one", "other")},
    behave,
    (figure("ms", "ms"), ratio("speed-up", "ms"), ratio("share", "ms", inverse=True)),
    "right away",
    axes=(("mib", "MiB"), ("ms", "ms")),
)


def given(*arguments: str) -> Any:
    return runs.options("").parse_args(arguments)


def test_a_process_has_the_caches_it_is_given_and_returns_figures(tmp_path: Path) -> None:
    found = processes.isolated(behave, Case("one", "twice", cache=str(tmp_path)), "fork", 20.0)
    assert found == {"ms": 1.0, "mib": 3, "caches": [str(tmp_path), str(tmp_path / "triton")], "files": []}
    assert str(tmp_path) not in os.environ.values()


def test_systems_have_empty_caches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "about_machine", about_nothing)
    rows = runs.run(replace(BENCHMARK, again=in_warm_caches), given("--only", "one", "--systems", "right*,twice,fails"))
    first, second, failed = rows
    assert [r.get("files") for r in (first, second)] == [[], []]
    assert first.get("warm") == first.get("caches")[0] != second.get("caches")[0]
    assert not any(Path(folder).exists() for r in (first, second) for folder in r.get("caches"))
    assert failed.note == "failed: ValueError: no such thing"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, begin = list[str](), processes.begin

    def begin_quickly(measure: processes.Measure, case: Case, start: str) -> Any:
        starts.append(start)
        return begin(measure, case, "fork")  # a new process imports torch before it does anything

    monkeypatch.setattr(processes, "about_machine", no_gpu)
    monkeypatch.setattr(processes, "begin", begin_quickly)
    with pytest.raises(SystemExit, match=r"this needs a GPU \(RuntimeError: none here\); --tiny runs anywhere"):
        runs.run(BENCHMARK, given())
    assert starts == ["fork", "spawn"]


@pytest.mark.parametrize(
    ("system", "error", "message"),
    [
        ("dies", FailedError, "its process died"),
        ("hangs", LeftOutError, "stopped after 0 s"),
        ("fails", FailedError, "ValueError: no such thing"),
        ("is left out", LeftOutError, "it is not installed"),
    ],
)
def test_what_goes_wrong_in_a_process(system: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        processes.isolated(behave, Case("one", system), "fork", 0.4 if system == "hangs" else 20.0)


def test_side_by_side_each_is_timed_alone_and_what_had_no_memory_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "about_machine", about_nothing)
    cases = {"one": ["right away", "has no memory", "fails", "twice"]}
    benchmark = replace(BENCHMARK, cases=cases, measure=Crowded(tmp_path))
    rows = runs.run(benchmark, given("--jobs", "4", "--json", str(tmp_path / "figures.json")))
    assert [r.system for r in rows] == cases["one"]
    assert [r.note for r in rows] == ["", "", "failed: ValueError: no such thing", ""]
    spans = sorted(tuple(r.get("alone")) for r in rows if r.figures.get("alone"))
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert len(runs.load(tmp_path / "figures.json")["runs"][0]["rows"]) == len(rows)


def test_side_by_side_ends_in_time_and_says_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "about_machine", about_nothing)
    start = time.monotonic()
    rows = runs.run(BENCHMARK, given("--systems", "hangs", "--jobs", "1", "--seconds", "2"))
    assert time.monotonic() - start < 20
    assert [r.note for r in rows] == ["left out: 2 of 2 s were over"] * 2


def test_a_run_adds_itself_to_the_file_and_compares_with_its_own_baseline(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in processes.CACHES:
        monkeypatch.setenv(name, str(tmp_path))
    file = tmp_path / "figures.json"
    for models, systems in (("one", "right*,twice,is*,fails"), ("on*", "right*")):
        runs.run(BENCHMARK, given("--tiny", "--only", models, "--systems", systems, "--json", str(file)))
    first, second = runs.load(file)["runs"]
    assert [len(run["rows"]) for run in (first, second)] == [4, 1]
    rows = {row.system: row for row in first["rows"]}
    assert rows["twice"].get("ms") == 1.0
    assert rows["is left out"].note == "it is not installed"
    assert rows["fails"].note == "failed: ValueError: no such thing"
    assert first["machine"]["torch"]
    lines = capsys.readouterr().out.splitlines()
    assert "one: twice               1.0     2.00×      0.50" in lines
    assert "one: is left out    it is not installed" in lines


def test_what_may_not_end_in_time_is_left_out() -> None:
    clock = Clock(100.0)
    clock.longest = 101.0
    case = Case("one", "right away")
    log = runs.Log(BENCHMARK, None, {}, {}, [case])
    (row,) = runs.measure_all([case], log, clock, behave)
    assert row.note == "left out: 0 of 100 s were over"


def test_nothing_selected() -> None:
    with pytest.raises(SystemExit, match="nothing to run; there are"):
        runs.run(BENCHMARK, given("--only", "none"))


def test_compile_times_are_not_measured_with_everything_compiled() -> None:
    with pytest.raises(SystemExit, match="waiting measures compiling; --jobs would have it done before"):
        runs.run(replace(BENCHMARK, again=in_warm_caches), given("--jobs", "2"))


def test_pictures_have_the_systems_that_were_measured(tmp_path: Path) -> None:
    rows = [Row("A b-1", "BF16", "", {"ms": 2.0, "mib": 3.0}), Row("A b-1", "torchao", "not installed"), Row("C", "x")]
    runs.draw(BENCHMARK, rows, tmp_path)
    (picture,) = tmp_path.iterdir()
    assert picture.name == "waiting_a_b_1.svg"
    assert ">BF16<" in picture.read_text()
    assert "torchao" not in picture.read_text()


def test_cells_without_a_figure() -> None:
    row = Row("m", "s", "", {"ms": 1.0})
    assert text_line((figure("ms", "ms"), ratio("speed-up", "ms"), figure("peak", "gib")), 6, row, None).split() == [
        "m:", "s", "1.0", "–", "–",
    ]  # fmt: skip
    assert markdown(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_a_file_is_whole_at_any_time(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    log = runs.Log(BENCHMARK, file, {"device": "none"}, {}, [Case("one", "twice")])
    for n in range(3):
        log.add(Row("one", f"system {n}"))
        assert len(json.loads(file.read_text())["runs"][0]["rows"]) == n + 1


def test_what_models_need_is_what_they_needed(tmp_path):
    """The most of all runs and systems; a model that was never measured may need a whole GPU."""
    rows = [
        [{"model": "a", "system": "x", "figures": {"peak_gib": 12.0}}, {"model": "b", "system": "x", "figures": {}}],
        [{"model": "a", "system": "y", "figures": {"peak_gib": 5.0}}, {"model": "a", "system": "x", "figures": {}}],
        [{"model": "c", "system": "x", "figures": {"peak_gib": 90.0}}],
    ]
    known = tmp_path / "figures.json"
    known.write_text(json.dumps({"runs": [{"rows": r} for r in rows]}))
    cases = [Case(model, "y") for model in "abc"]
    found = {need.name: need.gib for need, _ in runs.needs(cases, known, 70.0)}
    assert found == {"a": 12.0, "b": 70.0, "c": 70.0}
    assert {need.gib for need, _ in runs.needs(cases, tmp_path / "none.json", 70.0)} == {70.0}
