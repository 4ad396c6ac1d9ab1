"""Graphs as stable text: one line a node, dtype and shape of every value, markers in short form.

%quantize: e4m3[16, 256] = fp8.quantize(%x, %scale, e4m3, row)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8compile.formats import FP8_DTYPES
from fp8compile.ops import NAMESPACE
from fp8compile.passes.core.node_views import Getitem, call_of

SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int64": "i64", "int32": "i32"}


def graph_text(graph: fx.Graph) -> str:
    """Return `graph` as text, one line a node, ending in a newline."""
    return "".join(_line(node) + "\n" for node in graph.nodes)


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    head = f"%{node.name}: {_type(node.meta.get('val'))}"
    if node.op in ("placeholder", "get_attr"):
        return f"{head} = {node.op}"
    if item := Getitem.of(node):
        return f"{head} = {_argument(item.source)}[{item.index}]"
    marker = getattr(node.target, "namespace", "") == NAMESPACE
    args = [_short(a) if marker else _argument(a) for a in _trimmed(node, marker)]
    args += [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{head} = {_name(node.target)}({', '.join(args)})"


def _trimmed(node: fx.Node, marker: bool) -> list[Any]:
    """Return arguments without the defaults of a marker's trailing flags."""
    args = list(node.args)
    if marker:
        arguments = call_of(node)._schema.arguments
        defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
        names = [a.name for a in arguments]
        while args and names[len(args) - 1] in defaults and args[-1] == defaults[names[len(args) - 1]]:
            args.pop()
        for i, (name, arg) in enumerate(zip(names, args, strict=False)):
            if name in defaults:
                args[i] = name if arg is True else f"{name}={_argument(arg)}"
    return args


def _short(arg: Any) -> str:
    return arg if isinstance(arg, str) else _argument(arg)


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        prefix = "" if target.namespace == "aten" else f"{target.namespace}."
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        return f"{prefix}{target._opname}{overload}"
    return getattr(target, "__name__", str(target))


def _type(val: Any) -> str:
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(_type, val))})"
    if not isinstance(val, torch.Tensor):
        return "?" if val is None else type(val).__name__
    name = FP8_DTYPES[val.dtype].name if val.dtype in FP8_DTYPES else str(val.dtype).removeprefix("torch.")
    return f"{SHORT.get(name, name)}[{', '.join(map(str, val.shape))}]"


def _argument(arg: Any) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(map(_argument, arg))}]"
    if isinstance(arg, torch.dtype):
        name = str(arg).removeprefix("torch.")
        return SHORT.get(name, name)
    return str(arg)
