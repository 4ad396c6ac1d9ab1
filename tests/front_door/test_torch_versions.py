"""Which versions of torch are refused, warned of once, or taken without a word."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import fp8compile
from fp8compile import torch_versions

ROOT = Path(fp8compile.__file__).parent.parent


def said_of(version: str) -> list[str]:
    said: list[str] = []
    torch_versions.check(version, said.append)
    return said


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.14.1+cu130", "2.15.0a0+git1234"])
def test_tested_versions_are_taken(version: str) -> None:
    assert not said_of(version)
    assert torch_versions.is_tested(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0.dev20270101+cu140", "2.100.1", "3.0.0a0"])
def test_a_newer_version_is_warned_of_with_the_tested_range(version: str) -> None:
    (message,) = said_of(version)
    assert "tested with torch 2.11 to 2.15" in message
    assert version in message
    assert not torch_versions.is_tested(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0", "unknown"])
def test_an_older_version_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"needs torch 2.11 or newer; this is torch {re.escape(version)}"):
        said_of(version)


def test_the_package_has_no_upper_bound_on_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [x for x in project["dependencies"] if re.match(r"torch\b", x)]
    assert torch == f"torch>={torch_versions.OLDEST[0]}.{torch_versions.OLDEST[1]}"
