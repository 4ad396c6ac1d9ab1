"""Which graphs belong to one model: by the parameters that they read, as objects.

A model has several graphs: for training and for inference, and one for each part after a graph break. Two models may
share some parameters, a trunk or an embedding, and are two all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter


class Parameters:
    """The parameters among the inputs of a graph; they are not kept alive.

    One alone is referred to, weakly: `torch.utils.swap_tensors` refuses what something refers to.
    """

    def __init__(self, inputs: Iterable[Any]) -> None:
        parameters = [x for x in inputs if isinstance(x, Parameter)]
        self._first = weakref.ref(parameters[0]) if parameters else None
        self._ids = frozenset(map(id, parameters))

    def are_gone(self) -> bool:
        """Return True if there are none, or not any more."""
        return self._first is None or self._first() is None

    def are_of_one_model(self, others: Parameters) -> bool:
        """Return True if both begin with the same parameter, and one graph reads all that the other one reads."""
        mine, theirs = (x._first() if x._first is not None else None for x in (self, others))
        if mine is None or mine is not theirs:
            return False
        return self._ids <= others._ids or others._ids <= self._ids
