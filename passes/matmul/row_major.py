"""Row major: what comes transposed is copied once, before kernels of rows read it again and again.

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
from fp8compile.passes.core.compilation import STANDS_ALONE, VIEWS, Compilation, aten, hint, is_tensor, value
from fp8compile.passes.core.iteration import same
from fp8compile.passes.core.replace import restride
from fp8compile.plan.rows import FP8

LONG = 128  # elements of rows of which a tile holds few


def run(c: Compilation) -> None:
    """Copy whatever that is true of."""
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
    """The activations and gradients that will be cast with scales along their rows, as matmuls take them."""
    rows = [row for row in c.plan.matmuls if row.decision == FP8 and row.role in ("output", "grad_input")]
    found = {
        c.sites[row.node].left
        for row in rows
        if row.left is not None
        and parse_granularity(row.left.granularity).kind in ("row", "group")
        and not c.sites[row.node].weight_on_left
    }
    return {node for node in found if node is not None}


def _is_transposed(node: fx.Node) -> bool:
    """Whether `node` comes with the elements of its rows apart from each other: a view, or what no region computes."""
    if node.op == "output" or not is_tensor(node) or value(node).dtype not in fusible.FLOATS:
        return False
    if fusible.is_fusible(node) and node.target not in VIEWS:
        return False  # it lies as what it is computed of
    x = value(node)
    return x.dim() > 1 and hint(x.shape[-1]) >= LONG and not statically_known_true(x.stride(-1) <= 1)


def _is_read_in_rows(node: fx.Node, cast: set[fx.Node]) -> bool:
    """Whether what is computed of `node`, element by element, is reduced along its last dimension, or cast by rows."""
    length = value(node).shape[-1]
    stack, seen = [node], {node}
    while stack:
        reader = stack.pop()
        if reader in cast:
            return True
        for user in reader.users:
            if user in seen:
                continue
            seen.add(user)
            if fusible.is_row_reduction(user) and len(fusible.reduced_dims(user)) == 1:
                return True
            if fusible.is_pointwise(user) or user.target in fusible.RESHAPES:
                shape = value(user).shape
                stack += [user] if shape and same(shape[-1], length) else []
    return False
