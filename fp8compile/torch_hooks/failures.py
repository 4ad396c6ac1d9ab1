"""When a pass fails on somebody's graph: a warning that says why, and a bug report ready to send.

The graph is then compiled as it came, without FP8; `strict=True` raises instead. The verifier runs after each pass, so
a wrong rewrite is a failed pass and not a wrong number.
"""

from __future__ import annotations

import platform
import tempfile
import traceback
from pathlib import Path

import torch
from torch import fx

from fp8compile.errors import first_line as first_line
from fp8compile.options import Options
from fp8compile.passes.core.graph_text import graph_text
from fp8compile.torch_hooks.calls.user_frame import warn_user


def warn(
    error: Exception, graph: fx.Graph, options: Options, consequence: str = "This graph is compiled without FP8"
) -> None:
    """Write a report on `error` and warn with its path and the consequence; `graph` is the graph before any pass."""
    path = _write(error, graph, options)
    warn_user(
        f"fp8: a pass failed ({first_line(error)}). {consequence}. "
        f"A bug report is ready at {path}; options={{'strict': True}} raises instead."
    )


def _write(error: Exception, graph: fx.Graph, options: Options) -> Path:
    path = Path(tempfile.mkdtemp(prefix="fp8compile-")) / "report.txt"
    trace = "".join(traceback.format_exception(error))
    path.write_text(
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}\n"
        f"{options!r}\n\n{trace}\nThe graph before the passes:\n{graph_text(graph)}"
    )
    return path
