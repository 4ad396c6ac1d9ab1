"""Graphs as Python files: each defines `Graph`, a module that runs, and runs it on random data when executed.

    gm = fp8compile.load_graph("dump/graph0/12_joint_share_casts.py")      # an fx.GraphModule
    outputs = gm(*inputs)

A graph that holds what no file can (a Triton kernel by its number in a table, a graph as an attribute, a constant
without data) is kept as text alone; `write_graph` says why.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor  # constants of this kind have no data

from fp8compile.errors import Fp8Error

UNKNOWN = 16  # a size that only the data knows
Spec = tuple[str, Any, Any, str, str] | tuple[str, int]  # name, shape, strides, dtype, device; or name, number


def write_graph(graph: fx.Graph, path: Path, title: str) -> str:
    """Write `graph` as a file that runs; returns "", or why it cannot be."""
    constants = {n.target: _attribute(graph.owning_module, n.target) for n in graph.nodes if n.op == "get_attr"}
    for name, value in constants.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return f"attribute {name} is a {type(value).__name__}: it cannot be written to a file"
    wrapped = next((n for n in graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)), None)
    if wrapped is not None:
        return f"%{wrapped.name} calls {wrapped.target}, which refers to objects of the process that compiled it"
    code = _code(graph)
    used = set(re.findall(r"\w+", code.src))
    imports = [_import(name, value) for name, value in code.globals.items() if name in used]
    if None in imports:
        return "its code names objects that cannot be imported"
    if constants:
        torch.save({_flat(name): value for name, value in constants.items()}, path.with_suffix(".pt"))
    path.write_text(_file(title, code.src, [i for i in imports if i], constants, _inputs(graph)))
    return ""


def _code(graph: fx.Graph) -> Any:
    copy = fx.Graph()
    output = copy.graph_copy(graph, {})
    copy.output(output)
    for node in copy.nodes:
        if node.op == "get_attr":
            node.target = _flat(node.target)
    return copy.python_code("self")


def _flat(name: Any) -> str:
    return str(name).replace(".", "_")


def _attribute(owner: Any, name: Any) -> Any:
    for part in str(name).split("."):
        owner = getattr(owner, part, None)
    return owner


def _import(name: str, value: Any) -> str | None:
    if isinstance(value, ModuleType):
        return "" if name == "torch" else f"import {value.__name__} as {name}"
    if isinstance(value, float) or name in ("inf", "nan"):
        return f"from math import {name}"
    if value is type(None):
        return f"{name} = type(None)"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    renamed = "" if name == qualified else f" as {name}"
    return f"from {module} import {qualified}{renamed}" if module and qualified.isidentifier() else None


def _file(title: str, source: str, imports: Iterable[str], constants: Iterable[Any], inputs: Sequence[Spec]) -> str:
    body = "".join(f"    {line}\n" if line.strip() else "\n" for line in source.strip().splitlines())
    names = [_flat(name) for name in constants]
    load = "        constants = torch.load(Path(__file__).with_suffix('.pt'), weights_only=True)\n" if names else ""
    load += "".join(f"        self.register_buffer({n!r}, constants[{n!r}])\n" for n in names)
    start = f"    def __init__(self):\n        super().__init__()\n{load}\n" if names else ""
    listed = "".join(f"    {spec!r},\n" for spec in inputs)
    extra = "\n".join(sorted(imports))
    return f'''"""{title}

Run this file to run the graph on random data; fp8compile.load_graph makes an fx.GraphModule of it.
"""

from pathlib import Path

import torch

import fp8compile  # its operators
{extra}

INPUTS = [  # name, shape, strides, dtype, device; or name, number
{listed}]


class Graph(torch.nn.Module):
{start}{body}

if __name__ == "__main__":
    from fp8compile.insight.dump.graph_files import run

    run(Graph(), INPUTS)
'''


def _inputs(graph: fx.Graph) -> list[Spec]:
    return [_spec(n.name, n.meta.get("val")) for n in graph.find_nodes(op="placeholder")]


def _spec(name: str, val: Any) -> Spec:
    if not isinstance(val, torch.Tensor):
        return name, _number(val)
    dtype = str(val.dtype).removeprefix("torch.")
    return name, tuple(map(_number, val.shape)), tuple(map(_number, val.stride())), dtype, str(val.device)


def _number(size: Any) -> int:
    try:
        return size if isinstance(size, int) else int(size.node.hint)
    except (AttributeError, TypeError, ValueError):
        return UNKNOWN


# ---- reading --------------------------------------------------------------------------------------------------------


def load_graph(path: str | Path) -> fx.GraphModule:
    """Return the graph in a file of a dump, as an `fx.GraphModule` that runs. Raises `Fp8Error` where there is none."""
    module = _load(Path(path))
    return fx.symbolic_trace(module.Graph())


def example_inputs(path: str | Path, seed: int = 0) -> list[Any]:
    """Return random arguments for the graph in this file, with the shapes, strides and dtypes of its compilation."""
    return random_inputs(_load(Path(path)).INPUTS, seed)


def _load(path: Path) -> Any:
    if path.suffix != ".py" or not path.is_file():
        raise Fp8Error(f"{path} is no graph of a dump that runs: those end in .py, and index.txt lists them")
    spec = importlib.util.spec_from_file_location(f"fp8compile_graph_{abs(hash(path.resolve()))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_inputs(specs: Sequence[Spec], seed: int = 0) -> list[Any]:
    """Return normal numbers, small token ids, booleans and payloads, laid out as the specs say."""
    generator = torch.Generator().manual_seed(seed)
    return [spec[1] if len(spec) == 2 else _random(spec, generator) for spec in specs]


def _random(spec: Any, generator: torch.Generator) -> torch.Tensor:
    _, shape, strides, name, device = spec
    dtype = getattr(torch, name)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    else:
        values = torch.randint(0, 2, shape, generator=generator, dtype=torch.int64, device="cpu")
    needed = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    memory = torch.zeros(needed, dtype=dtype, device=device)
    return memory.as_strided(shape, strides).copy_(values.to(dtype))


def run(graph: torch.nn.Module, specs: Sequence[Spec]) -> None:
    """Run `graph` on random data and print what it returns."""
    results = graph(*random_inputs(specs))
    for i, x in enumerate(results if isinstance(results, (list, tuple)) else [results]):
        if isinstance(x, torch.Tensor):
            norm = x.float().norm().item()
            print(f"output {i}: {str(x.dtype).removeprefix('torch.')}{list(x.shape)}, norm {norm:.4g}")
        else:
            print(f"output {i}: {x!r}")
