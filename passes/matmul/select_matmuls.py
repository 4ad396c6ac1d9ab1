"""Select matmuls: which of them become FP8, and the reason for every one that does not.

Decides only: the graph stays as it is, the plan gets one row a matmul. The rules stand in RULES, in order; the first
that objects gives the reason. What no rule objects to must pay as well (`passes/matmul/profitability.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fp8compile.errors import OptionError
from fp8compile.formats import ALIGNMENT
from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import VIEWS, Compilation, aten, base, dependents, hint, is_tangent, value
from fp8compile.passes.matmul.gathered_weights import gathered
from fp8compile.passes.matmul.grouped_matmuls import GROUPED, remark, role_of, why_not_grouped
from fp8compile.passes.matmul.matmul_costs import Costs
from fp8compile.passes.matmul.profitability import leave_out
from fp8compile.passes.matmul.roles import MATMULS, Site, find_sites
from fp8compile.plan import overrides
from fp8compile.plan.rows import BF16, FP8, READ_ROUNDED, Matmul
from fp8compile.recipe import Role

HEADS = re.compile(
    r"(^|\.)(lm_head|head|heads|output|output_layer|output_projection|classifier|score|scores|embed_out|proj_out"
    r"|to_logits|logits|cls|unembed|vocab_proj|generator|qa_outputs|(predictions|lm_head)\.decoder)$"
)
OPERATIONS = {"bmm": "batched", "convolution": "convolution"}  # kind -> its name in option `operations`
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class Candidate:
    """A matmul before the rules: its role's recipe, and what they need to know of the whole graph."""

    site: Site
    role: Role | None
    is_head: bool
    dtypes: set[torch.dtype]
    row: Matmul
    objection: str = ""  # of the first rule that has one


def run(c: Compilation) -> None:
    """Write one row a matmul into the plan."""
    sites = find_sites(c)
    c.sites = {site.key: site for site in sites}
    heads = _heads(c, sites)
    dtypes = {value(s.node).dtype for s in sites if s.role == "output" and s.kind != "convolution"}
    rows = [_row(site) for site in sites]
    c.edits = overrides.decisions(c.options.plan, rows, c.plan.graph)
    candidates = []
    for site, row in zip(sites, rows, strict=True):
        is_head = site in heads or (site.forward is not None and site.forward in heads)
        candidate = Candidate(site, role_of(site, c.options.recipe), is_head, dtypes, row)
        candidate.objection = next(filter(None, (rule(candidate, c) for rule in RULES)), "")
        candidates.append(candidate)
        sizes = (site.m, site.n, site.k, site.batch)
        c.plan.hints.update({str(s): hint(s) for s in sizes if not isinstance(s, int)} | _symbols(sizes))
    costs = _what_pays(candidates, c)
    c.plan.matmuls += [_edited(candidate, costs, c) for candidate in candidates]


def _what_pays(candidates: Sequence[Candidate], c: Compilation) -> Costs:
    """The costs beside the matmuls that are to be in FP8; those without which all is faster get their objection."""
    chosen = [x for x in candidates if not x.objection]
    costs = Costs(c.device, (x.site for x in chosen))
    if c.options.select != "all" and c.device.has_fp8:
        gathered_in_fp8 = {x.site.key for x in chosen if _is_gathered(x.site)}
        timed = [(x.site, x.role) for x in chosen if x.role is not None]
        left_out = leave_out(timed, costs, gathered_in_fp8)
        for x in chosen:
            if x.site.key in left_out:
                x.objection = _too_dear(x.site)
    return costs


def _row(site: Site) -> Matmul:
    m, n, k, batch, groups = map(_plain, (site.m, site.n, site.k, site.batch, site.groups))
    dtype = str(_dtype(site)).removeprefix("torch.")
    return Matmul(site.key, site.path, site.source, site.kind, site.role, m, n, k, batch, dtype, groups=groups)


def _plain(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def _dtype(site: Site) -> torch.dtype | None:
    return value(site.left).dtype if site.left is not None else None


def _edited(candidate: Candidate, costs: Costs, c: Compilation) -> Matmul:
    """What the rules decide; or what a given plan says, where that differs."""
    wanted = c.edits.get(candidate.site.key)
    usual = _decide(candidate, costs, c)
    if wanted is None:
        return usual
    if wanted.decision == BF16:
        return usual if usual.decision == BF16 else replace(usual, decision=BF16, reason=wanted.reason)
    candidate.role = wanted.role or candidate.role
    why = _impossible(candidate, c)
    if why:
        raise OptionError(f"the plan wants {usual.path} {usual.role} in FP8, which cannot be: {why}")
    usual = _timed(usual, candidate, costs)
    changed = usual.decision != FP8 or wanted.reason != overrides.REASON
    return replace(usual, decision=FP8, reason=wanted.reason) if changed else usual


def _impossible(x: Candidate, c: Compilation) -> str:
    """Why a matmul cannot run in FP8 whatever anybody wants; "" if it can."""
    if x.site.role == "other" or x.role is None:
        return _has_weight(x, c) or f"{_in_recipe(x, c)}, and the plan names no casts"
    if _dtype(x.site) not in FLOATS:
        return _has_dtype(x, c)
    return _has_work(x, c) or _can_be_grouped(x, c) or ("" if c.device.emulated else _has_units(x, c))


def _decide(candidate: Candidate, costs: Costs, c: Compilation) -> Matmul:
    row = _timed(candidate.row, candidate, costs)
    if candidate.objection:
        reason = candidate.objection + (f"; {READ_ROUNDED}" if _is_gathered(candidate.site) else "")
        return replace(row, decision=BF16, reason=reason)
    why = "every matmul that can run" if c.options.select == "all" else "faster by the cost model"
    if c.options.select != "all" and candidate.role is not None and not costs.pays(candidate.site, candidate.role):
        why += " for all that share its casts"
    if _is_gathered(candidate.site):
        why = "its weight is gathered in FP8"
    why += remark(candidate.site, c.options.recipe)
    return replace(row, decision=FP8, reason=why)


def _timed(row: Matmul, candidate: Candidate, costs: Costs) -> Matmul:
    """The row with estimated times, where the device has figures."""
    if candidate.role is None or not costs.device.has_fp8:
        return row
    bf16, fp8 = costs.milliseconds(candidate.site, candidate.role)
    return replace(row, milliseconds_bf16=bf16, milliseconds_fp8=fp8)


def _is_gathered(site: Site) -> bool:
    """Whether this matmul reads a weight that arrived in FP8."""
    return site.role in ("output", "grad_input") and any(gathered(x) is not None for x in (site.left, site.right))


def _has_weight(x: Candidate, c: Compilation) -> str:
    return "" if x.site.role != "other" else x.site.why_other


def _in_recipe(x: Candidate, c: Compilation) -> str:
    return "" if x.role is not None else f"recipe {c.options.recipe.name!r} keeps {x.site.role} in BF16"


def _is_listed(x: Candidate, c: Compilation) -> str:
    operation = OPERATIONS.get(x.site.kind, "linear")
    listed = ", ".join(c.options.operations)
    return "" if operation in c.options.operations else f"operations={listed}: this one is {operation}"


def _has_dtype(x: Candidate, c: Compilation) -> str:
    dtype = _dtype(x.site)
    if dtype not in FLOATS:
        return f"{x.row.dtype} is not a dtype that FP8 can stand in for"
    lower = x.dtypes & {torch.bfloat16, torch.float16}
    if dtype == torch.float32 and lower and c.options.select != "all":
        return "FP32 among lower-precision matmuls: the model asks for this one's precision"
    return ""


def _is_not_skipped(x: Candidate, c: Compilation) -> str:
    pattern = c.options.skips(x.row.path)
    return f"skip={pattern!r}" if pattern else ""


def _is_not_head(x: Candidate, c: Compilation) -> str:
    return "the output head (lm_head=True converts it)" if x.is_head and not c.options.lm_head else ""


def _has_units(x: Candidate, c: Compilation) -> str:
    if c.device.has_fp8:
        blockwise = x.role is not None and x.role.left.granularity.size
        if blockwise and not c.device.blockwise:
            return f"{c.device.name} has no block-wise FP8 matmul"
        return ""
    if c.device.emulated and c.options.select == "all":
        return ""
    hint = "; select='all' emulates FP8" if c.device.emulated else ""
    return f"{c.device.why_not}{hint}"


def _can_be_grouped(x: Candidate, c: Compilation) -> str:
    return why_not_grouped(x.site, x.role, c.device) if x.site.kind == GROUPED else ""


def _has_work(x: Candidate, c: Compilation) -> str:
    sizes = (x.site.m, x.site.n, x.site.k)
    return "a matmul without elements" if any(isinstance(s, int) and s == 0 for s in sizes) else ""


def _too_dear(site: Site) -> str:
    """Why a matmul is not faster in FP8."""
    unaligned = [f"{d} = {s}" for d, s in (("N", hint(site.n)), ("K", hint(site.k))) if s % ALIGNMENT]
    if unaligned:
        return f"{' and '.join(unaligned)}: not a multiple of {ALIGNMENT}, and padding does not pay"
    return "too small: casts would cost more than the FP8 matmul saves"


def _symbols(sizes: Sequence[Any]) -> dict[str, int]:
    """What the symbols of these sizes were: other sizes are made of them."""
    found: dict[str, int] = {}
    for size in sizes:
        if isinstance(size, torch.SymInt):
            values = size.node.shape_env.backed_var_to_val
            found |= {str(s): int(values[s]) for s in size.node.expr.free_symbols if s in values}
    return found


RULES: tuple[Callable[[Candidate, Compilation], str], ...] = (
    _has_weight,
    _in_recipe,
    _is_listed,
    _has_dtype,
    _is_not_skipped,
    _is_not_head,
    _has_units,
    _can_be_grouped,
    _has_work,
)


def _heads(c: Compilation, sites: list[Site]) -> list[Site]:
    """The output matmuls that make the model's logits.

    One whose weight is also an embedding table; or that no later matmul of the forward half reads and that either is
    called like a head (and is not the last layer of a residual block) or feeds a cross-entropy.
    """
    embeddings = {base(n.args[0]) for n in c.graph.nodes if n.target is aten.embedding.default}  # type: ignore[arg-type]
    forward = [s for s in sites if s.role == "output"]
    consumers = {s.node for s in sites} | {n for n in c.graph.nodes if operators.is_attention(n.target)}
    backward = dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    found = []
    for site in forward:
        if site.weight is not None and _root(site.weight) in embeddings:
            found.append(site)
            continue
        named = bool(HEADS.search(site.path)) and not _enters_residual(site.node)
        later = dependents(c.graph, [site.node]) - {site.node} if named or _feeds_loss(site.node) else None
        if later is not None and not (later & consumers) - backward:
            found.append(site)
    return found


def _root(node: fx.Node) -> fx.Node:
    """The parameter behind a cast or a view."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _enters_residual(node: fx.Node) -> bool:
    """Whether what `node` computes is added to another activation of its shape, as the last layer of a block is."""
    for user in node.users:
        if user.target in VIEWS or user.target is torch.ops.prims.convert_element_type.default:
            if _enters_residual(user):
                return True
        elif user.target is aten.add.Tensor:
            shapes = [list(map(str, value(a).shape)) for a in user.args if isinstance(a, fx.Node)]
            if len(shapes) == 2 and shapes[0] == shapes[1]:
                return True
    return False


def _feeds_loss(node: fx.Node) -> bool:
    """Whether a gather by class index reads what `node` computes, through at most a dozen pointwise steps."""
    frontier, seen = [node], {node}
    for _ in range(16):
        frontier = [u for n in frontier for u in n.users if u not in seen]
        seen.update(frontier)
        if any(u.target in (aten.gather.default, aten.nll_loss_forward.default) for u in frontier):
            return True
        frontier = [u for u in frontier if u.target not in MATMULS]
    return False
