"""The list of mutations is current, and a mutation that a test notices is told from one that none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutate
from tests.mutate import Mutation


@pytest.mark.parametrize("mutation", mutate.mutations(), ids=lambda m: f"{m.file}: {m.new}")
def test_a_mutation_changes_one_place_and_its_tests_are_there(mutation: Mutation) -> None:
    assert (mutate.ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    assert all((mutate.ROOT / test.split("::")[0]).exists() for test in mutation.names)


def test_what_is_not_there_once_is_no_mutation(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "x = 2"):
        with pytest.raises(ValueError, match=r"a\.py has 'x = .' . times, not once"):
            Mutation("a.py", old, "", "").apply(tmp_path)


def test_what_no_test_notices_survives() -> None:
    """Of a copy of this checkout, whose tests pass."""
    said = mutate.survives(
        Mutation(
            "fp8compile/source_digest.py",
            "hashlib.sha256()",
            "hashlib.sha512()",
            "tests/front_door/test_source_digest.py",
        )
    )
    assert " passed" in said


@pytest.mark.parametrize(("new", "said"), [("x = 2", ""), ("x = (", "error")])
def test_only_what_no_test_notices_survives(
    new: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkout that imports nothing: a test that fails is told from one that cannot run."""
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "test_a.py").write_text("import a\n\n\ndef test_x():\n    assert a.x == 1\n")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "COPIED", ("a.py", "test_a.py"))
    found = mutate.survives(Mutation("a.py", "x = 1", new, "test_a.py"))
    assert said in found
    assert bool(found) == bool(said)
