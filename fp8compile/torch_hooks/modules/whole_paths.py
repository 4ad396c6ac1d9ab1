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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import eval_frame  # its frames are where a call of what torch.compile made begins

from fp8compile.passes.core.origin import clean_path

STACK = "nn_module_stack"
BEGIN = re.compile(r"""L\[['"]args['"]\]\[0\]|[LG]\[['"][^\]]*['"]\]""")  # of the source of what a frame was given
LOADED = "L['___stack"  # begins the source of what was loaded before a graph break, from the module whose code it is
COMPILED = (eval_frame.__file__, ("compile_wrapper", "_fn"))  # the frames of a call of what was compiled
CALLED = (nn.modules.module.__file__, ("_call_impl",))  # of a module; its locals are not kept longer by looking at them
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule")


@dataclass(frozen=True)
class Given:
    """A parameter that a graph is given: its input, its name there, and its names in the model."""

    node: fx.Node
    local: str
    whole: Sequence[str]


@dataclass
class Names:
    """Hold what parameters and layers of a graph are called in the model.

    inputs: whole names of parameters by the names of their inputs, of those alone that Dynamo names from inside of the
    model. model: the one that is being called, None if there is none. layers: paths of all layers that run this graph.
    """

    inputs: dict[str, str] = field(default_factory=dict)
    model: nn.Module | None = None
    layers: set[str] = field(default_factory=set)


def complete_paths(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Names:
    """Write whole paths into the module stacks of the nodes of Dynamo's graph `gm`; return what was found."""
    running = _running_modules()
    if not running:
        return Names()
    owner, root = running[0], running[-1]
    given = _given(gm, example_inputs, root)
    names = Names(model=root, layers={_parent(whole) for known in given.values() for x in known for whole in x.whole})
    begins = {begin: path for begin, known in given.items() if (path := _path(known))}
    if not begins:
        return names
    modules = {clean_path(name): m for name, m in root.named_modules(remove_duplicate=False)}
    own = next((name for name, m in modules.items() if m is owner), None)
    label, paths = "", dict[str, str]()
    for begin, path in begins.items():
        is_own = own is not None and (path == own or (begin.startswith(LOADED) and _is_within(path, own)))
        module = own if is_own and own is not None else path
        if module not in modules:  # a container of parameters, say
            continue
        used = [[part for part in f"{path[len(module) :]}.{x.local}".split(".") if part] for x in given[begin]]
        alike = [name for name, m in modules.items() if _may_take_the_place(m, modules[module], used)]
        names.layers |= {_parent(".".join([*filter(None, [name]), *parts])) for name in alike for parts in used}
        if (shared := _with_stars(alike)) is None:
            continue
        label = shared if is_own else label
        paths[begin] = shared + path[len(module) :] if module else path
    _write(gm, paths, label, type(owner))
    names.inputs = {x.node.name: f"{paths[begin]}.{x.local}" for begin in paths for x in given[begin]}
    return names


def _running_modules() -> list[nn.Module]:
    """Return the modules whose calls are running in what torch.compile made, innermost first; none outside of it."""
    frame: FrameType | None = sys._getframe(1)
    found: list[nn.Module] = []
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file == CALLED[0] and name in CALLED[1]:
            found += _named(frame.f_locals["self"])
        elif file == COMPILED[0] and name in COMPILED[1]:
            return found + _named(getattr(frame.f_locals.get("fn"), "__self__", None))  # of a method
        frame = frame.f_back
    return []


def _named(module: Any) -> list[nn.Module]:
    """Return a module if others are named from it on."""
    is_transparent = isinstance(module, fx.GraphModule) or type(module).__name__ in WRAPPERS
    return [module] if isinstance(module, nn.Module) and not is_transparent else []


def _given(gm: fx.GraphModule, example_inputs: Sequence[Any], root: nn.Module) -> dict[str, list[Given]]:
    """Return the parameters of a graph that `root` has, by the beginning of their sources."""
    found = []
    for node, x in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        source = getattr(getattr(node, "_dynamo_source", None), "name", "")
        if isinstance(x, nn.Parameter) and (begin := BEGIN.match(source)):
            found.append((node, x, begin.group(), clean_path(source)))
    wanted, names = {id(x) for _, x, _, _ in found}, defaultdict[int, list[str]](list)
    for name, p in nn.Module.named_parameters(root, remove_duplicate=False):
        if id(p) in wanted:
            names[id(p)].append(clean_path(name))
    given = defaultdict[str, list[Given]](list)
    for node, x, begin, local in found:
        given[begin].append(Given(node, local, names[id(x)]))
    return given


def _path(known: Sequence[Given]) -> str | None:
    """Return the path of the module that has these parameters by their names there; None if there is none."""
    places = [
        {whole[: -len(x.local)].removesuffix(".") for whole in x.whole if f".{whole}".endswith(f".{x.local}")}
        for x in known
    ]
    return min(set.intersection(*places), key=lambda path: (len(path), path), default=None)


def _may_take_the_place(other: nn.Module, module: nn.Module, used: Iterable[Sequence[str]]) -> bool:
    """Return True if what is compiled for `module` may run for `other`: one of its class, with parameters of the same
    shapes. Whether they need gradients, and what they are of (FSDP shards them), may change from call to call."""
    if type(other) is not type(module):
        return False
    pairs = [(_parameter(other, parts), _parameter(module, parts)) for parts in used]
    return all(x is y or (x is not None and y is not None and x.shape == y.shape) for x, y in pairs)


def _parameter(module: Any, parts: Sequence[str]) -> torch.Tensor | None:
    for part in parts:
        module = getattr(getattr(module, "_checkpoint_wrapped_module", module), part, None)
    return module if isinstance(module, torch.Tensor) else None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _is_within(path: str, own: str) -> bool:
    return not own or path == own or path.startswith(f"{own}.")


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
