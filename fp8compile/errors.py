"""Every error and warning that a user can meet, one class per kind of mistake."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator


class Fp8Error(Exception):
    """Base of all errors raised by fp8compile."""


class OptionError(Fp8Error, ValueError):
    """An option, recipe or pattern that cannot mean anything."""


class VerificationError(Fp8Error):
    """A pass left an invalid graph: our bug. Names the pass, the node and the broken rule."""


class StateError(Fp8Error, ValueError):
    """An optimizer state that is corrupted, belongs to other parameters, or cannot be made."""


class ShardingError(Fp8Error, RuntimeError):
    """Weights or gradients that were to be exchanged in FP8, and cannot be as things are."""


class CheckpointError(Fp8Error, ValueError):
    """A model that cannot be exported in FP8, or a folder that does not hold what a model needs."""


class CaptureError(Fp8Error, RuntimeError):
    """A training step that cannot become one CUDA graph, with the reason."""


class FreedWeightError(Fp8Error, RuntimeError):
    """A weight that is needed as it is, and was freed by `fp8compile.free_weights`."""


class Fp8Warning(UserWarning):
    """Something was left undone, with its reason: nothing converted, a pattern without a match, a fall-back."""


MANY = 40  # names that nobody would read


LONGEST = 200  # characters of a value that an error repeats


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> OptionError:
    """Return an `OptionError` for `name` with the nearest of the `valid` names, and all unless they are many."""
    names = {known.lower(): known for known in sorted(valid)}
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.55)  # of two letters both
    hint = f" Did you mean {names[near[0]]!r}?" if near else ""
    known = f" Valid: {', '.join(names.values())}." if len(names) <= MANY else ""
    return OptionError(f"unknown {kind} {shown(name)}.{hint}{known}")


def shown(value: object) -> str:
    """Return a value that was given, as an error repeats it: not all of a tensor or a plan."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


@contextlib.contextmanager
def inside(where: str) -> Iterator[None]:
    """Say where in every `OptionError` that is raised in this context."""
    try:
        yield
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error.__cause__


def first_line(error: Exception) -> str:
    """Return the error's type and the first line of what it says."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
