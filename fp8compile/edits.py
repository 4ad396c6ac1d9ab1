"""Plans handed back: options={"plan": …} makes the compiler decide as the rows of a plan say.

    plan = fp8compile.explain(model, x)              # or last_compile()
    Path("plan.json").write_text(plan.to_json())     # edit `decision`, `left`, `right` of a matmul, `form` of a tensor
    torch.compile(model, backend="fp8", options={"plan": "plan.json"})

A row speaks of a matmul by module path, role and occurrence (a module may run several times): node names and the
number of tokens may differ. Its feature sizes must agree, so that a plan of another model is found out. A merged row
speaks of each of its `merged` paths. Matmuls without a row are decided as usual, so rows may be deleted.
A saved tensor is known by module path, source line, dtype, last dimension and occurrence.

The content of the plan is part of `Options`, and so of every cache's key.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from fp8compile.errors import OptionError, unknown_name
from fp8compile.formats import parse_format, parse_granularity
from fp8compile.plan import BF16, FP8, Matmul, Operand, Plan, plans_from_json
from fp8compile.recipe import Cast, Delayed, Role

REASON = "the plan says so"
SCHEDULED = "schedule: "  # begins the reasons of rows that an automatic schedule moved; they are kept
Key: TypeAlias = tuple[str, str, int]  # module path, role, occurrence
SavedKey: TypeAlias = tuple[str, str, str, int | str, int]  # path, source, dtype, last dimension, occurrence


@dataclass(frozen=True)
class Decision:
    """What a row says of one matmul. role: its casts as a recipe has them, None where it is left or names none."""

    decision: str
    role: Role | None
    sizes: tuple[int | str, ...]  # m, n, k; empty for a member of a merged row
    reason: str = REASON  # a schedule's evidence, where the row has it


@dataclass(frozen=True)
class GraphEdits:
    """The rows of one graph."""

    graph: str
    matmuls: tuple[tuple[Key, Decision], ...]


@dataclass(frozen=True)
class Edits:
    """All that a plan says, in a form that can be hashed and compared. name: where it came from."""

    name: str
    graphs: tuple[GraphEdits, ...]
    saved: tuple[tuple[SavedKey, str], ...] = ()


# ---- loading --------------------------------------------------------------------------------------------------------


def load(value: Any) -> Edits:
    """`Edits` from a path to JSON, a `Plan`, a list of them, or an `Explanation`. Raises `OptionError`."""
    if isinstance(value, Edits):
        return value
    if isinstance(value, (str, Path)):
        return _edits(f"plan {str(value)!r}", _read(Path(value)))
    plans = [value] if isinstance(value, Plan) else getattr(value, "plans", value)
    if not isinstance(plans, (list, tuple)) or not all(isinstance(p, Plan) for p in plans):
        raise OptionError(f"option 'plan' is a path, a Plan or an Explanation, and not {value!r}")
    return _edits("the given plan", plans)


def _read(path: Path) -> list[Plan]:
    if not path.is_file():
        raise OptionError(f"option 'plan': there is no file {str(path)!r}")
    try:
        return plans_from_json(path.read_text())
    except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"plan {str(path)!r} cannot be read: {error}") from error


def _edits(name: str, plans: Sequence[Plan]) -> Edits:
    graphs = tuple(GraphEdits(p.graph, tuple(_decisions(p, name))) for p in plans if p.matmuls)
    return Edits(name, graphs, tuple(form for p in plans for form in _saved_forms(p, name)))


def _decisions(plan: Plan, name: str) -> Iterable[tuple[Key, Decision]]:
    seen: Counter[tuple[str, str]] = Counter()
    for row in plan.matmuls:
        decision = _decision(row, name)
        for path in row.merged or (row.path,):
            yield (path, row.role, seen[path, row.role]), replace(decision, sizes=() if row.merged else decision.sizes)
            seen[path, row.role] += 1


def _decision(row: Matmul, name: str) -> Decision:
    where = f"{name}: {row.path or '(the model itself)'} {row.role}"
    if row.decision not in (FP8, BF16):
        raise OptionError(f"{where}: decision {row.decision!r} is neither 'fp8' nor 'bf16'")
    if row.decision == FP8 and row.role == "other":
        raise OptionError(f"{where} cannot be FP8: {row.reason or 'it has no weight'}")
    role = None
    if row.decision == FP8 and row.left is not None and row.right is not None:
        try:
            role = Role(_cast(row.left), _cast(row.right), row.fast_accumulation)
        except OptionError as error:
            raise OptionError(f"{where}: {error}") from error
    reason = row.reason if row.reason.startswith(SCHEDULED) else REASON
    return Decision(row.decision, role, (row.m, row.n, row.k), reason)


def _cast(operand: Operand) -> Cast:
    history = Delayed(operand.history, operand.margin) if operand.history else None
    return Cast(
        parse_granularity(operand.granularity), parse_format(operand.format), bool(operand.power_of_two), history
    )


# ---- matmuls --------------------------------------------------------------------------------------------------------


def decisions(edits: Edits | None, rows: Sequence[Matmul], graph: str) -> dict[str, Decision]:
    """What `edits` say of these matmuls of one graph ("training" or "inference"), by node.

    Raises `OptionError` where no row is about this graph, a row is about none of its matmuls, or sizes disagree.
    """
    here = _keys(rows)
    if edits is None or not any(role != "other" for _, role, _ in here):
        return {}
    chosen = _choose(edits, here, graph)
    for key, decision in chosen.items():
        if key not in here:
            raise OptionError(f"{edits.name}: {_unmatched(key, here)}")
        _check_sizes(edits.name, key, decision, here[key])
    return {row.node: chosen[key] for key, row in here.items() if key in chosen}


def _keys(rows: Iterable[Matmul]) -> dict[Key, Matmul]:
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for row in rows:
        found[row.path, row.role, seen[row.path, row.role]] = row
        seen[row.path, row.role] += 1
    return found


def _choose(edits: Edits, here: dict[Key, Matmul], graph: str) -> dict[Key, Decision]:
    """The rows of the graph that has most matmuls in common with this one."""
    roles = ("output",) if graph == "inference" else ("output", "grad_input", "grad_weight")
    found: list[tuple[int, dict[Key, Decision]]] = []
    for one in edits.graphs:
        rows = {key: decision for key, decision in one.matmuls if key[1] in roles}
        same = [key for key, decision in rows.items() if key in here and not _disagree(decision, here[key])]
        found.append((len(same) - (len(rows) - len(same)), rows))
    best = max((score for score, _ in found), default=0)
    tied = [rows for score, rows in found if score == best]
    if not tied or not any(key in here for key in tied[0]):
        mine, theirs = ({key[0] for key in keys} for keys in (here, [k for _, rows in found for k in rows]))
        raise OptionError(
            f"{edits.name} has no row about this graph. Its paths: {_some(theirs)}. Paths here: {_some(mine)}. "
            "explain(…).to_json() exports the rows of all graphs of a model."
        )
    if any(rows != tied[0] for rows in tied):
        raise OptionError(
            f"{edits.name} has several graphs with the same modules and different decisions: "
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


def _check_sizes(name: str, key: Key, decision: Decision, row: Matmul) -> None:
    if _disagree(decision, row):
        planned, actual = "×".join(map(str, decision.sizes)), f"{row.m}×{row.n}×{row.k}"
        raise OptionError(
            f"{name}: {key[0]} {key[1]} is M×N×K = {planned} there, {actual} here: a plan of another model"
        )


def _disagree(decision: Decision, row: Matmul) -> bool:
    """Whether more than the number of tokens differs: that is one of the three sizes."""
    pairs = zip(decision.sizes, (row.m, row.n, row.k), strict=bool(decision.sizes))
    return bool(decision.sizes) and sum(a != b for a, b in pairs) > 1


# ---- saved tensors --------------------------------------------------------------------------------------------------


def saved_key(path: str, source: str, dtype: str, shape: Sequence[int | str], occurrence: int) -> SavedKey:
    """By what a saved tensor is known. `occurrence` counts, in the graph's order, what is otherwise equal."""
    return path, source, dtype, shape[-1] if len(shape) else 1, occurrence


def saved_form(edits: Edits | None, key: SavedKey) -> str | None:
    """The form that a plan wants for a saved tensor ("bfloat16", "e4m3 group(128)"); None: decide as usual.

    Raises `OptionError` where several graphs of the plan save such a tensor in different forms.
    """
    forms = {form for known, form in edits.saved if known == key} if edits is not None else set()
    if edits is not None and len(forms) > 1:
        raise OptionError(f"{edits.name}: two graphs save a tensor of {key[0]} in different forms: which is meant?")
    return forms.pop() if forms else None


def _saved_forms(plan: Plan, name: str) -> Iterable[tuple[SavedKey, str]]:
    seen: Counter[SavedKey] = Counter()
    for row in plan.saved:
        first = saved_key(row.path, row.source, row.dtype, row.shape, 0)
        _check_form(row.form, row.dtype, f"{name}: saved tensor {row.node} of {row.path}")
        yield (*first[:4], seen[first]), row.form
        seen[first] += 1


def _check_form(form: str, dtype: str, where: str) -> None:
    """A form is the tensor's own dtype, or an FP8 format and a granularity."""
    if form == dtype:
        return
    name, _, granularity = form.partition(" ")
    try:
        if name not in ("e4m3", "e5m2"):
            raise unknown_name("form", form, [dtype, "e4m3 group(128)", "e5m2 group(128)", "e4m3 row", "e4m3 tensor"])
        parse_granularity(granularity)
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error
