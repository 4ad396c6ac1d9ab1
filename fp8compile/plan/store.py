"""Plans of what this process has compiled, in its memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from fp8compile import process_state
from fp8compile.plan import plan_warnings
from fp8compile.plan.plan import Plan
from fp8compile.plan.printers import printers
from fp8compile.torch_hooks.calls.compilations import Compilations, Frame

logger = logging.getLogger("fp8compile")  # quiet unless asked: TORCH_LOGS="fp8compile", or logging's own ways
_compiled = Compilations()


@contextlib.contextmanager
def collected() -> Iterator[list[Plan]]:
    """Collect the plans of what is compiled in this context in the list that it yields, and not in `compiles()`.

    At the end the list also gets those of calls that compiled nothing.
    """
    global _compiled
    before, _compiled = _compiled, Compilations()
    try:
        yield (found := _compiled).plans
        found.plans.extend(found.nothing)
    finally:
        _compiled = before


def compiled(plans: Sequence[Plan], frame: Frame | None) -> None:
    """Keep the plans of one call of the backend. frame: where its graph comes from."""
    _compiled.add(plans, frame)
    for plan in plans:
        logger.info("%s", printers.line(plan))


def nothing_compiled(plan: Plan) -> None:
    """Keep that a call of a compiled function reached no graph, as `plan` says."""
    _compiled.add_call(plan)
    logger.info("%s", plan.failure)


def last_call() -> list[Plan]:
    """Return the plans of the last call of a compiled function; [] before the first."""
    return _compiled.last()


def compiles() -> list[Plan]:
    """Return the plans of all graphs that this process has compiled, oldest first (graph breaks make several)."""
    return list(_compiled.plans)


def reset() -> None:
    """Forget all plans."""
    process_state.reset_module(__name__)
    process_state.reset_module(plan_warnings.__name__)
