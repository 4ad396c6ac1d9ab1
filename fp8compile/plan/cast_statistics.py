"""Statistics of casts in training: how well FP8 holds each tensor, and what another cast would do.

    SQNR          10·log10(Σ x² / Σ (x − x̂)²) in dB, x̂ = data · scale
    amax          the largest magnitude
    saturated     share of the elements with |x| / scale so far above the format's maximum that rounding alone would not
                  have brought them there (none with current scaling)
    underflown    share of the nonzero elements that become 0
    by_rows       SQNR in which every row counts the same: 10·log10 of 1 / (mean over the rows of noise / signal)
    by_columns    likewise every column, a column being an index of the contracted dimension

over all measured steps. With options={"watch": name} the pass `passes/matmul/observe_casts.py` puts `fp8::observe`
behind every scale; it adds up here, under that name, on the tensors' device and without waiting for it. After `steps`
measured executions (one in `every`) a cast is measured no more. Tensors that hold an inf or nan are left out and
counted. amax, and saturation under the scale of a whole tensor, are those of all elements. All else is measured on
whole rows, of large tensors 2²⁰ elements in all (`kernels/casts/cast_losses.py` says which, and does the measuring).

A few large columns (outlier channels) or rows (attention sinks) make up most of the signal, so SQNR stays high while
all else is lost; `by_columns` and `by_rows` see that.

    watched = fp8compile.watch(model, steps=10)       # call it in place of the model for some steps
    print(watched.statistics)
    options = {"plan": watched.statistics.plan(minimum=25.0)}
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fp8compile.errors import Fp8Error, OptionError
from fp8compile.kernels.casts.cast_losses import measure
from fp8compile.plan.cast_rows import Row, joined, row_of
from fp8compile.plan.improved_plan import improve
from fp8compile.plan.json_rows import an_object, made, parsed, require
from fp8compile.plan.plan import Plan
from fp8compile.plan.printers import printers

Operands: TypeAlias = tuple[tuple[str, str, int, str], ...]  # path, role, occurrence, left or right


@dataclass
class Statistics:
    """Measurements under one name. steps: how often each cast is measured; every: in one of how many executions,
    the casts taking turns."""

    name: str
    steps: int = 10
    every: int = 1
    plans: list[Plan] = field(default_factory=list)
    _sums: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _kept: list[Row] = field(default_factory=list, repr=False)
    _turns: dict[str, int] = field(default_factory=dict, repr=False)  # executions of a cast since its first turn

    def add(self, scale: Tensor | None, tensors: Sequence[Tensor], cast: str, transpose: bool, key: str) -> None:
        """Measure one execution of a cast; `key` is the JSON of its cast, its `Operands`, and a trait if it has one."""
        turn = self._turns.setdefault(key, -(len(self._turns) % self.every))  # casts begin one after the other
        self._turns[key] = turn + 1
        if 0 <= turn < self.steps * self.every and turn % self.every == 0:
            measured = measure(scale, tensors, cast, transpose)
            sums = self._sums.get(key)
            self._sums[key] = measured if sums is None else joined(sums, measured)

    def rows(self) -> list[Row]:
        """Return one `Row` for each operand that was measured, in the order of their first execution."""
        found = list(self._kept)
        for key, sums in self._sums.items():
            cast, operands, *trait = json.loads(key)
            cast, _, delay = cast.partition(" delayed(")
            history = int(delay.removesuffix(")") or 0)
            found += [row_of(operand, cast, sums.tolist(), "".join(trait), history) for operand in operands]
        return found

    def plan(self, minimum: float) -> list[Plan]:
        """Return the watched plans, changed so that every operand keeps `minimum` dB: for options={"plan": …}.

        An operand below it gets the first cast of `improved_plan.RUNNABLE` that reaches it; a matmul with an operand
        that no such cast can hold stays BF16.
        """
        known = {(row.path, row.role, row.occurrence, row.side): row for row in self.rows()}
        return [improve(plan, known, minimum) for plan in self.plans]

    def save(self, path: str | Path) -> None:
        """Write rows and plans as JSON; a report shows them if they lie in its dump as statistics.json."""
        plans = [json.loads(plan.to_json()) for plan in self.plans]
        data = {"name": self.name, "steps": self.steps, "rows": [asdict(row) for row in self.rows()], "plans": plans}
        Path(path).write_text(json.dumps(data, indent=1))

    @staticmethod
    def load(path: str | Path) -> Statistics:
        """Return what `save` wrote. Raises `Fp8Error` for another file."""
        file = Path(path)
        if not file.is_file():
            raise Fp8Error(f"{path} holds no statistics: it is {'a folder' if file.is_dir() else 'not there'}")
        try:
            data = an_object(parsed(file.read_text()), "statistics")
            require(data, ("name", "steps", "rows", "plans"), "statistics")
            plans = [Plan.from_json(json.dumps(plan)) for plan in data["plans"]]
            rows = [made(Row, _with_pairs(row), f"rows[{i}]") for i, row in enumerate(data["rows"])]
        except (OptionError, UnicodeDecodeError, TypeError, AttributeError) as error:
            raise Fp8Error(f"{path} holds no statistics: {error}") from error
        return Statistics(data["name"], data["steps"], plans=plans, _kept=rows)

    def __str__(self) -> str:
        rows = self.rows()
        return printers.statistics(rows) if rows else self._nothing()

    def _nothing(self) -> str:
        if not self.plans:
            return "nothing measured yet: call what is watched, then backward()\n"
        fp8 = sum(len(plan.converted) for plan in self.plans)
        why = "; call it again" if fp8 else ": no matmul runs in FP8, so no operand is cast"
        return f"nothing measured{why}\n"


_watched: dict[str, Statistics] = {}


def start(name: str, steps: int = 10, every: int = 1) -> Statistics:
    """Return fresh statistics under `name`, for what is compiled with options={"watch": name}."""
    _watched[name] = Statistics(name, steps, every)
    return _watched[name]


def observe(scale: Tensor, tensors: list[Tensor], cast: str, transpose: bool, name: str, key: str) -> Tensor:
    """Measure the cast of `tensors` under `scale`, and return the scale: `fp8::observe`."""
    statistics = _watched.get(name)
    if statistics is not None:
        with torch.no_grad():
            statistics.add(scale, tensors, cast, transpose, key)
    return scale.clone()


def probe(x: Tensor, transpose: bool, name: str, key: str) -> Tensor:
    """Measure what a cast of `x` would lose, as `key` names it, and return a copy of `x`: `fp8::probe`."""
    statistics = _watched.get(name)
    if statistics is not None:
        with torch.no_grad():
            statistics.add(None, [x], json.loads(key)[0], transpose, key)
    return x.clone(memory_format=torch.contiguous_format)


def rows(name: str) -> list[Row]:
    """Return what has been measured under `name`."""
    return _watched[name].rows() if name in _watched else []


def sums(name: str) -> dict[str, list[float]]:
    """Return the sums that have been measured under `name`, by cast: what `join` takes of other ranks."""
    return {key: x.tolist() for key, x in _watched[name]._sums.items()} if name in _watched else {}


def join(name: str, everything: Sequence[dict[str, list[float]]]) -> None:
    """Let the sums under `name` be those of all ranks together: a cast may run on some of them alone."""
    together: dict[str, Tensor] = {}
    for key in dict.fromkeys(key for mine in everything for key in mine):
        found = [torch.tensor(mine[key], dtype=torch.float64, device="cpu") for mine in everything if key in mine]
        together[key] = functools.reduce(joined, found)
    if name in _watched:
        _watched[name]._sums = together


def stop(name: str) -> None:
    """Stop measuring what runs under `name`."""
    _watched.pop(name, None)


def _with_pairs(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "evenly": {cast: tuple(pair) for cast, pair in row.get("evenly", {}).items()}}
