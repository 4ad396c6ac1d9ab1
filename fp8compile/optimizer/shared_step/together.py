"""Kinds of parameters that are stepped together: the host does once for them what it would do for each.

Kinds of a group differ in dtypes, in layout and in the formats of states. What is computed of step counts and rates is
mostly the same function for all of them. Then one copy sends all addresses and settings, one call computes all numbers,
and one launch adds to all counts. Where all parameters have gradients, a CUDA graph replays those launches.

    numbers   [rows, numbers]   kind A: a row a parameter, … · kind B: …     each kind begins at a multiple of ROWS
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8compile.kernels.optimizer import update
from fp8compile.kernels.optimizer.bound_launch import AddressTables
from fp8compile.optimizer import state_ops
from fp8compile.optimizer.shared_step.alike import Alike
from fp8compile.optimizer.shared_step.replayed import Replayed
from fp8compile.optimizer.shared_step.roles import SETTING, Role, as_number, setting
from fp8compile.optimizer.shared_step.roles import STATE as STATE_ROLE
from fp8compile.optimizer.shared_step.template import NumberFunction, compiled
from fp8compile.options import Options

if TYPE_CHECKING:
    from fp8compile.kernels.optimizer.scattered_numbers import ScatteredNumbers

PADDED = 256  # on a GPU the numbers of so many parameters, or a multiple, are computed: groups share compiled code
ROWS = 4  # a row is of FP32 numbers: the first one of a kind lies at a multiple of 16 bytes


@dataclass
class Together:
    """Kinds whose numbers are the same function. shared: by which gradients are unscaled, by name."""

    alike: list[Alike]
    shared: Mapping[str, Tensor]
    options: Options
    given: dict[Role, Any] = field(default_factory=dict)  # settings of this step
    starts: list[int] = field(default_factory=list)  # of each kind, among the rows
    places: list[int] = field(default_factory=list)  # of each parameter, among the rows

    def __post_init__(self) -> None:
        self.template, self.device = self.alike[0].template, self.alike[0].device
        self.states = [state for x in self.alike for state in x.states]
        order = self._order()
        self.count = _padded(len(order), self.device)
        self.order = order + [0] * (self.count - len(order))
        self.function = self.template.numbers(self.count)
        read = {role.name for role in self._inputs() if role.kind == STATE_ROLE}
        names = read | {name for name, _ in self.template.counted} | set(self.template.copied)
        self.vectors = {name: [state[name] for state in self.states] for name in names}
        self.scattered = {name: _scattered(numbers, self.order) for name, numbers in self.vectors.items()}
        launches = [x.launch for x in self.alike if x.launch is not None]
        self.settings = [role for role in self._inputs() if role.kind == SETTING]
        self.tables = AddressTables(launches, len(self.settings)) if launches else None
        is_launched = len(launches) == len(self.alike) and allows_graphs(self.options)
        self.replayed = Replayed(self.device) if is_launched else None
        self.counters = list({c.data_ptr(): c for x in self.alike if x.launch for c in x.counters}.values())
        self.scattered_counters = _scattered(self.counters)

    def _order(self) -> list[int]:
        """Return the parameter of each row, and note where kinds and parameters are."""
        order: list[int] = []
        step = ROWS if self.device.type == "cuda" else 1
        for x in self.alike:
            order += order[-1:] * (-len(order) % step)
            first = len(self.places)
            self.starts.append(len(order))
            self.places += range(len(order), len(order) + len(x.parameters))
            order += range(first, first + len(x.parameters))
        return order

    def _inputs(self) -> list[Role]:
        return [] if self.function is None else self.function.inputs

    def prepare(self, group: Mapping[str, Any]) -> None:
        """Compile what computes the numbers."""
        self.given = self._settings(group)
        if self.function is not None:
            self.run = compiled(self.function.module, self._arguments(), self.options)

    def _settings(self, group: Mapping[str, Any]) -> dict[Role, Any]:
        return {role: setting(group, role) for role in self.settings}

    def _arguments(self) -> list[Tensor]:
        return [self._argument(role) for role in self._inputs()]

    def _argument(self, role: Role) -> Tensor:
        """Return what the function of numbers takes. A setting is a tensor itself, or was sent with the addresses."""
        if role.kind == SETTING:
            given = self.given[role]
            if self.tables is None or isinstance(given, Tensor):
                return as_number(given)
            return self.tables.numbers[self.settings.index(role)]
        if role.is_shared:
            return self.shared[role.name]
        scattered = self.scattered[role.name]
        if scattered is not None:
            return scattered.vector(self.count)
        own = self.vectors[role.name]
        return torch.stack([own[i] for i in self.order])

    def step(self, group: Mapping[str, Any]) -> None:
        """Update the parameters that have gradients, as `Alike.is_current` has seen them."""
        active = list(chain.from_iterable(x.active for x in self.alike))
        if not any(active):
            return
        self.given = self._settings(group)
        tensors = [x for x in self.given.values() if isinstance(x, Tensor)]
        if self.tables is not None:
            gradients = [x.addresses_of_gradients() for x in self.alike if x.launch is not None and x.launch.narrow]
            numbers = [0.0 if isinstance(x, Tensor) else x for x in self.given.values()]
            self.tables.read_again(list(chain.from_iterable(gradients)), numbers)
        if self.replayed is not None and all(active) and all(x.is_cuda for x in tensors):
            self.replayed(self._launch_all, [x.data_ptr() for x in tensors])
        else:
            self._launch(active)
        for x in self.alike:
            x.count_writes()
            x.forget_gradients()

    def _launch_all(self) -> None:
        self._launch([True] * len(self.states))

    def _launch(self, active: Sequence[bool]) -> None:
        """Compute the numbers, and update what is active."""
        results = [] if self.function is None else list(self.run(*self._arguments()))
        matrix = results.pop(0) if self.function is not None and self.function.has_matrix else None
        matrices = [None if matrix is None else matrix[start:] for start in self.starts]
        for x, own in zip(self.alike, matrices, strict=True):
            if any(x.active):
                x.step(own)
        self._count_random_bits(all(active), matrices)
        self._write_numbers(results, active)

    def _overflow(self) -> Tensor | None:
        """Return the number that is not 0 where a step is skipped."""
        return self.shared.get("overflow") if self.alike[0].kind.is_unscaled else None

    def _count_random_bits(self, is_whole: bool, matrices: Sequence[Tensor | None]) -> None:
        """Advance the counters of the parameters that launches have updated."""
        if is_whole and self.scattered_counters is not None:
            self.scattered_counters.add(1, self._overflow())
            return
        for x, matrix in zip(self.alike, matrices, strict=True):
            if x.launch is not None and x.counters:
                counters = update.counters_of(x.launch.update, x.stored_of_active())
                update.count(x.launch.update, counters, [] if matrix is None else [matrix])

    def _write_numbers(self, vectors: Sequence[Tensor], active: Sequence[bool]) -> None:
        """Write the states that are numbers, of parameters that were updated."""
        for name, by in self.template.counted:
            scattered = self.scattered[name]
            if scattered is not None and all(active):
                scattered.add(by, self._overflow())
            else:
                state_ops.add_in_place([*compress(self.vectors[name], active)], by, self._overflow())
        for name, vector in zip(self.template.copied, vectors, strict=True):
            rows = vector.unbind()
            new = [rows[place] for place in compress(self.places, active)]
            torch._foreach_copy_([*compress(self.vectors[name], active)], new)


def allows_graphs(options: Options) -> bool:
    """Return True unless the user has switched CUDA graphs off."""
    return dict(options.inductor).get("triton.cudagraphs") is not False


def _padded(count: int, device: torch.device) -> int:
    """Return how many rows are computed for `count`: with some to spare on a GPU."""
    return -(-count // PADDED) * PADDED if device.type == "cuda" else count


def _scattered(numbers: list[Tensor], order: Sequence[int] | None = None) -> ScatteredNumbers | None:
    """Return what reads and counts numbers by one launch; None where that cannot be."""
    if not numbers or not numbers[0].is_cuda:
        return None
    from fp8compile.kernels.optimizer.scattered_numbers import ScatteredNumbers, are_scattered  # imports Triton

    return ScatteredNumbers(numbers, order) if are_scattered(numbers) else None


def together(
    alike: Sequence[Alike], group: Mapping[str, Any], shared: Mapping[str, Tensor], options: Options
) -> list[Together]:
    """Return the kinds of a group, in their order, with those together whose numbers are the same function."""
    found: dict[Any, list[Alike]] = {}
    for x in alike:
        found.setdefault((x.device, _function_key(x)), []).append(x)
    made = [Together(kinds, shared, options) for kinds in found.values()]
    for x in made:
        x.prepare(group)
    return made


def _function_key(x: Alike) -> Any:
    """Return what is equal for kinds with the same function of numbers, which are written alike."""
    function: NumberFunction | None = x.template.numbers(2)  # of more it differs in the length of its vectors alone
    code = None if function is None else (function.module.code, tuple(function.inputs), function.has_matrix)
    types = tuple(value for _, value in x.kind.states if isinstance(value, tuple) and value[0] == "number")
    return code, types, tuple(x.template.counted), tuple(x.template.copied), x.kind.is_unscaled
