"""Choose the cases of tests that `make test` leaves out, by what each of them was seen to run.

    pip install coverage
    OMP_NUM_THREADS=1 pytest -n 2 --dist worksteal --all-cases -p arcs --arcs FOLDER      an hour, on two cores
    python -m tests.cases FOLDER                                                          writes tests/left_out.json

A run without --all-cases takes a fraction of that, and `tests.cases --further FOLDER` then leaves out more than before.

What stays: cases so short that leaving them out gains nothing; those that read sources instead of running them; those
that run nearly every branch that any test runs, first those that run most for their time; the shortest case of each
other test, unless it is long; and tests that tests/mutations.toml names. Of tests that start other processes, whose
branches are not seen, the shortest case stays unless it takes very long. `python -m tests.mutate` says whether what
stays notices what is broken.
`make test ARGS="--all-cases"` runs all. A case that the list does not know always runs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from tests import mutate

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("left_out.json")
SHORT, LONG, VERY_LONG = 0.5, 2.0, 20.0  # seconds
SHARE = 0.998  # of the branches that any test runs
ALWAYS = (  # their branches say little of them
    "tests/optimizer/test_shared_step.py::test_each_has_its_own_numbers",
    "tests/passes/attention/test_symbolic_masks.py::test_what_is_not_proven_is_read[window of 1000]",
    "tests/torch_hooks/test_trainers.py::test_hugging_face_trainer",
    "tests/train/test_lengths_that_change.py::test_lengths_that_are_quotients[inferred features-eager]",
)
OF_SOURCES = (  # they read files and modules: what they run says nothing of what they look at
    "tests/front_door/test_process_state.py",
    "tests/project/test_devices_of_launches.py",
    "tests/project/test_docstrings.py",
    "tests/project/test_imports.py",
    "tests/project/test_rooms.py",
    "tests/torch_hooks/test_patches.py",
    "tests/torch_hooks/test_private_api.py",
)
OTHER_PROCESSES = re.compile(r"\branks\b|subprocess|multiprocessing|printed_by|import command")


@dataclass(frozen=True, eq=False)
class Case:
    """One case of a test. name: as pytest has it; branches: numbers of those that it ran."""

    name: str
    seconds: float
    branches: frozenset[int]

    @property
    def test(self) -> str:
        """Its file and function, without its parameters."""
        return self.name.partition("[")[0]

    @property
    def parameters(self) -> str:
        """What stands in brackets."""
        return self.name.partition("[")[2].removesuffix("]")


def read(folder: Path) -> list[Case]:
    """Return what the processes of a run have noted."""
    numbers: dict[tuple[str, int, int], int] = {}
    cases = []
    for file in sorted(folder.glob("*.pickle")):
        own, tests = pickle.loads(file.read_bytes())
        known = {number: numbers.setdefault(branch, len(numbers)) for branch, number in own.items()}
        for name, (seconds, met) in tests.items():
            cases.append(Case(name, seconds, frozenset(known[number] for number in met)))
    return cases


@cache
def starts_processes(file: str) -> bool:
    """Return True if a test file names what starts other processes."""
    return OTHER_PROCESSES.search((ROOT / file).read_text()) is not None


def chosen(cases: Sequence[Case], named: Iterable[str] = ()) -> list[Case]:
    """Return the cases that stay. named: tests, and cases, that stay in any case."""
    must, shortest = frozenset(named), {c.test: c for c in sorted(cases, key=lambda c: -c.seconds)}
    unseen = {c for c in shortest.values() if starts_processes(c.name.partition("::")[0]) and c.seconds < VERY_LONG}
    must |= {c.name for c in cases if c.name.startswith(OF_SOURCES)}
    stays = [c for c in cases if c.seconds < SHORT or c in unseen or c.name in must or c.test in must]
    stays += _covering(cases, stays)
    tested = {c.test for c in stays}
    return stays + [c for test, c in shortest.items() if test not in tested and c.seconds < LONG]


def _covering(cases: Sequence[Case], taken: Iterable[Case]) -> list[Case]:
    """Return the cases which, with those that are taken, run nearly every branch.

    Those come first that run most for their time. What a case is worth only falls, so it is looked at again when it is
    the next one.
    """
    known = set(taken)
    missing = _run_by(cases) - _run_by(known)
    allowed = (1 - SHARE) * len(_run_by(cases))

    def worth(case: Case) -> float:
        return len(missing & case.branches) / case.seconds

    waiting = [(-worth(c), i, c) for i, c in enumerate(cases) if c not in known]
    heapq.heapify(waiting)
    found: list[Case] = []
    while waiting and len(missing) > allowed:
        _, i, case = heapq.heappop(waiting)
        now = worth(case)
        if now and waiting and now < -waiting[0][0]:
            heapq.heappush(waiting, (-now, i, case))
        elif now:
            found.append(case)
            missing -= case.branches
    return found


def _run_by(cases: Iterable[Case]) -> set[int]:
    """Return the branches that any of the cases runs."""
    return set(chain.from_iterable(c.branches for c in cases))


def left_out() -> dict[str, list[str]]:
    """Return the parameters of the cases that are left out, by test."""
    found: dict[str, list[str]] = json.loads(LIST.read_text())
    return found


def is_left_out(name: str, by_test: Mapping[str, Iterable[str]]) -> bool:
    """Return True if the case of this name is one of those left out."""
    test, _, parameters = name.partition("[")
    return parameters.removesuffix("]") in by_test.get(test, ())


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what the processes of the run have written")
    parser.add_argument("--further", action="store_true", help="what the list leaves out already is left out")
    given = parser.parse_args(arguments)
    cases = [c for c in read(given.folder) if not c.name.startswith("tests/gpu/")]
    stay = chosen(cases, [*ALWAYS, *(test for m in mutate.mutations() for test in m.names if "::" in test)])
    names = {c.name for c in stay}
    by_test = defaultdict(set, {test: set(left) for test, left in left_out().items()} if given.further else {})
    for case in (c for c in cases if c.name not in names):
        by_test[case.test].add(case.parameters)
    lines = [json.dumps({test: sorted(left)}, ensure_ascii=False)[1:-1] for test, left in sorted(by_test.items())]
    LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    of_all, of_those = (sum(c.seconds for c in x) for x in (cases, stay))
    branches = len(_run_by(stay)) / len(_run_by(cases))
    print(f"{len(stay)} of {len(cases)} cases stay: {of_those:.0f} of {of_all:.0f} s, {branches:.2%} of the branches")


if __name__ == "__main__":
    sys.exit(main())
