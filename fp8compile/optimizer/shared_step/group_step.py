"""One group of parameters: which of them are updated by which template, and their step.

What a step does not change is kept: the tensors of each parameter, where they lie, the tables of the launch. Before
each step it is compared with what is there now, by identity and address: a checkpoint may have been loaded, a state or
a parameter have become another tensor, a setting another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fp8compile.kernels.optimizer import update
from fp8compile.kernels.optimizer.bound_launch import ALIGNMENT, BoundLaunch, is_usable
from fp8compile.optimizer import state_ops
from fp8compile.optimizer.shared_step.kinds import Kind
from fp8compile.optimizer.shared_step.roles import GRADIENT, SETTING, Role, as_number, setting, tensor_of
from fp8compile.optimizer.shared_step.template import NumberFunction, Template
from fp8compile.optimizer.states import FP8State
from fp8compile.options import Options
from fp8compile.torch_hooks.local_parts import local_part

if TYPE_CHECKING:
    from fp8compile.kernels.optimizer.scattered_numbers import ScatteredNumbers

PAYLOAD = attrgetter("payload")
DTYPE, LAYOUT = Tensor.dtype.__get__, Tensor.layout.__get__  # type: ignore[attr-defined]  # of many tensors, without Python
PADDED = 256  # on a GPU the numbers of so many parameters, or a multiple, are computed: kinds share compiled code
Shared = Mapping[str, Tensor]  # by which gradients are unscaled, by name


@dataclass
class Alike:
    """Parameters of one kind, and what their step takes."""

    kind: Kind
    template: Template
    parameters: list[Tensor]
    states: list[dict[str, Any]]
    shared: Shared
    options: Options
    launch: BoundLaunch | None = None
    function: NumberFunction | None = None
    stored: list[Tensor] = field(default_factory=list)
    vectors: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stored = self._flat(self.template.stored)
        names = {name for name, _ in self.template.counted} | set(self.template.copied)
        self.vectors = {name: [state[name] for state in self.states] for name in names}
        self.scattered = {name: _scattered(numbers) for name, numbers in self.vectors.items()}
        self.kept = [x for state in self.states for x in state.values()]
        mine = list(map(local_part, self.kept))
        self.in_8_bits = [x for x in mine if isinstance(x, FP8State)]
        self.payloads = list(map(PAYLOAD, self.in_8_bits))
        parts = chain.from_iterable(x.parts() for x in self.in_8_bits)
        self.placed = [*map(local_part, self.parameters), *parts, *(x for x in mine if type(x) is Tensor)]
        self.addresses = [x.data_ptr() for x in self.placed]
        device = self.stored[0].device
        self.width = len(self.template.stored)
        self.is_distributed = any(isinstance(p, DTensor) for p in self.parameters)
        self.gradients: list[Any] = []
        self.counters = update.counters_of(self.template.update, self.stored)
        self.scattered_counters = _scattered(self.counters)
        if device.type == "cuda" and all(map(is_usable, self.stored)) and self._reads_gradients_alone():
            self.launch = BoundLaunch(self.template.spec, self.stored, self._flat(self.template.read))

    def _flat(self, roles: Sequence[Role]) -> list[Tensor]:
        pairs = zip(self.parameters, self.states, strict=True)
        return [tensor_of(role, p, state) for p, state in pairs for role in roles]

    def _reads_gradients_alone(self) -> bool:
        """Return True if a launch reads nothing else: what else is read might lie elsewhere in the next step."""
        return [role.kind for role in self.template.read] in ([], [GRADIENT])

    def prepare(self, group: Mapping[str, Any]) -> None:
        """Compile what computes the numbers."""
        self.function = self.template.numbers(self._count(), lambda role: self._input(role, group), self.options)

    def _count(self) -> int:
        """Return how many parameters numbers are computed for: with some to spare on a GPU."""
        count = len(self.parameters)
        return -(-count // PADDED) * PADDED if self.stored[0].is_cuda else count

    def _input(self, role: Role, group: Mapping[str, Any]) -> Tensor:
        if role.kind == SETTING:
            return as_number(setting(group, role))
        if role.is_shared:
            return self.shared[role.name]
        scattered = self.scattered.get(role.name)
        if scattered is not None:
            return scattered.vector(self._count())
        own = self.vectors.get(role.name) or [state[role.name] for state in self.states]
        vector = torch.stack(own)
        spare = self._count() - len(own)
        return torch.cat([vector, vector[:1].expand(spare)]) if spare else vector

    def is_current(self, states: Mapping[Tensor, Any]) -> bool:
        """Return True if states are the tensors that they were, and they and the parameters lie where they lay.

        Looks at gradients once; `step` takes those.
        """
        if not all(map(is_, map(states.get, self.parameters), self.states)):
            return False
        now = chain.from_iterable(map(dict.values, self.states))
        if sum(map(len, self.states)) != len(self.kept) or not all(map(is_, now, self.kept)):
            return False
        if not all(map(is_, map(PAYLOAD, self.in_8_bits), self.payloads)):
            return False
        if self.is_distributed and not all(map(is_, self._flat(self.template.stored), self.stored)):
            return False
        found = [p.grad for p in self.parameters]
        self.gradients = list(map(local_part, found)) if self.is_distributed else found
        return self.addresses == list(map(Tensor.data_ptr, self.placed)) and self._are_gradients_alike()

    def _are_gradients_alike(self) -> bool:
        found = [g for g in self.gradients if g is not None]
        as_ever = map(is_, map(DTYPE, found), repeat(self.kind.gradient))
        return all(as_ever) and all(map(is_, map(LAYOUT, found), repeat(torch.strided)))

    def step(self, group: Mapping[str, Any]) -> None:
        """Update the parameters that have gradients, as `is_current` has seen them."""
        gradients, self.gradients = self.gradients, []
        active = tuple(g is not None for g in gradients)
        if not any(active):
            return
        results = self._numbers(group)
        matrix = results.pop(0) if self.function is not None and self.function.has_matrix else None
        if self.launch is not None:
            self._launch(self.launch, gradients, active, matrix)
        else:
            self._call(active, matrix)
        self._write_numbers(results, active)

    def _numbers(self, group: Mapping[str, Any]) -> list[Tensor]:
        if self.function is None:
            return []
        return list(self.function.run(*[self._input(role, group) for role in self.function.inputs]))

    def _launch(
        self, launch: BoundLaunch, gradients: list[Any], active: tuple[bool, ...], matrix: Tensor | None
    ) -> None:
        """Launch the kernel, on copies of gradients that it cannot take where they lie."""
        addresses = [0 if g is None else g.data_ptr() for g in gradients]
        copies: list[Any] = []
        if any(map((ALIGNMENT - 1).__and__, addresses)) or not all(g is None or g.is_contiguous() for g in gradients):
            copies = [g if g is None or is_usable(g) else g.contiguous().clone() for g in gradients]
            addresses = [0 if g is None else g.data_ptr() for g in copies]
        launch.update_only(active)
        if self.template.read:
            launch.read_again(0, addresses)
        launch(matrix)
        self._count_random_bits(launch, active, matrix)

    def _count_random_bits(self, launch: BoundLaunch, active: tuple[bool, ...], matrix: Tensor | None) -> None:
        """Advance the counters of those parameters that were updated."""
        if self.scattered_counters is not None and all(active):
            self.scattered_counters.add(1, update.overflow_in(launch.update, matrix))
            return
        counters = self.counters if all(active) else update.counters_of(launch.update, self._of_active(active))
        update.count(launch.update, counters, [] if matrix is None else [matrix])

    def _call(self, active: tuple[bool, ...], matrix: Tensor | None) -> None:
        """Run the operator, as a graph of all parameters would."""
        members = [i for i, wanted in enumerate(active) if wanted]
        read = [tensor_of(role, self.parameters[i], self.states[i]) for i in members for role in self.template.read]
        numbers = [] if matrix is None else [_rows(matrix, active)]
        state_ops.update_parameters(self._of_active(active), read, numbers, self.template.spec)

    def _of_active(self, active: tuple[bool, ...]) -> list[Tensor]:
        if all(active):
            return self.stored
        w = self.width
        return [x for i, wanted in enumerate(active) if wanted for x in self.stored[i * w : (i + 1) * w]]

    def _write_numbers(self, vectors: Sequence[Tensor], active: tuple[bool, ...]) -> None:
        """Write the states that are numbers, of parameters that were updated."""
        overflow = self.shared.get("overflow") if self.kind.is_unscaled else None
        for name, by in self.template.counted:
            scattered = self.scattered[name]
            if scattered is not None and all(active):
                scattered.add(by, overflow)
            else:
                state_ops.add_in_place(_some(self.vectors[name], active), by, overflow)
        for name, vector in zip(self.template.copied, vectors, strict=True):
            new = list(vector[: len(active)].unbind())
            torch._foreach_copy_(_some(self.vectors[name], active), _some(new, active))


def _scattered(numbers: list[Tensor]) -> ScatteredNumbers | None:
    """Return what reads and counts numbers by one launch; None where that cannot be."""
    if not numbers or not numbers[0].is_cuda:
        return None
    from fp8compile.kernels.optimizer.scattered_numbers import ScatteredNumbers, are_scattered  # imports Triton

    return ScatteredNumbers(numbers) if are_scattered(numbers) else None


def _rows(matrix: Tensor, active: tuple[bool, ...]) -> Tensor:
    """Return the rows of those that are active: in runs, as no index is sent to a GPU."""
    changes = [i for i in range(1, len(active)) if active[i] != active[i - 1]]
    runs = list(pairwise([0, *changes, len(active)]))
    found = [matrix[start:end] for start, end in runs if active[start]]
    return found[0] if len(found) == 1 else torch.cat(found)


def _some(tensors: list[Tensor], active: tuple[bool, ...]) -> list[Tensor]:
    return tensors if all(active) else [x for x, wanted in zip(tensors, active, strict=True) if wanted]


@dataclass
class GroupStep:
    """A group as it was when its parameters were sorted by kind."""

    parameters: list[Tensor]
    settings: dict[str, Any]
    alike: list[Alike]
    others: list[Tensor]  # without a state, for want of a gradient

    def is_current(self, opt: Optimizer, group: Mapping[str, Any]) -> bool:
        """Return True if all is as it was but for numbers that may change."""
        now = group["params"]
        if len(now) != len(self.parameters) or not all(map(is_, now, self.parameters)):
            return False
        if any(p.grad is not None for p in self.others) or not same_settings(self.settings, group):
            return False
        return all(x.is_current(opt.state) for x in self.alike)

    def step(self, group: Mapping[str, Any]) -> None:
        """Update all parameters of the group that have gradients."""
        for x in self.alike:
            x.step(group)


def same_settings(settings: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Return True if a group has these settings: tensors by identity."""
    return all(
        group[name] is value
        or (not isinstance(value, Tensor) and type(group[name]) is type(value) and group[name] == value)
        for name, value in settings.items()
    )


def by_kind(parameters: Sequence[Tensor], kind_of: Callable[[Tensor], Kind]) -> dict[Kind, list[Tensor]]:
    """Return the parameters by kind, in their order."""
    found: dict[Kind, list[Tensor]] = {}
    for p in parameters:
        found.setdefault(kind_of(p), []).append(p)
    return found
