"""The backend under a name of its own, for trainers that take a name and no options.

    fp8compile.register_backend()                                     # "fp8", for accelerate
    fp8compile.register_backend("fp8_rowwise", recipe="rowwise")      # and with options
    TrainingArguments(torch_compile=True, torch_compile_backend="fp8_rowwise")

torch finds "fp8" by itself. accelerate (and Hugging Face's Trainer by it) compares names with a list of its own, an
enumeration, which gets a value for each name that is registered here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from typing import Any

from torch import _dynamo

from fp8compile.backend import fp8
from fp8compile.errors import OptionError
from fp8compile.options import Options
from fp8compile.torch_hooks.calls import compiled_calls

_registered: dict[str, dict[str, Any]] = {"fp8": {}}


def register_backend(name: str = "fp8", **options: Any) -> str:
    """Let `torch.compile(…, backend=name)` mean the FP8 backend with `options`, in accelerate too; returns `name`.

    Raises `OptionError` for options that mean nothing, a name with capitals (accelerate changes them), and a name that
    belongs to another backend or to other options.
    """
    Options.parse(options)
    if not name.isidentifier() or name != name.lower():
        raise OptionError(f"a backend's name is an identifier in lower case, and is not {name!r}")
    if name not in _registered and name not in _dynamo.list_backends(exclude_tags=()):
        backend = functools.partial(fp8, options=options)
        compiled_calls.watch(backend)
        _dynamo.register_backend(backend, name)
        _registered[name] = options
    if _registered.get(name) != options:
        raise OptionError(f"a backend called {name!r} exists already: give these options another name")
    if importlib.util.find_spec("accelerate") is not None:
        _tell_accelerate()
    return name


def register_what_is_not_installed() -> None:
    """Let torch know "fp8" where the package is on Python's path without having been installed: there it has no entry
    point that torch could find it by."""
    installed = importlib.metadata.entry_points(group="torch_dynamo_backends", name="fp8")
    if not installed:
        _dynamo.register_backend(fp8, "fp8")


def _tell_accelerate() -> None:
    """Give accelerate's enumeration of backends a value for each registered name, when it is asked for one."""
    from accelerate.utils import DynamoBackend  # takes a second: only for those who register

    def missing(cls: Any, value: object) -> Any:
        if str(value).lower() not in _registered:
            return None  # the enumeration raises its own ValueError
        member = str.__new__(cls, value)
        member._name_ = member._value_ = value
        cls._value2member_map_[value] = cls._member_map_[value] = member  # where Python 3.11.2 looks for it to copy it
        type.__setattr__(cls, str(value), member)  # and where all from 3.12 on look for the name
        return member

    DynamoBackend._missing_ = classmethod(missing)  # type: ignore[assignment]
