"""Tables of pages are what the files of benchmarks give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import front_page, tables

MACHINE = {"device": "a GPU", "torch": "2.11"}


def row(model: str, system: str, **figures: float) -> dict[str, Any]:
    return {"model": model, "system": system, "note": "" if figures else "not installed", "figures": figures}


def run(day: int, *rows: dict[str, Any]) -> dict[str, Any]:
    return {"when": f"2026-01-{day:02}T00:00:00+00:00", "machine": MACHINE, "settings": {}, "rows": list(rows)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with a page and files of two benchmarks."""
    (tmp_path / "docs").mkdir()
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    runs = [
        run(1, row("Llama-8B", "BF16 compile", ms=76, peak_gib=5), row("Llama-8B", "fp8compile", ms=60, peak_gib=4)),
        run(2, row("Llama-8B", "BF16 compile", ms=75, peak_gib=5), row("Llama-8B", "fp8compile", ms=50, peak_gib=3),
            row("Llama-8B", "torchao rowwise"), row("Llama-8B", "BF16 eager") | {"note": "left out: 9 of 9 s over"}),
        run(3, row("Llama-8B", "fp8compile", ms=10), row("GPT-2 XL", "BF16 compile", ms=9)),
    ]  # fmt: skip
    (results / "block.json").write_text(json.dumps({"benchmark": "block", "runs": runs}))
    shape = row("Llama 1.1B", "down: output", m=1, n=2, k=3, BF16=700.4)
    (results / "matmul.json").write_text(json.dumps({"benchmark": "matmul", "runs": [run(4, shape)]}))
    (tmp_path / "README.md").write_text(
        "Before\n<!-- figures: block -->\nold\n<!-- end of figures -->\nafter\n"
        "<!-- figures: block summary -->\n<!-- end of figures -->\n"
    )
    (tmp_path / "docs" / "page.md").write_text("<!-- figures: matmul -->\n<!-- end of figures -->\n")
    return tmp_path


def test_places_are_filled_once(root: Path) -> None:
    assert tables.main(["--root", str(root)]) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("Before\n<!-- figures: block -->\n\n**Llama-8B**\n\n| system | ms | speed-up |")
    assert "old" not in text
    assert "<!-- end of figures -->\nafter\n" in text
    assert tables.main(["--root", str(root), "--check"]) == 0


def test_a_table_is_of_the_last_run_with_a_baseline(root: Path) -> None:
    tables.main(["--root", str(root)])
    text = (root / "README.md").read_text()
    assert "| fp8compile | 50.00 | 1.50× |" in text
    assert "| torchao rowwise | not installed |  |" in text
    assert "BF16 eager" not in text
    assert "a GPU, torch 2.11; 2026-01-02, 2026-01-03." in text  # of the third run the other model


def test_a_summary_has_a_line_a_model(root: Path) -> None:
    tables.main(["--root", str(root)])
    text = (root / "README.md").read_text()
    assert "|  | BF16 compile | fp8compile |\n" in text
    assert "| Llama-8B | 75.0 ms · 5.0 GiB | 1.50× · 0.60 |\n| GPT-2 XL | 9.0 ms | – |\n" in text


def test_a_benchmark_without_a_baseline(root: Path) -> None:
    tables.main(["--root", str(root)])
    assert "| down: output | 1 × 2 × 3 | 700 | – |" in (root / "docs" / "page.md").read_text()


def test_passes_have_a_line_each(root: Path) -> None:
    compiled = {**row("Llama 1.1B", "fp8compile", cold_seconds=9), "note": ""}
    compiled["figures"]["by_pass"] = {"canonicalize": 0.0124, "cut": 1.5}
    runs = [run(5, row("Llama 1.1B", "BF16 compile", cold_seconds=8), compiled)]
    file = root / "benchmarks" / "results" / "compile_time.json"
    file.write_text(json.dumps({"benchmark": "compile_time", "runs": runs}))
    (root / "README.md").write_text("<!-- figures: compile_time passes -->\n<!-- end of figures -->\n")
    tables.main(["--root", str(root)])
    table = "| pass | Llama 1.1B, ms |\n| --- | --- |\n| canonicalize | 12 |\n| cut | 1500 |\n"
    assert table in (root / "README.md").read_text()


STEPS = [
    row("Llama 1.1B", "BF16 compile", ms=240.04, peak_gib=20), row("Llama 1.1B", "torchao tensorwise"),
    row("Llama 1.1B", "BF16, masks folded", ms=200, peak_gib=19),
    row("Llama 1.1B", "fp8compile + 8-bit states", ms=120, peak_gib=10.04),
    row("Llama 100M", "BF16 compile", ms=9, peak_gib=2), row("ViT-H", "BF16 compile", ms=50, peak_gib=4),
    row("ViT-H", "fp8compile + 8-bit states", ms=40, peak_gib=3),
]  # fmt: skip


@pytest.fixture
def front(root: Path) -> Path:
    """A project with training steps, and the places of a first page."""
    file = root / "benchmarks" / "results" / "train_step.json"
    file.write_text(json.dumps({"benchmark": "train_step", "runs": [run(6, *STEPS)]}))
    forms = ("headline", "front")
    (root / "README.md").write_text(
        "".join(f"<!-- figures: train_step {f} -->\n<!-- end of figures -->\n" for f in forms)
    )
    (root / "docs" / "train_step.svg").write_text("old")
    tables.main(["--root", str(root)])
    return root


def test_the_first_page_has_systems_that_were_measured(front: Path) -> None:
    text = (front / "README.md").read_text()
    assert "|  | BF16 compile | BF16, masks folded | fp8compile + 8-bit states |\n" in text  # torchao has no figures
    assert "| Llama 1.1B | 240.0 ms · 20.0 GiB | 1.20× · 0.95 | 2.00× · 0.50 |\n" in text
    assert "| ViT-H | 50.0 ms · 4.0 GiB | – | 1.25× · 0.75 |\n" in text
    assert "Llama 100M" not in text


def test_the_headline_is_of_the_first_model(front: Path) -> None:
    text = (front / "README.md").read_text()
    result = "a training step of Llama 1.1B takes **120 ms** instead of 200 (1.67×; 2.00× with its mask read)"
    assert f"On one a GPU {result},\nand at most **10.0 GiB** instead of 19.0.\n" in text  # beside masks folded
    rows = [tables.Row(r["model"], r["system"], figures=r["figures"]) for r in STEPS if "masks" not in r["system"]]
    said = front_page.headline({"Llama 1.1B": ({"machine": {"device": "GPU"}}, rows)})
    assert "instead of 240 (2.00×),\n" in said


def test_a_picture_is_kept_up_to_date(front: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = front / "docs" / "train_step.svg"
    assert picture.read_text().count("<circle") == 3 + 2  # one a model and system beside BF16, and the legend
    assert tables.main(["--root", str(front), "--check"]) == 0
    picture.write_text("old")
    assert tables.main(["--root", str(front), "--check"]) == 1
    assert "docs/train_step.svg is not what the files give" in capsys.readouterr().out


def test_a_check_names_pages_and_writes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (root / "README.md").read_text()
    assert tables.main(["--root", str(root), "--check"]) == 1
    assert (root / "README.md").read_text() == before
    told = "{} is not what the files give; run: python -m benchmarks.tables\n"
    assert capsys.readouterr().out == told.format("README.md") + told.format("docs/page.md")


def test_a_place_of_an_unknown_benchmark(root: Path) -> None:
    (root / "README.md").write_text("<!-- figures: blocks -->\n<!-- end of figures -->\n")
    with pytest.raises(KeyError, match="blocks"):
        tables.main(["--root", str(root)])


def test_a_place_without_a_file(root: Path) -> None:
    (root / "README.md").write_text("<!-- figures: train_step -->\n<!-- end of figures -->\n")
    with pytest.raises(SystemExit, match=r"^README.md shows train_step, and \S+/train_step.json is not there$"):
        tables.main(["--root", str(root)])


def test_the_pages_of_this_project_are_up_to_date() -> None:
    assert tables.main(["--check"]) == 0
