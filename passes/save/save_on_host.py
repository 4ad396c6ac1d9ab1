"""Save on the host: what is beyond the activation budget lies in the host's memory until backward reads it.

Forward     %x ─► …        %h = to_host(%x)     %k = copied(%h, %x)        returned for backward: %k
Backward    %h             %x' = to_device(%h)  %k' = copied(%x', %h) ─► …

Copies run beside the GPU's kernels and take no time of theirs, as long as the link carries them while forward computes;
more than that is not moved. First moved is what is made first: it is read last, and until then there is most time.
Here the copies of forward stand at its end and those of backward at its beginning: `passes/lower/place_copies.py` puts
them where they run, once kernels are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from fp8compile import host_copies
from fp8compile.devices import Device
from fp8compile.passes.core.compilation import VIEWS, aten, is_tensor, update_value, value
from fp8compile.passes.core.fusible import is_library_kernel
from fp8compile.passes.core.library_seconds import library_seconds
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.scale_groups import dense_order
from fp8compile.passes.core.sizes import count
from fp8compile.passes.save.min_cut import Halves
from fp8compile.passes.save.saved_forms import bytes_of, memory_of

LEAST = 2**20  # bytes; a copy of fewer is not worth its launches


@dataclass(frozen=True)
class Host:
    """The host's memory, as a cut may use it.

    carried: bytes that are copied in the time that forward computes. returned: what the model returns, whose memory
    lives on wherever a copy is. where: the device that computes; what a nested region has moved is there no more.
    """

    carried: int
    returned: frozenset[fx.Node]
    where: torch.device

    @staticmethod
    def of(halves: Halves, returned: Iterable[fx.Node], device: Device, where: torch.device) -> Host:
        """Return what the host's memory can do for a joint graph. Only matmuls, convolutions and attention count."""
        kernels = [n for n in halves.forward if is_library_kernel(n) and isinstance(n.target, torch._ops.OpOverload)]
        seconds = sum(library_seconds(n, device) for n in kernels)
        return Host(int(seconds * device.host_link * 1e12), frozenset(returned), where)

    def taken(self, saved: Iterable[fx.Node], halves: Halves) -> dict[fx.Node, int]:
        """Return what can be moved of what is saved, before values become payloads and scales, each with its bytes.

        Those made first, as many as are copied in time.
        """
        nodes = list(saved)
        rounded = {n: count(value(n).shape) for n in nodes if _is_rounded(n, halves)}  # payloads have their own memory
        exact = {n: bytes_of(value(n)) for n in self._movable(nodes, halves) if not _is_rounded(n, halves)}
        sizes, found, left = {**rounded, **exact}, dict[fx.Node, int](), self.carried
        for node in sorted(sizes):
            size = sizes[node]
            if LEAST <= size <= left:
                found[node] = size
                left -= size
        return found

    def choose(self, kept: Iterable[fx.Node], wanted: int, halves: Halves) -> list[fx.Node]:
        """Return the nodes to move: as few as take `wanted` bytes, if there are so many."""
        chosen = []
        for node in sorted(self._movable(list(kept), halves)):
            if wanted <= 0:
                break
            if bytes_of(value(node)) >= LEAST:
                chosen.append(node)
                wanted -= bytes_of(value(node))
        return chosen

    def _movable(self, nodes: list[fx.Node], halves: Halves) -> list[fx.Node]:
        """Return the nodes whose memory is free when they are copied: nothing else that lives on lies in it.

        None that is the value of an input which is overwritten: Inductor takes a clone for what it is of.
        """
        tensors = [n for n in nodes if is_tensor(n) and n not in halves.static and value(n).device == self.where]
        tensors = [n for n in tensors if _source(n) not in halves.written]
        owners = Counter(memory_of(n) for n in dict.fromkeys(tensors))
        staying = halves.inputs | {memory_of(n) for n in self.returned if is_tensor(n)}
        return [n for n in tensors if (m := memory_of(n)) not in staying and owners[m] == 1 and _is_dense(n)]


def _source(node: fx.Node) -> fx.Node:
    """Return what `node` has the values of, through views and clones."""
    while node.target in VIEWS or node.target is aten.clone.default:
        node = first_input(node)
    return node


def _is_rounded(node: fx.Node, halves: Halves) -> bool:
    form = halves.forms.get(node)
    return form is not None and form.granularity is not None


def _is_dense(node: fx.Node) -> bool:
    x = value(node)
    return x.layout is torch.strided and x.permute(dense_order(x)).is_contiguous()


def move_to_host(forward: fx.Graph, backward: fx.Graph, moved: Iterable[str]) -> None:
    """Let the values that are named `moved` in both halves travel by the host's memory."""
    made, given = ({n.name: n for n in graph.nodes} for graph in (forward, backward))
    last_input = list(backward.find_nodes(op="placeholder"))[-1]
    for name in moved:
        x, output = made[name], forward.output_node()
        device = value(x).device
        with forward.inserting_before(output):
            host = _call(forward, host_copies.to_host, x, dense_order(value(x)))
            end = _call(forward, host_copies.copied, host, x)
        output.replace_input_with(x, end)
        saved = given[name]
        users = list(saved.users)
        saved.meta = {**saved.meta, "val": end.meta["val"]}
        saved.meta.pop("tensor_meta", None)
        with backward.inserting_after(last_input):
            back = _call(backward, host_copies.to_device, saved, device)
        with backward.inserting_after(back):
            end = _call(backward, host_copies.copied, back, saved)
        for user in users:
            user.replace_input_with(saved, end)


def _call(graph: fx.Graph, target: torch._ops.OpOverload, *args: object) -> fx.Node:
    node = graph.call_function(target, args)  # type: ignore[arg-type]
    update_value(node)
    return node
