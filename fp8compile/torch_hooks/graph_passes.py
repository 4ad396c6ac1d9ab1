"""Torch's hooks for graph passes, shared with passes that a user has put there.

Whoever sets `torch._inductor.config.post_grad_custom_pre_pass` and its kind, or gives them in `options["inductor"]`,
keeps them: theirs run first, on a graph without FP8, and ours on what they leave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config  # where the hooks are
from torch._inductor import custom_graph_pass  # their base class: its uuid() keys the compile caches
from torch._inductor.custom_graph_pass import CustomGraphPass

from fp8compile.torch_hooks.calls.user_frame import warn_user

CUT = "custom_partitioner_fn"
_several = getattr(custom_graph_pass, "get_custom_graph_passes", None)  # newer torch: a hook holds several passes

GraphPass = Callable[[fx.Graph], None]


def shared(settings: Mapping[str, Any], ours: Mapping[str, CustomGraphPass]) -> dict[str, Any]:
    """Return settings for the hooks of `ours` with which passes that a user has set run before."""
    return {name: _after(_theirs(settings, name), own) for name, own in ours.items()}


def theirs_uuid(settings: Mapping[str, Any], *names: str) -> str:
    """Return a text that changes with the passes that others have put into the hooks `names`; "" if there are none."""
    return "".join(repr(_uuid(p)) for name in names for p in _listed(_theirs(settings, name)))


def warn_of_other_cut(settings: Mapping[str, Any]) -> None:
    """Say so where somebody else's cut into forward and backward gives way to ours."""
    if _theirs(settings, CUT) is not None:
        warn_user(
            f"fp8: torch._inductor.config.{CUT} is not used: what is saved for backward is chosen with FP8 in mind; "
            "the options 'save' and 'activation_budget' say how"
        )


@dataclass
class _InTurn(CustomGraphPass):
    """Several passes for a hook that holds one."""

    passes: tuple[GraphPass, ...]

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place, pass by pass."""
        for run in self.passes:
            run(graph)

    def uuid(self) -> str | None:
        """Return a digest of theirs; None, which keeps results out of the caches, if one has none."""
        known = [_uuid(p) for p in self.passes]
        return None if None in known else hashlib.sha256(repr(known).encode()).hexdigest()


def _theirs(settings: Mapping[str, Any], name: str) -> Any:
    return settings[name] if name in settings else getattr(inductor_config, name)


def _listed(passes: Any) -> tuple[Any, ...]:
    if _several is not None:
        return _several(passes)
    return () if passes is None else (passes,)


def _after(theirs: Any, ours: CustomGraphPass) -> Any:
    """Return `ours` behind `theirs`, as this torch takes several passes."""
    passes = (*_listed(theirs), ours)
    if len(passes) == 1:
        return ours
    return passes if _several is not None else _InTurn(passes)


def _uuid(graph_pass: Any) -> Any:
    return graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None
