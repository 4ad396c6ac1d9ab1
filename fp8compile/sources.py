"""One digest over all of our source: any change to the compiler makes new cache keys."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def source_digest() -> str:
    """SHA-256 of every Python file of the package, in order of name."""
    digest = hashlib.sha256()
    for folder in (HERE, HERE / "passes", HERE / "kernels"):
        for file in sorted(folder.glob("*.py")):
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
