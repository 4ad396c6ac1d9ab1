"""The versions of torch that this package was tested with: older ones are refused, newer ones warned of, once.

There is no upper bound. Under a newer torch all is tried as it is: what cannot be changed in it is left as it was
(`torch_hooks/patches.py`), and a graph that a pass cannot handle is compiled in its own precision; both say so.
`make test-matrix` runs the tests under each version.
"""

from __future__ import annotations

import re
from collections.abc import Callable

OLDEST, NEWEST = (2, 11), (2, 15)


def parsed(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version such as "2.16.0a0+git1234"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def is_newer(version: str) -> bool:
    """Return True if a version of torch is newer than those that were tested."""
    return parsed(version) > NEWEST


def is_tested(version: str) -> bool:
    """Return True if a version of torch is one of those that were tested."""
    return OLDEST <= parsed(version) <= NEWEST


def tested_range() -> str:
    """Return the versions that were tested, as warnings name them."""
    return f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check(version: str, warn: Callable[[str], None]) -> None:
    """Raise `ImportError` for a version of torch that is too old; warn of one that is newer than what was tested."""
    if parsed(version) < OLDEST:
        raise ImportError(f"fp8compile needs torch {OLDEST[0]}.{OLDEST[1]} or newer; this is torch {version}")
    if is_newer(version):
        warn(
            f"fp8: tested with {tested_range()}; this is torch {version}. What does not work there stays in its own "
            'precision, with a warning; options={"strict": True} raises instead.'
        )
