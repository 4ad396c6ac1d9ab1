"""Plans from JSON: their own, edited ones, or those of an explanation."""

from __future__ import annotations

from pathlib import Path

from fp8compile.errors import OptionError, shown
from fp8compile.plan.plan import Plan
from fp8compile.plan.read_rows import given_plans


def read_plans(path: str | Path) -> list[Plan]:
    """Return the plans in a file. Raises `OptionError`."""
    try:
        if Path(path).is_dir():
            raise OptionError("it is a folder; name a file in it, such as a dump's graph0/plan.json")
        if not Path(path).exists():
            raise OptionError("there is no file of that name")
        return plans_from_json(Path(path).read_text())
    except (OSError, ValueError) as error:  # of the file, of its text, or of what that says (`OptionError`)
        raise OptionError(f"plan {shown(str(path))} cannot be read: {error}") from error


def plans_from_json(text: str) -> list[Plan]:
    """Return the plans in the text of one plan, or of an explanation. Raises `OptionError` for other text."""
    return [Plan.from_data(data, where) for data, where in given_plans(text)]
