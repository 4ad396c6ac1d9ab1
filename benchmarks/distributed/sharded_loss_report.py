"""What `sharded_loss.py` makes of its runs: rows in a file, a table, a picture."""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import curves

READING, LAST = 10, 50  # steps in a reading, steps in the result
SHOWN = (1, 10, 50, 100, 200, 300)


@dataclass(frozen=True)
class System:
    """A way to train; `alone`: also on one GPU."""

    name: str
    fp8: bool = True
    gather: bool = False
    eight_bit: bool = False
    alone: bool = False


SYSTEMS = {
    system.name: system
    for system in (
        System("BF16", fp8=False, alone=True),
        System("ours", alone=True),
        System("ours + FP8 gather", gather=True),
        System("ours + FP8 gather, 8-bit states", gather=True, eight_bit=True),
    )
}


@dataclass
class Row:
    """What a system gave on so many ranks; `note` says why there is nothing.

    losses: of each step, the mean over ranks; batch: sequences of a rank in a step; fp8_matmuls: in a block;
    states_mib: of the optimizer, on a rank; seconds: all that it took, compiling included.
    """

    ranks: int
    system: str
    device: str
    note: str = ""
    losses: list[float] = field(default_factory=list)
    ms: float = 0.0
    batch: int = 0
    fp8_matmuls: int = 0
    states_mib: float = 0.0
    seconds: float = 0.0

    def at(self, step: int) -> float:
        """Return the loss of the steps up to `step`, as the table has it."""
        return statistics.mean(self.losses[max(0, step - READING) : step])

    @property
    def tail(self) -> int:
        """How many steps the result is the mean of: 50 of 300, a sixth of fewer."""
        return max(1, min(LAST, len(self.losses) // 6))

    @property
    def last(self) -> float:
        return statistics.mean(self.losses[-self.tail :])


# ---- the file -------------------------------------------------------------------------------------------------------


def read(file: Path, settings: Mapping[str, Any] | None = None) -> list[Row]:
    """Return the rows of a file, which has to be of these settings."""
    if not file.exists():
        return []
    with file.open() as f:
        fcntl.flock(f, fcntl.LOCK_SH)  # until it is closed
        return parse(f.read(), file, settings)


def parse(text: str, file: Path, settings: Mapping[str, Any] | None) -> list[Row]:
    """Return the rows of a file's text; raises SystemExit where its settings, and so its losses, are others."""
    if not text:
        return []
    found = json.loads(text)
    if settings is not None and (now := json.loads(json.dumps(settings))) != found["settings"]:
        changed = ", ".join(name for name in now if now[name] != found["settings"].get(name))
        raise SystemExit(f"{file} has rows of other settings ({changed}): take another --json")
    return [Row(**row) for row in found["rows"]]


def add(row: Row, file: Path, settings: Mapping[str, Any]) -> None:
    """Add a row to the file, in place of one of the same ranks and system; others may do so at the same time."""
    with file.open("a+") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        rows = {(r.ranks, r.system): r for r in parse(f.read(), file, settings)}
        rows[row.ranks, row.system] = row
        order = sorted(rows.values(), key=lambda r: (r.ranks, list(SYSTEMS).index(r.system)))
        f.truncate(0)
        f.write(json.dumps({"settings": settings, "rows": [asdict(r) for r in order]}) + "\n")


# ---- printing -------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> str:
    """Return the rows for people."""
    done = {(r.ranks, r.system): r for r in rows if not r.note}
    if not done:
        return "\n".join(f"{r.ranks} × {r.system}: {r.note}" for r in rows) or "no rows"
    some = next(iter(done.values()))
    steps = sorted({step for step in SHOWN if step < len(some.losses)} | {len(some.losses)})
    head = f"{'GPUs':<6}{'system':<33}" + "".join(f"{f'at {step}':>9}" for step in steps)
    lines = [f"{head}{f'last {some.tail}':>10}{'one GPU':>10}{'BF16':>9}{'ms':>9}"]
    for r in rows:
        start = f"{r.ranks:<6}{r.system:<33}"
        if r.note:
            lines.append(start + "  " + r.note)
            continue
        itself, other, bf16 = (done.get((1, name)) for name in (r.system, "ours", "BF16"))
        alone = beside(r, itself) if itself or not SYSTEMS[r.system].fp8 else beside(r, other, "*")
        figures = "".join(f"{r.at(step):9.4f}" for step in steps) + f"{r.last:10.4f}"
        lines.append(f"{start}{figures}{alone:>10}{beside(r, bf16):>9}{r.ms:9.1f}")
    return "\n".join(lines)


def beside(row: Row, base: Row | None, mark: str = "") -> str:
    """Return how far the result of a row lies above another's."""
    if base is None or base is row:
        return "-"
    return f"{row.last / base.last - 1:+.2%}{mark}"


def picture(rows: Sequence[Row]) -> str:
    """Readings of the training loss over steps, as SVG."""
    found = []
    for r in (r for r in rows if not r.note):
        x = [*range(READING, len(r.losses), READING), len(r.losses)]
        name = f"{r.ranks} × {r.system.removeprefix('ours + ')}"
        found.append(curves.Curve(name, x, [r.at(step) for step in x], [0.0] * len(x)))
    return curves.draw(found, "Training loss under FSDP2", "steps", "nats per byte")
