"""Symbolic sizes: the same ones are known however they are written, and they become nodes of what the graph knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8compile.passes.core.compilation import aten, update_value
from fp8compile.passes.core.sizes import same_sizes
from fp8compile.passes.regions.part_values import RefusedError
from fp8compile.passes.regions.region_graph import GraphEditor

Size = Any
SIZES: dict[str, Callable[[Size, Size], Size]] = {
    "product": lambda a, b: a * b,
    "square": lambda a, b: a * a * b,
    "sum": lambda a, b: 3 * a + b + 7,
    "quotient": lambda a, b: a * b // 8,
    "filled up": lambda a, b: -(-a * b // 4) * 4,
    "of what is filled up": lambda a, b: (-(-a * b // 128) * 128) // 128 * b,
    "rest": lambda a, b: a * b % 5 + 1,
    "larger": lambda a, b: torch.sym_max(a * 3, b),
    "smaller": lambda a, b: torch.sym_min(a * 3, b),
}


class Symbolic:
    """A graph of one input of symbolic shape, and the symbols."""

    def __init__(self, flat: bool) -> None:
        mode = FakeTensorMode(shape_env=ShapeEnv())
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
        fake = mode.from_tensor(torch.empty(6, 10), symbolic_context=context, source=ConstantSource("x"))
        self.a, self.b = fake.shape
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        with mode:
            self.x.meta["val"] = fake.view(-1) if flat else fake
        self.double = self.graph.call_function(aten.add.Tensor, (self.x, self.x))
        self.again = self.graph.call_function(aten.add.Tensor, (self.double, self.x))
        for node in (self.double, self.again):
            update_value(node)

    def values(self, nodes: list[Any], shape: tuple[int, ...]) -> list[int]:
        self.graph.output(tuple(nodes))
        self.graph.lint()
        return list(fx.Interpreter(fx.GraphModule({}, self.graph)).run(torch.empty(shape)))


def test_sizes_are_the_same_however_they_are_written() -> None:
    """As where a matrix of [s, 2 s] is viewed as [2 s, s] and sliced, which divides the product by one of them."""
    given = Symbolic(flat=False)
    a, b = given.a, given.b
    assert same_sizes([a, 3], [a, 3])
    assert same_sizes([a * a // a, b], [a, b])
    assert same_sizes([-(-(a * a // a) // 8) * 8], [-(-a // 8) * 8])
    assert not same_sizes([a, b], [b, a])
    assert not same_sizes([a], [a, 1])
    assert not same_sizes([a + 1], [a])
    assert not same_sizes([a], [6]), "6 is what it was when it was traced"
    assert not a.node.shape_env.guards


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_computed_whatever_the_batch(name: str) -> None:
    given = Symbolic(flat=False)
    node = GraphEditor(given.graph).size_node(SIZES[name](given.a, given.b), given.again)
    assert given.values([node], (13, 9)) == [SIZES[name](13, 9)]


def test_the_rows_of_what_came_flat_are_enough() -> None:
    given = Symbolic(flat=True)
    node = GraphEditor(given.graph).size_node(SIZES["filled up"](given.a, given.b), given.again)
    assert given.values([node], (13 * 9,)) == [120]


def test_a_part_that_is_not_known_is_said() -> None:
    given = Symbolic(flat=True)
    with pytest.raises(RefusedError, match=f"a size {given.a} that"):
        GraphEditor(given.graph).size_node(given.a + 1, given.again)


def test_who_comes_later_may_stand_before() -> None:
    """A size computed for a late node is there for an early one, and for sizes made of it."""
    given = Symbolic(flat=False)
    editor = GraphEditor(given.graph)
    late = editor.size_node(given.a * given.b // 8, given.again)
    early = editor.size_node(given.a * given.b // 8 + given.a, given.double)
    assert early < given.double
    assert given.values([late, early], (13, 9)) == [14, 27]
    assert next(n.op for n in given.graph.nodes) == "placeholder"


def test_a_size_of_an_input_is_not_read_off_a_tensor_in_the_middle() -> None:
    """Who makes that tensor may need the size."""
    given = Symbolic(flat=False)
    with given.graph.inserting_before(given.again):
        known = given.graph.call_function(aten.sym_size.int, (given.double, 0))
    known.meta["val"] = given.a
    node = GraphEditor(given.graph).size_node(given.a * 2, given.again)
    assert node < given.double < known
    assert given.values([node], (13, 9)) == [26]
