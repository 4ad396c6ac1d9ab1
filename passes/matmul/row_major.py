"""Row major: make inputs of row-wise kernels contiguous, with one copy, where they come transposed.

Before      %v = permute(view(%convolution, [64, 768, 1024]), [0, 2, 1])    [64, 1024, 768], columns 1024 apart
            %x = add(%v, %positions)                                        lies in memory as %v does
            %m = var_mean(%x, [2]) …                                        and so does all that is added to it

After       %w = clone(%v), contiguous; no region computes it               %x = add(%w, %positions), rows contiguous

Operators of torch keep the layout of what they read, so a whole residual stream may lie transposed because of the patch
embedding that it begins with. Eager kernels hardly mind. One that has a few rows at a time, as row reductions and casts
with scales of rows want it, reads 32 bytes for each two that it needs; what is cast in groups lies the other way round
as well. One copy by tiles takes less than one such read. Tiles of short rows hold many of them, and need no copy.

Sound because values stay what they are, and everybody who sees strides is shown the old ones
(`passes/core/replace.py`).
"""

from __future__ import annotations

from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8compile.formats import parse_granularity
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import STANDS_ALONE, VIEWS, Compilation, aten, is_tensor, value
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.replace import restride
from fp8compile.passes.core.sizes import hint
from fp8compile.passes.core.walk import walk

LONG = 128  # elements of rows of which a tile holds few


def run(c: Compilation) -> None:
    """Copy every tensor that comes transposed and is read along its rows. Runs after convolutions are lowered."""
    cast = _cast_by_rows(c)
    for node in list(c.graph.nodes):
        if _is_transposed(node) and _is_read_in_rows(node, cast):
            copy = c.emit(aten.clone.default, node, like=node, before=node.next, contiguous=True)
            copy.meta[STANDS_ALONE] = True
            users = [user for user in node.users if user is not copy and fusible.is_fusible(user)]
            for user in users:
                user.replace_input_with(node, copy)
            restride(c, copy, value(node).stride(), users)


def _cast_by_rows(c: Compilation) -> set[fx.Node]:
    """Return the activations and gradients that will be cast with scales along their rows, as matmuls take them."""
    return {
        matmul.pair[0]
        for matmul in c.matmuls.converted
        if matmul.role in ("output", "grad_input")
        and parse_granularity(matmul.casts[0].granularity).kind in ("row", "group")
        and not matmul.weight_on_left
    }


def _is_transposed(node: fx.Node) -> bool:
    """Return True if the elements of the rows of `node` lie apart: it is a view, or no region computes it."""
    if node.op == "output" or not is_tensor(node) or value(node).dtype not in fusible.FLOATS:
        return False
    if fusible.is_fusible(node) and node.target not in VIEWS:
        return False  # it lies as what it is computed of
    x = value(node)
    return x.dim() > 1 and hint(x.shape[-1]) >= LONG and not statically_known_true(x.stride(-1) <= 1)


def _is_read_in_rows(node: fx.Node, cast: set[fx.Node]) -> bool:
    """Return True if something computed of `node`, element by element, is reduced along its last dimension, or cast by
    rows."""
    length = value(node).shape[-1]

    def has_its_rows(user: fx.Node) -> bool:
        if not (fusible.is_pointwise(user) or user.target in fusible.RESHAPES):
            return False
        shape = value(user).shape
        return bool(shape) and same(shape[-1], length)

    def readers(reader: fx.Node) -> list[fx.Node]:
        return [user for user in reader.users if _reduces_rows(user) or has_its_rows(user)]

    return any(n in cast or (n is not node and _reduces_rows(n)) for n in walk([node], readers))


def _reduces_rows(node: fx.Node) -> bool:
    return fusible.is_row_reduction(node) and len(fusible.reduced_dims(node)) == 1
