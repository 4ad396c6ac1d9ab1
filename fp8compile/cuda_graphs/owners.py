"""Owners: models, optimizers and scalers whose tensors and settings a captured step reads and writes.

A CUDA graph knows addresses and numbers as they were when it was captured. What can be compared before each replay is
in a `Snapshot`; what changes in every step anyway, the rates of optimizers, becomes a tensor that the graph reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp8compile import delayed
from fp8compile.errors import OptionError
from fp8compile.optimizer.states import FP8State
from fp8compile.torch_hooks.local_parts import local_part

Owner: TypeAlias = nn.Module | Optimizer | GradScaler
RATE = "lr"
SCALER_SETTINGS = ("get_growth_factor", "get_backoff_factor", "get_growth_interval")
SCALER_STATES = ("_scale", "_growth_tracker")
PLAIN = frozenset((bool, int, float, str))  # attributes of modules that a step may read, such as the rate of a dropout
ORDINARY = frozenset((Tensor, nn.Parameter))


@dataclass
class Snapshot:
    """Hold what a graph of a step relies on: addresses of tensors, None where there is none, modes and settings."""

    modes: list[Any] = field(default_factory=list)  # of modules: training or not, and other plain attributes
    tensors: list[Any] = field(default_factory=list)  # parameters, buffers and plain tensors of models
    trained: list[bool] = field(default_factory=list)  # requires_grad of each parameter
    states: list[Any] = field(default_factory=list)  # of optimizers and scalers; counts in Python as they are
    settings: list[Any] = field(default_factory=list)

    def differs_in(self, other: Snapshot) -> str:
        """Return the name of the first field that is not the same; "" if all are."""
        return next((f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), "")


@dataclass
class Rate:
    """Hold the rate of a group in a tensor. given: the tensor in whose place it is, as long as that is written."""

    group: dict[str, Any]
    tensor: Tensor
    given: Tensor | None = None
    version: int = 0

    @classmethod
    def of(cls, group: dict[str, Any]) -> Rate:
        """Put a tensor on the parameters' device into the place of a group's rate: torch gives all groups the same."""
        value = group[RATE]
        given = value if isinstance(value, Tensor) else None
        dtype, device = torch.float32 if given is None else given.dtype, group["params"][0].device
        group[RATE] = tensor = torch.as_tensor(value, dtype=dtype, device=device).detach().clone()
        return cls(group, tensor, given, 0 if given is None else given._version)

    def hold(self) -> None:
        """Take over what was written in the place of the tensor, or into the one that was given."""
        value = self.group[RATE]
        if value is not self.tensor:
            self.tensor.copy_(torch.as_tensor(value, device=self.tensor.device).reshape(self.tensor.shape))
            self.group[RATE] = self.tensor
        elif self.given is not None and self.given._version != self.version:
            self.tensor.copy_(self.given)
            self.version = self.given._version


@dataclass
class Owners:
    """Hold models, optimizers and scalers, and the tensors in which the optimizers' rates are."""

    all: Sequence[Owner]
    rates: dict[int, Rate] = field(default_factory=dict)  # by the id of the group

    def __post_init__(self) -> None:
        for owner in self.all:
            if not isinstance(owner, Owner):
                raise OptionError(
                    f"capture_step takes models, optimizers and GradScalers behind the step, not a "
                    f"{type(owner).__name__}: give it all whose tensors the step changes"
                )
        if not self.optimizers and not self.modules:
            raise OptionError("capture_step needs the model and the optimizer that the step trains")

    @property
    def modules(self) -> list[nn.Module]:
        """The models."""
        return [x for x in self.all if isinstance(x, nn.Module)]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers."""
        return [x for x in self.all if isinstance(x, Optimizer)]

    @property
    def scalers(self) -> list[GradScaler]:
        """The scalers that scale."""
        return [x for x in self.all if isinstance(x, GradScaler) and x.is_enabled()]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers."""
        return [group for opt in self.optimizers for group in opt.param_groups]

    def submodules(self) -> list[nn.Module]:
        """Return every module of the models."""
        return [module for model in self.modules for module in model.modules()]

    def parameters(self, modules: Sequence[nn.Module] | None = None) -> list[Tensor]:
        """Return every parameter of models and optimizers, once. modules: all of the models, if they are known."""
        found: dict[int, Tensor] = {}
        for module in self.submodules() if modules is None else modules:
            found.update((id(p), p) for p in vars(module)["_parameters"].values() if p is not None)
        for group in self.groups:
            found.update((id(p), p) for p in group["params"])
        return list(found.values())

    def devices(self) -> set[torch.device]:
        """Return the devices of all parameters."""
        return {p.device for p in self.parameters()}

    def hold_rates(self) -> None:
        """Have every rate in a tensor of its own on the parameters' device: a scheduler writes it, a graph reads it."""
        for group in self.groups:
            if id(group) in self.rates:
                self.rates[id(group)].hold()
            elif group["params"] and RATE in group:
                self.rates[id(group)] = Rate.of(group)

    def versions_of_rates(self) -> list[int]:
        """Return how often each rate has been written."""
        return [rate.tensor._version for rate in self.rates.values()]

    def versions_of_others(self) -> list[int]:
        """Return how often each trained parameter has been written that no optimizer has, of models that one has."""
        mine = {id(p) for group in self.groups for p in group["params"]}
        found = []
        for module in self.modules:
            parameters = list(module.parameters())
            if any(id(p) in mine for p in parameters):
                found += [p._version for p in parameters if p.requires_grad and id(p) not in mine]
        return found

    def snapshot(self) -> Snapshot:
        """Return where all tensors lie now, and how modes and settings are."""
        found, modules = Snapshot(), self.submodules()
        parameters = self.parameters(modules)
        for module in modules:
            names = vars(module)
            for x in names.values():
                if type(x) in PLAIN:
                    found.modes.append(x)
                elif type(x) is Tensor:
                    found.tensors.append(x.data_ptr())
            found.tensors += map(_address, names["_buffers"].values())
        found.tensors += map(_address, parameters)
        for opt in self.optimizers:
            for group in opt.param_groups:
                found.settings += (_setting(value) for name, value in group.items() if name != "params")
            for state in opt.state.values():  # of a parameter, or one of all
                found.states += map(_address, state.values() if isinstance(state, dict) else (state,))
        for scaler in self.scalers:
            found.settings += (getattr(scaler, name)() for name in SCALER_SETTINGS)
            found.states += (_address(vars(scaler)[name]) for name in SCALER_STATES)
        found.states += (x.data_ptr() for x in delayed.tensors())
        found.trained += (p.requires_grad for p in parameters)
        return found

    def gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return each parameter with its gradient."""
        return [(p, p.grad) for p in self.parameters()]

    def keep(self) -> Callable[[], None]:
        """Return what puts every tensor that a step may exchange back into its place."""
        kept: list[tuple[Any, Any]] = []
        for module in self.submodules():
            kept += [(vars(module)[name], dict(vars(module)[name])) for name in ("_parameters", "_buffers")]
        for opt in self.optimizers:
            kept += [(group, dict(group)) for group in opt.param_groups]
            kept += [(opt.state, dict(opt.state)), *((x, dict(x)) for x in opt.state.values() if isinstance(x, dict))]
        kept += [(vars(scaler), {name: vars(scaler)[name] for name in SCALER_STATES}) for scaler in self.scalers]
        gradients = self.gradients()

        def put_back() -> None:
            for there, before in kept:
                for name in () if SCALER_STATES[0] in before else set(there) - set(before):
                    del there[name]
                there.update(before)
            for p, gradient in gradients:
                p.grad = gradient

        return put_back

    @contextlib.contextmanager
    def seeing_zero_grad(self) -> Iterator[set[int]]:
        """Yield the ids of the parameters whose gradients `zero_grad` of an owner sets to None meanwhile."""
        emptied: set[int] = set()
        watched: list[nn.Module | Optimizer] = [*self.modules, *self.optimizers]

        def watching(zero_grad: Callable[..., None]) -> Callable[..., None]:
            def call(*args: Any, **kwargs: Any) -> None:
                there = [p for p, gradient in self.gradients() if gradient is not None]
                zero_grad(*args, **kwargs)
                emptied.update(id(p) for p in there if p.grad is None)

            return call

        for owner in watched:
            vars(owner)["zero_grad"] = watching(owner.zero_grad)
        try:
            yield emptied
        finally:
            for owner in watched:
                del vars(owner)["zero_grad"]


def _address(x: Any) -> Any:
    """Return where a tensor lies, all parts of an 8-bit state; of a container, where its tensors lie; else as it is."""
    if type(x) in ORDINARY:
        return x.data_ptr()
    if isinstance(x, Tensor):
        mine = local_part(x)
        return [part.data_ptr() for part in mine.parts()] if isinstance(mine, FP8State) else mine.data_ptr()
    return pytree.tree_map(_address, x) if isinstance(x, list | tuple | dict) else x


def _setting(value: Any) -> Any:
    """Return a setting of a group: a tensor by its identity."""
    return value if type(value) in PLAIN else pytree.tree_map(lambda x: id(x) if isinstance(x, Tensor) else x, value)


def is_number_like(value: Any) -> bool:
    """Return True for what can be compared, and stays the same: numbers, text, None, dtypes, devices."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
