"""The systems that benchmarks compare: BF16, torchao's recipes, and `torch.compile(model, backend="fp8")`.

All train the same BF16 parameters. The output head stays in BF16 everywhere: ours leaves it by default, and torchao is
told to. On a CPU ours runs its graphs node by node, and nothing is tuned: that it works, no times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import fp8compile

ON_CPU = {"executor": "eager", "select": "all", "save_min_bytes": 0, "strict": True}
HEADS = ("lm_head", "classifier")


class LeftOutError(Exception):
    """A system that has nothing to measure here, and why."""


@dataclass(frozen=True)
class System:
    """A way to train.

    compile: what torch.compile is given, None for eager; recipe: of torchao's; eight_bit: the optimizer is compiled
    with 8-bit states, instead of torch's fused one.
    """

    name: str
    compile: dict[str, Any] | None = field(default_factory=dict)
    recipe: str = ""
    eight_bit: bool = False

    @property
    def ours(self) -> bool:
        return self.compile is not None and self.compile.get("backend") == "fp8"


def torchao(recipe: str) -> System:
    return System(f"torchao {recipe}", recipe=recipe)


def ours(name: str = "", eight_bit: bool = False, **options: Any) -> System:
    """Ours with these options; `name` says what is not the default."""
    how = {"backend": "fp8", "options": options}
    return System(f"fp8compile + {name}" if name else "fp8compile", how, eight_bit=eight_bit)


EAGER = System("BF16 eager", None)
BASELINE = System("BF16 compile")
NO_FP8 = {"skip": ["*"], "save": "bf16", "chunk_loss": False}  # leaves what is done for attention alone
MASKS_FOLDED = System("BF16, masks folded", {"backend": "fp8", "options": NO_FP8})
_FAST = {"fast_accumulation": True}
FAST_GRAD_INPUT = {"base": "mixed", "grad_input": _FAST}  # recipes; `mixed` accumulates fast in output alone
FAST_GRADIENTS = {**FAST_GRAD_INPUT, "grad_weight": _FAST}
TORCHAO = tuple(torchao(recipe) for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"))


def prepare(system: System, model: nn.Module, device: str) -> Any:
    """Return what is called for `model`, which may change. Raises `LeftOutError` if there is nothing to see."""
    if system.recipe:
        convert(model, system.recipe, device)
    if system.compile is None:
        return model
    compiled: Any = torch.compile(model, **compile_arguments(system, device))
    return compiled


def compile_arguments(system: System, device: str) -> dict[str, Any]:
    """Return what torch.compile is given."""
    arguments: dict[str, Any] = dict(system.compile or {})
    if device != "cpu":
        return arguments
    return {**arguments, "options": {**arguments["options"], **ON_CPU}} if system.ours else {"backend": "eager"}


def convert(model: nn.Module, recipe: str, device: str) -> None:
    """Exchange the linear layers of `model`, in place, as torchao's users do."""
    if find_spec("torchao") is None:
        raise LeftOutError("torchao is not installed")
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    if device == "cpu":
        config = replace(config, emulate=True)
    float8.convert_to_float8_training(model, config=config, module_filter_fn=converts)
    if not any(type(m).__name__ == "Float8Linear" for m in model.modules()):
        raise LeftOutError("torchao converts no layer of this model")


def converts(module: nn.Module, name: str) -> bool:
    """Return True if torchao is to convert a module: a linear layer that FP8 matmuls can take, and no output head."""
    if not isinstance(module, nn.Linear) or name.split(".")[-1] in HEADS:
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def optimizer(system: System, model: nn.Module, device: str) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """AdamW and its step: torch's fused kernel, or ours with 8-bit states."""
    if not system.eight_bit:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return opt, opt.step
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options: dict[str, Any] = {"executor": "eager"} if device == "cpu" else {}
    return opt, torch.compile(opt.step, backend="fp8", options=options)


def in_fp8(system: System, model: nn.Module) -> str:
    """Return how much of the model's matmuls run in FP8, in the words of the system: what does nothing is seen."""
    if system.recipe:
        layers = [type(m).__name__ == "Float8Linear" for m in model.modules() if isinstance(m, nn.Linear)]
        return f"{sum(layers)} of {len(layers)} layers"
    if not system.ours:
        return ""
    plans = [plan for plan in fp8compile.compiles() if plan.graph == "training"]
    return f"{sum(len(p.converted) for p in plans)} of {sum(len(p.matmuls) for p in plans)} matmuls"


def failure() -> str:
    """Return why a graph that ours compiled fell back to BF16, if one did."""
    return next((f"fell back: {plan.failure}" for plan in fp8compile.compiles() if plan.failure), "")
