"""Numbers as people read them."""

from __future__ import annotations

WIDTH = 120  # of a terminal, in columns


def size(count: int) -> str:
    """Return a number of bytes in the largest unit that leaves a number of at least one."""
    number, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.2f} {units[0]}"


def si(count: int) -> str:
    """Return a number with three digits and a prefix: 1 230 000 → "1.23 M"."""
    number, units = float(count), ["", "k", "M", "G", "T", "P", "E"]
    while number >= 1000 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.3g} {units[0]}"


def counted(n: int, word: str, plural: str = "s") -> str:
    """Return a number with its noun: "1 launch", "2 launches"."""
    return f"{n} {word}{plural if n != 1 else ''}"
