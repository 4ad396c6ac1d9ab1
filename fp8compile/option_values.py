"""Readers of the options' values: each returns a value, or raises an `OptionError` that says what it may be."""

from __future__ import annotations

import collections.abc
import tempfile
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._inductor import config as inductor_config  # names and types of the settings that are passed on

from fp8compile.adaptive.settings import Adaptive
from fp8compile.errors import OptionError, inside, shown, unknown_name
from fp8compile.optimizer.state_recipe import StateRecipe
from fp8compile.plan.overrides import Overrides
from fp8compile.plan.overrides import load as load_plan
from fp8compile.recipe import Recipe

EXECUTORS = ("inductor", "eager")
KERNELS = ("generated", "inductor")
SAVED_FORMS = ("fp8", "fp8_with_qk", "bf16")
AUTO = "auto"  # option `save`: no pattern names anything
WIRES = ("exact", "fp8", "bf16")
SELECTIONS = ("profitable", "all")
OPERATIONS = ("linear", "batched", "convolution")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes in which torch replays CUDA graphs
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's own

Reader = Callable[[str, Any], Any]


def read_option(name: str, value: Any) -> Any:
    """Return the value of the option `name` as the compiler wants it. Raises `OptionError`, which names the option."""
    return READERS[name](name, value)


def _wrong(name: str, what: str, value: Any) -> OptionError:
    return OptionError(f"option {name!r} {what}, not {shown(value)}")


def _nested(read: Callable[[Any], Any]) -> Reader:
    """Return a reader whose own errors do not name the option."""

    def named(name: str, value: Any) -> Any:
        with inside(f"option {name!r}"):
            return read(value)

    return named


def _one_of(valid: Sequence[str], absent: bool = False) -> Reader:
    def read(name: str, value: Any) -> str | None:
        if (value is None and absent) or (isinstance(value, str) and value in valid):
            return value
        with inside(f"option {name!r}"):
            raise unknown_name("value", value, valid)

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "is True or False", value)
    return value


def _bytes(name: str, value: Any) -> int:
    if not _is_int(value) or value < 0:
        raise _wrong(name, "is a number of bytes (an int from 0)", value)
    return value


def _budget(name: str, value: Any) -> float | int | None:
    if value is None:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(name, "is a number of bytes (int), a share (float, 0.0 to 1.0) or None", value)
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise OptionError(f"option {name!r} as a share lies between 0.0 and 1.0, not at {value!r}")
    if isinstance(value, int) and value < 0:
        raise _wrong(name, "is a number of bytes from 2, or a share from 0.0 to 1.0", value)
    if isinstance(value, int) and value <= 1:
        raise OptionError(f"option {name!r}: {value!r} bytes? A share is a float: {float(value)!r}")
    return value


def _chunks(name: str, value: Any) -> str | bool | int:
    if isinstance(value, bool) or (isinstance(value, str) and value == "auto"):
        return value
    if not isinstance(value, int):
        raise _wrong(name, 'is "auto", True, False or a number of rows', value)
    if value < 1:
        raise OptionError(f"option {name!r}: chunks of {value} rows? False leaves logits whole")
    return value


def _forms(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(value, str) and value == AUTO:
        return ()
    given, valid = (value, SAVED_FORMS) if isinstance(value, Mapping) else ({"*": value}, (AUTO, *SAVED_FORMS))
    for pattern, form in given.items():
        if not isinstance(pattern, str) or not pattern:
            raise _wrong(name, "maps module path patterns (strings)", pattern)
        with inside(f"option {name!r}"):
            if not isinstance(form, str) or form not in SAVED_FORMS:
                raise unknown_name("form of saved activations", form, valid)
    return tuple(given.items())


def _operations(name: str, value: Any) -> tuple[str, ...]:
    named = (value,) if isinstance(value, str) else value
    if not isinstance(named, Sequence) or not named:
        raise _wrong(name, f"takes some of {', '.join(OPERATIONS)}", value)
    for operation in named:
        if not isinstance(operation, str) or operation not in OPERATIONS:
            with inside(f"option {name!r}"):
                raise unknown_name("operation", operation, OPERATIONS)
    return tuple(operation for operation in OPERATIONS if operation in named)


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    for pattern in given if isinstance(given, Sequence) else [given]:
        if not isinstance(pattern, str) or not pattern:
            raise _wrong(name, "takes module path patterns (strings)", pattern)
    return tuple(given)


def _text(name: str, value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _wrong(name, "is a name for statistics", value)
    return value


def _plan(name: str, value: Any) -> Overrides | None:
    return None if value is None else load_plan(value)


def _dump(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        raise _wrong(name, "is the path of a folder", value)
    return writable_folder(f"option {name!r}", value)


def writable_folder(who: str, path: str | Path) -> str:
    """Return the absolute `path`, where files can be written to it or it can be made. Raises `OptionError` elsewhere.

    who: what names it, for the error. Root may write anywhere by its rights, and yet not to /proc: so it is tried.
    """
    folder = Path(path).absolute()
    try:
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        if not nearest.is_dir():
            raise OptionError(
                f"{who} is the path of a folder, not {shown(str(path))}, and {nearest} is a file: give another one"
            )
        with tempfile.TemporaryDirectory(dir=nearest, prefix=".fp8compile-"):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise OptionError(
            f"{who}: nothing can be written to {shown(str(path))} ({why}): give another folder"
        ) from error
    return str(folder)


def _settings(name: str, value: Any) -> tuple[tuple[str, Any], ...]:
    """Return the settings of torch._inductor.config, as torch.compile's own `options` takes them."""
    if not isinstance(value, Mapping):
        raise OptionError(f"option {name!r} maps torch._inductor.config names to values, and is not {shown(value)}")
    known = inductor_config.get_config_copy()  # type: ignore[attr-defined]
    for setting, given in value.items():
        if not isinstance(setting, str) or setting not in known:
            with inside(f"option {name!r}"):
                raise unknown_name("setting of torch._inductor.config", setting, known)
        kind = inductor_config.get_type(setting)  # type: ignore[attr-defined]
        if not _fits(given, kind):
            raise OptionError(f"option {name!r}: {setting!r} is {_words(kind)}, not {shown(given)}")
    return tuple(sorted(value.items()))


def _fits(value: Any, kind: Any) -> bool:
    """Return True if `value` is of the type `kind`, as far as that can be told."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is collections.abc.Callable:
        return callable(value)
    if kind is float:
        return isinstance(value, (int, float))
    if kind is type(None) or not isinstance(origin or kind, type):
        return kind is not type(None) or value is None
    return isinstance(value, origin or kind)


def _words(kind: Any) -> str:
    """Return a type as people write it."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_words, parts))
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if kind is type(None):
        return "None"
    return {"bool": "True or False", "int": "an int", "float": "a number", "str": "a string"}.get(
        name := getattr(origin or kind, "__name__", str(kind)), f"a {name}"
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


READERS: Mapping[str, Reader] = {
    "level": lambda name, value: value,  # read before all others: it stands for some of them
    "recipe": _nested(Recipe.parse),
    "select": _one_of(SELECTIONS),
    "operations": _operations,
    "skip": _patterns,
    "lm_head": _flag,
    "chunk_loss": _chunks,
    "fold_masks": _flag,
    "executor": _one_of(EXECUTORS),
    "save": _forms,
    "save_min_bytes": _bytes,
    "activation_budget": _budget,
    "offload": _flag,
    "wire": _one_of(WIRES),
    "kernels": _one_of(KERNELS),
    "one_pass_casts": _flag,
    "frozen": _flag,
    "keep_casts": _flag,
    "strict": _flag,
    "verify": _flag,
    "states": _nested(StateRecipe.parse),
    "mode": _one_of(MODES, absent=True),
    "captured": _flag,
    "inductor": _settings,
    "plan": _plan,
    "adaptive": _nested(Adaptive.parse),
    "watch": _text,
    "dump": _dump,
}
