"""Edit saved: a plan that was handed back says in which form single tensors are kept; the cut stays what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from torch import fx

from fp8compile.errors import OptionError
from fp8compile.passes.core.compilation import is_tensor, value
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.save.min_cut import Halves
from fp8compile.passes.save.saved_forms import as_it_is, dtype_name, made_at
from fp8compile.plan import overrides
from fp8compile.plan.overrides import Overrides
from fp8compile.plan.reasons import BY_PLAN


def saved_keys(saved: Iterable[fx.Node], halves: Halves) -> dict[fx.Node, overrides.SavedKey]:
    """By what a plan knows each tensor of `saved` that is no parameter."""
    seen: Counter[overrides.SavedKey] = Counter()
    found = {}
    for node in saved:
        if not is_tensor(node) or node in halves.static:
            continue
        x, made = value(node), made_at(node)
        shape = [n if isinstance(n, int) else str(n) for n in x.shape]
        *known, _ = overrides.saved_key(module_path(made), source_line(made), dtype_name(x), shape, 0)
        key: overrides.SavedKey = (*known, 0)  # type: ignore[assignment]
        found[node] = (*known, seen[key])
        seen[key] += 1
    return found  # type: ignore[return-value]


def edit_saved(keys: Mapping[fx.Node, overrides.SavedKey], halves: Halves, plan: Overrides | None) -> None:
    """Change the forms of saved tensors as the plan says. Raises `OptionError` for a form that the tensor cannot have:
    it is kept in its own dtype, or as the compiler would."""
    for node, key in keys.items() if plan is not None else ():
        x = value(node)
        wanted = overrides.saved_form(plan, key)
        form = halves.forms.get(node) or as_it_is(x, "")
        if wanted is None or wanted == form.name(x):
            continue
        if wanted != dtype_name(x):
            where = key[0] or "a tensor of the model itself"
            other = f" or {form.name(x)!r}" if form.granularity else f": {form.reason}"
            raise OptionError(
                f"the plan wants {where} ({key[1]}) kept as {wanted!r}; it can be kept as {dtype_name(x)!r}{other}"
            )
        halves.forms[node] = as_it_is(x, BY_PLAN.text)
