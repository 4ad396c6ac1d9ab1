"""Unpack costs: what a step takes longer because activations are kept in FP8, where a library's kernel reads them.

A step in BF16 keeps what the matmuls, convolutions and attention of its backward half read. One with a matmul in FP8
keeps payloads (`passes/save/saved_forms.py`), of which another kernel makes BF16 again for all that stays in BF16:

    backward    reads the payload, or what a norm or an activation function is computed from, and writes the value
    forward     writes the payload of what a library's kernel computed, if none is at hand; and reads that as well where
                no cast does anyway

A grad_weight in FP8 reads payloads as they are. So a matmul that would be faster in BF16 by itself may be slower there,
and a model of which few matmuls gain from FP8 may lose more than they gain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import fx

from fp8compile.passes.core import fusible, operators
from fp8compile.passes.core.compilation import (
    Compilation,
    base,
    dependents,
    in_recomputed_region,
    is_tangent,
    is_tensor,
    value,
)
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.origin import module_path
from fp8compile.passes.core.scale_groups import group_of
from fp8compile.passes.core.sizes import count
from fp8compile.passes.matmul.weights import weight_nodes
from fp8compile.recipe import Role


@dataclass(frozen=True, eq=False)
class Unpacked:
    """Hold what unpacking an activation for library kernels of backward takes.

    readers: matmuls of backward that read it; always: something else does, which is never in FP8.
    casters: matmuls of forward that read it, and cast it if they are in FP8. backward, forward, cast: milliseconds;
    forward where a cast is there anyway, cast where none is.
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


def find_unpacked(c: Compilation, matmuls: Sequence[tuple[MatmulNode, Role | None]]) -> list[Unpacked]:
    """Return the activations that backward would unpack if no matmul of a joint graph were in FP8, in its order.

    matmuls: all of the graph, with their casts by the recipe.
    """
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    weights = weight_nodes(c)
    readers: dict[fx.Node, set[MatmulNode]] = {}
    casters: dict[fx.Node, set[MatmulNode]] = {}
    always: set[fx.Node] = set()
    exact: set[fx.Node] = set()
    for matmul, _ in matmuls:
        found = readers if matmul.node in backward else casters
        for node in _activations((matmul.left, matmul.right), backward | weights):
            found.setdefault(node, set()).add(matmul)
    for attention in c.graph.nodes:
        if attention in backward and operators.is_attention(attention.target):
            rounded, others = _read_by(attention, c)
            exact.update(_activations(others, backward | weights))
            for node in _activations(rounded, backward | weights):
                readers.setdefault(node, set())
                always.add(node)
    returned = {x for n in c.graph.output_node().all_input_nodes if n not in backward for x in (n, base(n))}
    roles = dict(matmuls)
    kept = [node for node in readers if node not in exact and _is_kept_in_fp8(node, returned, c)]
    return [_unpacked(node, readers[node], casters.get(node, set()), node in always, roles, c) for node in kept]


def _activations(operands: Iterable[fx.Node | None], others: Set[fx.Node]) -> list[fx.Node]:
    """Return the tensors of forward among these operands, whatever their layout is. others: weights and gradients."""
    return [fusible.laid_out(x) for x in operands if x is not None and x not in others]


def _read_by(attention: fx.Node, c: Compilation) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return what an attention's backward reads of the tensors of forward: those rounded to be kept, and the others."""
    is_all = c.options.saves(module_path(attention))[1] == "fp8_with_qk"
    rounded, exact = (["value", "query", "key", "out"], []) if is_all else (["value"], ["query", "key", "out"])
    given = operators.arguments(attention)

    def tensors(names: list[str]) -> list[fx.Node]:
        return [x for name in names if isinstance(x := given.get(name), fx.Node) and is_tensor(x)]

    return tensors(rounded), tensors(exact)


def _is_kept_in_fp8(node: fx.Node, returned: Set[fx.Node], c: Compilation) -> bool:
    """Return True for an activation that a step with FP8 keeps as payload and scales, if it keeps it: not computed
    again in a checkpointed region (`passes/save/saved_forms.py` decides in the end)."""
    made, x = fusible.made_at(node), value(node)
    if made.op == "placeholder" or node in returned or x.dtype not in fusible.FLOATS or x.dim() < 2:
        return False
    if any(map(in_recomputed_region, (node, made))) or c.options.saves(module_path(made))[1] == "bf16":
        return False
    return count(x.shape) * x.element_size() >= c.options.save_min_bytes and group_of(node)[0] is not None


def _unpacked(
    node: fx.Node,
    readers: Set[MatmulNode],
    casters: Set[MatmulNode],
    always: bool,
    roles: Mapping[MatmulNode, Role | None],
    c: Compilation,
) -> Unpacked:
    elements, size = count(value(node).shape), value(node).element_size()
    rate, launch = c.device.casts * 1e9, c.device.launch * 1e-3  # bytes a millisecond; milliseconds
    backward = (1 + size) * elements / rate + launch
    forward, cast = elements / rate, (size + 1) * elements / rate + launch
    if any(_casts_by_rows(node, m, roles[m]) for m in casters):  # that payload is kept
        forward = 0.0
    if fusible.is_fusible(base(node)):  # computed from what is kept, by kernels that are there anyway
        forward = cast = 0.0
    return Unpacked(frozenset(readers), frozenset(casters), always, backward, forward, cast)


def _casts_by_rows(node: fx.Node, matmul: MatmulNode, role: Role | None) -> bool:
    """Return True if a matmul of forward casts `node` with a scale for each row or group of it."""
    if role is None:
        return False
    is_left = matmul.left is not None and fusible.laid_out(matmul.left) is node
    return (role.left if is_left else role.right).granularity.kind in ("row", "group")
