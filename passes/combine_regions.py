"""Combine regions: fewer launches, and no copy where casts are concatenated.

Before      %q1 = region(%w1)[0]   %q2 = region(%w2)[0]   %q = cat([%q1, %q2], 0)
After       %q  = region(%w1, %w2)[0]                     one kernel of two parts that fill one buffer

1. An amax that programs left in pieces is put together by the region that reads it, if the pieces are few; else by a
   region of its own, and those whose results only leave the graph become one.
2. Parts of a concatenation are written in place.
3. Small regions of one kind that the same matmul or region waits for, and that do not wait for each other, become one;
   so do those between two matmuls whose results only leave the graph.

Sound as long as no region waits for itself; every combination is checked for that.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from fp8compile import ops
from fp8compile.kernels import schedule as schedules
from fp8compile.kernels.spec import PARTIALS, ROW_REDUCTIONS, Buffer, Input, Part, Region, Store, Value
from fp8compile.passes.compilation import aten, depends_on, getitems, value
from fp8compile.passes.fusible import is_library_kernel
from fp8compile.passes.region_graph import GraphEditor, put_in_order, regions_of, spec_of

FEW = 1024  # pieces of an amax that each program of the next kernel may read
MAX_PARTS = 16
LARGE = 32 << 20  # bytes of results that are not made before they are needed for the sake of a launch


def combine_regions(graph: fx.Graph) -> None:
    """Rewrite the regions of `graph`."""
    editor = GraphEditor(graph)
    _read_pieces(graph)
    for cat in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        _write_in_place(editor, cat)
    _finish_amaxes(editor)
    put_in_order(graph)
    graph.eliminate_dead_code()
    editor.number()
    for node in list(graph.nodes):
        if node.target is ops.scaled_mm or node.target is ops.region:
            _combine_producers(editor, node)
    _combine_saved(editor)
    _combine_last(editor)
    put_in_order(graph)
    graph.eliminate_dead_code()


# ---- amaxes in pieces -----------------------------------------------------------------------------------------------


def _pieces(node: fx.Node) -> fx.Node | None:
    """The pieces that `node` is the maximum of, if they are a region's."""
    if node.target is ops.amax and node.args[1] == "tensor" and _is_from_region(node.args[0]):
        return node.args[0]  # type: ignore[return-value]
    return None


def _is_from_region(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is operator.getitem and node.args[0].target is ops.region  # type: ignore[union-attr]


def _read_pieces(graph: fx.Graph) -> None:
    """Let regions read the pieces of an amax instead of waiting for a kernel that puts them together."""
    for node in regions_of(graph):
        tensors: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        region, _ = spec_of(node)
        changed = False
        for t, tensor in enumerate(tensors):
            pieces = _pieces(tensor)
            if pieces is not None and value(pieces).numel() <= FEW:
                tensors[t] = pieces
                region = _reading_pieces(region, t, value(pieces).numel())
                changed = True
        if changed:
            strides = tuple(
                (1,) if a is not b else s
                for a, b, s in zip(tensors, node.args[0], region.strides, strict=True)  # type: ignore[arg-type]
            )
            _update(node, tensors, replace(region, strides=strides))


def _reading_pieces(region: Region, tensor: int, count: int) -> Region:
    parts = []
    for part in region.parts:
        inputs, values = list(part.inputs), list(part.values)
        for n, i in enumerate(part.inputs):
            if i.tensor == tensor:
                inputs[n] = Input(tensor, "float32", (), ((count, 1),))
                values = [Value("load_max", (), v.params) if v == Value("load", (), (n,)) else v for v in values]
        parts.append(replace(part, inputs=tuple(inputs), values=tuple(values)))
    return replace(region, parts=tuple(parts))


def _update(node: fx.Node, tensors: Sequence[fx.Node], region: Region) -> None:
    node.args = (list(tensors), node.args[1], region.to_json(), schedules.choose(region).to_json())


def _finish_amaxes(editor: GraphEditor) -> None:
    """Put together by a region each what is left in pieces, with the scale that is made of it."""
    for node in list(editor.graph.find_nodes(op="call_function", target=ops.amax)):
        pieces = _pieces(node)
        if pieces is None or not node.users:
            continue
        count = value(pieces).numel()
        values = [Value("load", (), (0,)), Value("row_amax", (0,))]
        made, users = [], []
        for scale in [u for u in node.users if u.target is ops.scale]:
            _, fmt, *power = scale.args
            values.append(Value("scale_power_of_two" if power and power[0] else "scale", (1,), (fmt,)))
            made.append(scale)
            users.append(list(scale.users))
        stores = [Store(n, n + 2) for n in range(len(made))]
        others = [u for u in node.users if u not in made]
        if others:
            stores.append(Store(len(made), 1))
            made.append(node)
            users.append(others)
        part = Part(1, count, (Input(0, "float32", (), ((count, 1),)),), tuple(values), tuple(stores))
        region = Region((part,), tuple(Buffer((1,), "float32") for _ in made), (), ((1,),))
        editor.insert(region, [pieces], [], made, users, pieces=False)


# ---- concatenations -------------------------------------------------------------------------------------------------


def _write_in_place(editor: GraphEditor, cat: fx.Node) -> None:
    """Combine the regions whose buffers `cat` concatenates, and let them fill its result."""
    pieces: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    dim: int = (cat.args[1] if len(cat.args) > 1 else 0) % value(cat).dim()  # type: ignore[operator]
    if value(cat).dim() != 2 or not all(_is_from_region(p) and len(p.users) == 1 for p in pieces):
        return
    if len(set(pieces)) != len(pieces) or not all(isinstance(s, int) for s in value(cat).shape):
        return
    nodes = list(dict.fromkeys(p.args[0] for p in pieces))
    joint = _joined(editor, nodes)  # type: ignore[arg-type]
    if joint is None:
        return
    region, _ = spec_of(joint.node)
    at = [joint.index[p] for p in cat.args[0]]  # type: ignore[index,union-attr]
    if not all(_writes_whole(region, n) for n in at):
        return
    _update(joint.node, joint.node.args[0], _filling_one(region, at, value(cat), dim))  # type: ignore[arg-type]
    editor.refresh(joint.node)
    whole = getitems(joint.node).get(at[0]) or editor.emit(
        operator.getitem, joint.node, at[0], before=joint.node.next, like=cat
    )
    editor.refresh(whole)
    cat.replace_all_uses_with(whole)
    editor.graph.erase_node(cat)
    _drop(editor, joint.node, at[1:])


def _drop(editor: GraphEditor, node: fx.Node, dead: Sequence[int]) -> None:
    """Remove buffers that nobody reads and nothing fills from a region."""
    region, _ = spec_of(node)
    kept = [n for n in range(len(region.buffers)) if n not in dead]
    for n, item in getitems(node).items():
        if n in dead:
            editor.graph.erase_node(item)
        else:
            item.args = (node, kept.index(n))
    parts = tuple(
        replace(p, stores=tuple(replace(s, buffer=kept.index(s.buffer)) for s in p.stores)) for p in region.parts
    )
    _update(node, node.args[0], replace(region, parts=parts, buffers=tuple(region.buffers[n] for n in kept)))  # type: ignore[arg-type]
    editor.refresh(node)


def _writes_whole(region: Region, buffer: int) -> bool:
    """Whether one plain store fills this buffer, row by row."""
    stores = [(p, s) for p in region.parts for s in p.stores if s.buffer == buffer]
    if len(stores) != 1 or not all(isinstance(d, int) for d in region.buffers[buffer].shape):
        return False
    part, store = stores[0]
    return part.values[store.value].op not in PARTIALS and store.row_multiple == store.col_multiple == 1


def _filling_one(region: Region, at: list[int], whole: Any, dim: int) -> Region:
    """`region` with the buffers `at` side by side along `dim` in the place of the first; the others stay, empty."""
    width = whole.shape[1]
    offsets, start = {}, 0
    for n in at:
        offsets[n] = start * (width if dim == 0 else 1)
        start += region.buffers[n].shape[dim]

    def moved(store: Store) -> Store:
        if store.buffer not in offsets:
            return store
        return replace(store, buffer=at[0], lead=width, offset=offsets[store.buffer])

    buffers = list(region.buffers)
    dtype = buffers[at[0]].dtype
    for n in at[1:]:
        buffers[n] = Buffer((0,), dtype)
    buffers[at[0]] = Buffer(tuple(whole.shape), dtype)
    parts = tuple(replace(p, stores=tuple(map(moved, p.stores))) for p in region.parts)
    return replace(region, parts=parts, buffers=tuple(buffers))


# ---- regions side by side -------------------------------------------------------------------------------------------


@dataclass
class Joined:
    """A region made of several, and the number of the buffer that each old result has become."""

    node: fx.Node
    index: dict[fx.Node, int]


def _joined(editor: GraphEditor, nodes: Sequence[fx.Node]) -> Joined | None:
    """One region in the place of `nodes`; None where one of them waits for another."""
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
        names = {n: _number_of(size, sizes) for n, size in zip(region.sizes, node.args[1], strict=True)}  # type: ignore[arg-type]
        renamed = _renamed(region, names, len(parts), len(buffers))
        where = []
        for tensor, stride in zip(node.args[0], renamed.strides, strict=True):  # type: ignore[arg-type]
            if tensor not in tensors:
                tensors.append(tensor)
                strides.append(stride)
            where.append(tensors.index(tensor))
        parts += [replace(p, inputs=tuple(replace(i, tensor=where[i.tensor]) for i in p.inputs)) for p in renamed.parts]
        index |= {item: n + len(buffers) for n, item in getitems(node).items()}
        buffers += renamed.buffers
        origins |= dict.fromkeys(region.origins)
    joint = Region(tuple(parts), tuple(buffers), tuple(origins), tuple(strides))
    return Joined(_replaced(editor, nodes, joint, tensors, sizes, index), index)


def _number_of(size: Any, sizes: list[Any]) -> str:
    if size not in sizes:
        sizes.append(size)
    return f"n{sizes.index(size)}"


def _renamed(region: Region, names: dict[str, str], first_part: int, first_buffer: int) -> Region:
    """`region` with other names for sizes, counts of programs and buffers."""

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
    schedule = schedules.choose(region)
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


def _combine_producers(editor: GraphEditor, consumer: fx.Node) -> None:
    """Combine the regions of one kind whose results `consumer` reads; what fits any kind joins the first."""
    producers = dict.fromkeys(i.args[0] for i in consumer.all_input_nodes if _is_from_region(i))
    producers = [node for node in producers if not _is_large(node)]  # type: ignore[arg-type]
    by_kind: dict[Any, list[fx.Node]] = {}
    for node in producers:
        kind = _kind(node)  # type: ignore[arg-type]
        if kind is not None:
            by_kind.setdefault(kind, []).append(node)  # type: ignore[arg-type]
    groups = {kind: nodes for kind, nodes in by_kind.items() if kind not in (ANY_WARPS, PIECES)}
    if groups:
        next(iter(groups.values())).extend(by_kind.pop(ANY_WARPS, []))
    for nodes in by_kind.values():
        if len(nodes) > 1:
            _joined(editor, nodes)


def _is_large(node: fx.Node) -> bool:
    """Whether a region's results had better be made when they are needed: a launch is nothing beside moving them, and
    made earlier they take memory meanwhile."""
    sizes = [value(item).numel() * value(item).element_size() for item in getitems(node).values()]
    return isinstance(total := sum(sizes), int) and total > LARGE


PIECES, ANY_WARPS = "pieces", "any number of warps"


def _kind(node: fx.Node) -> Any:
    """What regions must have in common to be combined; None for those that are left alone.

    A region that reduces rows is left: others, a weight's cast, may run long before, and it takes other tiles. Casts to
    one layout are as fast with 8 warps as with 4.
    """
    region, schedule = spec_of(node)
    if any(v.op in ROW_REDUCTIONS for p in region.parts for v in p.values):
        return None
    if all(p.values[s.value].op in PARTIALS for p in region.parts for s in p.stores):
        return PIECES
    layouts = [{s.transposed for s in p.stores if p.values[s.value].op == "quantize"} for p in region.parts]
    if schedule.warps <= 8 and all(len(found) == 1 for found in layouts):
        return ANY_WARPS
    return schedule.warps, schedule.stages


def _combine_saved(editor: GraphEditor) -> None:
    """Combine casts that only leave the graph, where no matmul or attention lies between them: q, k and v, say."""
    output = editor.graph.output_node()
    waiting: dict[Any, list[fx.Node]] = {}
    for node in list(editor.graph.nodes):
        if node.target is ops.region:
            kind = _kind(node) if _only_leaves(node, output) and not _is_finish(node) else None
            if kind is not None:
                waiting.setdefault(kind, []).append(node)
        elif node.op == "output" or is_library_kernel(node):
            for nodes in waiting.values():
                if len(nodes) > 1:
                    _joined(editor, nodes)
            waiting.clear()


def _combine_last(editor: GraphEditor) -> None:
    """Combine the amaxes that are put together only to leave the graph."""
    output = editor.graph.output_node()
    last = [node for node in regions_of(editor.graph) if _only_leaves(node, output) and _is_finish(node)]
    for start in range(0, len(last), MAX_PARTS):
        if len(last[start : start + MAX_PARTS]) > 1:
            _joined(editor, last[start : start + MAX_PARTS])


def _is_finish(node: fx.Node) -> bool:
    region, _ = spec_of(node)
    return all(p.rows == 1 and [v.op for v in p.values[:2]] == ["load", "row_amax"] for p in region.parts)


def _only_leaves(node: fx.Node, output: fx.Node) -> bool:
    readers: Iterable[fx.Node] = [u for item in getitems(node).values() for u in item.users]
    return all(u is output or (u.target is aten.view.default and set(u.users) == {output}) for u in readers)
