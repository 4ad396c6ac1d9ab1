"""Unpack costs: what a step takes longer because activations are kept in FP8, where a library's kernel reads them.

A step in BF16 keeps what the matmuls, convolutions and attention of its backward half read. One with a matmul in FP8
keeps payloads (`passes/save/saved_forms.py`), of which another kernel makes BF16 again for all that stays in BF16:

    backward    reads the payload, or what a norm or an activation function is computed from, and writes the value
    forward     writes the payload of what a library's kernel computed, and reads that as well where no cast does anyway

A grad_weight in FP8 reads payloads as they are. So a matmul that would be faster in BF16 by itself may be slower there,
and a model of which few matmuls gain from FP8 may lose more than they gain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from fp8compile.devices import Device
from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import Compilation, base, dependents, hint, is_tangent, value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.node_views import argument
from fp8compile.passes.core.origin import module_path


@dataclass(frozen=True)
class Unpacked:
    """Hold what unpacking an activation for library kernels of backward takes.

    readers: matmuls of backward that read it; always: something else does, which is never in FP8. casters: matmuls of
    forward that read it, and cast it if they are in FP8. backward, forward, cast: milliseconds; forward where a cast is
    there anyway, cast where none is.
    """

    readers: frozenset[MatmulNode]
    casters: frozenset[MatmulNode]
    always: bool
    backward: float
    forward: float
    cast: float

    def milliseconds(self, in_fp8: Collection[MatmulNode]) -> float:
        """Return how much longer a step takes in which these matmuls are in FP8."""
        if not self.always and all(m in in_fp8 for m in self.readers):
            return 0.0
        return self.backward + (self.forward if any(m in in_fp8 for m in self.casters) else self.cast)


def find_unpacked(c: Compilation, matmuls: Collection[MatmulNode]) -> list[Unpacked]:
    """Return the activations that backward would unpack if none of these matmuls of a joint graph were in FP8."""
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    readers: dict[fx.Node, set[MatmulNode]] = {}  # in the order of the graph
    casters: dict[fx.Node, set[MatmulNode]] = {}
    always: set[fx.Node] = set()
    for matmul in matmuls:
        if matmul.role == "grad_input":  # its other operand is a weight
            continue
        found = readers if matmul.node in backward else casters
        for node in _of_forward((matmul.left, matmul.right), backward):
            found.setdefault(node, set()).add(matmul)
    for attention in c.graph.nodes:
        if attention in backward and operators.is_attention(attention.target):
            for node in _of_forward(_values(attention), backward):
                readers.setdefault(node, set())
                always.add(node)
    kept = [node for node in readers if _is_kept_in_fp8(node, c)]
    return [_unpacked(n, readers[n], casters.get(n, set()), n in always, c.device) for n in kept]


def _of_forward(operands: Iterable[fx.Node | None], backward: set[fx.Node]) -> list[fx.Node]:
    """Return the tensors of forward among these operands, whatever their layout is."""
    return [fusible.laid_out(x) for x in operands if x is not None and x not in backward]


def _values(attention: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that an attention's backward reads: queries and keys are kept as they are."""
    try:
        found = argument(attention, "value")
    except (AttributeError, KeyError):  # no operator, or of other arguments
        return
    if isinstance(found, fx.Node):
        yield found


def _is_kept_in_fp8(node: fx.Node, c: Compilation) -> bool:
    """Return True if `node` is an activation that a step with FP8 keeps as payload and scales."""
    x = value(node)
    if base(node).op == "placeholder" or not x.is_floating_point():
        return False
    is_large = hint(x.numel()) * x.element_size() >= c.options.save_min_bytes
    return is_large and c.options.saves(module_path(node))[1] != "bf16"


def _unpacked(
    node: fx.Node, readers: Iterable[MatmulNode], casters: Iterable[MatmulNode], always: bool, device: Device
) -> Unpacked:
    elements, size = hint(value(node).numel()), value(node).element_size()
    rate, launch = device.casts * 1e9, device.launch * 1e-3  # bytes a millisecond; milliseconds
    computed = fusible.is_fusible(
        base(node)
    )  # from what is kept: the payload is written, and read, by what is there anyway
    backward = (1 + size) * elements / rate + launch
    forward, cast = (0.0, 0.0) if computed else (elements / rate, (size + 1) * elements / rate + launch)
    return Unpacked(frozenset(readers), frozenset(casters), always, backward, forward, cast)
