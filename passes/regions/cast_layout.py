"""How a cast sees its tensor, and where in the scale's memory the scale of each element lies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fp8compile.formats import Granularity, parse_granularity
from fp8compile.passes.core.iteration import Access, NoAccessError, Size, broadcast, divides
from fp8compile.passes.core.marker_views import cast_marker


@dataclass(frozen=True)
class CastLayout:
    """The layout in which a marker reads its tensor: granularity, orientation, multiples of rows and columns."""

    granularity: Granularity
    transpose: bool = False
    row_multiple: int = 1
    col_multiple: int = 1

    @staticmethod
    def of(node: fx.Node) -> CastLayout:
        """Return the layout of an amax or a quantize."""
        cast = cast_marker(node)
        return CastLayout(parse_granularity(cast.granularity), cast.transpose, *cast.multiples)

    def scale_access(self, access: Access, shape: list[Size]) -> Access:
        """Return the access to the scale of data with this shape, given that to the data (as the marker orients it)."""
        *batch, rows, cols = shape
        kind, size = self.granularity.kind, self.granularity.size
        if kind == "tensor":
            return ()
        if kind == "row":
            return broadcast(access, shape, [*batch, rows, 1])
        if not divides(size, cols) or (kind == "block" and not divides(size, rows)):
            raise NoAccessError(f"{self.granularity} does not divide {shape}")
        if kind == "group":
            return broadcast(access, [*batch, rows, cols // size, size], [*batch, rows, cols // size, 1])
        blocked = [*batch, rows // size, size, cols // size, size]
        return broadcast(access, blocked, [*batch, rows // size, 1, cols // size, 1])
