"""Compiled functions of which torch compiled nothing: why, and what to do about it, in words."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from fp8compile.optimizer.state_conversion import is_prepared
from fp8compile.plan.plan import Plan

# Beginnings of what Dynamo says where a user left something out by choice.
BREAK = "Call to `torch._dynamo.graph_break()`"
BY_CHOICE = ("Skip calling `torch.compiler.disable()`d function", BREAK)
RECURRENT = (
    "These know no FP8: nothing is gained by compiling one alone. (GRU and RNN can be traced step by step with "
    "torch._dynamo.config.allow_rnn = True, which takes long for long sequences.)"
)
HOOKS = "Remove the hooks, or register them on modules whose class is your own: the forward of these is compiled."
NUMBERS = "Keep numbers that it computes in tensors, without .item()."
CURES = (
    ("Recurrent module is called between graphs", RECURRENT),
    ("Attempted to wrap RNN, GRU, or LSTM", RECURRENT),
    ("Module-level backwards hooks", HOOKS),
    ("Unsupported Tensor.item()", NUMBERS),
)  # beginnings of what Dynamo says, and what to do
ELSE = 'TORCH_LOGS="graph_breaks" shows the lines.'
AGAIN = "Call torch.compiler.reset() before you compile it, or compile it first."
FUSED = (
    "fused=True runs torch's own kernel, which torch.compile does not see into. Make the optimizer with foreach=True "
    "or fused=False; if it has made a step already, call torch.compiler.reset() before the next"
)
IN_8_BITS = "its states are kept in 8 bits all the same, stored by each operation, slower and less precise"
DISABLED = "torch lets nobody compile this step: leave it uncompiled"


def plan(name: str, optimizer: Optimizer | None, why: Sequence[str], is_earlier: bool = False) -> Plan:
    """Return the plan of a call of `name` that reached no graph.

    why: what Dynamo said; is_earlier: in another call, after which it left this code alone.
    """
    if optimizer is not None:
        states = IN_8_BITS if is_prepared(optimizer) else "its states stay as they are"
        text = f"nothing of {name} was compiled, and {states}: {_of_step(optimizer, why)}."
        return Plan("optimizer", failure=text)
    earlier = " in an earlier call of the same code, and leaves that alone since" if is_earlier else ""
    cures = [AGAIN] if is_earlier else _cures(why) or [ELSE]
    text = f"nothing of {name} was compiled, so nothing of it runs in FP8. torch gave up{earlier}: {_shortened(why)}."
    return Plan("none", failure=" ".join([text, *cures]))


def in_place(name: str) -> Plan:
    """Return the plan of a call of one of torch's own modules after `module.compile()`."""
    return Plan(
        "none",
        failure=f"nothing of {name} was compiled, so nothing of it runs in FP8: module.compile() takes up modules of "
        "your own classes, and not torch's. Use torch.compile(module, …), or compile what it is a part of.",
    )


def without_matmuls(name: str, why: Sequence[str]) -> Plan | None:
    """Return the plan of a call whose graphs lack matmuls because of modules that Dynamo is known to leave; or None."""
    known = [text for text in why if any(text.startswith(start) for start, _ in CURES[:3])]
    if not known:
        return None
    text = f"no matmul of {name} was compiled, so nothing of it runs in FP8. torch left modules: {_shortened(known)}."
    return Plan("none", failure=" ".join([text, *_cures(known)]))


def unwanted(why: Sequence[str], optimizer: Optimizer | None) -> list[str]:
    """Return the reasons that nobody has asked for. In a step it is torch, not the user, that disables functions."""
    return [text for text in why if not text.startswith(BY_CHOICE if optimizer is None else BREAK)]


def _of_step(optimizer: Optimizer, why: Sequence[str]) -> str:
    if any(group.get("fused") for group in optimizer.param_groups):
        return FUSED
    if getattr(type(optimizer).step, "_torchdynamo_disable", False):
        return DISABLED
    return f"torch gave up: {_shortened(unwanted(why, None) or why)}. {' '.join(_cures(why) or [ELSE])}".rstrip(".")


def _shortened(why: Sequence[str]) -> str:
    """Return what Dynamo says: of each reason what it met, and its explanation."""
    return "; ".join(dict.fromkeys(_short(text) for text in why[:3]))


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    explained = next((x.removeprefix("Explanation:").strip() for x in lines if x.startswith("Explanation:")), "")
    return ": ".join(x.rstrip(".") for x in (lines[0] if lines else text, explained) if x)


def _cures(why: Sequence[str]) -> list[str]:
    return [cure for start, cure in CURES if any(text.startswith(start) for text in why)]
