"""Paths of modules from the compiled model on, in graphs that begin inside of it.

After a graph break Dynamo compiles what follows, and each module that is called, as frames of their own, and names
modules from there:

    L['self'].mlp.up          in the frame of a block           in the model: layers.0.mlp.up
    L['___stack0']            a head, loaded before the break   in the model: lm_head

The parameters of the graph tell where that is: they are looked for in the outermost module whose call is running. Code
that several modules run is compiled once for all of them. Where their paths differ in numbers alone, these become `*`
(layers.*.mlp.up); where they differ otherwise, paths stay as Dynamo has them.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn
from torch._dynamo import eval_frame  # its frames are where a call of what torch.compile made begins

from fp8compile.passes.core.origin import clean_path
from fp8compile.plan import plan_warnings

STACK = "nn_module_stack"
BEGIN = re.compile(r"""L\[['"]args['"]\]\[0\]|[LG]\[['"][^\]]*['"]\]""")  # of the source of what a frame was given
CALLS = (Path(eval_frame.__file__), ("compile_wrapper", "_fn"))
WRAPPERS = ("torch.nn.parallel.", "torch.distributed.fsdp.")  # their forward is Python, and their names are nobody's


def complete_paths(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, str]:
    """Write whole paths into the module stacks of the nodes of Dynamo's graph `gm`.

    Returns whole names of parameters, by the names of their inputs: of those alone whose paths were not whole.
    """
    running = _running_modules()
    if not running:
        return {}
    owner, root = running[0], running[-1]
    plan_warnings.note_layers(root)
    parameters = {clean_path(name): p for name, p in root.named_parameters(remove_duplicate=False)}
    names = defaultdict(list)
    for name, p in parameters.items():
        names[id(p)].append(name)
    given: dict[str, list[tuple[fx.Node, str, list[str]]]] = defaultdict(list)
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        source = getattr(getattr(node, "_dynamo_source", None), "name", "")
        if isinstance(x, nn.Parameter) and (begin := BEGIN.match(source)):
            given[begin.group()].append((node, clean_path(source), names[id(x)]))
    paths = {begin: path for begin, known in given.items() if (path := _path(known))}
    if not paths:
        return {}
    used = [whole for known in given.values() for _, _, wholes in known for whole in wholes]
    shared = _shared_path(root, owner, used, parameters)
    if shared is None:
        return {}
    own, label = shared
    paths = {
        begin: label + path.removeprefix(own)
        for begin, path in paths.items()
        if label == own or f"{path}.".startswith(f"{own}.")
    }
    _write(gm, paths, label, type(owner))
    return {node.name: f"{paths[begin]}.{local}" for begin in paths for node, local, _ in given[begin]}


def _running_modules() -> list[nn.Module]:
    """Return the modules whose calls are running in what torch.compile made, innermost first; none outside of it."""
    frame: FrameType | None = sys._getframe(1)
    found: list[nn.Module] = []
    while frame is not None:
        if Path(frame.f_code.co_filename) == CALLS[0] and frame.f_code.co_name in CALLS[1]:
            return found
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and not _is_transparent(owner):
            found.append(owner)
        frame = frame.f_back
    return []


def _is_transparent(module: nn.Module) -> bool:
    return isinstance(module, fx.GraphModule) or type(module).__module__.startswith(WRAPPERS)


def _path(known: Sequence[tuple[fx.Node, str, Sequence[str]]]) -> str | None:
    """Return the path of the module that Dynamo calls otherwise, by (_, its name, whole names) of its parameters."""
    places = [
        {whole[: -len(local)].removesuffix(".") for whole in wholes if f".{whole}".endswith(f".{local}")}
        for _, local, wholes in known
    ]
    return min(set.intersection(*places), key=len, default=None)


def _shared_path(
    root: nn.Module, owner: nn.Module, used: Sequence[str], parameters: Mapping[str, Tensor]
) -> tuple[str, str] | None:
    """Return the path of `owner`, and one for all modules that may run what is compiled for it; None if there is none.

    used: whole names of the parameters that the graph reads.
    """
    modules = root.named_modules(remove_duplicate=False)
    alike = [(clean_path(name), m) for name, m in modules if type(m) is type(owner)]
    own = next((name for name, m in alike if m is owner), None)
    if own is None:
        return None
    inside = [name.removeprefix(own) for name in used if f"{name}.".startswith(f"{own}.") or not own]

    def may_run(name: str) -> bool:
        pairs = [(parameters.get(name + rest), parameters[own + rest]) for rest in inside]
        return all(x is not None and _kind(x) == _kind(y) for x, y in pairs)

    label = _with_stars([name for name, _ in alike if may_run(name)])
    return None if label is None else (own, label)


def _kind(x: Tensor) -> tuple[Any, ...]:
    """Return what a compiled frame asks of a parameter."""
    return type(x), tuple(x.shape), x.dtype, x.device, x.requires_grad


def _with_stars(paths: Sequence[str]) -> str | None:
    """Return one path for all, with `*` for numbers that differ; None if something else does."""
    parts = [path.split(".") for path in paths]
    if len({len(part) for part in parts}) != 1:
        return None
    found = []
    for components in zip(*parts, strict=True):
        if len(set(components)) > 1 and not all(c.isdigit() for c in components):
            return None
        found.append(components[0] if len(set(components)) == 1 else "*")
    return ".".join(found)


def _write(gm: fx.GraphModule, paths: Mapping[str, str], label: str, kind: type) -> None:
    """Write paths into module stacks. What has none is the owner's own, which has the path `label`."""

    def whole(path: str) -> str:
        begin = BEGIN.match(path)
        if begin is None or begin.group() not in paths:
            return path
        return f"{begin.group()}.{paths[begin.group()]}{path[begin.end() :]}"

    own = {"owner": (f"L['self'].{label}", kind)} if label else None
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if stack := node.meta.get(STACK):
                node.meta[STACK] = {key: (whole(path), of) for key, (path, of) in stack.items()}
            elif own is not None and node.op.startswith("call"):
                node.meta[STACK] = own
