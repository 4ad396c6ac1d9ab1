"""What a host launches costs nothing here: these tests compare times of a GPU. `test_host_costs.py` has the host's."""

from __future__ import annotations

import pytest

from fp8compile.passes.matmul import host_costs


@pytest.fixture(autouse=True)
def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_costs, "is_shorter", lambda *times: True)
