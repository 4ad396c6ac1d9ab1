"""Errors of users past Dynamo, which wraps what a backend raises into a `BackendCompilerFailed` with a long traceback.

    torch.compile(model, backend="fp8", options={"recpie": "mixed"})(x)
    OptionError: unknown option 'recpie'. Did you mean 'recipe'? …

torch.compile looks a backend up by its name without showing it the options, so the first call is the earliest at which
they can be read. What passes Dynamo as it is, is a `ShortenTraceback`: the class by which backends of torch's own tell
users that something of theirs must change (`TritonMissing`). It cuts Dynamo's frames out of the traceback as well.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from torch._dynamo.exc import ShortenTraceback  # what Dynamo hands to the user as it is

from fp8compile.errors import Fp8Error, FreedWeightError, OptionError, ShardingError

P = ParamSpec("P")
R = TypeVar("R")


def _passing(kind: type[Fp8Error]) -> Any:
    """Return a class of errors of this kind that Dynamo lets through."""

    class Passing(kind, ShortenTraceback):
        """first_useful_frame: where its traceback begins, Dynamo's cut away."""

        def __init__(self, message: str, first_useful_frame: FrameType | None) -> None:
            kind.__init__(self, message)
            self.message, self.first_useful_frame = message, first_useful_frame

        def __str__(self) -> str:
            """Return the message without the advice for debugging that Dynamo appends to what is raised under it."""
            return self.message

        def __reduce__(self) -> tuple[Any, ...]:
            """Return how to make the plain error in another process: frames cannot be sent."""
            return kind, (self.message,)

    # Its name is what a traceback shows: users are told one name, which fp8compile exports.
    Passing.__name__ = Passing.__qualname__ = kind.__name__
    Passing.__module__ = kind.__module__
    return Passing


PASSING = {kind: _passing(kind) for kind in (OptionError, FreedWeightError, ShardingError)}


def unwrapped(backend: Callable[P, R]) -> Callable[P, R]:
    """Return `backend` with what users must change raised as it is, not wrapped by Dynamo."""

    @functools.wraps(backend)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return backend(*args, **kwargs)
        except tuple(PASSING) as error:
            below = error.__traceback__.tb_next if error.__traceback__ else None
            kind = next(kind for kind in PASSING if isinstance(error, kind))
            raise PASSING[kind](str(error), inspect.currentframe()).with_traceback(below) from error.__cause__

    return call
