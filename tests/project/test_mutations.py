"""The list of mutations is current, and a mutation that a test notices is told from one that none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutate
from tests.mutate import Mutation

DIGEST = "fp8compile/source_digest.py"


@pytest.mark.parametrize("mutation", mutate.mutations(), ids=lambda m: f"{m.file}: {m.new}")
def test_a_mutation_changes_one_place_and_its_tests_are_there(mutation: Mutation) -> None:
    assert (mutate.ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert all((mutate.ROOT / test.split("::")[0]).exists() for test in mutation.tests.split())


def test_what_is_not_there_once_is_no_mutation(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "x = 2"):
        with pytest.raises(ValueError, match=r"a\.py has 'x = .' . times, not once"):
            Mutation("a.py", old, "", "").apply(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "is_noticed"),
    [('root.rglob("*.py")', 'root.glob("*.py")', True), ("hashlib.sha256()", "hashlib.sha512()", False)],
)
def test_only_what_no_test_notices_survives(old: str, new: str, is_noticed: bool) -> None:
    said = mutate.survives(Mutation(DIGEST, old, new, "tests/front_door/test_source_digest.py"))
    assert bool(said) != is_noticed, said
