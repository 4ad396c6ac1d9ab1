"""Functions that show plans and statistics. They live in `fp8compile/insight/` and are registered when fp8compile is
imported (`insight/printers.py`), so that plans are plain data and import no tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Printers:
    """Functions of a `Plan`: its first screen, one line for a log, HTML, one table, the rows of one table; and the text
    of the rows of `Statistics`."""

    text: Callable[[Any], str] = repr
    line: Callable[[Any], str] = repr
    html: Callable[[Any], str] = repr
    table: Callable[[Any, str], str] = lambda plan, name: repr(plan)
    rows: Callable[[Any, str], list[dict[str, Any]]] = lambda plan, name: []
    statistics: Callable[[Any], str] = repr


printers = Printers()
