"""JSON as rows of dataclasses. People edit it, so every error says which row and which field is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from fp8compile.errors import OptionError, unknown_name

T = TypeVar("T")


def parsed(text: str, where: str = "this") -> Any:
    """Return what JSON text holds. Raises `OptionError`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{where} is no JSON: {error}") from error


def an_object(data: Any, where: str) -> dict[str, Any]:
    """Return `data`, if it is a JSON object. Raises `OptionError`."""
    if not isinstance(data, dict):
        raise OptionError(f"{where} is a JSON object, and not {data!r}")
    return data


def made(kind: Callable[..., T], data: Any, where: str, absent: Mapping[str, Any] = {}) -> T:
    """Return the dataclass `kind` of these fields; absent: what fields are that `data` lacks. Raises `OptionError`."""
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name, value in an_object(data, where).items():
        if name not in known:
            raise OptionError(f"{where}: {unknown_name('field', name, known)}")
        if not _fits(value, str(known[name].type)):
            raise OptionError(f"{where}: {name!r} is {_words(str(known[name].type))}, and not {value!r}")
    values = {**absent, **{name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}}
    values |= {n: list(v) for n, v in data.items() if isinstance(v, list) and str(known[n].type).startswith("list[")}
    require(values, (n for n, f in known.items() if f.default is f.default_factory is MISSING), where)
    return kind(**values)


def require(data: dict[str, Any], names: Iterable[str], where: str) -> None:
    """Raise `OptionError` where `data` lacks one of the fields."""
    missing = [name for name in names if name not in data]
    if missing:
        raise OptionError(f"{where}: there is no {' and no '.join(map(repr, missing))}")


def _fits(value: Any, declared: str) -> bool:
    """Return True if a value is what an annotation declares: "int | str", "tuple[str, ...]". Of dicts, the outside."""
    if declared.startswith("tuple["):
        inner = declared.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, (list, tuple)) and all(_fits(v, inner) for v in value)
    names = {part.split("[")[0] for part in declared.split(" | ")}
    own = type(value).__name__
    return own in names or (own == "int" and "float" in names) or (value is None and "None" in names)


def _words(declared: str) -> str:
    return declared.replace("tuple[", "a list of ").replace(", ...]", "").replace(" | ", " or ").replace("None", "null")
