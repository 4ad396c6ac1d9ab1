"""Environment variables: every FP8COMPILE_* variable that the compiler reads is read here, when it is imported.

| variable | meaning |
|---|---|
| FP8COMPILE_DUMP | a folder: write there what is compiled, as options={"dump": …} does |
"""

from __future__ import annotations

import os

folder: str | None = os.environ.get("FP8COMPILE_DUMP") or None  # where to dump; `fp8compile.dump` changes it


def dump_folder() -> str | None:
    """Return the folder for dumps of compilations whose options name none."""
    return folder
