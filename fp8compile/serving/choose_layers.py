"""Choose which layers of a model are exported in FP8: those whose output matmul ran in FP8, by this process's plans.

A plan's paths begin at what was compiled, which may be a module around the exported one, or a part of it; one with `*`
stands for all layers that run the same code. `layers` of the user takes the place of plans. What is no plain
`nn.Linear` and no module of stacked experts, shares its weight, or belongs to layers that servers fuse and of which
another is not FP8, stays as it is, with that reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from fp8compile.errors import CheckpointError, unknown_name
from fp8compile.options import matching
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import FP8
from fp8compile.serving.layouts import Layout
from fp8compile.serving.stacked_experts import stacked_experts
from fp8compile.serving.tensors import WRAPPERS, names_by_tensor, within

T = TypeVar("T")
# Servers make one matmul of these, with one format (vLLM's packed_modules_mapping).
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass
class Choice:
    """The names of linear layers that become FP8, and of modules with stacked experts; of those that do not, with the
    reason."""

    quantized: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def choose(
    model: nn.Module,
    plans: Sequence[Plan],
    layers: Sequence[str] | None,
    skip: Sequence[str],
    layout: Layout,
    experts: Mapping[str, str],
) -> Choice:
    """Return the layers of `model` that become FP8. Raises `CheckpointError` if there is none, and says why.

    experts: why stacked experts cannot be, or "" (`stacked_experts.refusals`).
    """
    linear, called = _linear_layers(model)
    called |= {name: [name] for name in experts}
    if not called:
        raise CheckpointError(f"no layer of this {type(model).__name__} can be exported in FP8: it has no nn.Linear")
    for given, what in ((layers, "layers"), (skip, "skip")):
        valid = [name for names in called.values() for name in names]
        if unknown := [p for p in given or () if not any(matching([p], name) for name in valid)]:
            raise unknown_name(f"layer in {what}", unknown[0], valid)
    wanted = _named(called, layers) if layers is not None else _of_plans(model, plans)
    choice, names = Choice(), names_by_tensor(model)
    for name, module in linear.items():
        cannot = _reason(name, module, names, layout)
        if reason := (cannot if name not in wanted else "") or _unwanted(called[name], wanted, skip) or cannot:
            choice.kept[name] = reason
        else:
            choice.quantized.append(name)
    for name, refusal in experts.items():
        if reason := _unwanted([name], wanted, skip) or refusal:
            choice.kept[name] = reason
        else:
            choice.experts.append(name)
    _keep_fused_together(choice)
    if not choice.quantized and not choice.experts:
        counts = Counter(choice.kept.values()).most_common(3)
        why = "; ".join(f"{n}× {reason}" for reason, n in counts)
        raise CheckpointError(f"no layer of this {type(model).__name__} can be exported in FP8: {why}")
    return choice


def _linear_layers(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, list[str]]]:
    """Return linear layers by the first name of each, and all names of each by its first."""
    linear: dict[str, nn.Linear] = {}
    called: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names = called.setdefault(id(module), [])
            names.append(WRAPPERS.sub("", name))
            linear[names[0]] = module
    return linear, {names[0]: names for names in called.values()}


def _named(called: Mapping[str, Sequence[str]], layers: Sequence[str]) -> dict[str, str]:
    """Return "" for layers that the user named, by any name of theirs, and a reason for the others."""
    return {
        first: "" if any(matching(layers, name) for name in names) else "not in layers"
        for first, names in called.items()
    }


def _of_plans(model: nn.Module, plans: Sequence[Plan]) -> dict[str, str]:
    """Return "" for layers whose output matmul ran in FP8 in a plan, and for the others why it did not. Of stacked
    experts all matmuls must have, in one plan."""
    found: dict[str, str] = {}
    for plan in plans:
        rows = [m for m in plan.matmuls if m.role == "output"]
        in_bf16 = {m.path: m for m in rows if m.decision != FP8 and m.kind != "mm"}
        for m in rows:
            exact = in_bf16.get(m.path, m)
            for path in m.merged or (m.path,):
                if found.get(path) != "":  # a graph for other sizes may have left it in BF16
                    found[path] = "" if exact.decision == FP8 else f"in training: {exact.reason}"
    if not found:
        raise CheckpointError(
            "nothing says which layers trained in FP8: this process has compiled no model; train a step first, or name "
            'them: layers=["*"]'
        )
    known = by_name(model, found)
    if not known:
        raise CheckpointError(
            f"the plans of this process are not of this {type(model).__name__}: they name "
            f"{', '.join(list(found)[:3])}, …; export what was compiled, or name layers"
        )
    return known


def by_name(model: nn.Module, by_path: Mapping[str, T]) -> dict[str, T]:
    """Return, by names of layers of `model`, what is known by paths of plans. Other paths are left out."""
    names = {WRAPPERS.sub("", name) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names |= stacked_experts(model).keys()
    shared_first = sorted(by_path.items(), key=lambda row: "*" not in row[0])  # what is said of one layer alone holds
    merged = [(path, x) for given, x in shared_first for path in _each(WRAPPERS.sub("", given))]
    paths = {path: x for given, x in merged for path in _numbered(given, names)}
    before, inside = _prefixes(paths, names)
    moved = {inside + path.removeprefix(before): x for path, x in paths.items() if path.startswith(before)}
    return {name: x for name, x in moved.items() if name in names}


def _each(path: str) -> list[str]:
    """Return the paths that a merged one stands for: a.(b+c) is a.b and a.c."""
    start, bracket, members = path.removesuffix(")").partition("(")
    return [start + member for member in members.split("+")] if bracket else [path]


def _numbered(path: str, names: Iterable[str]) -> list[str]:
    """Return the paths that one with `*` stands for, by the names that end as it does: layers.*.up is layers.0.up, …"""
    if "*" not in path:
        return [path]
    found, parts = dict[str, None](), path.split(".")
    for name in names:
        ends = name.split(".")[-len(parts) :]
        rest = parts[-len(ends) :]
        if all(p == end or (p == "*" and end.isdigit()) for p, end in zip(rest, ends, strict=True)):
            found[".".join([*parts[: len(parts) - len(ends)], *ends])] = None
    return [*found]


def _prefixes(paths: Iterable[str], names: Iterable[str]) -> tuple[str, str]:
    """Return what to take off paths, and what to put before them, so that most become names."""
    votes: Counter[tuple[str, str]] = Counter()
    ends = defaultdict(list)
    for name in names:
        ends[name.rpartition(".")[2]].append(name)
    for path in paths:
        for name in ends[path.rpartition(".")[2]]:
            if f".{path}".endswith(f".{name}"):
                votes[path[: len(path) - len(name)], ""] += 1
            elif f".{name}".endswith(f".{path}"):
                votes["", name[: len(name) - len(path)]] += 1
    return votes.most_common(1)[0][0] if votes else ("", "")


def _unwanted(names: Sequence[str], wanted: Mapping[str, str], skip: Sequence[str]) -> str:
    """Return why a layer with these names, of which plans know the first, is not to be exported in FP8; "" if it is."""
    if reason := wanted.get(names[0], "no compiled graph has a matmul of this name"):
        return reason
    pattern = next((found for name in names if (found := matching(skip, name))), None)
    return f"skip={pattern!r}" if pattern else ""


def _reason(name: str, module: nn.Module, names: Mapping[int, Sequence[str]], layout: Layout) -> str:
    """Return why a linear layer cannot be exported in FP8; "" if it can. names: `names_by_tensor` of the model."""
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if type(module) is not nn.Linear and type(module).forward is not nn.Linear.forward:
        return f"a {type(module).__name__} does not compute what an nn.Linear does"
    shared = [n for n in (WRAPPERS.sub("", n) for n in names[id(weight)]) if n != within(name, "weight")]
    if shared:
        return f"its weight is {shared[0]} as well"
    taken = next((n for n in (layout.scale, layout.input_scale) if n in module.state_dict(keep_vars=True)), "")
    if taken:
        return f"it has a tensor of its own that is called {taken}, as its scale would be"
    return layout.refusal(weight.shape)


def _keep_fused_together(choice: Choice) -> None:
    for family in FUSED:
        groups = defaultdict(list)
        for name in (*choice.quantized, *choice.kept):
            parent, _, last = name.rpartition(".")
            if last in family:
                groups[parent].append(name)
        for members in groups.values():
            if exact := [name for name in members if name in choice.kept]:
                for name in (n for n in members if n not in choice.kept):
                    choice.kept[name] = f"servers fuse it with {exact[0]}, which is not FP8"
                    choice.quantized.remove(name)
