"""Write update: the expression of one parameter's update as a spec, with the nodes that its slots stand for.

Roundings between the operators of a BF16 graph are left out: values are FP32 from load to store. Equal updates get
equal specs: targets are put in the order of their expressions' texts, and slots in the order in which they are met.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile.kernels.codegen.spec.region import Value
from fp8compile.kernels.optimizer.update_spec import PLAIN, SCALAR, SPLIT, STATE, Slot, Update
from fp8compile.passes.core.compilation import is_tensor, value
from fp8compile.passes.optimizer.find_updates import ParameterUpdate, Target, is_elementwise
from fp8compile.passes.optimizer.state_views import LoadState, Unscale
from fp8compile.passes.optimizer.update_rules import FILLS, IDENTITIES, POWERS, RULES, SHAPED, call_of


class UpdateSkipError(Exception):
    """An update cannot be merged; the reason reaches the plan."""


@dataclass
class Written:
    """A spec, the nodes of each slot, and the copies that it makes unnecessary."""

    spec: Update
    nodes: list[tuple[fx.Node, ...]]
    copies: list[fx.Node]


def write_update(update: ParameterUpdate, overflow: fx.Node | None = None) -> Written:
    """Return the spec of `update`; raises `UpdateSkipError` with the reason if it has none. It writes nothing where the
    number `overflow` is not 0."""
    shapes = {tuple(map(str, value(t.written).shape)) for t in update.targets}  # sizes may be symbolic
    if len(shapes) != 1:
        raise UpdateSkipError(f"its tensors have different shapes: {sorted(shapes)}")
    writer = _SpecWriter(update)
    keys = {t.written: _text(t.root, {}) for t in update.targets}
    for target in sorted(update.targets, key=lambda t: (t.store is not None, keys[t.written])):
        writer.store(target)
    return Written(writer.finish(overflow), writer.nodes, [c for t in update.targets for c in t.copies])


def _text(node: Any, known: dict[fx.Node, str]) -> str:
    """Return a digest of an expression: equal for equal expressions over inputs of equal kinds, of whatever shapes."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if node not in known:
        call = call_of(node) if is_elementwise(node) else None
        if call is not None and call[0] in SHAPED:
            parts = ["shaped", _text(_carried(call[0], call[1]), known)]
        elif call is not None:
            parts = [
                call[0],
                *(_text(a, known) for a in call[1]),
                *(f"{k}{_text(a, known)}" for k, a in call[2].items()),
            ]
        elif load := LoadState.of(node):
            parts = ["state", load.format]
        else:
            parts = [PLAIN, str(value(node).dtype), str(value(node).dim() == 0)] if is_tensor(node) else ["number"]
        known[node] = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
    return known[node]


def _carried(name: str, args: tuple[Any, ...]) -> Any:
    """Return the tensor or the number that one of `IDENTITIES` or `FILLS` hands on, in whatever shape."""
    if name in IDENTITIES:
        return args[1] if name == "copy" else args[0]
    place = FILLS[name]
    return float(name == "ones_like") if place is None else args[place]


@dataclass
class _SpecWriter:
    """Collects values and slots; a `Writer` for the rules."""

    update: ParameterUpdate
    values: list[Value] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    nodes: list[tuple[fx.Node, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known: dict[Value, int] = {}
        self.of_node: dict[fx.Node, int] = {}
        self.of_slot: dict[fx.Node, int] = {}
        self.shape = value(self.update.targets[0].written).shape
        self.rider = self._rider()

    def _rider(self) -> Target | None:
        """Return the state that carries what belongs to the parameter."""
        riders = [t for t in self.update.targets if t.parameter_rounding != "nearest"]
        plain = [t for t in self.update.targets if t.store is None]
        if riders and (len(riders) > 1 or len(plain) != 1):
            raise UpdateSkipError(
                "which of its tensors is the parameter is not clear, so it cannot be rounded specially"
            )
        return riders[0] if riders else None

    # ---- what rules write with ----------------------------------------------------------------------------------

    def op(self, name: str, *args: int, params: tuple[Any, ...] = ()) -> int:
        constants = [v.params[0] if v.op == "constant" else None for v in (self.values[i] for i in args)]
        if name == "where" and constants[0] is not None:  # torch.lerp asks whether a weight is small
            return args[1] if constants[0] else args[2]
        if name == "mul" and 1.0 in constants:
            return args[1 - constants.index(1.0)]
        return self._value(Value(name, args, params))

    def constant(self, x: Any) -> int:
        return self._value(Value("constant", (), (x if isinstance(x, bool) else float(x),)))

    def _value(self, value: Value) -> int:
        if value not in self.known:
            self.known[value] = len(self.values)
            self.values.append(value)
        return self.known[value]

    # ---- nodes --------------------------------------------------------------------------------------------------

    def number(self, x: Any) -> int:
        """Return the position of the value of an argument: a node or a number."""
        if not isinstance(x, fx.Node):
            return self.constant(x)
        if x not in self.of_node:
            self.of_node[x] = self._number_of_node(x)
        return self.of_node[x]

    def _number_of_node(self, node: fx.Node) -> int:
        if not is_tensor(node):
            raise UpdateSkipError("it reads a symbolic number, no tensor")
        if value(node).dim() == 0 and self.shape != value(node).shape and not _is_fill(node):
            number = self._load(Slot(SCALAR, "float32"), (node,))  # all numbers of a step are FP32
            return self.op("ne", number, self.constant(0.0)) if value(node).dtype == torch.bool else number
        if value(node).shape != self.shape and not _is_fill(node):
            raise UpdateSkipError(
                f"it reads a tensor of shape {list(value(node).shape)}, its own is {list(self.shape)}"
            )
        if load := LoadState.of(node):
            return self._load(Slot(STATE, load.format), (load.payload, load.side))
        call = call_of(node)
        if call is None or not is_elementwise(node):
            return self._load(self._plain(node), (node,))
        if unscaled := Unscale.of(node):
            product = self.op("mul", self.number(unscaled.gradient), self.number(unscaled.inverse))
            dtype = self._plain(node).type
            return product if dtype == "float32" else self.op("round", product, params=(dtype,))
        return self._computed(*call)

    def _computed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if name in IDENTITIES or name in FILLS:
            return self.number(_carried(name, args))
        if name == "pow":
            if args[1] not in POWERS:
                raise UpdateSkipError(f"a power of {args[1]}, which kernels do not have")
            return POWERS[args[1]](self, self.number(args[0]))
        given = [None if a is None else self.number(a) for a in args]
        named = {k: self.number(a) for k, a in kwargs.items() if a is not None and not (k == "alpha" and a == 1)}
        try:
            return RULES[name](self, *given, **named)
        except TypeError as error:
            raise UpdateSkipError(f"{name} with arguments that kernels do not have ({error})") from error

    def _load(self, slot: Slot, nodes: tuple[fx.Node, ...]) -> int:
        return self.op("load", params=(self._slot(slot, nodes),))

    def _slot(self, slot: Slot, nodes: tuple[fx.Node, ...]) -> int:
        first = nodes[0]
        if first not in self.of_slot:
            self.of_slot[first] = len(self.slots)
            self.slots.append(slot)
            self.nodes.append(nodes)
        return self.of_slot[first]

    def _plain(self, node: fx.Node) -> Slot:
        return Slot(PLAIN, str(value(node).dtype).removeprefix("torch."))

    # ---- targets ------------------------------------------------------------------------------------------------

    def store(self, target: Target) -> None:
        """Make the slot of `target` one that is written."""
        root = self.number(target.root)
        if target.store is not None:
            assert target.side is not None
            self._load(Slot(STATE, target.store.format), (target.written, target.side))
        else:
            self._load(self._plain(target.written), (target.written,))
        i = self.of_slot[target.written]
        slot, nodes = self.slots[i], self.nodes[i]
        if target.store is not None:
            draws = "stochastic" in slot.type
            counter = target.counter if draws else None
            self.slots[i] = Slot(STATE, slot.type, root, counter=draws)
            self.nodes[i] = (*nodes, counter) if counter is not None else nodes
        elif self.rider is None:
            self.slots[i] = Slot(PLAIN, slot.type, root)
        elif self.rider.parameter_rounding == "split":
            assert self.rider.low is not None
            self.slots[i], self.nodes[i] = Slot(SPLIT, slot.type, root), (*nodes, self.rider.low)
        else:
            assert self.rider.counter is not None
            self.slots[i] = Slot(PLAIN, slot.type, root, counter=True, stochastic=True)
            self.nodes[i] = (*nodes, self.rider.counter)

    def finish(self, overflow: fx.Node | None) -> Update:
        """Return the spec, without values that nothing stores (of slots that turned out to be written only)."""
        skip = None if overflow is None else self._slot(Slot(SCALAR, "float32"), (overflow,))
        return Update(tuple(self.slots), tuple(self.values), skip)


def _is_fill(node: fx.Node) -> bool:
    call = call_of(node)
    return call is not None and call[0] in ("full", "scalar_tensor")
