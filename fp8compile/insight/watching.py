"""watch: a model to call in place of the model for some steps, which measures its casts while it trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp8compile.errors import OptionError
from fp8compile.insight.compiled_targets import uncompiled
from fp8compile.plan import cast_statistics, store
from fp8compile.plan.cast_statistics import Statistics

_numbers = itertools.count()


class Watched:
    """A compiled model that shares its parameters with the model it was made of, and measures.

    Train with it for some steps, as with the model itself; the numbers are the same. `statistics` says what was seen.
    Every other attribute (`train`, `parameters`, `state_dict`, …) is the model's.
    """

    def __init__(self, model: Callable[..., Any], steps: int, every: int, options: Mapping[str, Any]):
        self.statistics: Statistics = cast_statistics.start(f"watch{next(_numbers)}", steps, every)
        chosen: dict[str, Any] = {**options, "adaptive": None, "watch": self.statistics.name}
        self._model = model
        self._compiled = torch.compile(model, backend="fp8", options=chosen)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_model":  # of a copy that has nothing yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        with store.collected() as found:
            output = self._compiled(*args, **kwargs)
        self.statistics.plans += [plan for plan in found if plan.matmuls]
        return output


def watch(
    model: Callable[..., Any], steps: int = 10, every: int = 1, options: Mapping[str, Any] | None = None
) -> Watched:
    """Return the `Watched` form of `model`, which measures each cast `steps` times, forward and backward.

    model: a model, or a compiled one (then `options` are its own, unless given). It is compiled anew, with the
    operators that measure; `model` itself stays as fast as it was, so go back to it afterwards. amax, and saturation
    under a scale of a whole tensor, are those of all elements; all else is that of whole rows, 2²⁰ elements of larger
    tensors (`kernels/casts/cast_losses.py`). On a GPU that is one read of the tensor and some 25 launches for each
    cast.
    every: measure a cast in one of so many steps only, the casts taking turns: watching then takes `every` times as
    many steps, and each of them little longer than usual. Raises `OptionError` for other numbers than counts from 1.
    """
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in (steps, every)):
        raise OptionError(f"watch: steps and every are counts from 1, not {steps!r} and {every!r}")
    original, known = uncompiled(model)
    return Watched(original, steps, every, known if options is None else options)
