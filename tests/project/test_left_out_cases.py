"""Cases are left out whose branches others run too, and are run where they are named or asked for."""

from __future__ import annotations

import array
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import cases, mutate
from tests.cases import Case
from tests.conftest import pytest_collection_modifyitems

FILE = "tests/project/test_mutations.py"  # one that starts no process by the words that are looked for


def case(test: str, parameters: str, seconds: float, *branches: int, file: str = FILE) -> Case:
    brackets = f"[{parameters}]" if parameters else ""
    return Case(f"{file}::{test}{brackets}", seconds, frozenset(branches))


def names(chosen: list[Case]) -> set[str]:
    return {c.name.partition("::")[2] for c in chosen}


def test_what_runs_nothing_new_is_left_out() -> None:
    found = [
        case("test_a", "all", 4.0, 1, 2, 3, 4),
        case("test_a", "some", 3.0, 1, 2),
        case("test_a", "few", 2.0, 3),
        case("test_a", "other", 9.0, 9),
    ]
    assert names(cases.chosen(found)) == {"test_a[all]", "test_a[other]"}


def test_what_is_named_stays() -> None:
    found = [case("test_a", "x", 1.0, 1), case("test_a", "y", 3.0, 1), case("test_a", "z", 4.0, 1)]
    assert names(cases.chosen(found, [f"{FILE}::test_a[z]"])) == {"test_a[z]"}
    assert cases.chosen(found, [f"{FILE}::test_a"]) == found


def test_many_branches_for_their_time_come_first() -> None:
    found = [case("test_a", "slow", 10.0, 1, 2, 3), case("test_a", "x", 1.0, 1, 2), case("test_a", "y", 1.0, 3)]
    assert names(cases.chosen(found)) == {"test_a[x]", "test_a[y]"}


def test_what_is_worth_less_by_now_is_looked_at_again() -> None:
    """`b` is second at first; when `a` was taken, `c` runs more that is new."""
    found = [
        case("test_a", "a", 1.0, 1, 2, 3, 4, 5),
        case("test_a", "b", 1.0, 1, 2, 3, 4),
        case("test_a", "c", 1.0, 6, 7),
    ]
    assert names(cases.chosen(found)) == {"test_a[a]", "test_a[c]"}


def test_short_ones_stay() -> None:
    found = [case("test_a", "", 5.0, 1), case("test_a", "x", 0.09, 1), case("test_a", "y", 1.0, 1)]
    assert names(cases.chosen(found)) == {"test_a[x]"}


def test_of_each_test_the_shortest_case_stays_unless_it_is_long() -> None:
    found = [case("test_a", "", 0.4, 1), case("test_b", "x", 3.0, 1), case("test_b", "y", 1.5, 1)]
    found += [case("test_c", "x", 6.0, 1), case("test_c", "y", 5.0, 1), case("test_d", "", 9.0, 2)]
    assert names(cases.chosen(found)) == {"test_a", "test_b[y]", "test_d"}


def test_what_starts_processes_keeps_a_case() -> None:
    """What those run is not seen."""
    file = "tests/distributed/test_fsdp2.py"
    found = [case("test_a", "x", 25.0, 1, file=file), case("test_a", "y", 14.0, 1, file=file)]
    found += [case("test_c", "", 25.0, 1, file=file)]
    assert names(cases.chosen([case("test_b", "", 0.4, 1), *found])) == {"test_b", "test_a[y]"}


def test_the_last_branches_may_cost_too_much() -> None:
    """One in five hundred is not asked for."""
    found = [case("test_a", "x", 3.0, *range(999)), case("test_a", "y", 30.0, 999), case("test_a", "z", 30.0, 1000)]
    assert names(cases.chosen(found)) == {"test_a[x]"}
    assert names(cases.chosen([found[0], case("test_a", "y", 30.0, 999, 1000, 1001)])) == {"test_a[x]", "test_a[y]"}


def test_numbers_of_several_processes_are_of_the_same_branches(tmp_path: Path) -> None:
    first, second = ("a.py", 1, 2), ("b.py", 1, 2)
    for name, numbers in (("x", {first: 0, second: 1}), ("y", {second: 0, first: 1})):
        tests = {f"{FILE}::test_{name}": (1.0, array.array("i", [1]))}
        (tmp_path / f"{name}.pickle").write_bytes(pickle.dumps((numbers, tests)))
    x, y = cases.read(tmp_path)
    assert x.branches != y.branches
    assert x.branches | y.branches == {0, 1}


def test_no_case_that_a_mutation_names_is_left_out() -> None:
    by_test = cases.left_out()
    named = {test for m in mutate.mutations() for test in m.names if "::" in test}
    assert not {name for name in named if name in by_test or cases.is_left_out(name, by_test)}


def test_the_list_names_tests_that_exist() -> None:
    assert cases.left_out()
    for test, parameters in cases.left_out().items():
        file, *_, function = test.split("::")
        assert f"def {function}(" in (cases.ROOT / file).read_text(), f"{test}: run `python -m tests.cases` anew"
        assert len(set(parameters)) == len(parameters) > 0


@pytest.mark.parametrize(
    ("arguments", "keyword", "every", "runs"),
    [
        (["tests"], "", False, False),
        (["tests/plan"], "", False, False),
        (["tests"], "", True, True),
        (["tests"], "name", False, True),
        (["tests/x.py::test_y[z]"], "", False, True),
    ],
)
def test_what_is_named_runs(arguments: list[str], keyword: str, every: bool, runs: bool) -> None:
    test, parameters = next(iter(cases.left_out().items()))
    gone: list[Any] = []
    config: Any = SimpleNamespace(
        getoption=lambda name: every,
        option=SimpleNamespace(keyword=keyword),
        args=arguments,
        hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)),
    )
    items: list[Any] = [Named(f"{test}[{parameters[0]}]"), Named(f"{test}[never known]")]
    left = list(items)
    pytest_collection_modifyitems(config, left)
    assert len(left) == (2 if runs else 1)
    assert left + gone == items if runs else gone == items[:1]


class Named:
    """An item of pytest that has a name alone, and can be one of a set."""

    def __init__(self, name: str):
        self.nodeid = name
