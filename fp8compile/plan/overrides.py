"""Plans handed back: options={"plan": …} makes the compiler decide as the rows of a plan say.

    plan = fp8compile.explain(model, x)              # or last_compile()
    Path("plan.json").write_text(plan.to_json())     # edit `decision`, `left`, `right` of a matmul, `form` of a tensor
    torch.compile(model, backend="fp8", options={"plan": "plan.json"})

A row speaks of a matmul by module path, role and occurrence (a module may run several times): node names and the
number of tokens may differ. Its feature sizes, where it has them, must agree, so that a plan of another model is found
out. A merged row speaks of each of its `merged` paths. Matmuls without a row are decided as usual, so rows may be
deleted; those of a graph of which a pass failed say nothing.
A saved tensor is known by module path, source line, dtype, last dimension and occurrence.

The content of the plan is part of `Options`, and so of every cache's key.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from fp8compile.errors import OptionError, shown, unknown_name
from fp8compile.formats import parse_format, parse_granularity
from fp8compile.plan.from_json import read_plans
from fp8compile.plan.plan import Plan
from fp8compile.plan.reasons import BY_PLAN, Reason, Why
from fp8compile.plan.rows import BF16, FP8, Matmul, Operand
from fp8compile.recipe import Cast, Delayed, Role

FP8_FORMS = ("e4m3", "e5m2")
Key: TypeAlias = tuple[str, str, int]  # module path, role, occurrence
MERGED = {"output": 1, "grad_input": 2, "grad_weight": 0}  # which of m, n, k a merged matmul has the sum of
SavedKey: TypeAlias = tuple[str, str, str, int | str, int]  # path, source, dtype, last dimension, occurrence


@dataclass(frozen=True)
class Decision:
    """The decision of a row on one matmul. role: its casts as a recipe has them, None where it is left or names none.

    why: that the plan says so, or, where precision that follows the training has moved it, the evidence of that.
    """

    decision: str
    role: Role | None
    sizes: tuple[int | str, ...]  # m, n, k of the row; 0: not said
    why: Why = BY_PLAN
    members: tuple[Key, ...] = ()  # of a merged row: all that it speaks of


@dataclass(frozen=True)
class GraphOverrides:
    """The decisions of the rows of one graph."""

    graph: str
    matmuls: tuple[tuple[Key, Decision], ...]


@dataclass(frozen=True)
class Overrides:
    """All decisions of a plan, in a form that can be hashed and compared. name: where it came from."""

    name: str
    graphs: tuple[GraphOverrides, ...]
    saved: tuple[tuple[SavedKey, str], ...] = ()


# ---- loading --------------------------------------------------------------------------------------------------------


def load(value: Any) -> Overrides:
    """Return `Overrides` from a path to JSON, a `Plan`, a list of them, or an `Explanation`. Raises `OptionError`."""
    if isinstance(value, Overrides):
        return value
    if isinstance(value, (str, Path)):
        return _overrides(f"plan {str(value)!r}", read_plans(value))
    plans = [value] if isinstance(value, Plan) else getattr(value, "plans", value)
    if not isinstance(plans, (list, tuple)) or not all(isinstance(p, Plan) for p in plans):
        raise OptionError(f"option 'plan' is a path, a Plan or an Explanation, and not {shown(value)}")
    if not plans:
        raise OptionError(f"option 'plan' holds no plan, and is {shown(value)}: nothing had been compiled")
    return _overrides("the given plan", plans)


def _overrides(name: str, plans: Sequence[Plan]) -> Overrides:
    plans = [p for p in plans if not p.failure]
    graphs = tuple(GraphOverrides(p.graph, tuple(_decisions(p, name))) for p in plans if p.matmuls)
    return Overrides(name, graphs, tuple(form for p in plans for form in _saved_forms(p, name)))


def _decisions(plan: Plan, name: str) -> Iterable[tuple[Key, Decision]]:
    seen: Counter[tuple[str, str]] = Counter()
    for row in plan.matmuls:
        decision, keys = _decision(row, name), []
        for path in row.merged or (row.path,):
            keys.append((path, row.role, seen[path, row.role]))
            seen[path, row.role] += 1
        members = tuple(keys) if row.merged else ()
        yield from ((key, replace(decision, members=members)) for key in keys)


def _decision(row: Matmul, name: str) -> Decision:
    where = f"{name}: {row.path or '(the model itself)'} {row.role}"
    if row.decision not in (FP8, BF16):
        raise OptionError(f"{where}: decision {row.decision!r} is neither 'fp8' nor 'bf16'")
    if row.decision == FP8 and row.role == "other":
        raise OptionError(f"{where} cannot be FP8: {row.reason or 'it has no weight'}")
    if row.decision == FP8 and (row.left is None) != (row.right is None):
        given, other = ("left", "right") if row.right is None else ("right", "left")
        raise OptionError(f"{where}: {given!r} is given without {other!r}; leave out both for the casts of the recipe")
    role = None
    if row.decision == FP8 and row.left is not None and row.right is not None:
        try:
            role = Role(_cast(row.left), _cast(row.right), row.fast_accumulation)
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from error
    why = Why(Reason.ADAPTIVE, row.reason) if row.code == Reason.ADAPTIVE else BY_PLAN
    return Decision(row.decision, role, (row.m, row.n, row.k), why)


def _cast(operand: Operand) -> Cast:
    history = Delayed(operand.history, operand.margin) if operand.history else None
    return Cast(
        parse_granularity(operand.granularity), parse_format(operand.format), bool(operand.power_of_two), history
    )


# ---- matmuls --------------------------------------------------------------------------------------------------------


def decisions(given: Overrides | None, rows: Sequence[Matmul], graph: str) -> list[Decision | None]:
    """Return for each of these matmuls of one graph ("training" or "inference") what `given` says of it; None: nothing.

    Raises `OptionError` where no row is about this graph, a row is about none of its matmuls, or sizes disagree.
    """
    here = _keys(rows)
    if given is None or not any(role != "other" for _, role, _ in here):
        return [None] * len(rows)
    chosen = _choose(given, here, graph)
    for key, decision in chosen.items():
        if key not in here:
            raise OptionError(f"{given.name}: {_unmatched(key, here)}")
        _check_sizes(given.name, key, decision, here)
    return [chosen.get(key) for key in here]


def _keys(rows: Iterable[Matmul]) -> dict[Key, Matmul]:
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for row in rows:
        found[row.path, row.role, seen[row.path, row.role]] = row
        seen[row.path, row.role] += 1
    return found


def _choose(given: Overrides, here: dict[Key, Matmul], graph: str) -> dict[Key, Decision]:
    """Return the decisions of the graph that has most matmuls in common with this one."""
    roles = ("output",) if graph == "inference" else ("output", "grad_input", "grad_weight")
    found: list[tuple[int, dict[Key, Decision]]] = []
    for one in given.graphs:
        rows = {key: decision for key, decision in one.matmuls if key[1] in roles}
        same = [key for key, decision in rows.items() if key in here and not _disagree(key, decision, here)]
        found.append((len(same) - (len(rows) - len(same)), rows))
    best = max((score for score, _ in found), default=0)
    tied = [rows for score, rows in found if score == best]
    if not tied or not any(key in here for key in tied[0]):
        mine, theirs = ({key[0] for key in keys} for keys in (here, [k for _, rows in found for k in rows]))
        raise OptionError(
            f"{given.name} has no row about this graph. Its paths: {_some(theirs)}. Paths here: {_some(mine)}. "
            "explain(…).to_json() exports the rows of all graphs of a model."
        )
    if any(rows != tied[0] for rows in tied):
        raise OptionError(
            f"{given.name} has several graphs with the same modules and different decisions: "
            "which of them is meant cannot be told"
        )
    return tied[0]


def _some(paths: Iterable[str]) -> str:
    listed = sorted(path or "(the model itself)" for path in paths)
    return ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")


def _unmatched(key: Key, here: dict[Key, Matmul]) -> str:
    path, role, occurrence = key
    times = f" (occurrence {occurrence + 1})" if occurrence else ""
    same = [r for p, r, _ in here if p == path]
    if same:
        return (
            f"{path} {role}{times} is in the plan and not in this graph, which has its {', '.join(dict.fromkeys(same))}"
        )
    near = difflib.get_close_matches(path, sorted({p for p, _, _ in here}), n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"no matmul of this graph is {path} {role}{times}.{hint}"


def _check_sizes(name: str, key: Key, decision: Decision, here: dict[Key, Matmul]) -> None:
    if _disagree(key, decision, here):
        planned, actual = ("×".join(map(str, s)) for s in (decision.sizes, _sizes(key, decision, here)))
        paths = " + ".join(path or "(the model itself)" for path, _, _ in decision.members or (key,))
        raise OptionError(
            f"{name}: {paths} {key[1]} is M×N×K = {planned} there, {actual} here: a plan of another model. Only the "
            "number of tokens may differ; sizes that a row leaves out are not compared."
        )


def _disagree(key: Key, decision: Decision, here: dict[Key, Matmul]) -> bool:
    """Return True if sizes of features differ. Those that one side does not know as a number agree with any."""
    if key[1] == "other" or any(member not in here for member in decision.members):  # the latter has its own error
        return False
    pairs = list(zip(decision.sizes, _sizes(key, decision, here), strict=True))
    del pairs[_tokens(key, here)]
    return any(a != b for a, b in pairs if a and isinstance(a, int) and isinstance(b, int))


def _sizes(key: Key, decision: Decision, here: dict[Key, Matmul]) -> tuple[int | str, ...]:
    """Return m, n, k in this graph of what a row speaks of: members of a merged one lie side by side."""
    rows = [here[member] for member in decision.members or (key,)]
    sizes: list[int | str] = [rows[0].m, rows[0].n, rows[0].k]
    if decision.members:
        along = MERGED[key[1]]
        parts = [(row.m, row.n, row.k)[along] for row in rows]
        sizes[along] = sum(p for p in parts if isinstance(p, int)) if all(isinstance(p, int) for p in parts) else "?"
    return tuple(sizes)


def _tokens(key: Key, here: dict[Key, Matmul]) -> int:
    """Return which of m, n, k counts tokens: k of grad_weight, else m, or n where the weight is on the left."""
    path, role, _ = key
    if role == "grad_weight":
        return 2
    contracted = {row.k for (p, r, _), row in here.items() if (p, r) == (path, "grad_weight")}
    return 1 if here[key].n in contracted and here[key].m not in contracted else 0


# ---- saved tensors --------------------------------------------------------------------------------------------------


def saved_key(path: str, source: str, dtype: str, shape: Sequence[int | str], occurrence: int) -> SavedKey:
    """Return the key of a saved tensor. `occurrence` counts, in the graph's order, what is otherwise equal."""
    return path, source, dtype, shape[-1] if len(shape) else 1, occurrence


def saved_form(given: Overrides | None, key: SavedKey) -> str | None:
    """Return the form that a plan wants for a saved tensor ("bfloat16", "e4m3 group(128)"); None: decide as usual.

    Raises `OptionError` where several graphs of the plan save such a tensor in different forms.
    """
    forms = {form for known, form in given.saved if known == key} if given is not None else set()
    if given is not None and len(forms) > 1:
        raise OptionError(f"{given.name}: two graphs save a tensor of {key[0]} in different forms: which is meant?")
    return forms.pop() if forms else None


def wants_fp8(given: Overrides | None) -> bool:
    """Return True if a plan wants any saved tensor in FP8."""
    return given is not None and any(form.startswith(FP8_FORMS) for _, form in given.saved)


def _saved_forms(plan: Plan, name: str) -> Iterable[tuple[SavedKey, str]]:
    seen: Counter[SavedKey] = Counter()
    for row in plan.saved:
        first = saved_key(row.path, row.source, row.dtype, row.shape, 0)
        _check_form(row.form, row.dtype, f"{name}: saved tensor {row.node} of {row.path}")
        yield (*first[:4], seen[first]), row.form
        seen[first] += 1


def _check_form(form: str, dtype: str, where: str) -> None:
    """Raise where a form is neither the tensor's own dtype nor an FP8 format and a granularity."""
    if form == dtype:
        return
    name, _, granularity = form.partition(" ")
    try:
        if name not in FP8_FORMS:
            raise unknown_name("form", form, [dtype, "e4m3 group(128)", "e5m2 group(128)", "e4m3 row", "e4m3 tensor"])
        parse_granularity(granularity)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error
