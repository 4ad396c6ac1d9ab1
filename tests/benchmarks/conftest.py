"""Benchmarks look for garbage before each system: among all that a run of many tests has made it takes longer than some
systems do."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def _garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)
