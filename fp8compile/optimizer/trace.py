"""The step of an optimizer while Dynamo traces it: whose step it is, and how it is traced again.

Dynamo hands a backend a graph, not the optimizer; but while it does, the frame that it traces is at hand, and its
`self` is the optimizer. Private API of torch, imported here only; where it finds nothing, the graph is compiled with
the states as they are, and `fp8compile.prepare_optimizer` does the same explicitly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis  # the restart that keeps what was learned of scalars
from torch._dynamo.pgo import auto_dynamic, get_code_state  # what it takes for constant
from torch._dynamo.source import AttrSource  # a part of what has a source
from torch.optim import Optimizer

from fp8compile.torch_hooks.calls import compiled_calls
from fp8compile.torch_hooks.calls.compilations import translator
from fp8compile.torch_hooks.calls.user_frame import warn_user

RATES = ("lr", "weight_decay")
NO_STEPS = ("torch.optim.swa_utils", "torch.optim.lr_scheduler")  # what they compile is part of no step


def traced_optimizer(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Optimizer | None:
    """Return the optimizer whose step this graph is; None for any other graph.

    Its `self` or first argument is an optimizer; or a local variable is one, and the graph has states of it.
    """
    tx = translator()
    if tx is None:
        return None
    root = tx.output.root_tx or tx
    frame = dict(root.f_locals)
    first = [frame.get("self"), *list(frame.get("args") or ())[:1]]
    if found := next((x for x in first if isinstance(x, Optimizer)), None):
        return found
    near = [getattr(x, "__self__", x) for x in frame.values()]
    inputs = {id(x) for x in (*example_inputs, *gm.__dict__.get("_buffers", {}).values(), *gm.__dict__.values())}
    found = next((x for x in near if isinstance(x, Optimizer) and inputs & _state_ids(x)), None)
    if found is None and _is_part_of_a_step(root) and not compiled_calls.step_is_warned_of():
        _warn_of_part(root)
    return found


def _state_ids(opt: Optimizer) -> set[int]:
    return {id(x) for state in opt.state.values() for x in state.values() if isinstance(x, torch.Tensor)}


def _is_part_of_a_step(root: Any) -> bool:
    """Return True if what is compiled is a function of torch.optim that only writes the results of a step."""
    module = str(root.f_globals.get("__name__"))
    return module.startswith("torch.optim.") and module not in NO_STEPS and not torch.is_grad_enabled()


def _warn_of_part(root: Any) -> None:
    warn_user(
        f"fp8: {root.f_code.co_name} of {root.f_globals['__name__']} is compiled by itself, not the step of an "
        "optimizer: its states stay as they are. Dynamo traces no step of this class as a whole any more after one "
        "that it could not compile, as with fused=True: call torch._dynamo.reset(), and leave fused=True out."
    )


def trace_again(gm: fx.GraphModule) -> NoReturn:
    """Raise Dynamo's own signal to trace the frame once more, before anything is compiled."""
    tx = translator()
    assert tx is not None  # who traces a step can trace it again
    tx.speculation_log.clear()  # the next trace may take another path
    gm._buffers.clear()  # Dynamo keeps this graph as long as the optimizer lives: the plain states go now
    raise TensorifyScalarRestartAnalysis(restart_reason="optimizer states became FP8, rates symbolic")


def let_numbers_change(names: Sequence[str] = RATES) -> bool:
    """Have Dynamo take settings as numbers that may change; return True if it took one as a constant.

    Dynamo does so by itself when it first meets another number. A schedule then costs no second compilation. A decay
    of 0 stays one: a step that decays is another.
    """
    ends = tuple(f"['{name}']" for name in names)
    found = [
        entry
        for state in get_code_state().values()
        for name, entry in state.automatic_dynamic.items()
        if "param_groups" in name and _setting(name).endswith(ends) and isinstance(entry.scalar, float)
        if entry.scalar or name.endswith("['lr']")
    ]
    for entry in found:
        entry.scalar = auto_dynamic
    return bool(found)


def take_as_constants(code: str, names: Sequence[str]) -> None:
    """Have Dynamo take settings that are 0 as constants in a function with code of this name.

    It may have learned of another group that they change. A step reads no decay of 0, and of a number that is not read
    AOTAutograd says so late: Dynamo traces once more.
    """
    ends = tuple(f"['{name}']" for name in names)
    for state in (state for of, state in get_code_state().items() if of.name == code):
        for name, entry in state.automatic_dynamic.items():
            if ends and name.endswith(ends) and entry.scalar is auto_dynamic:
                entry.scalar = 0


def _setting(name: str) -> str:
    """Return the name of a source without the place in a setting that is a tuple."""
    return re.sub(r"\[\d+\]$", "", name)


def name_sources(gm: fx.GraphModule, parts: Mapping[str, tuple[str, str]], added: Iterable[str]) -> None:
    """Say where new buffers of `gm` come from, as AOTAutograd asks.

    parts: of a buffer that is a part of a state, that state and the part. added: buffers that no user has; they get
    sources that are not met again.
    """
    sources = gm.__dict__.get("_param_name_to_source")
    if sources is None:
        return
    sources |= {name: AttrSource(sources[state], part) for name, (state, part) in parts.items()}
    sources |= {name: AttrSource(next(iter(sources.values())), name) for name in added}
