"""Early casts: what is cast where it arrives is cast before it travels, and the payload travels in its place.

Before      %y = all_gather(%x)                     After   %a = fp8.amax(%x, row)    %s = fp8.scale(%a, e4m3)
            %ay = fp8.amax(%y, row)                         %q = fp8.quantize(%x, %s, e4m3, row)
            %sy = fp8.scale(%ay, e4m3)                      %qy = all_gather(%q)      %ay = all_gather(%a)
            %qy = fp8.quantize(%y, %sy, e4m3, row)          %sy = fp8.scale(%ay, e4m3)

The values are the same, bit for bit. Rows and groups along the last dimension are whole on every rank: their amaxes
travel beside the payload, four bytes each. The amax of a tensor is the largest of those of its parts, which are
gathered first, so every rank casts with the same scale. Amaxes are gathered, and not reduced by the library: it may
drop a nan. Payloads travel as bytes, which every library moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fp8compile import ops
from fp8compile.formats import FORMATS, parse_granularity
from fp8compile.passes.core.collectives import ALL_GATHER, AS_BYTES, Journey, Sent
from fp8compile.passes.core.compilation import AS_STORED, Compilation, aten, value
from fp8compile.passes.core.marker_views import Amax, Quantize, Scale, cast_marker, is_amax_of_tensor
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.origin import module_path
from fp8compile.passes.core.replace import replace_value

SCALE_BYTES = 4


@dataclass(frozen=True)
class Cast:
    """The cast of a tensor before it travels; `scale`: the node of a tensor's one scale."""

    format: str
    granularity: str
    power_of_two: bool = False
    scale: fx.Node | None = None

    def __str__(self) -> str:
        return f"{self.format} {self.granularity}"

    def bytes_a_row(self, cols: int) -> int:
        """Return the bytes of a row of so many elements, its amaxes included."""
        return cols + (
            0 if self.scale else SCALE_BYTES * parse_granularity(self.granularity).scale_shape([1, cols])[-1]
        )


@dataclass
class Readers:
    """Who reads what a journey has moved.

    early: casts that may be made before it, each with the nodes that make it now; amaxes: those that may be, too.
    late: who must see the values where they arrive, and why.
    """

    early: dict[Cast, list[fx.Node]] = field(default_factory=dict)
    amaxes: list[fx.Node] = field(default_factory=list)
    late: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def why_late(self) -> str:
        """Return the reason of the first of `late`; or that there is no reader at all."""
        return next(iter(self.late.values()), "no FP8 matmul reads it")

    @property
    def why_plain(self) -> str:
        """The reader that needs the values as they are, and is no cast; "" if none is."""
        return next((why for node, why in self.late.items() if node.target not in ops.CASTS), "")


def readers_of(journey: Journey) -> Readers:
    """Return the readers, sorted."""
    found = Readers()
    whole = journey.whole
    for shown, reader in journey.readers():
        why = _why_late(shown, reader, whole, journey)
        if why:
            found.late[reader] = why
        elif reader.target is ops.amax:
            found.amaxes.append(reader)
        else:
            found.early.setdefault(_cast_of(reader), []).append(reader)
    return found


def _why_late(shown: fx.Node, reader: fx.Node, whole: set[fx.Node], journey: Journey) -> str:
    if reader.target not in (ops.amax, ops.quantize):
        path = module_path(reader)
        return f"read as it is by {_name(reader)}{f' in {path}' if path else ''}"
    cast, granularity = cast_marker(reader), cast_marker(reader).granularity
    if granularity == "tensor":
        if journey.collective.target is not ALL_GATHER or shown not in whole:
            return "one scale for what comes from several ranks in parts"
        if reader.target is ops.amax:
            return ""
        if cast.multiples != (1, 1):
            return "its cast is padded"
        made = Scale.of(Quantize(reader).scale)
        if made is not None and made.is_delayed:
            return "its delayed scale is each rank's own: an overflow on one stays out of that rank's history"
        own = _is_common(Quantize(reader).scale, whole)
        return "" if own else "its scale is shared with what does not travel"
    if cast.transpose or granularity.startswith("block"):
        return f"scales of {granularity} along the tokens of several ranks"
    if cast.multiples != (1, 1):
        return "its cast is padded"
    if reader.target is ops.amax:
        return ""
    scale = Scale.of(Quantize(reader).scale)
    amax = Amax.of(scale.amax) if scale and not scale.is_delayed else None
    return "" if amax and amax.x is shown else "its scale comes from elsewhere"


def _is_common(scale: fx.Node, whole: set[fx.Node]) -> bool:
    """Return True if a tensor's scale is made of what travels alone, so that every rank has the same."""
    made = Scale.of(scale)
    if made is None or not is_amax_of_tensor(made.amax):
        return False
    of = first_input(made.amax)
    finer = Amax.of(of)
    return of in whole or (finer is not None and finer.x in whole)


def _cast_of(quantize: fx.Node) -> Cast:
    cast = Quantize(quantize)
    if cast.granularity == "tensor":
        return Cast(cast.format, "tensor", scale=cast.scale)
    return Cast(cast.format, cast.granularity, Scale(cast.scale).power_of_two)


def _name(node: fx.Node) -> str:
    if node.op == "output":
        return "the caller"
    if node.target is ops.grouped_cast:
        return "grad_weight"
    return str(node.target).removeprefix("aten.").split(".")[0]


@dataclass
class Early:
    """Makes casts before a journey, and what replaces the readers behind it."""

    c: Compilation
    journey: Journey
    amaxes: dict[str, Sent] = field(default_factory=dict)
    payloads: dict[Cast, Sent] = field(default_factory=dict)
    arrived: dict[tuple[fx.Node, Cast], fx.Node] = field(default_factory=dict)
    total: fx.Node | None = None

    def _emit(self, target: Any, *args: Any) -> fx.Node:
        return self.c.emit(target, *args, like=self.journey.collective)

    def _of_source(self, target: Any, *args: Any) -> fx.Node:
        """Return a marker that reads what would have travelled: in a kernel that computes it, as it would have been
        stored."""
        node = self._emit(target, self.journey.source, *args)
        node.meta[AS_STORED] = True
        return node

    def replace_amax(self, amax: fx.Node) -> None:
        """Let an amax be of what was sent."""
        shown, granularity = Amax(amax).x, Amax(amax).granularity
        new = self._total() if granularity == "tensor" else self._amaxes(granularity).at(shown)
        replace_value(self.c, amax, new)

    def replace_cast(self, quantize: fx.Node) -> None:
        """Let a payload be what was sent; its transpose is a copy of bytes."""
        data = self.data(Quantize(quantize).x, _cast_of(quantize))
        if Quantize(quantize).transpose:
            turned = [*range(value(data).dim())]
            turned[-2:] = turned[-1], turned[-2]
            permuted = self._emit(aten.permute.default, data, turned)
            data = self.c.emit(aten.clone.default, permuted, like=self.journey.collective, contiguous=True)
        replace_value(self.c, quantize, data)

    def data(self, shown: fx.Node, cast: Cast) -> fx.Node:
        """Return the payload where `shown` shows the values."""
        if (shown, cast) not in self.arrived:
            self.arrived[shown, cast] = self._data(shown, cast)
        return self.arrived[shown, cast]

    def _data(self, shown: fx.Node, cast: Cast) -> fx.Node:
        if cast not in self.payloads:
            scale = cast.scale or self._scale(self._amaxes(cast.granularity).source, cast)
            payload = self._of_source(ops.quantize, scale, cast.format, cast.granularity)
            payload = self._emit(AS_BYTES, payload, torch.uint8)
            self.payloads[cast] = Sent(self.c, self.journey, payload, self.journey.collective)
        moved = self.payloads[cast].at(shown)
        if not value(moved).is_contiguous():
            moved = self.c.emit(aten.clone.default, moved, like=self.journey.collective, contiguous=True)
        return self._emit(AS_BYTES, moved, FORMATS[cast.format].dtype)

    def values(self, shown: fx.Node, cast: Cast) -> fx.Node:
        """Return the rounded values where `shown` shows the exact ones."""
        scale = cast.scale or self._scale(self._amaxes(cast.granularity).at(shown), cast)
        return self._emit(ops.dequantize, self.data(shown, cast), scale, cast.granularity, value(shown).dtype)

    def _amaxes(self, granularity: str) -> Sent:
        if granularity not in self.amaxes:
            local = self._of_source(ops.amax, granularity)
            self.amaxes[granularity] = Sent(self.c, self.journey, local, self.journey.collective)
        return self.amaxes[granularity]

    def _total(self) -> fx.Node:
        if self.total is None:
            local = self._emit(aten.view.default, self._of_source(ops.amax, "tensor"), [1, 1])
            of_all = Sent(self.c, self.journey, local, self.journey.collective).at(self.journey.arrival)
            self.total = self._emit(ops.amax, of_all, "tensor")
        return self.total

    def _scale(self, amax: fx.Node, cast: Cast) -> fx.Node:
        return self._emit(ops.scale, amax, cast.format, cast.power_of_two)
