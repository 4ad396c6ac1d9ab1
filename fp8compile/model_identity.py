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
    """The parameters among the inputs of a graph; they are not kept alive."""

    def __init__(self, inputs: Iterable[Any]) -> None:
        self._references = [weakref.ref(x) for x in inputs if isinstance(x, Parameter)]

    def ids(self) -> set[int]:
        """Return what tells the parameters that are alive from any other object."""
        return {id(p) for reference in self._references if (p := reference()) is not None}

    def are_of_one_model(self, others: Parameters) -> bool:
        """Return True if one graph reads all the parameters that the other one reads."""
        mine, theirs = self.ids(), others.ids()
        return bool(mine & theirs) and (mine <= theirs or theirs <= mine)
