"""States once: an optimizer step reads each 8-bit state once and writes it once, from Dynamo's graph on.

Before      s.lerp_(grad, 0.1)      r = s.sqrt()
After       p = s.dequantize()      p.lerp_(grad, 0.1)      r = p.sqrt()      …      s.store(p)

Each operation on an `FP8State` loads it, and stores it if it writes; AOTAutograd would trace all of that, several times
over, for `store_load_forwarding` to undo most of it. Sound because an update uses unquantized new states, as there.
Only states that meet nothing but arithmetic are rewritten; others are loaded and stored by each operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from fp8compile.optimizer.states import FP8State
from fp8compile.passes.core.stages import DynamoGraph

ARITHMETIC = {
    "abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "div", "fma.default", "lerp", "maximum", "minimum",
    "mul", "neg", "pow", "reciprocal", "rsqrt", "sign", "sqrt", "sub",
}  # fmt: skip


def run(c: DynamoGraph) -> None:
    """Load each state once, and store it once if anything writes it."""
    gm = c.gm
    output = gm.graph.output_node()
    for state in [node for node in gm.graph.nodes if _is_state(gm, node)]:
        users = list(_users(state))
        if not users or not all(_is_arithmetic(user, node) for user, node in users):
            continue
        with gm.graph.inserting_before(min(state.users)):
            plain = gm.graph.call_method("dequantize", (state,))
        state.replace_all_uses_with(plain, delete_user_cb=lambda user, plain=plain: user is not plain)
        if any(_writes(user, plain) for user in plain.users):
            with gm.graph.inserting_before(output):
                gm.graph.call_method("store", (state, plain))
    gm.graph.lint()
    gm.recompile()


def _is_state(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return isinstance(getattr(gm, str(node.target), None), FP8State)
    return node.op == "placeholder" and isinstance(node.meta.get("example_value"), FP8State)


def _users(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield who reads or writes `node`, or what an operation that writes to it returns, and which of these."""
    for user in node.users:
        yield user, node
        if _writes(user, node):
            yield from _users(user)


def _is_arithmetic(user: fx.Node, node: fx.Node) -> bool:
    if _name(user) == "copy_":  # a state takes FP32 as it is, a plain tensor of another dtype does not
        return user.args[0] is node and _dtype(user.args[1]) is _dtype(node)
    return _name(user).removeprefix("_foreach_").removesuffix("_") in ARITHMETIC and "out" not in user.kwargs


def _dtype(x: Any) -> Any:
    """Return the dtype of what Dynamo saw; what it did not see has one of its own."""
    return x.meta["example_value"].dtype if isinstance(x, fx.Node) and "example_value" in x.meta else object()


def _writes(user: fx.Node, node: fx.Node) -> bool:
    if not _name(user).endswith("_") or not user.args:
        return False
    first = user.args[0]
    return first is node or (isinstance(first, (list, tuple)) and node in first)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
