"""Rows of plans out of plain data, as JSON has it. What is wrong is named with its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8compile.errors import OptionError
from fp8compile.plan.json_rows import an_object, made, parsed, require
from fp8compile.plan.reasons import ADAPTED, Reason
from fp8compile.plan.rows import (
    Group,
    Kernel,
    Loss,
    Lowered,
    Mask,
    Matmul,
    MergedUpdate,
    Operand,
    Recomputed,
    Saved,
    State,
    Transfer,
)

TABLES = {
    "saved": Saved, "restored": Recomputed, "states": State, "groups": Group, "losses": Loss, "masks": Mask,
    "transfers": Transfer,
}  # fmt: skip
ONCE_ADAPTED = ("schedule: ",)  # as reasons began in earlier versions
UNSAID = {"node": "", "source": "", "kind": "mm", "m": 0, "n": 0, "k": 0}  # of a matmul's row; a size of 0: any
UNSAID_SAVED = {"node": "", "bytes": 0, "reason": ""}


def given_plans(text: str) -> list[tuple[Any, str]]:
    """Return the plain data of each plan in the JSON of a plan or of an explanation, with its name in errors.

    Raises `OptionError` for other text.
    """
    data = parsed(text)
    plans = data.get("plans", [data]) if isinstance(data, dict) else None
    if not isinstance(plans, list) or not all(isinstance(p, dict) and "matmuls" in p for p in plans):
        raise OptionError("this JSON is neither a plan nor an explanation: it has no 'matmuls'")
    return [(plan, f"plans[{i}]" if "plans" in data else "the plan") for i, plan in enumerate(plans)]


def plan_fields(data: Any, where: str) -> dict[str, Any]:
    """Return the fields of a plan, its rows made of plain data. Raises `OptionError`."""
    tables: dict[str, Any] = {"matmuls": [_matmul(row, at) for row, at in _listed(data, "matmuls", where)]}
    for name, kind in TABLES.items():
        absent = UNSAID_SAVED if name == "saved" else {}
        tables[name] = [
            made(kind, _with_code(row) if name == "saved" else row, at, absent)
            for row, at in _listed(data, name, where)
        ]
    halves = an_object(data.get("halves", {}), f"{where}: 'halves'")
    tables["halves"] = {n: lowered_from(half, f"{where}: halves[{n!r}]") for n, half in halves.items()}
    return {**data, **tables}


def lowered_from(data: dict[str, Any], where: str = "a half") -> Lowered:
    """Return a half made of its plain data, as `dataclasses.asdict` gives it. Raises `OptionError`."""
    kernels = [made(Kernel, row, at) for row, at in _listed(data, "kernels", where)]
    updates = [made(MergedUpdate, row, at) for row, at in _listed(data, "updates", where)]
    return made(Lowered, {**data, "kernels": kernels, "updates": updates}, where)


def _listed(data: Any, table: str, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows of a table, each with its place in words."""
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
    if "code" in row or not str(row.get("reason", "")).startswith((ADAPTED, *ONCE_ADAPTED)):
        return row
    return {**row, "code": Reason.ADAPTIVE.value}
