"""Owners: models, optimizers and scalers whose tensors and settings a captured step reads and writes.

A CUDA graph knows addresses and numbers as they were when it was captured. What can be compared before each replay is
in a `Snapshot`; what changes in every step anyway, the rates of optimizers, becomes a tensor that the graph reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fp8compile.errors import OptionError
from fp8compile.optimizer.states import FP8State
from fp8compile.torch_hooks.local_parts import local_part

Owner: TypeAlias = nn.Module | Optimizer | GradScaler
RATE = "lr"
SCALER_SETTINGS = ("get_growth_factor", "get_backoff_factor", "get_growth_interval", "is_enabled")


@dataclass
class Snapshot:
    """What a graph of a step relies on: addresses of tensors (None where there is no tensor), modes and settings."""

    modes: list[bool] = field(default_factory=list)  # of modules: training or not
    tensors: list[Any] = field(default_factory=list)  # parameters and buffers of models
    gradients: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)  # of optimizers and scalers; counts in Python as they are
    settings: list[Any] = field(default_factory=list)

    def differs_in(self, other: Snapshot) -> str:
        """Return the name of the first field that is not the same; "" if all are."""
        return next((f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)), "")


@dataclass
class Owners:
    """Models, optimizers and scalers, and the tensors that hold the optimizers' rates."""

    all: Sequence[Owner]
    rates: list[tuple[dict[str, Any], Tensor]] = field(default_factory=list)

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

    def parameters(self) -> Iterator[Tensor]:
        """Yield every parameter of models and optimizers, once."""
        found: dict[int, Tensor] = {}
        for module in self.modules:
            found |= {id(p): p for p in module.parameters()}
        for opt in self.optimizers:
            found |= {id(p): p for group in opt.param_groups for p in group["params"]}
        yield from found.values()

    def devices(self) -> set[torch.device]:
        """Return the devices of all parameters."""
        return {p.device for p in self.parameters()}

    def hold_rates(self) -> None:
        """Have every rate in a tensor on the parameters' device, where a scheduler writes it and a graph reads it.

        A float that took the place of such a tensor is written into the tensor.
        """
        held = {id(group): rate for group, rate in self.rates}
        self.rates = []
        for group in (g for opt in self.optimizers for g in opt.param_groups if g["params"] and RATE in g):
            value, known = group[RATE], held.get(id(group))
            if known is None:
                dtype = value.dtype if isinstance(value, Tensor) else torch.float32
                known = torch.as_tensor(value, dtype=dtype, device=group["params"][0].device)
            elif value is not known:
                known.fill_(value)
            group[RATE] = known
            self.rates.append((group, known))

    def versions_of_rates(self) -> list[int]:
        """Return how often each rate has been written."""
        return [rate._version for _, rate in self.rates]

    def snapshot(self) -> Snapshot:
        """Return where all tensors lie now, and how modes and settings are."""
        found = Snapshot()
        for module in (m for model in self.modules for m in model.modules()):
            names = vars(module)
            found.modes.append(module.training)
            found.tensors += map(_address, (*names["_parameters"].values(), *names["_buffers"].values()))
        for opt in self.optimizers:
            for group in opt.param_groups:
                found.settings += (_setting(group[name]) for name in opt.defaults if name in group)
                found.tensors += map(_address, group["params"])
                for p in group["params"]:
                    found.states += map(_address, opt.state[p].values() if p in opt.state else ())
        for scaler in (x for x in self.all if isinstance(x, GradScaler)):
            found.settings += (getattr(scaler, name)() for name in SCALER_SETTINGS)
            found.states += (_address(vars(scaler)[name]) for name in ("_scale", "_growth_tracker"))
        found.gradients += (_address(p.grad) for p in self.parameters())
        return found

    def gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return each parameter with its gradient."""
        return [(p, p.grad) for p in self.parameters()]


def _address(x: Any) -> Any:
    """Return where a tensor lies, all parts of an 8-bit state; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    mine = local_part(x)
    return tuple(part.data_ptr() for part in mine.parts()) if isinstance(mine, FP8State) else mine.data_ptr()


def _setting(value: Any) -> Any:
    """Return a setting of a group: a tensor by its identity."""
    return pytree.tree_map(lambda x: id(x) if isinstance(x, Tensor) else x, value)


def is_number_like(value: Any) -> bool:
    """Return True for what can be compared, and stays the same: numbers, text, None, settings."""
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
