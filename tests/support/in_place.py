"""Operators of a user's own that add 100 to what they are given, in place, and a function that reads it before.

    ops.add_(x)                         nothing is returned
    ops.add_all(y, xs=[x, ...])         y + 1, which is no alias of what is written

Their memory is that of the arguments alone, as torch asks of custom operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

library = torch.library.Library("tests_in_place", "DEF")
TAGS = (torch.Tag.pt2_compliant_tag,)
library.define("add_(Tensor(a!) x) -> ()", tags=TAGS)
library.define("add_all(Tensor y, *, Tensor(a!)[] xs) -> Tensor", tags=TAGS)
library.impl("add_", lambda x: (x.add_(100), None)[1], "CompositeExplicitAutograd")
library.impl("add_all", lambda y, xs: (torch._foreach_add_(xs, 100), y + 1)[1], "CompositeExplicitAutograd")
torch.library.register_fake("tests_in_place::add_", lambda x: None, lib=library)
torch.library.register_fake("tests_in_place::add_all", lambda y, xs: torch.empty_like(y), lib=library)
ops: Any = torch.ops.tests_in_place


def one(x: Tensor, z: Tensor) -> Any:
    y = x * 2 + z
    ops.add_(x)
    return y
