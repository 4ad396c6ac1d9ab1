"""The groups of parameters of an optimizer, one by one: their settings, and what became of their states."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8compile.plan.rows import Group, State

PLAIN = ("", "float32")  # formats of states that are not in 8 bits
NO_SETTINGS = ("params", "param_names")  # what a group has beside hyperparameters


def group_rows(opt: Optimizer, states: Iterable[State]) -> list[Group]:
    """Return a row for each group of `opt`; states: rows of its states (`state_conversion.state_rows`)."""
    known: defaultdict[int, list[State]] = defaultdict(list)
    for row in states:
        known[row.parameter].append(row)
    rows, first = [], 0
    for number, group in enumerate(opt.param_groups):
        parameters: list[Tensor] = list(group["params"])
        own = [known[first + i] for i in range(len(parameters))]
        rows.append(_row(number, group, parameters, own))
        first += len(parameters)
    return rows


def _row(number: int, group: Mapping[str, Any], parameters: list[Tensor], states: list[list[State]]) -> Group:
    reasons = [_why_plain(p, own) for p, own in zip(parameters, states, strict=True)]
    flat = [row for own in states for row in own]
    return Group(
        group=number,
        parameters=len(parameters),
        elements=sum(p.numel() for p in parameters),
        in_8_bits=reasons.count(""),
        before=sum(plain_bytes(row) for row in flat),
        after=sum(row.bytes for row in flat),
        others=dict(Counter(why for why in reasons if why).most_common()),
        settings={name: _setting(value) for name, value in group.items() if name not in NO_SETTINGS},
    )


def plain_bytes(row: State) -> int:
    """Return the bytes of a state as the plain tensor with which the optimizer computes."""
    return math.prod(row.shape) * getattr(torch, row.dtype).itemsize


def _why_plain(parameter: Tensor, states: list[State]) -> str:
    """Return the reason why no state of `parameter` is in 8 bits; "" if one is."""
    if any(row.format not in PLAIN for row in states):
        return ""
    if states:
        return states[0].reason
    return "it has no state of its shape" if parameter.requires_grad else "frozen: it has no states"


def _setting(value: Any) -> Any:
    """Return a hyperparameter as JSON has it: a number, a flag, or text."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        return value.item()
    if isinstance(value, (list, tuple)):
        return f"({', '.join(str(_setting(x)) for x in value)})"
    return value if isinstance(value, (int, float, bool, str, type(None))) else str(value)
