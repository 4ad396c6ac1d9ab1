"""Join regions: several region nodes become one, with the parts of all; no more than the mechanics.

Before      %q1 = region(%x, %w)[0]   %q2 = region(%x, %v)[0]
After       %r = region(%x, %w, %v)   %q1 = %r[0]   %q2 = %r[1]

Sound as long as none of them waits for another, which is checked.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.spec.region import Buffer, Part, Region
from fp8compile.passes.core.compilation import depends_on, getitems, value
from fp8compile.passes.core.sizes import count
from fp8compile.passes.regions.region_graph import GraphEditor, sizes_of, spec_of, tensors_of

MAX_PARTS = 16
LARGE = 32 << 20  # bytes of results that are made before they are needed, or of pieces kept, for the sake of a launch


@dataclass
class Joined:
    """A region made of several, and the number of the buffer that each old result has become."""

    node: fx.Node
    index: dict[fx.Node, int]


def joined(editor: GraphEditor, nodes: Sequence[fx.Node]) -> Joined | None:
    """Return one region in the place of `nodes`; None where one of them waits for another."""
    if len(nodes) == 1:
        return Joined(nodes[0], {item: n for n, item in getitems(nodes[0]).items()})
    if depends_on([i for node in nodes for i in node.all_input_nodes], set(nodes), editor.order):
        return None
    if sum(len(spec_of(n)[0].parts) for n in nodes) > MAX_PARTS:
        return None
    tensors: list[fx.Node] = []
    sizes: list[Any] = []
    parts: list[Part] = []
    buffers: list[Buffer] = []
    origins: dict[str, None] = {}
    strides: list[Any] = []
    index: dict[fx.Node, int] = {}
    for node in nodes:
        region, _ = spec_of(node)
        names = {n: name_among(size, sizes) for n, size in zip(region.sizes, sizes_of(node), strict=True)}
        renamed = _renamed(region, names, len(parts), len(buffers))
        where = []
        for tensor, stride in zip(tensors_of(node), renamed.strides, strict=True):
            if tensor not in tensors:
                tensors.append(tensor)
                strides.append(stride)
            where.append(tensors.index(tensor))
        parts += [replace(p, inputs=tuple(i.renumbered(where.__getitem__) for i in p.inputs)) for p in renamed.parts]
        index |= {item: n + len(buffers) for n, item in getitems(node).items()}
        buffers += renamed.buffers
        origins |= dict.fromkeys(region.origins)
    joint = Region(tuple(parts), tuple(buffers), tuple(origins), tuple(strides))
    return Joined(_replaced(editor, nodes, joint, tensors, sizes, index), index)


def bytes_made(node: fx.Node) -> int:
    """Return the bytes of a region's results, by the sizes that it was compiled with."""
    return sum(map(_bytes_of, getitems(node).values()))


def bytes_read(node: fx.Node) -> int:
    """Return the bytes of the tensors that a region reads, by the sizes that it was compiled with."""
    return sum(map(_bytes_of, tensors_of(node)))


def _bytes_of(node: fx.Node) -> int:
    return count(value(node).shape) * value(node).element_size()


def name_among(size: Any, sizes: list[Any]) -> str:
    """Return the name of a size that a region is given among `sizes`, to which it is added if it is new."""
    if size not in sizes:
        sizes.append(size)
    return f"n{sizes.index(size)}"


def _renamed(region: Region, names: dict[str, str], first_part: int, first_buffer: int) -> Region:
    """Return `region` with other names for sizes, counts of programs and buffers."""

    def name(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(name(y) for y in x)
        if not isinstance(x, str):
            return x
        for word in ("row_programs", "programs"):
            if x.startswith(word):
                return f"{word}{int(x.removeprefix(word)) + first_part}"
        return names.get(x, x)

    def part(p: Part) -> Part:
        return replace(
            p,
            rows=name(p.rows),
            inputs=tuple(replace(i, rows=name(i.rows), cols=name(i.cols)) for i in p.inputs),
            values=tuple(replace(v, params=name(v.params)) if v.op == "random" else v for v in p.values),
            stores=tuple(
                replace(s, buffer=s.buffer + first_buffer, lead=name(s.lead), offset=name(s.offset)) for s in p.stores
            ),
        )

    buffers = tuple(Buffer(name(b.shape), b.dtype) for b in region.buffers)
    return replace(region, parts=tuple(map(part, region.parts)), buffers=buffers, strides=name(region.strides))


def _replaced(
    editor: GraphEditor,
    nodes: Sequence[fx.Node],
    region: Region,
    tensors: list[fx.Node],
    sizes: list[Any],
    index: dict[fx.Node, int],
) -> fx.Node:
    users = [u for item in index for u in item.users]
    place = editor.place(users, tensors) if users else nodes[0]
    schedule = choose_schedule.choose(region)
    call = editor.emit(ops.region, tensors, sizes, region.to_json(), schedule.to_json(), before=place, like=nodes[0])
    for item, n in list(index.items()):
        new = editor.emit(operator.getitem, call, n, before=place, like=item)
        item.replace_all_uses_with(new)
        editor.graph.erase_node(item)
        index[new] = index.pop(item)
    for node in nodes:
        editor.graph.erase_node(node)
    editor.settle(call)
    return call
