"""Override saved values: a plan that was handed back says in which form single tensors are kept; the cut stays."""

from __future__ import annotations

from collections.abc import Iterable

from fp8compile.errors import OptionError
from fp8compile.passes.core.compilation import value
from fp8compile.passes.save.saved_forms import dtype_name
from fp8compile.passes.save.saved_value import SavedValue
from fp8compile.plan import overrides
from fp8compile.plan.reasons import BY_PLAN


def override_saved(saved: Iterable[SavedValue], plan: overrides.Overrides | None) -> None:
    """Change the forms of saved tensors as the plan says. Raises `OptionError` for a form that the tensor cannot have:
    it is kept in its own dtype, or as the compiler would."""
    for one in saved if plan is not None else ():
        x, form = value(one.node), one.form
        wanted = overrides.saved_form(plan, one.key) if one.key is not None else None
        if one.key is None or wanted is None or wanted == form.name(x):
            continue
        if wanted != dtype_name(x):
            where = one.key[0] or "a tensor of the model itself"
            other = f" or {form.name(x)!r}" if form.is_fp8 else f": {form.why.text}"
            raise OptionError(
                f"the plan wants {where} ({one.key[1]}) kept as {wanted!r}; it can be kept as {dtype_name(x)!r}{other}"
            )
        one.keep_as_it_is(BY_PLAN)
