"""The table of what was seen under each version of torch: how it is made, and that the page has a row for each."""

from __future__ import annotations

import re
from pathlib import Path

from fp8compile.torch_versions import NEWEST, OLDEST
from tests import matrix

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite time="90">
<testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="it differs">…</failure></testcase>
<testcase classname="tests.a" name="three"><skipped message="no GPU"/></testcase>
<testcase classname="tests.b" name="four"><error message="no fixture">…</error></testcase>
</testsuite></testsuites>"""
VERSIONS = {"torch": "2.15.0", "triton": "3.9.0", "python": "3.11.7"}


def test_a_row_counts_what_passed_failed_and_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    row = matrix.results(tmp_path / "report.xml", VERSIONS)
    assert (row.passed, row.skipped, row.failed) == (1, 1, ("tests.a::two", "tests.b::four"))
    shown = matrix.table([row]).splitlines()
    assert shown[2] == "| 2.15.0 | 3.9.0 | – | 3.11.7 | 1 | 1 | 2 | 2 |"
    assert shown[-2:] == ["2.15.0: tests.a::two", "2.15.0: tests.b::four"]


def test_a_run_that_ended_before_its_report_has_failed(tmp_path: Path) -> None:
    assert matrix.results(tmp_path / "none.xml", VERSIONS).failed


def test_every_version_is_run_and_has_a_row_in_the_docs() -> None:
    supported = {f"2.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)}
    default = re.search(r"^TORCH \?= (2\.\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert default is not None
    assert {*matrix.VERSIONS, default[1]} == supported
    page = (ROOT / "docs" / "versions.md").read_text()
    assert supported <= set(re.findall(r"^\| (2\.\d+)", page, re.MULTILINE))
