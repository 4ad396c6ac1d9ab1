"""Template: the rule by which parameters of one kind are updated, found on two stand-ins.

    spec      what happens to each element (`kernels/optimizer/update_spec.py`)
    stored    the roles of the tensors of one parameter that are written; `read`: of those that are only read
    numbers   what is computed of step counts and rates, for all parameters at once
    counted   states that are numbers and get `by` more; copied: those that get another number

Sound because the graph of the two consists of one update and such numbers alone, with equal slots for both, and because
what else a step may look at is part of the kind (`kinds.py`). Anything else raises `NotAlikeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx

from fp8compile.kernels.optimizer.update_spec import STATE, Update, from_json
from fp8compile.optimizer import state_ops
from fp8compile.optimizer.shared_step.roles import PARAMETER, NotAlikeError, Role, StatesToComeError
from fp8compile.optimizer.shared_step.roles import STATE as STATE_ROLE
from fp8compile.optimizer.shared_step.tracing import Traced
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.node_views import Copy
from fp8compile.passes.core.run_passes import run_passes
from fp8compile.passes.core.stages import OptimizerGraph, Stage
from fp8compile.passes.optimizer import merge_updates, skip_overflow, store_load_forwarding, vector_numbers
from fp8compile.passes.optimizer.state_views import UpdateParameters
from fp8compile.passes.optimizer.update_rules import call_of
from fp8compile.torch_hooks.inductor.inductor_settings import WITHOUT_JOINT_PASSES, inductor_settings

_compiled: dict[tuple[str, str], Callable[..., Sequence[Tensor]]] = {}  # functions of numbers, by code
PASSES = (store_load_forwarding.run, merge_updates.run)


@dataclass
class NumberFunction:
    """Numbers of so many parameters: a function of the tensors with these roles. It returns the matrix of the update,
    if that has numbers, then a vector for each state that is copied."""

    module: fx.GraphModule
    inputs: list[Role]
    has_matrix: bool


@dataclass
class Template:
    """The facts in the module's table, and the graph from which numbers are made."""

    spec: str
    stored: list[Role]
    read: list[Role]
    counted: list[tuple[str, float]]
    copied: list[str]
    constants: dict[tuple[str, str], Any]
    graph: fx.Graph = field(repr=False)
    roles: list[Role] = field(repr=False)
    functions: dict[int, NumberFunction] = field(default_factory=dict, repr=False)

    @property
    def update(self) -> Update:
        """The spec as an object."""
        return from_json(self.spec)

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of the states."""
        return tuple(slot.type for slot in self.update.slots if slot.kind == STATE)

    def numbers(self, count: int) -> NumberFunction | None:
        """Return the numbers of `count` parameters, to be compiled; None if there are none."""
        if not self.update.scalars and not self.copied:
            return None
        if count not in self.functions:
            self.functions[count] = self._numbers(count)
        return self.functions[count]

    def _numbers(self, count: int) -> NumberFunction:
        graph, leaves = _copied(self.graph, self.roles)
        update = graph.find_nodes(op="call_function", target=state_ops.update_parameters)[0]
        copies = _copies_by_name(graph, leaves, [*self.copied, *(name for name, _ in self.counted)])
        wanted = [copies[name] for name in self.copied]
        for name, _ in self.counted:
            for node in copies[name]:
                node.replace_all_uses_with(Copy(node).written)
                graph.erase_node(node)
        known = {node: (role.of_any, not role.is_shared) for node, role in leaves.items()}
        try:
            found = vector_numbers.vectorized(update, wanted, known, count)
        except vector_numbers.NotVectorError as error:
            raise NotAlikeError(str(error)) from error
        return NumberFunction(found.module, cast("list[Role]", found.inputs), found.has_matrix)


def compiled(module: fx.GraphModule, inputs: list[Tensor], options: Options) -> Callable[..., Sequence[Tensor]]:
    """Return `module` as options want it to run, for inputs like these; equal ones are compiled once.

    Of a kernel on some hundred numbers Inductor would compile two versions and time them, each with an empty L2 cache,
    for which it allocates as much as that holds: more than the states of a small model.
    """
    if options.executor == "eager":
        return module
    types = [(x.shape, x.dtype, x.device) for x in inputs]
    key = module.code, repr((types, options.inductor, options.mode))
    if key not in _compiled:
        settings = {
            "triton.autotune_pointwise": False,
            **WITHOUT_JOINT_PASSES,
            **inductor_settings(options, of_optimizer=True),
        }
        with torch.no_grad():
            made = compile_fx(module, inputs, config_patches=settings)
        _compiled[key] = cast("Callable[..., Sequence[Tensor]]", made)
    return _compiled[key]


def template_of(traced: Traced, options: Options, constants: dict[tuple[str, str], Any]) -> Template:
    """Return the rule in a graph of two stand-ins. constants: settings that the graph does not read."""
    graph = traced.graph
    roles = dict(zip(graph.find_nodes(op="placeholder"), traced.roles, strict=True))
    _refuse_results(graph)
    c = OptimizerGraph(graph, options, skip_overflow.overflow_of(graph))
    steps = [step for step in pipeline.passes_for(c) if step.run in PASSES]
    run_passes(steps, c, pipeline.RULES[Stage.OPTIMIZER])
    if reasons := [row.reason for row in c.lowered.updates if row.reason]:
        raise NotAlikeError(reasons[0].removeprefix("not merged: "))
    updates = graph.find_nodes(op="call_function", target=state_ops.update_parameters)
    if len(updates) != 1:
        raise NotAlikeError(f"two parameters of a kind are updated by {len(updates)} rules")
    view = UpdateParameters(updates[0])
    stored, read = (_roles_of_each(nodes, roles) for nodes in (view.stored, view.read))
    if not any(role.kind == PARAMETER for role in stored):
        raise NotAlikeError("its step does not write a parameter")
    counted, copied = _numbers_written(graph, roles)
    if c.overflow is not None and copied:
        raise NotAlikeError(f"its step computes {copied[0]!r}, which a step that overflowed must not")
    return Template(view.spec, stored, read, counted, copied, constants, graph, traced.roles)


def _refuse_results(graph: fx.Graph) -> None:
    """Raise where a step returns something: states that it has made."""
    results = cast("Sequence[Any]", graph.output_node().args[0])
    written = set(graph.find_nodes(op="call_function", target=aten.copy_.default))
    if any(isinstance(x, fx.Node) and x.op != "placeholder" and x not in written for x in results):
        raise StatesToComeError("its first step makes states while it steps")


def _roles_of_each(nodes: Sequence[fx.Node], roles: dict[fx.Node, Role]) -> list[Role]:
    """Return the roles of one parameter's tensors; raises unless those of the other are the same."""
    half = len(nodes) // 2
    if len(nodes) % 2 or any(node not in roles for node in nodes):
        raise NotAlikeError("an update reads what is no state, and is not computed element by element")
    first, second = ([roles[node] for node in part] for part in (nodes[:half], nodes[half:]))
    members = [{role.member for role in part} for part in (first, second)]
    same = [role.of_any for role in first] == [role.of_any for role in second]
    if not same or any(len(m) > 1 or None in m for m in members):
        raise NotAlikeError("an update reads tensors of another parameter")
    return [role.of_any for role in first]


def _numbers_written(graph: fx.Graph, roles: dict[fx.Node, Role]) -> tuple[list[tuple[str, float]], list[str]]:
    """Return which states that are numbers count by how much, and which are written otherwise."""
    ways: dict[str, set[float | None]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        role = roles.get(Copy(node).written)
        if role is None or role.kind != STATE_ROLE or role.part or value(Copy(node).written).dim():
            raise NotAlikeError("its step writes what is neither a parameter nor a state of one")
        ways.setdefault(role.name, set()).add(_count(node))
    counted = [(name, by) for name, (by, *more) in ((n, tuple(w)) for n, w in ways.items()) if by and not more]
    return counted, [name for name in ways if name not in dict(counted)]


def _count(copy: fx.Node) -> float | None:
    """Return how much more a number gets, where that is all that is done to it."""
    call = call_of(Copy(copy).source)
    if call is None or call[0] != "add" or call[2] or call[1][0] is not Copy(copy).written:
        return None
    by = call[1][1]
    return by if isinstance(by, int | float) else None


def _copied(graph: fx.Graph, roles: Sequence[Role]) -> tuple[fx.Graph, dict[fx.Node, Role]]:
    """Return a copy of a graph, and the roles of its inputs."""
    new, nodes = fx.Graph(), {}
    results = new.graph_copy(graph, nodes)
    new.output(results)
    old = graph.find_nodes(op="placeholder")
    return new, {nodes[node]: role for node, role in zip(old, roles, strict=True)}


def _copies_by_name(graph: fx.Graph, roles: dict[fx.Node, Role], names: Sequence[str]) -> dict[str, list[fx.Node]]:
    """Return what writes each of these states, parameter by parameter."""
    found: dict[str, list[tuple[int, fx.Node]]] = {name: [] for name in names}
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        role = roles[Copy(node).written]
        found[role.name].append((role.member or 0, node))
    return {name: [node for _, node in sorted(pairs, key=lambda pair: pair[0])] for name, pairs in found.items()}
