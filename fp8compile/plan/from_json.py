"""Plans from JSON: their own, edited ones, or those of an explanation. What is wrong is named with its place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8compile.errors import OptionError, shown
from fp8compile.plan.json_rows import an_object, made, parsed, require
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import (
    Group,
    Kernel,
    Loss,
    Lowered,
    Mask,
    Matmul,
    MergedUpdate,
    Operand,
    Plan,
    Recomputed,
    Saved,
    State,
    Transfer,
)

TABLES = {
    "saved": Saved, "restored": Recomputed, "states": State, "groups": Group, "losses": Loss, "masks": Mask,
    "transfers": Transfer,
}  # fmt: skip
ADAPTIVE = "schedule: "  # begins the reasons of rows that an automatic schedule moved
UNSAID = {"node": "", "source": "", "kind": "mm", "m": 0, "n": 0, "k": 0}  # of a matmul's row; a size of 0: any
UNSAID_SAVED = {"node": "", "bytes": 0, "reason": ""}


def read_plans(path: str | Path) -> list[Plan]:
    """The plans in a file. Raises `OptionError`."""
    try:
        if Path(path).is_dir():
            raise OptionError("it is a folder; name a file in it, such as a dump's graph0/plan.json")
        if not Path(path).exists():
            raise OptionError("there is no file of that name")
        return plans_from_json(Path(path).read_text())
    except (OSError, ValueError) as error:  # of the file, of its text, or of what that says (`OptionError`)
        raise OptionError(f"plan {shown(str(path))} cannot be read: {error}") from error


def plans_from_json(text: str) -> list[Plan]:
    """The plans in the text of one plan, or of an explanation. Raises `OptionError` for other text."""
    data = parsed(text)
    plans = data.get("plans", [data]) if isinstance(data, dict) else None
    if not isinstance(plans, list) or not all(isinstance(p, dict) and "matmuls" in p for p in plans):
        raise OptionError("this JSON is neither a plan nor an explanation: it has no 'matmuls'")
    return [_plan(plan, f"plans[{i}]" if "plans" in data else "the plan") for i, plan in enumerate(plans)]


def plan_from_json(text: str) -> Plan:
    """The plan in the text of one, or of an explanation of one graph. Raises `OptionError` for other text."""
    data = parsed(text)
    if not isinstance(data, dict) or "plans" not in data:
        return _plan(data, "the plan")
    plans = plans_from_json(text)
    if len(plans) != 1:
        raise OptionError(f"this is an explanation of {len(plans)} graphs: Explanation.from_json reads them")
    return plans[0]


def lowered_from(data: dict[str, Any], where: str = "a half") -> Lowered:
    """A half from its plain data, as `dataclasses.asdict` gives it."""
    kernels = [made(Kernel, row, at) for row, at in _listed(data, "kernels", where)]
    updates = [made(MergedUpdate, row, at) for row, at in _listed(data, "updates", where)]
    return made(Lowered, {**data, "kernels": kernels, "updates": updates}, where)


def _plan(data: Any, where: str) -> Plan:
    tables: dict[str, Any] = {"matmuls": [_matmul(row, at) for row, at in _listed(data, "matmuls", where)]}
    for name, kind in TABLES.items():
        absent = UNSAID_SAVED if name == "saved" else {}
        tables[name] = [
            made(kind, _with_code(row) if name == "saved" else row, at, absent)
            for row, at in _listed(data, name, where)
        ]
    halves = an_object(data.get("halves", {}), f"{where}: 'halves'")
    tables["halves"] = {n: lowered_from(half, f"{where}: halves[{n!r}]") for n, half in halves.items()}
    return made(Plan, {**data, **tables}, where)


def _listed(data: Any, table: str, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a table, each with its place in words."""
    rows = an_object(data, where).get(table, [])
    if not isinstance(rows, list):
        raise OptionError(f"{where}: {table!r} is a list of rows, and not {rows!r}")
    for i, row in enumerate(rows):
        own = an_object(row, f"{table}[{i}] of {where}")
        named = " ".join(str(own[name]) for name in ("path", "role") if name in own)
        yield own, f"{table}[{i}]{f' ({named})' if named else ''} of {where}"


def _matmul(row: dict[str, Any], where: str) -> Matmul:
    require(row, ("path", "role", "decision"), where)
    sides = {s: made(Operand, row[s], f"{s!r} in {where}") for s in ("left", "right") if row.get(s) is not None}
    return made(Matmul, {**_with_code(row), **sides}, where, UNSAID)


def _with_code(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the code of its reason, where that matters for what is made of the plan.

    Plans that were written before reasons had codes say by the text alone what has followed the training.
    """
    if "code" in row or not str(row.get("reason", "")).startswith(ADAPTIVE):
        return row
    return {**row, "code": Reason.ADAPTIVE.value}
