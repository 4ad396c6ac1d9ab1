"""Find updates: which parameters an optimizer graph updates, and by which expression; decided by graph, not by class.

    copy_(param, add(mul(param, …), div(%m, …)))     copy_(payload, store_state(%m)[0])     %m = lerp(load_state(…), …)

Every `copy_` to an input is a target. Targets whose expressions have elements in common (the gradient, a new moment)
belong to one parameter. An expression goes down from its target through operators of
`passes/optimizer/update_rules.py`, to what it reads: inputs, 8-bit states, numbers (0-d tensors, which stay in the
graph), and whatever else computes a tensor of the parameter's shape. Sound because all of these are functions of the
graph's inputs as they were before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.compilation import aten, is_tensor, value
from fp8compile.passes.core.node_views import Copy, Getitem, first_input
from fp8compile.passes.optimizer.state_views import StoreState
from fp8compile.passes.optimizer.store_load_forwarding import stored_by
from fp8compile.passes.optimizer.update_rules import FILLS, IDENTITIES, RULES, call_of, operands

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Target:
    """An input that is written: by `root`, which is stored in 8 bits if `store` is there; `copies` do it now."""

    written: fx.Node  # the parameter, or the payload of a state
    root: fx.Node
    copies: list[fx.Node]
    store: StoreState | None = None
    side: fx.Node | None = None

    @property
    def counter(self) -> fx.Node | None:
        """The input that counts the random bits of the state."""
        node = self.store.counter if self.store is not None else None
        while node is not None and node.op != "placeholder":
            node = first_input(node)
        return node

    @property
    def low(self) -> fx.Node | None:
        """The input with the missing bits of the parameter, on the state that it rides on."""
        return self.store.low if self.store is not None else None

    @property
    def parameter_rounding(self) -> str:
        """The rounding of the parameter of this state."""
        return self.store.parameter if self.store is not None else "nearest"


@dataclass
class ParameterUpdate:
    """All that is written for one parameter."""

    targets: list[Target]
    elements: set[fx.Node] = field(default_factory=set)


def find_updates(graph: fx.Graph) -> list[ParameterUpdate]:
    """Return the updates of `graph`, in its order; what cannot be one (a step counter) is left out."""
    owners: dict[fx.Node, ParameterUpdate] = {}
    updates: dict[int, ParameterUpdate] = {}
    for target in _targets(graph):
        fresh = ParameterUpdate([target], set(elements_of(target)))
        for other in {id(owners[n]): owners[n] for n in fresh.elements if n in owners}.values():
            fresh = ParameterUpdate(other.targets + fresh.targets, other.elements | fresh.elements)
            del updates[id(other)]
        updates[id(fresh)] = fresh
        owners |= dict.fromkeys(fresh.elements, fresh)
    return list(updates.values())


def _targets(graph: fx.Graph) -> list[Target]:
    copies = {Copy(n).written: n for n in graph.find_nodes(op="call_function", target=aten.copy_.default)}
    found: list[Target] = []
    for written, copy in copies.items():
        root = Copy(copy).source
        if written.op != "placeholder":
            continue
        store = stored_by(root)
        if store is None:
            if value(written).dtype in FLOATS and value(written).dim() > 0:
                found.append(Target(written, root, [copy]))
        elif Getitem(root).index == 0:
            side = next(w for w, c in copies.items() if stored_by(Copy(c).source) == store and w is not written)
            found.append(Target(written, store.x, [copy, copies[side]], store, side))
    for target in found:
        if target.counter in copies:
            target.copies.append(copies[target.counter])
    return found


def elements_of(target: Target) -> Iterable[fx.Node]:
    """Return what its expression computes or reads element by element, constants left out: two parameters may share
    one."""
    shape = value(target.root).shape
    found: dict[fx.Node, None] = {target.written: None}
    stack = [target.root]
    while stack:
        node = stack.pop()
        if node in found or not is_tensor(node) or value(node).shape != shape:
            continue
        if node.target is state_ops.load_state:
            found[node] = None
            found |= dict.fromkeys(node.all_input_nodes)
            continue
        call = call_of(node)
        inputs = list(operands(*call[1:])) if call is not None and is_elementwise(node) else []
        inputs = inputs[:1] if node.target is state_ops.unscale else inputs  # its numbers are every parameter's
        if node.op == "placeholder" or inputs or not is_elementwise(node):
            found[node] = None
        stack += inputs
    return found


def is_elementwise(node: fx.Node, floats: Sequence[torch.dtype] = FLOATS) -> bool:
    """Return True if `node` is computed, in one of these dtypes, by an operator that an update can hold."""
    call = call_of(node)
    if call is None or not is_tensor(node) or value(node).dtype not in (*floats, torch.bool):
        return False
    name, args, _ = call
    if name in IDENTITIES:
        source = args[1] if name == "copy" else args[0]
        return is_tensor(source) and value(source).dtype in (*floats, torch.bool)
    return name in RULES or name in ("pow", "unscale", *FILLS)
