"""Parameters of one kind: what a step takes of them, and whether it is what it was.

What a step does not change is kept: the tensors of each parameter, where they lie, the tables of the launch. Before
each step it is compared with what is there now, by identity and address: a checkpoint may have been loaded, a state or
a parameter have become another tensor. This costs the host some microseconds a parameter, nearly all for objects that
are in no cache of the processor. So parts of 8-bit states are asked for their addresses only where some state has got
other memory (`FP8State.moves`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, pairwise, repeat
from operator import is_, is_not
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fp8compile.kernels.optimizer import update
from fp8compile.kernels.optimizer.bound_launch import ALIGNMENT, BoundLaunch, is_usable, matrices_of
from fp8compile.kernels.optimizer.memory_order import lies_as
from fp8compile.optimizer import state_ops
from fp8compile.optimizer.shared_step.kinds import Kind
from fp8compile.optimizer.shared_step.roles import GRADIENT, Role, tensor_of
from fp8compile.optimizer.shared_step.template import Template
from fp8compile.optimizer.states import FP8State
from fp8compile.torch_hooks.local_parts import local_part

DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]  # of many tensors, without Python


@dataclass
class Alike:
    """Parameters of one kind, and what their step takes."""

    kind: Kind
    template: Template
    parameters: list[Tensor]
    states: list[dict[str, Any]]
    launch: BoundLaunch | None = None
    gradients: list[Any] = field(default_factory=list)  # of the step that runs
    active: tuple[bool, ...] = ()  # which parameters have one
    found_at: list[int] = field(default_factory=list)  # where the gradients of those lie

    def __post_init__(self) -> None:
        self.stored = self._flat(self.template.stored)
        self.device = self.stored[0].device
        self.mine = list(map(local_part, self.parameters))
        self.sizes, is_ordered = list(map(Tensor.numel, self.mine)), all(map(Tensor.is_contiguous, self.mine))
        self.strides = None if is_ordered else list(map(Tensor.stride, self.mine))
        self.kept = [x for state in self.states for x in state.values()]
        kept = list(map(local_part, self.kept))
        self.in_8_bits = [x for x in kept if isinstance(x, FP8State)]
        self.moves, self.parts = FP8State.moves, self._parts()
        self.unswapped = list(map(weakref.ref, self.in_8_bits))  # `torch.utils.swap_tensors` refuses them then
        self.placed = [*self.mine, *(x for x in kept if type(x) is Tensor)]
        self.addresses = [x.data_ptr() for x in self.placed]
        self.width = len(self.template.stored)
        self.is_distributed = any(isinstance(p, DTensor) for p in self.parameters)
        self.counters = update.counters_of(self.template.update, self.stored)
        self.likes: list[Any] = [None] * len(self.parameters)  # of gradients: what they must lie as
        if self.device.type == "cuda" and self._reads_gradients_alone():
            self._bind()

    def _bind(self) -> None:
        """Make the launch, if one can take all tensors where they lie."""
        matrices, given = None, (self.template.spec, self.stored, self._flat(self.template.read))
        if not all(map(is_usable, self.stored)):
            matrices = matrices_of(self.template.update, self.stored, self.mine)
            if matrices is None:
                return
            self.likes = self.mine
        self.launch = BoundLaunch(*given, matrices=matrices)

    def _parts(self) -> list[tuple[int, int]]:
        """Return which tensors 8-bit states are made of, and where they lie."""
        return [(id(part), part.data_ptr()) for x in self.in_8_bits for part in x.parts()]

    def _flat(self, roles: Sequence[Role]) -> list[Tensor]:
        pairs = zip(self.parameters, self.states, strict=True)
        return [tensor_of(role, p, state) for p, state in pairs for role in roles]

    def _reads_gradients_alone(self) -> bool:
        """Return True if a launch reads nothing else: what else is read might lie elsewhere in the next step."""
        return [role.kind for role in self.template.read] in ([], [GRADIENT])

    def is_current(self, states: Mapping[Tensor, Any] | None) -> bool:
        """Return True if states are the tensors that they were, and they and the parameters lie where they lay.

        states: by parameter; None if they are known to be the mappings that they were. Looks at gradients once; `step`
        takes those.
        """
        if states is not None and not all(map(is_, map(states.get, self.parameters), self.states)):
            return False
        now = chain.from_iterable(map(dict.values, self.states))
        if sum(map(len, self.states)) != len(self.kept) or not all(map(is_, now, self.kept)):
            return False
        if self.moves != FP8State.moves:
            if self.parts != self._parts():
                return False
            self.moves = FP8State.moves
        if self.is_distributed and not all(map(is_, self._flat(self.template.stored), self.stored)):
            return False
        if self.addresses != list(map(Tensor.data_ptr, self.placed)) or not self._lie_as_they_lay():
            return False
        found = [p.grad for p in self.parameters]
        self.gradients = list(map(local_part, found)) if self.is_distributed else found
        self.active = tuple(map(is_not, found, repeat(None)))
        return self._are_gradients_alike()

    def _lie_as_they_lay(self) -> bool:
        """Return True if no parameter has become longer or shorter, or been transposed, where it lies."""
        if self.sizes != list(map(Tensor.numel, self.mine)):
            return False
        if self.strides is None:
            return all(map(Tensor.is_contiguous, self.mine))
        return self.strides == list(map(Tensor.stride, self.mine))

    def _are_gradients_alike(self) -> bool:
        found = self._present()
        try:
            self.found_at = list(map(Tensor.data_ptr, found))
        except RuntimeError:  # sparse tensors have no address
            return False
        return all(map(is_, map(DTYPE, found), repeat(self.kind.gradient)))

    def _present(self) -> list[Any]:
        return self.gradients if all(self.active) else [g for g in self.gradients if g is not None]

    def addresses_of_gradients(self) -> list[int]:
        """Return where the launch finds them: 0 of a parameter without one. Copies those that it cannot take so."""
        if not self._lie_in_order() or any(map((ALIGNMENT - 1).__and__, self.found_at)):
            self.gradients = list(map(_usable, self.gradients, self.likes))
            self.found_at = list(map(Tensor.data_ptr, self._present()))
        if all(self.active):
            return self.found_at
        found = iter(self.found_at)
        return [next(found) if wanted else 0 for wanted in self.active]

    def _lie_in_order(self) -> bool:
        """Return True if the elements of each gradient lie as those of its parameter."""
        if self.likes[0] is None:
            return all(map(Tensor.is_contiguous, self._present()))
        return all(g is None or lies_as(g, like) for g, like in zip(self.gradients, self.likes, strict=True))

    def forget_gradients(self) -> None:
        """Keep no gradient alive until the next step."""
        self.gradients = []

    def count_writes(self) -> None:
        """Count the write to each parameter that has a gradient, as operators do and launches do not.

        A backward whose graph was made before the step needs the old values: autograd refuses it then.
        """
        if self.launch is not None:
            local = compress(self.mine, self.active) if self.is_distributed else ()
            increment_version([*compress(self.parameters, self.active), *local])

    def step(self, matrix: Tensor | None) -> None:
        """Update the parameters that have gradients: some. matrix: numbers, with a row a parameter or more rows."""
        if self.launch is None:
            self._call(matrix)
        else:
            self.launch.update_only(self.active)
            self.launch(matrix)

    def _call(self, matrix: Tensor | None) -> None:
        """Run the operator, as a graph of all parameters would."""
        members = [i for i, wanted in enumerate(self.active) if wanted]
        read = [tensor_of(role, self.parameters[i], self.states[i]) for i in members for role in self.template.read]
        numbers = [] if matrix is None else [_rows(matrix, self.active)]
        state_ops.update_parameters(self.stored_of_active(), read, numbers, self.template.spec)

    def stored_of_active(self) -> list[Tensor]:
        """Return what is written, of the parameters that have gradients."""
        if all(self.active):
            return self.stored
        w = self.width
        return [x for i, wanted in enumerate(self.active) if wanted for x in self.stored[i * w : (i + 1) * w]]


def _usable(gradient: Any, like: Any) -> Any:
    """Return a gradient, or a copy that a launch can take."""
    if gradient is None or is_usable(gradient, like):
        return gradient
    return (
        gradient.contiguous().clone() if like is None else torch.empty_like(like, dtype=gradient.dtype).copy_(gradient)
    )


def _rows(matrix: Tensor, active: tuple[bool, ...]) -> Tensor:
    """Return the rows of those that are active: in runs, as no index is sent to a GPU."""
    changes = [i for i in range(1, len(active)) if active[i] != active[i - 1]]
    runs = list(pairwise([0, *changes, len(active)]))
    found = [matrix[start:end] for start, end in runs if active[start]]
    return found[0] if len(found) == 1 else torch.cat(found)
