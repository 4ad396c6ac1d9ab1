"""What one system has measured of rows of which the other's figures are missing: kept for the next run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.harness.columns import Row


class Halves:
    """Rows of single systems, in a file that is there as long as any row waits for another system's."""

    def __init__(self, path: Path, systems: Sequence[str]):
        self.path, self.systems = path, systems
        known = [Row(**row) for row in json.loads(path.read_text())] if path.exists() else []
        self.rows = {(row.model, row.system): row for row in known}

    def has(self, model: str, system: str) -> bool:
        return (model, system) in self.rows

    def add(self, row: Row) -> list[Row]:
        """Return the rows of all systems on this model, in their order, once all are there; until then none."""
        self.rows[row.model, row.system] = row
        complete = all(self.has(row.model, system) for system in self.systems)
        found = [self.rows.pop((row.model, system)) for system in self.systems] if complete else []
        self._write()
        return found

    def _write(self) -> None:
        if not self.rows:
            self.path.unlink(missing_ok=True)
            return
        aside = self.path.with_suffix(".part")
        aside.write_text(json.dumps([asdict(row) for row in self.rows.values()]) + "\n")
        aside.replace(self.path)
