"""Let Inductor read a buffer before an operator overwrites it: in torch, what is computed late sees what was written.

    y = x * 2;  op_(x);  return y           torch.compile returns the new x, times 2

Inductor computes `x * 2` only where it is needed, but before `x` is overwritten. For operators without lowering (custom
ones, collectives in place) it does so too late: they are in its list of things to do by then, which goes by order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.virtualized import V
from torch.utils import _pytree as pytree

from fp8compile.torch_hooks.inductor.our_graph import is_ours


def realize_readers_first() -> None:
    """Patch Inductor's node of an operator without a lowering; for graphs of ours it does more."""
    create: Callable[..., None] = ir.FallbackKernel.__init__

    def created(
        self: Any,
        layout: Any,
        kernel: Any,
        tensor_args: Sequence[Any],
        nontensor_args: Sequence[Any],
        unflatten_args: Callable[..., Any],
        *more: Any,
        **settings: Any,
    ) -> None:
        if is_ours() and isinstance(kernel, torch._ops.OpOverload) and kernel._schema.is_mutable:
            arguments, named = unflatten_args(tensor_args, nontensor_args)
            _realize_readers(kernel._schema, arguments, named)
        create(self, layout, kernel, tensor_args, nontensor_args, unflatten_args, *more, **settings)

    ir.FallbackKernel.__init__ = created  # type: ignore[method-assign]


def _realize_readers(schema: torch._C.FunctionSchema, arguments: Sequence[Any], named: dict[str, Any]) -> None:
    """Compute now what reads the arguments that are written. arguments, named: nodes of Inductor, with their memory."""
    given = {a.name: x for a, x in zip(schema.arguments, arguments, strict=False)} | named
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    for x in pytree.tree_leaves(written):
        if isinstance(x, ir.IRNode):
            V.graph.mark_buffer_mutated(x.get_name())
