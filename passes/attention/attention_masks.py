"""Attention masks: what a mask says, where the graph alone decides it, is told to attention instead of being read.

Before      %mask = …(arange, eq, le, and, …)  [b, 1, s, s]    After   %o = attention(%q, %k, %v, is_causal=True)
            %bias = where(%mask, 0, -inf)                              and likewise in backward
            %o = attention(%q, %k, %v, %bias)

Models build masks from positions, for what a batch might need (padding, packed sequences). If no input takes part, the
value is known when the graph is compiled: it is computed here, once, and compared with the two masks that attention
knows: causal, and everything. Its kernels then skip what is masked and read nothing for it, and neither the mask nor
the bias is made or kept.

Sound because the value is compared element by element; of symbolic sizes it is proven (`symbolic_masks.py`). Nothing
is assumed of inputs, buffers or random numbers, or of what other libraries' operators give: these may know more than
their arguments.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily  # passes run under the fake mode of the graph
from torch.utils._pytree import tree_leaves

from fp8compile.passes.attention.symbolic_masks import CAUSAL, EVERYTHING, NEVER, symbolic_kind
from fp8compile.passes.core.compilation import Compilation, aten, value
from fp8compile.passes.core.matmul_node import plain
from fp8compile.passes.core.node_views import argument, call_of, first_input, node_argument, set_argument
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.core.walk import walk
from fp8compile.plan.rows import Mask

LARGEST = 2**31  # bytes in memory of a tensor that is computed while compiling
MASKS = ("attn_mask", "attn_bias")


def run(c: Compilation) -> None:
    """Tell every attention what its mask says, if that is known."""
    if not c.options.fold_masks:
        return
    constants = _constants(c.graph)
    kinds: dict[int | fx.Node, str | None] = {}
    for node in list(c.graph.nodes):
        mask = _unexpanded(argument(node, _mask_name(node))) if _takes_mask(node) else None
        if isinstance(mask, fx.Node) and not argument(node, "is_causal"):
            known = constants.get(mask, mask)
            if known not in kinds:
                kinds[known] = _kind(mask) if mask in constants else symbolic_kind(mask)
            kind = kinds[known]
            if kind and _fits(node, kind == CAUSAL):
                _tell(c, node, mask, kind)


# ---- what is constant ------------------------------------------------------------------------------------------------


def _constants(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the nodes whose value the graph alone decides → a number; nodes of one number have one value."""
    found: dict[fx.Node, int] = {}
    numbers: dict[tuple[str, str], int] = {}
    for node in graph.nodes:
        if _is_literal(node) or (_is_pure(node) and all(n in found for n in node.all_input_nodes)):
            given = fx.map_arg((node.args, node.kwargs), lambda n: ("node", found[n]))
            what = (str(node.target), repr(given))
            found[node] = numbers.setdefault(what, len(numbers))
    return found


def _is_literal(node: fx.Node) -> bool:
    """Return True if a node is what was written as a number or a list in the program: the -inf of `mask[i < j] =
    -inf`."""
    if node.op != "get_attr" or any(u.target is not aten.lift_fresh_copy.default for u in node.users):
        return False
    return type(_literal(node)) is Tensor  # not a fake one


def _literal(node: fx.Node) -> Any:
    module = node.graph.owning_module
    return operator.attrgetter(str(node.target))(module) if module is not None else None


def _is_pure(node: fx.Node) -> bool:
    """Return True if a node gives tensors of known sizes, the same each time, and changes none."""
    if node.op != "call_function":
        return False
    target, results = node.target, tree_leaves(node.meta.get("val"))
    if not results or not all(isinstance(x, Tensor) and _has_known_sizes(x) for x in results):
        return False
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags
    return not target._schema.is_mutable and not random and sum(map(_bytes, results)) <= LARGEST


def _has_known_sizes(x: Tensor) -> bool:
    return all(isinstance(n, int) for n in (*x.shape, *x.stride()))


def _bytes(x: Tensor) -> int:
    """Return the bytes in memory: of what is expanded, once."""
    return x.itemsize * math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step)


def _computed(node: fx.Node) -> Tensor:
    """Return the value of a constant node, on its device or, where that is not there, on the CPU."""
    wanted = value(node).device
    device = wanted if wanted.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
    order, readers = _ancestors(node)
    known: dict[fx.Node, Any] = {}
    for n in order:
        if n.op == "get_attr":
            known[n] = _literal(n)
            continue
        args, kwargs = fx.map_arg((n.args, n.kwargs), known.__getitem__)
        args, kwargs = _on(device, args), {name: _on(device, x) for name, x in kwargs.items()}
        known[n] = call_of(n)(*args, **kwargs)
        for source in n.all_input_nodes:
            readers[source] -= 1
            if not readers[source]:
                del known[source]
    return known[node]


def _on(device: torch.device, x: Any) -> Any:
    """Return `x` with `device` in place of every device in it."""
    if isinstance(x, (list, tuple)):
        return type(x)(_on(device, y) for y in x)
    return device if isinstance(x, torch.device) and x.type == "cuda" else x


def _ancestors(node: fx.Node) -> tuple[list[fx.Node], dict[fx.Node, int]]:
    """Return `node` and all that it needs, in order, and how many of these read each."""
    needed = set(walk([node]))
    return sorted(needed), {n: sum(u in needed for u in n.users) for n in needed}


# ---- what it says ----------------------------------------------------------------------------------------------------


def _kind(mask: fx.Node) -> str | None:
    """Return `CAUSAL` or `EVERYTHING`, if the mask is that, in every batch and head."""
    queries, keys = (1, 1, *value(mask).shape)[-2:]
    with unset_fake_temporarily(), torch.no_grad():
        try:
            allowed = _allowed(_once(_computed(mask)))
        except (RuntimeError, IndexError):  # too little memory; or not here, or not while results must be deterministic
            return None
        if allowed is None:
            return None
        if bool(allowed.all()):
            return EVERYTHING
        causal = torch.ones(queries, keys, dtype=torch.bool, device=allowed.device).tril()
        return CAUSAL if queries == keys and bool((allowed == causal).all()) else None


def _unexpanded(mask: Any) -> Any:
    """Return what a mask is expanded from, to batches and heads of any number: that has the same to say."""
    while isinstance(mask, fx.Node) and mask.target is aten.expand.default:
        mask = first_input(mask)
    return mask


def _once(mask: Tensor) -> Tensor:
    """Return a mask without the batches and heads that lie in memory once."""
    for dim in range(mask.dim() - 2):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    return mask


def _allowed(mask: Tensor) -> Tensor | None:
    """Return where a mask lets queries see keys; None if it does more than to let or not to let."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    allowed = mask == 0
    return allowed if bool((allowed | (mask <= NEVER)).all()) else None


# ---- attention -------------------------------------------------------------------------------------------------------


def _takes_mask(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or "_scaled_dot_product_" not in str(node.target):
        return False
    names = _names(node)
    return "is_causal" in names and not names.isdisjoint(MASKS)


def _names(node: fx.Node) -> set[str]:
    """Return the names of the arguments that an attention takes."""
    return {a.name for a in call_of(node)._schema.arguments}


def _mask_name(node: fx.Node) -> str:
    """Return by what name an attention takes its mask."""
    return next(name for name in MASKS if name in _names(node))


def _fits(node: fx.Node, causal: bool) -> bool:
    """Return True if attention means what the mask says: causal is of as many queries as keys. Who asks for a gradient
    of the mask needs the mask."""
    q, k = node_argument(node, "query"), node_argument(node, "key")
    square = str(value(q).shape[-2]) == str(value(k).shape[-2])
    wants = argument(node, "grad_input_mask") if "grad_input_mask" in _names(node) else None
    return (square or not causal) and not (wants and wants[-1])


def _tell(c: Compilation, node: fx.Node, mask: fx.Node, kind: str) -> None:
    if "backward" not in str(node.target):
        shape = tuple(map(plain, value(mask).shape))
        c.plan.masks.append(Mask(node.name, module_path(node), source_line(node), shape, kind))
    set_argument(node, _mask_name(node), None)
    if kind == CAUSAL:
        set_argument(node, "is_causal", True)
