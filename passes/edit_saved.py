"""Edit saved: a plan that was handed back says in which form single tensors are kept; the cut stays what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import fx

from fp8compile import edits
from fp8compile.edits import Edits
from fp8compile.errors import OptionError
from fp8compile.passes.compilation import is_tensor, value
from fp8compile.passes.origin import module_path, source_line
from fp8compile.passes.plan_saved import Halves
from fp8compile.passes.saved_forms import as_it_is, dtype_name, made_at


def saved_keys(saved: Iterable[fx.Node], halves: Halves) -> dict[fx.Node, edits.SavedKey]:
    """By what a plan knows each tensor of `saved` that is no parameter."""
    seen: Counter[edits.SavedKey] = Counter()
    found = {}
    for node in saved:
        if not is_tensor(node) or node in halves.static:
            continue
        x, made = value(node), made_at(node)
        shape = [n if isinstance(n, int) else str(n) for n in x.shape]
        *known, _ = edits.saved_key(module_path(made), source_line(made), dtype_name(x), shape, 0)
        key: edits.SavedKey = (*known, 0)  # type: ignore[assignment]
        found[node] = (*known, seen[key])
        seen[key] += 1
    return found  # type: ignore[return-value]


def edit_saved(keys: Mapping[fx.Node, edits.SavedKey], halves: Halves, plan: Edits | None) -> None:
    """Change the forms of saved tensors as the plan says. Raises `OptionError` for a form that the tensor cannot have:
    it is kept in its own dtype, or as the compiler would."""
    for node, key in keys.items() if plan is not None else ():
        x = value(node)
        wanted = edits.saved_form(plan, key)
        form = halves.forms.get(node) or as_it_is(x, "")
        if wanted is None or wanted == form.name(x):
            continue
        if wanted != dtype_name(x):
            where = key[0] or "a tensor of the model itself"
            other = f" or {form.name(x)!r}" if form.granularity else f": {form.reason}"
            raise OptionError(
                f"the plan wants {where} ({key[1]}) kept as {wanted!r}; it can be kept as {dtype_name(x)!r}{other}"
            )
        halves.forms[node] = as_it_is(x, edits.REASON)
