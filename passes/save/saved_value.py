"""Saved values: one record for each, from the cut that chose it to the row of the plan that tells of it.

partitioner         the node, and the form that was found for it
saved_overrides     another form, where a given plan says so
save_as_fp8         the nodes that are saved for it
saved_rows          the row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from torch import fx

from fp8compile import ops
from fp8compile.formats import FP8_DTYPES
from fp8compile.passes.core.collectives import is_sent
from fp8compile.passes.core.compilation import is_tensor, value
from fp8compile.passes.core.fusible import made_at
from fp8compile.passes.core.marker_views import GroupedPart, is_amax
from fp8compile.passes.core.matmul_node import plain
from fp8compile.passes.core.node_views import Getitem
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.save.saved_forms import Form, as_it_is, dtype_name
from fp8compile.plan.overrides import SavedKey, saved_key
from fp8compile.plan.reasons import Reason, Why

NO_TENSOR = Form(Why(Reason.INPUT, "a number"), 0)


@dataclass(eq=False)
class SavedValue:
    """A value of the forward half that backward is given.

    node: computes it. form: how it is kept, and why. is_parameter: it stays where it is, whatever is done.
    key: by what a plan knows it; None for what has no row. kept: the nodes that are saved for it: itself, a copy of it,
    or payload and scales.
    """

    node: fx.Node
    form: Form
    is_parameter: bool = False
    key: SavedKey | None = None
    kept: tuple[fx.Node, ...] = ()

    @property
    def has_row(self) -> bool:
        """True if the plan tells of it: it is a tensor, and no parameter."""
        return is_tensor(self.node) and not self.is_parameter

    def keep_as_it_is(self, why: Why) -> None:
        """Let it keep its precision."""
        self.form = as_it_is(value(self.node), why)


def saved_values(nodes: Iterable[fx.Node], forms: Mapping[fx.Node, Form], parameters: Set[fx.Node]) -> list[SavedValue]:
    """Return the records of what was chosen, in its order. `forms`: of the values for which one was found."""
    seen: Counter[SavedKey] = Counter()
    found = []
    for node in nodes:
        form = forms.get(node) or (as_it_is(value(node), _why_itself(node)) if is_tensor(node) else NO_TENSOR)
        saved = SavedValue(node, form, node in parameters)
        if saved.has_row:
            first = _first_key(node)
            saved.key = (*first[:4], seen[first])
            seen[first] += 1
        found.append(saved)
    return found


def _first_key(node: fx.Node) -> SavedKey:
    """Return the key of the first of all values that are otherwise known by the same."""
    x, made = value(node), made_at(node)
    return saved_key(module_path(made), source_line(made), dtype_name(x), [plain(n) for n in x.shape], 0)


def _why_itself(node: fx.Node) -> Why:
    """Return why a value for which no form was found is kept as it is."""
    if node.target is ops.quantize or value(node).dtype in FP8_DTYPES or is_sent(node):
        return Why(Reason.PAYLOAD, "a payload that a matmul of backward reads")
    if node.target is ops.scale or is_amax(node) or GroupedPart.of(node) is not None:
        return Why(Reason.AMAX, "an amax: its tensor is not read again for it")
    if value(node).is_complex():
        return Why(Reason.COMPLEX, "complex numbers")
    if not value(node).is_floating_point():
        return Why(Reason.INDICES, "indices or a mask")
    part = Getitem.of(node)
    if part is not None and part.source.target in ops.CHUNKED_LOSSES:
        return Why(Reason.GRADIENT, "a gradient: its loss is computed in chunks")
    if node.op == "call_function":
        return Why(Reason.FOR_BACKWARD, "made for backward alone")
    return Why(Reason.INPUT, "an input")
