"""Levels: sets of plain options under a name. `docs/levels.md` shows this table; nothing else is in a level.

    torch.compile(model, backend="fp8", options={"level": "O2"})
    torch.compile(opt.step, backend="fp8", options={"level": "O2"})          # the same options, and it reads `states`

An option given beside a level wins over the level's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8compile.errors import OptionError, inside


@dataclass(frozen=True)
class Level:
    """A level. options: what it sets; around: what it expects of the training script, which it does not change."""

    options: Mapping[str, Any] = field(hash=False)
    around: str


LEVELS: dict[str, Level] = {
    "O1": Level(
        {"recipe": "mixed", "operations": ["linear"], "save": "bf16", "states": "float32"},
        "FP32 parameters, torch.autocast around the forward pass",
    ),
    "O2": Level(
        {
            "recipe": "mixed",
            "operations": ["linear", "batched", "convolution"],
            "save": "bf16",
            "states": {"first": "float32", "second": "float32", "parameters": "split"},
        },
        "BF16 parameters, the optimizer's step compiled (it keeps FP32 masters); or as O1",
    ),
    "O3": Level(
        {
            "recipe": "mixed",
            "operations": ["linear", "batched", "convolution"],
            "save": "auto",
            "states": {"first": "log", "second": "log/stochastic", "parameters": "split"},
        },
        "as O2",
    ),
}


def with_level(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with those of its level that it does not name. Raises `OptionError` for an unknown level."""
    given = dict(options)
    name = given.get("level")
    if name is None:
        return given
    if not isinstance(name, str) or name not in LEVELS:
        with inside("option 'level'"):
            raise _unknown(name)
    return {**LEVELS[name].options, **given}


def _unknown(name: object) -> OptionError:
    """Return an error without a nearest name, unless a small letter was meant: of two letters, all names are near."""
    meant = str(name).strip().upper().removeprefix("O")
    hint = f" Did you mean 'O{meant}'?" if f"O{meant}" in LEVELS else ""
    if meant == "0":
        hint = ' A model without FP8 needs no level: leave backend="fp8" out of torch.compile.'
    return OptionError(f"unknown level {name!r}.{hint} Valid: {', '.join(LEVELS)} (from the least to the most in FP8).")
