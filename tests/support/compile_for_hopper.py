"""Run the scripts beside it that compile kernels for Hopper, all in one process; prints, as JSON, what each printed.

    python tests/support/compile_for_hopper.py

A process of its own, as Triton is either interpreted or compiled in one.
"""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from collections.abc import Callable

import compile_few_rows
import compile_grouped_casts
import compile_grouped_rows
import compile_regions
import compile_softmax
import compile_updates
import compile_watching

# 1024 takes minutes of ptxas, and has no operator of its own; 298 and 426 cast one number, and zeros, four at a time;
# -10037 has rows of 1000 in groups of 64, reduced: whole, they take more than the shared memory has.
SEEDS = (1027, 1028, 1030, 1031, 298, 426, -10037)
SCRIPTS: dict[str, Callable[[], None]] = {
    "regions": lambda: compile_regions.main(0, 0, *SEEDS),
    "softmax": lambda: compile_softmax.main(verbose=False),
    "updates": lambda: compile_updates.main(verbose=False),
    "watching": lambda: compile_watching.main(verbose=False),
    "few rows": lambda: compile_few_rows.main(verbose=False),
    "grouped casts": lambda: compile_grouped_casts.main(verbose=False),
    "grouped rows": lambda: compile_grouped_rows.main(verbose=False),
}


def said(script: Callable[[], None]) -> str:
    """What a script prints, errors included."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            script()
        except SystemExit:
            pass
        except Exception:
            traceback.print_exc()
    return text.getvalue().strip()


if __name__ == "__main__":
    print(json.dumps({name: said(script) for name, script in SCRIPTS.items()}))
