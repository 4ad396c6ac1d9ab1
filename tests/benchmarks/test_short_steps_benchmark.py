"""Benchmarks of short steps without a GPU: rows are rows of the field suite, and their figures are there."""

from __future__ import annotations

import multiprocessing

import pytest

from benchmarks.field.models import BY_NAME
from benchmarks.harness.processes import Case, in_this_process
from benchmarks.training import paired_steps, short_steps


def test_every_row_is_in_the_field_suite() -> None:
    assert set(short_steps.NAMES) <= set(BY_NAME)


@pytest.mark.parametrize("system", ["BF16 compile", "fp8compile + 8-bit states"])
def test_a_row_is_measured(system: str) -> None:
    figures = in_this_process(short_steps.measure, Case("nanoGPT's loop", system, tiny=True))
    parts = [figures[name] for name in short_steps.PARTS]
    assert min(parts) > 0
    assert bool(figures["in_fp8"]) == (system != "BF16 compile")
    assert not figures["note"]  # on a CPU nothing waits for a host


def test_systems_by_turns() -> None:
    (row,) = paired_steps.main(["--tiny", "--only", "nano*loop"])
    for name in paired_steps.SYSTEMS:
        assert row.get(f"{name}_ms") > 0
        assert row.get(f"{name}_host_ms") == pytest.approx(sum(row.get(f"{name}_parts_ms")))
        assert len(row.get(f"{name}_parts_ms")) == len(short_steps.PARTS)
    assert len({row.get(f"{name}_ms") for name in paired_steps.SYSTEMS}) == 3


def test_busy_cores_are_given_back() -> None:
    with short_steps.busy(2):
        assert len(multiprocessing.active_children()) == 2
    for process in multiprocessing.active_children():
        process.join(10)
    assert not multiprocessing.active_children()
