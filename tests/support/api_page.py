"""`docs/api.md`: what `fp8compile` exports, made from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import fp8compile

HEAD = """# API

What `import fp8compile` gives, from the docstrings of the code (`make accept` renews this page). The backend itself
needs no import: `torch.compile(model, backend="fp8", options={…})`; [options.md](options.md) has its options.
"""


def page() -> str:
    """Return the whole page: functions, then classes, then what is neither."""
    names = sorted(fp8compile.__all__, key=str.lower)
    kinds: dict[str, Callable[[Any], bool]] = {
        "Functions": inspect.isfunction,
        "Classes": lambda x: inspect.isclass(x) and not issubclass(x, BaseException | Warning),
        "Errors and warnings": lambda x: inspect.isclass(x) and issubclass(x, BaseException | Warning),
        "Modules": inspect.ismodule,
    }
    parts = [HEAD]
    for title, is_kind in kinds.items():
        parts.append(f"## {title}\n")
        parts += [entry(name, getattr(fp8compile, name)) for name in names if is_kind(getattr(fp8compile, name))]
    others = [n for n in names if not any(is_kind(getattr(fp8compile, n)) for is_kind in kinds.values())]
    parts.append("## Constants\n")
    parts += [f"- `{name}`: {_constant(getattr(fp8compile, name))}" for name in others]
    return "\n".join(parts) + "\n"


def entry(name: str, thing: Any) -> str:
    """Return the section of a function, class or module."""
    lines = [f"### {name}\n", "```text", *_signature(name, thing), *(inspect.getdoc(thing) or "").splitlines()]
    members = list(_members(thing))
    if members:
        lines += ["", *members]
    return "\n".join([*lines, "```", ""])


def _signature(name: str, thing: Any) -> list[str]:
    is_plain = isinstance(thing, ModuleType) or (inspect.isclass(thing) and issubclass(thing, BaseException))
    return [] if is_plain else [f"{name}{_arguments(thing)}", ""]


def _arguments(thing: Any) -> str:
    """Return arguments as source has them, one a line where they are long; `self` and factories are left out."""
    signature = inspect.signature(thing)
    parameters = [str(p) for name, p in signature.parameters.items() if name != "self"]
    shown = [re.sub(r": '([^']*)'", r": \1", text).replace("<factory>", "…") for text in parameters]
    returns = signature.return_annotation
    end = "" if inspect.isclass(thing) or returns is inspect.Signature.empty else f" -> {returns}"
    line = f"({', '.join(shown)}){end}"
    return line if len(line) <= 90 else "(\n" + "".join(f"    {p},\n" for p in shown) + f"){end}"


def _members(thing: Any) -> Iterator[str]:
    """Yield a line a public method or function of its own: arguments, and the first line of its docstring."""
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return
    for name, member in vars(thing).items() if inspect.isclass(thing) or inspect.ismodule(thing) else ():
        own = getattr(member, "__module__", thing.__name__) == getattr(thing, "__module__", thing.__name__)
        function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if name.startswith("_") or not inspect.isfunction(function) or not own:
            continue
        first = (inspect.getdoc(function) or "").partition("\n")[0]
        yield f".{name}({', '.join(p for p in inspect.signature(function).parameters if p not in ('self', 'cls'))})"
        yield f"    {first}"


def _constant(x: Any) -> str:
    return ", ".join(f"`{key}`" for key in x) if isinstance(x, dict) else f"`{x}`"
