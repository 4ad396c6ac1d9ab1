"""Select matmuls: decide which of them become FP8, with the reason for every one that does not.

Decides only: the graph stays as it is, each matmul gets its record. The rules stand in RULES, in order; the first
that objects gives the reason. A matmul that no rule objects to must be faster as well
(`passes/matmul/profitability.py`). A plan that was handed back overrides all that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fp8compile.errors import OptionError
from fp8compile.formats import ALIGNMENT
from fp8compile.passes.core.compilation import Compilation, value
from fp8compile.passes.core.derivatives import is_differentiated
from fp8compile.passes.core.matmul_node import CONVOLUTION, MatmulNode, Matmuls
from fp8compile.passes.core.sizes import hint
from fp8compile.passes.core.walk import walk
from fp8compile.passes.matmul import alternative_costs, host_costs
from fp8compile.passes.matmul.gathered_weights import gathered
from fp8compile.passes.matmul.grouped_matmuls import GROUPED, casts_of, takes_rows_alone, why_not_grouped
from fp8compile.passes.matmul.matmul_costs import Costs
from fp8compile.passes.matmul.output_heads import find_heads
from fp8compile.passes.matmul.profitability import leave_out
from fp8compile.passes.matmul.roles import find_roles
from fp8compile.passes.matmul.unpack_costs import find_unpacked
from fp8compile.passes.matmul.weights import frozen_nodes
from fp8compile.plan import overrides
from fp8compile.plan.reasons import BY_PLAN, DIFFERENTIATED, Reason, Why
from fp8compile.plan.rows import BF16, FP8
from fp8compile.recipe import Role

OPERATIONS = {"bmm": "batched", CONVOLUTION: "convolution"}  # kind -> its name in option `operations`
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
READ_ROUNDED = "; its weight was gathered in FP8, and is read rounded (prepare_fsdp(…, skip=…) leaves it out)"


@dataclass(eq=False)
class Candidate:
    """A matmul before the rules.

    casts: how the recipe runs it. dtypes: of the graph's linear layers. is_differentiated: True if its layer's weight
    is in a derivative that the model takes. objection: of the first rule that has one.
    """

    matmul: MatmulNode
    casts: Role | None
    is_head: bool
    dtypes: set[torch.dtype]
    is_differentiated: bool
    objection: Why | None = None


def run(c: Compilation) -> None:
    """Find the matmuls, and decide on each."""
    matmuls = find_roles(c)
    given = overrides.decisions(c.options.plan, [m.row() for m in matmuls], c.plan.graph)
    for matmul, override in zip(matmuls, given, strict=True):
        matmul.override = override
    candidates = _candidates(c, matmuls)
    for x in candidates:
        x.objection = next(filter(None, (rule(x, c) for rule in RULES)), None)
        _record_hints(x.matmul, c)
    costs = _profitable(candidates, c)
    _leave_to_bf16_if_no_step_is_shorter(candidates, costs, c)
    for x in candidates:
        _decide(x, costs, c)
        _override(x, costs, c)
    alternative_costs.record(c, matmuls, costs)
    c.matmuls = Matmuls(matmuls)


def _candidates(c: Compilation, matmuls: list[MatmulNode]) -> list[Candidate]:
    heads = find_heads(c, matmuls)
    dtypes = {value(m.node).dtype for m in matmuls if m.role == "output" and m.kind != CONVOLUTION}
    differentiated = _differentiated(matmuls)
    return [Candidate(m, casts_of(m, c.options.recipe), m.layer in heads, dtypes, m in differentiated) for m in matmuls]


def _differentiated(matmuls: list[MatmulNode]) -> set[MatmulNode]:
    """Return the matmuls of layers whose weight is in a derivative that the model takes: a value beside it has the
    same weight."""
    marked = {m for m in matmuls if is_differentiated(m.node) or is_differentiated(m.layer.node)}
    weights = {node for m in marked for node in _parameters_of(m)}
    return marked | {m for m in matmuls if not weights.isdisjoint(_parameters_of(m.layer))}


def _parameters_of(matmul: MatmulNode) -> set[fx.Node]:
    """Return the inputs of the graph that the weight of an output matmul is computed from."""
    weight = matmul.weight if matmul.role == "output" else None
    return {node for node in walk([weight]) if node.op == "placeholder"} if weight is not None else set()


def _record_hints(matmul: MatmulNode, c: Compilation) -> None:
    """Let the plan know what symbolic sizes were when the graph was traced."""
    sizes = (matmul.m, matmul.n, matmul.k, matmul.batch)
    c.plan.hints.update({str(s): hint(s) for s in sizes if not isinstance(s, int)} | _symbols(sizes))


def _profitable(candidates: Sequence[Candidate], c: Compilation) -> Costs:
    """Return the costs beside the matmuls that are to be in FP8; those without which all is faster get an objection."""
    chosen = [x for x in candidates if x.objection is None]
    unpacked = find_unpacked(c, [(x.matmul, x.casts) for x in candidates]) if c.device.has_fp8 else []
    costs = Costs(c.device, (x.matmul for x in chosen), c.options.one_pass_casts, unpacked, frozen_nodes(c))
    if c.options.select != "all" and c.device.has_fp8:
        gathered_in_fp8 = {x.matmul for x in chosen if _is_gathered(x.matmul)}
        timed = [(x.matmul, x.casts) for x in chosen if x.casts is not None]
        left_out = leave_out(timed, costs, gathered_in_fp8)
        for x in chosen:
            if x.matmul in left_out:
                x.objection = _too_dear(x.matmul)
    return costs


def _leave_to_bf16_if_no_step_is_shorter(candidates: Sequence[Candidate], costs: Costs, c: Compilation) -> None:
    """Object to all matmuls where FP8 makes the step no shorter: it waits for the host, or its GPU gains too little."""
    chosen = [x for x in candidates if x.objection is None]
    asked_for = c.options.select == "all" or any(_is_gathered(x.matmul) for x in chosen)
    if not chosen or asked_for or not c.device.has_fp8:
        return
    updated = host_costs.updated_bytes(c) if c.is_training else 0
    bf16 = host_costs.times_in_bf16(c.graph, (x.matmul for x in candidates), c.device, costs.kept, updated)
    fp8 = host_costs.times_in_fp8(bf16, [(x.matmul, x.casts) for x in chosen if x.casts is not None], costs)
    by_host = host_costs.host_launches() and not c.options.captured
    if host_costs.is_shorter(fp8, bf16, by_host):
        return
    digits = 1 if bf16.gpu >= 10 else 2
    gpu, host = (
        f"{x:.{digits}f} in BF16, {y:.{digits}f} in FP8" for x, y in ((bf16.gpu, fp8.gpu), (bf16.host, fp8.host))
    )
    why = f"the step would be no shorter: milliseconds on the GPU about {gpu}"
    if fp8.unpacking:
        why += f", {fp8.unpacking:.{digits}f} of it to unpack activations for what stays in BF16"
    if by_host:
        why += f"; on the host {host} (mode='reduce-overhead' or capture_step spares the host)"
    for x in chosen:
        x.objection = Why(Reason.HOST, why)


def _decide(x: Candidate, costs: Costs, c: Compilation) -> None:
    """Decide as the rules say."""
    _estimate(x, costs)
    if x.objection is not None:
        rounded = _is_gathered(x.matmul)
        x.matmul.decide(BF16, x.objection.with_remark(Reason.READ_ROUNDED, READ_ROUNDED) if rounded else x.objection)
        return
    if c.options.select == "all":
        why = Why(Reason.ALL, "every matmul that can run")
    else:
        why = Why(Reason.FASTER, "faster by the cost model")
        if x.casts is not None and not costs.pays(x.matmul, x.casts):
            why = why.with_remark(Reason.SHARED_CASTS, " for all that share its casts")
        elif x.casts is not None and not costs.is_faster(x.matmul, x.casts):
            why = why.with_remark(Reason.UNPACKED, " with what BF16 would take to keep and unpack its operand")
    if _is_gathered(x.matmul):
        why = Why(Reason.GATHERED, "its weight is gathered in FP8")
    if takes_rows_alone(x.matmul, c.options.recipe):
        why = why.with_remark(Reason.ROWS_ALONE, "; grouped FP8 takes other casts")
    x.matmul.decide(FP8, why)


def _override(x: Candidate, costs: Costs, c: Compilation) -> None:
    """Decide as a given plan says, where it differs. Raises `OptionError` where it wants what cannot be."""
    matmul, wanted = x.matmul, x.matmul.override
    if wanted is None:
        return
    if wanted.decision == BF16:
        if matmul.is_fp8:
            matmul.decide(BF16, wanted.why)
        return
    x.casts = wanted.role or x.casts
    why = _impossible(x, c)
    if why is not None:
        raise OptionError(f"the plan wants {matmul.path} {matmul.role} in FP8, which cannot be: {why.text}")
    _estimate(x, costs)
    if not matmul.is_fp8 or wanted.why != BY_PLAN:
        matmul.decide(FP8, wanted.why)


def _impossible(x: Candidate, c: Compilation) -> Why | None:
    """Return why a matmul cannot run in FP8 whatever anybody wants; None if it can."""
    if x.matmul.role == "other" or x.casts is None:
        no_casts = f"recipe {c.options.recipe.name!r} keeps {x.matmul.role} in BF16, and the plan names no casts"
        return _has_weight(x, c) or Why(Reason.RECIPE, no_casts)
    if x.matmul.dtype not in FLOATS:
        return _has_dtype(x, c)
    return _has_work(x, c) or _can_be_grouped(x, c) or (None if c.device.emulated else _has_units(x, c))


def _estimate(x: Candidate, costs: Costs) -> None:
    """Fill in estimated times, where the device has figures."""
    if x.casts is not None and costs.device.has_fp8:
        x.matmul.milliseconds_bf16, x.matmul.milliseconds_fp8 = costs.milliseconds(x.matmul, x.casts)


def _is_gathered(matmul: MatmulNode) -> bool:
    """Return True if this matmul reads a weight that arrived in FP8."""
    if matmul.role not in ("output", "grad_input"):
        return False
    return any(gathered(x) is not None for x in (matmul.left, matmul.right))


def _has_weight(x: Candidate, c: Compilation) -> Why | None:
    return x.matmul.why_other if x.matmul.role == "other" else None


def _in_recipe(x: Candidate, c: Compilation) -> Why | None:
    if x.casts is not None:
        return None
    return Why(Reason.RECIPE, f"recipe {c.options.recipe.name!r} keeps {x.matmul.role} in BF16")


def _is_listed(x: Candidate, c: Compilation) -> Why | None:
    operation = OPERATIONS.get(x.matmul.kind, "linear")
    if operation in c.options.operations:
        return None
    return Why(Reason.OPERATIONS, f"operations={', '.join(c.options.operations)}: this one is {operation}")


def _has_dtype(x: Candidate, c: Compilation) -> Why | None:
    dtype = x.matmul.dtype
    if dtype not in FLOATS:
        name = str(dtype).removeprefix("torch.")
        return Why(Reason.DTYPE, f"{name} is not a dtype that FP8 can stand in for")
    lower = x.dtypes & {torch.bfloat16, torch.float16}
    if dtype == torch.float32 and lower and c.options.select != "all":
        text = "FP32 among lower-precision matmuls: the model asks for this one's precision"
        return Why(Reason.HIGHER_PRECISION, text)
    return None


def _is_not_skipped(x: Candidate, c: Compilation) -> Why | None:
    pattern = c.options.skips(x.matmul.path)
    return Why(Reason.SKIP, f"skip={pattern!r}") if pattern else None


def _is_not_differentiated(x: Candidate, c: Compilation) -> Why | None:
    return DIFFERENTIATED if x.is_differentiated else None


def _is_not_head(x: Candidate, c: Compilation) -> Why | None:
    is_left = x.is_head and not c.options.lm_head
    return Why(Reason.HEAD, "the output head (lm_head=True converts it)") if is_left else None


def _has_units(x: Candidate, c: Compilation) -> Why | None:
    if c.device.has_fp8:
        blockwise = x.casts is not None and x.casts.left.granularity.size
        if blockwise and not c.device.blockwise:
            return Why(Reason.DEVICE, f"{c.device.name} has no block-wise FP8 matmul")
        return None
    if c.device.emulated and c.options.select == "all":
        return None
    hint = "; select='all' emulates FP8" if c.device.emulated else ""
    return Why(Reason.DEVICE, f"{c.device.why_not}{hint}")


def _can_be_grouped(x: Candidate, c: Compilation) -> Why | None:
    return why_not_grouped(x.matmul, x.casts, c.device) if x.matmul.kind == GROUPED else None


def _has_work(x: Candidate, c: Compilation) -> Why | None:
    sizes = (x.matmul.m, x.matmul.n, x.matmul.k)
    is_empty = any(isinstance(s, int) and s == 0 for s in sizes)
    return Why(Reason.EMPTY, "a matmul without elements") if is_empty else None


def _too_dear(matmul: MatmulNode) -> Why:
    """Return why a matmul is not faster in FP8."""
    unaligned = [f"{d} = {s}" for d, s in (("N", hint(matmul.n)), ("K", hint(matmul.k))) if s % ALIGNMENT]
    if unaligned:
        sizes = " and ".join(unaligned)
        return Why(Reason.UNALIGNED, f"{sizes}: not a multiple of {ALIGNMENT}, and padding does not pay")
    return Why(Reason.TOO_SMALL, "too small: casts would cost more than the FP8 matmul saves")


def _symbols(sizes: Sequence[Any]) -> dict[str, int]:
    """Return what the symbols of these sizes were: other sizes are made of them."""
    found: dict[str, int] = {}
    for size in sizes:
        if isinstance(size, torch.SymInt):
            values = size.node.shape_env.backed_var_to_val
            found |= {str(s): int(values[s]) for s in size.node.expr.free_symbols if s in values}
    return found


RULES: tuple[Callable[[Candidate, Compilation], Why | None], ...] = (
    _has_weight,
    _in_recipe,
    _is_listed,
    _has_dtype,
    _is_not_skipped,
    _is_not_differentiated,
    _is_not_head,
    _has_units,
    _can_be_grouped,
    _has_work,
)
