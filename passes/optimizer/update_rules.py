"""What an update's expression may consist of: for each operator, by name, how its value is written in a spec.

An optimizer graph has operators in three forms (mul.Tensor, mul.Scalar, and one output of _foreach_mul), which mean the
same element by element; the table therefore goes by name. An operator without a row stays in the graph, and what it
computes is read by the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from fp8compile.passes.core.fusible import POINTWISE, Rule, Writer
from fp8compile.passes.core.node_views import Getitem

FOREACH = "_foreach_"
IDENTITIES = {"expand", "view", "_unsafe_view", "reshape", "alias", "detach", "clone", "lift_fresh_copy", "_to_copy"}
IDENTITIES |= {"convert_element_type", "copy"}
FILLS = {"full": 1, "full_like": 1, "scalar_tensor": 0, "zeros_like": None, "ones_like": None}
SHAPED = (IDENTITIES | set(FILLS)) - {"convert_element_type", "_to_copy", "clone"}  # they name a shape


def _lerp(w: Writer, start: int, end: int, weight: int) -> int:
    return w.op("add", start, w.op("mul", weight, w.op("sub", end, start)))


def _addcmul(w: Writer, x: int, a: int, b: int, value: int | None = None) -> int:
    product = w.op("mul", a, b)
    return w.op("add", x, product if value is None else w.op("mul", value, product))


def _addcdiv(w: Writer, x: int, a: int, b: int, value: int | None = None) -> int:
    quotient = w.op("div", a, b)
    return w.op("add", x, quotient if value is None else w.op("mul", value, quotient))


def _fma(w: Writer, a: int, b: int, c: int) -> int:
    return w.op("add", w.op("mul", a, b), c)


def _scaled(name: str) -> Rule:
    def rule(w: Writer, a: int, b: int, alpha: int | None = None) -> int:
        return w.op(name, a, b if alpha is None else w.op("mul", b, alpha))

    return rule


def _sign(w: Writer, x: int) -> int:
    zero = w.constant(0.0)
    negative = w.op("where", w.op("lt", x, zero), w.constant(-1.0), x)
    return w.op("where", w.op("gt", x, zero), w.constant(1.0), negative)


def _powers() -> dict[float, Rule]:
    def square(w: Writer, x: int) -> int:
        return w.op("mul", x, x)

    return {
        1: lambda w, x: x,
        2: square,
        3: lambda w, x: w.op("mul", square(w, x), x),
        4: lambda w, x: square(w, square(w, x)),
        0.5: lambda w, x: w.op("sqrt", x),
        -0.5: lambda w, x: w.op("div", w.constant(1.0), w.op("sqrt", x)),
        -1: lambda w, x: w.op("div", w.constant(1.0), x),
    }


POWERS = _powers()
RULES: dict[str, Rule] = {op._schema.name.split("::")[1]: rule for op, rule in POINTWISE.items()} | {
    "add": _scaled("add"),
    "sub": _scaled("sub"),
    "rsub": lambda w, a, b, alpha=None: _scaled("sub")(w, b, a, alpha),
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "fma": _fma,
    "sign": _sign,
    "sgn": _sign,
    "rsqrt": lambda w, x: w.op("div", w.constant(1.0), w.op("sqrt", x)),
    "reciprocal": lambda w, x: w.op("div", w.constant(1.0), x),
}


def call_of(node: fx.Node) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """Return name and arguments of the operator that computes `node`, of one output of a foreach operator for this
    output."""
    if node.op != "call_function":
        return None
    if item := Getitem.of(node):
        source, index = item.source, item.index
        name = schema_name(source)
        if name is None or not name.startswith(FOREACH):
            return None
        args = tuple(_entry(a, index) for a in source.args)
        return name.removeprefix(FOREACH), args, {k: _entry(a, index) for k, a in source.kwargs.items()}
    name = schema_name(node)
    return None if name is None else (name, node.args, dict(node.kwargs))


def schema_name(node: Any) -> str | None:
    """Return the operator's name without namespace and overload."""
    schema = getattr(getattr(node, "target", None), "_schema", None)
    return None if schema is None else schema.name.split("::")[1]


def _entry(argument: Any, index: Any) -> Any:
    return argument[index] if isinstance(argument, (list, tuple)) else argument


def operands(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[fx.Node]:
    """Yield the nodes among the arguments."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, fx.Node):
            yield argument
