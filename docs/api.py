"""docs/api.md, made of the docstrings of everything public: options, recipes, levels, and the names of `fp8compile`.

    python docs/api.py            # writes docs/api.md
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import fp8compile
from fp8compile.levels import LEVELS

PAGE = Path(__file__).parent / "api.md"
HEAD = """# Reference

Made of the docstrings by `python docs/api.py`; a test sees that it is current.

"""
ENTRY = re.compile(r"^(\w+(?:, \w+)*): ")  # "name: what it is" begins an entry of a list in a docstring


def page() -> str:
    """Return the text of docs/api.md."""
    parts = [_options(), _recipes(), _levels()]
    named = [(name, getattr(fp8compile, name)) for name in fp8compile.__all__]
    parts.append(_section("Functions", [p for name, x in named if inspect.isfunction(x) for p in _function(name, x)]))
    classes = [(name, x) for name, x in named if inspect.isclass(x)]
    failures = [pair for pair in classes if issubclass(pair[1], (Exception, Warning))]
    plain = [pair for pair in classes if pair not in failures]
    parts.append(_section("Classes", [p for name, x in plain for p in _class(name, x)]))
    parts.append(_section("Errors and warnings", [f"- `{name}`: {_flowing(_doc(x))}" for name, x in failures], "\n"))
    parts.append(_section("Modules", [p for name, x in named if isinstance(x, types.ModuleType) for p in _module(name, x)]))
    rest = [name for name, x in named if not isinstance(x, types.ModuleType) and not inspect.isfunction(x)]
    constants = [name for name in rest if not inspect.isclass(getattr(fp8compile, name)) and name != "RECIPES"]
    values = [f"- `{name}`: {_flowing(_doc(type(getattr(fp8compile, name))))}" for name in constants]
    parts.append(_section("Constants", values, "\n"))
    return HEAD + "\n".join(parts)


def _section(title: str, parts: Sequence[str], between: str = "\n\n") -> str:
    return f"## {title}\n\n" + between.join(parts) + "\n"


# ---- options, recipes, levels ---------------------------------------------------------------------------------------


def _options() -> str:
    """Return a table of all options: name, default, and what the docstring of `Options` says."""
    said = dict(_entries(_doc(fp8compile.Options)))
    rows = [f"| `{f.name}` | {_default(f)} | {said[f.name].replace('|', chr(92) + '|')} |" for f in fields(fp8compile.Options)]
    call = '`torch.compile(model, backend="fp8", options={name: value, …})`'
    return _section("Options", [call, "\n".join(["| option | default | |", "|---|---|---|", *rows])])


def _default(option: Any) -> str:
    value = option.default if option.default is not MISSING else option.default_factory()
    return f"`{value.name!r}`" if isinstance(value, fp8compile.Recipe) else f"`{_value(value)}`"


def _value(value: Any) -> str:
    """Return a default as it is written: `Role()` for all that a class has by default."""
    if not is_dataclass(value):
        return "…" if "factory" in repr(value) else repr(value)
    return str(value) if any(f.default is f.default_factory for f in fields(value)) else f"{type(value).__name__}()"


def _recipes() -> str:
    rows = [
        f"| `{name}` | {_role(r.output)} | {_role(r.grad_input)} | {_role(r.grad_weight)} |"
        for name, r in fp8compile.RECIPES.items()
    ]
    head = "| recipe | output | grad_input | grad_weight |", "|---|---|---|---|"
    return _section("Recipes", ["Casts of the left and the right operand of each matmul.", "\n".join([*head, *rows])])


def _role(role: Any) -> str:
    return f"{role.left} × {role.right}" if role is not None else "BF16"


def _levels() -> str:
    rows = [f"| `{name}` | `{dict(level.options)}` | {level.around} |" for name, level in LEVELS.items()]
    return _section("Levels", ["\n".join(["| level | options | expects |", "|---|---|---|", *rows])])


# ---- names ----------------------------------------------------------------------------------------------------------


def _function(name: str, function: Any) -> Iterator[str]:
    yield f"### {name}"
    yield _signature(name, function)
    yield _markdown(_doc(function))


def _class(name: str, cls: type) -> Iterator[str]:
    yield f"### {name}"
    if cls is fp8compile.Options:
        yield "All options of the backend: [above](#options)."
    else:
        yield from [_signature(name, cls)] if is_dataclass(cls) else []
        yield _markdown(_doc(cls))
    if members := list(_members(cls)):
        yield "\n".join(members)


def _members(cls: type) -> Iterator[str]:
    """Yield an entry for each public method and property of a class, those of its own bases included."""
    ours = [c for c in cls.__mro__ if c.__module__.startswith("fp8compile")]
    found = {name: member for c in reversed(ours) for name, member in vars(c).items() if not name.startswith("_")}
    for name, member in sorted(found.items()):
        if isinstance(member, property):
            yield f"- `.{name}`: {_flowing(_doc(member))}"
        elif isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            arguments = ", ".join(_parameters(getattr(cls, name), annotated=False))
            yield f"- `{'' if inspect.isfunction(member) else cls.__name__}.{name}({arguments})`: {_flowing(_doc(member))}"


def _module(name: str, module: types.ModuleType) -> Iterator[str]:
    yield f"### {name}"
    yield _markdown(_doc(module))
    public = [x for n, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__ and n[0] != "_"]
    told = [f"- `{name}.{x.__name__}({', '.join(_parameters(x, False))})`: {_flowing(_doc(x))}" for x in public]
    yield "\n".join(told)


def _signature(name: str, x: Any) -> str:
    returned = "" if inspect.isclass(x) else f" -> {_annotation(inspect.signature(x).return_annotation)}"
    parameters = list(_parameters(x))
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returned}"
    return f"```text\n{line}\n```"


def _parameters(x: Any, annotated: bool = True) -> Iterator[str]:
    """Yield the parameters of a function, or the fields of a dataclass, as they are written in a definition."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    known = inspect.signature(x).parameters.values()
    for before, p in zip([None, *known], known, strict=False):
        if before is not None and before.kind is before.POSITIONAL_ONLY and p.kind is not p.POSITIONAL_ONLY:
            yield "/"
        if p.name == "self" or (is_dataclass(x) and p.name.startswith("_")):
            continue
        text = stars.get(p.kind, "") + p.name
        if annotated and p.annotation is not p.empty:
            text += f": {_annotation(p.annotation)}"
        if p.default is not p.empty:
            text += f" = {_value(p.default)}" if annotated else f"={_value(p.default)}"
        yield text


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


# ---- docstrings -----------------------------------------------------------------------------------------------------


def _doc(x: Any) -> str:
    return inspect.cleandoc(x.__doc__ or "")


def _flowing(text: str) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join(text.split("\n\n")[0].split())


def _entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield the entries of a docstring, "name: what it is" over one or several lines."""
    for paragraph in text.split("\n\n"):
        lines = paragraph.splitlines()
        starts = [i for i, line in enumerate(lines) if ENTRY.match(line)]
        for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
            name, _, told = " ".join(line.strip() for line in lines[start:end]).partition(": ")
            yield name, told


def _markdown(text: str) -> str:
    """Return a docstring as Markdown: entries as a list, what is indented or a session of Python as code."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith((">>>", "...")):
            lines += [*([""] if lines and lines[-1] and not lines[-1].startswith("    ") else []), f"    {line}"]
        elif ENTRY.match(line):
            starts = not lines or not (lines[-1].startswith(("- ", "  ")) or not lines[-1])
            lines += [*([""] if starts else []), ENTRY.sub(r"- **\1**: ", line)]
        elif line and lines and lines[-1].startswith(("- ", "  ")) and not lines[-1].startswith("    "):
            ends = lines[-1].endswith(".") and not line.startswith(" ")  # a sentence behind the list
            lines += ["", line] if ends else [f"  {line.strip()}"]
        else:
            lines.append(line)
    return textwrap.dedent("\n".join(lines))


if __name__ == "__main__":
    PAGE.write_text(page())
