"""One digest over all of our source that compiles: any change to the compiler makes new cache keys."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
READS_ONLY = "insight"  # it looks at plans and graphs, and no compiled code depends on it


@functools.cache
def source_digest() -> str:
    """Return the SHA-256 of every Python file that compiles, in all rooms, in order of path."""
    digest = hashlib.sha256()
    for name, file in sorted(sources_of(HERE).items()):
        digest.update(name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def sources_of(package: Path) -> dict[str, Path]:
    """Return the Python files below the folder of the package that compile, by their path in it."""
    return {file.relative_to(package).as_posix(): file for file in _python_files(package)}


def _python_files(package: Path) -> Iterator[Path]:
    for root in (package, package / "passes", package / "kernels"):
        for file in root.rglob("*.py"):
            if file.relative_to(package).parts[0] != READS_ONLY:
                yield file
