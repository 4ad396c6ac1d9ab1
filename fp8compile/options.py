"""`torch.compile(model, backend="fp8", options={…})`: every option, its default, and what it means."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch._inductor import config as inductor_config  # to check the names of settings that are passed on

from fp8compile import environment
from fp8compile.edits import Edits
from fp8compile.edits import load as load_plan
from fp8compile.errors import OptionError, unknown_name
from fp8compile.levels import with_level
from fp8compile.recipe import RECIPES, Recipe
from fp8compile.schedule_options import Schedule
from fp8compile.state_recipe import StateRecipe

EXECUTORS = ("inductor", "eager")
KERNELS = ("generated", "inductor")
SAVED_FORMS = ("fp8", "fp8_with_qk", "bf16")
KEEP_ALL = (("*", "bf16"),)  # option `save`: nothing is rounded
WIRES = ("exact", "fp8", "bf16")
SELECTIONS = ("profitable", "all")
OPERATIONS = ("linear", "batched", "convolution")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's own


@dataclass(frozen=True)
class Options:
    """All options of the backend.

    level: "O1", "O2" or "O3": options under a name (`fp8compile/levels.py`); what is given beside it wins.
    recipe: a recipe's name, a `Recipe`, or {"base": name, role: {…}} (`Recipe.parse`).
    select: "profitable" converts the matmuls that FP8 makes faster by the cost model; "all" converts whatever can run.
    operations: which matmuls may become FP8: "linear" (mm, addmm, grouped), "batched" (bmm), "convolution".
    skip: patterns of module paths whose matmuls stay BF16: a path, a run of its components, or a glob over them.
    lm_head: convert the output head as well.
    chunk_loss: compute an output head and its cross-entropy in chunks of rows, so that all logits never exist: "auto"
        where they are large and it costs nothing, True wherever it can be (some losses compute logits again in
        backward), False nowhere, or how many rows a chunk has at most.
    fold_masks: an attention mask that no input takes part in, and that is causal or lets everything through, is not
        made; attention is told instead.
    executor: "inductor", or "eager" (runs the rewritten graphs node by node: quick to compile, for tests and study).
    save: how activations are kept for backward: "fp8" (payload and scales in groups of up to 128 features),
        "fp8_with_qk" (queries and keys of attention too, which are in an exponent), "bf16" (as they are), or a mapping
        of module path patterns to these, the first that matches deciding, else "fp8".
    save_min_bytes: what is smaller is kept as it is.
    activation_budget: what may be kept for backward, in bytes (int), or as a share (float, 0.0 to 1.0) of what is kept
        where nothing is computed again or rounded. Below what `save` gives, matmuls and attention run again; above it,
        less is rounded. None: no budget.
    wire: activations and gradients that other ranks get for FP8 matmuls (all-gathers of sequence parallelism,
        all-to-alls of experts): "exact" casts them before they travel where no value changes and fewer bytes travel;
        "fp8" also where others of their readers then read rounded values, and all rows of experts; "bf16" never.
    kernels: "generated" makes Triton kernels of what is around FP8 casts; "inductor" leaves that to Inductor.
    strict: raise what a pass raises, instead of compiling that graph in BF16 with a warning.
    verify: check the graph's invariants after each pass.
    states: how an optimizer's states are kept where its step is compiled (`StateRecipe.parse`).
    mode: a torch.compile mode ("reduce-overhead", "max-autotune", …).
    inductor: settings of torch._inductor.config for this compilation. Graph passes among them run before ours.
    plan: decisions to carry out: a `Plan`, an `Explanation`, or a path to the JSON of one (`fp8compile/edits.py`).
    schedule: "auto", or a mapping of settings (`Schedule`): casts change while it trains, on evidence.
    watch: the name under which casts are measured (`fp8compile.watch` does it all).
    dump: a folder for graphs, plan, kernels and Inductor's code (`fp8compile/insight/dumps.py`).
    """

    level: str | None = None
    recipe: Recipe = field(default_factory=lambda: RECIPES["mixed"])
    select: str = "profitable"
    operations: tuple[str, ...] = OPERATIONS
    skip: tuple[str, ...] = ()
    lm_head: bool = False
    chunk_loss: str | bool | int = "auto"
    fold_masks: bool = True
    executor: str = "inductor"
    save: tuple[tuple[str, str], ...] = (("*", "fp8"),)
    save_min_bytes: int = 2**20
    activation_budget: float | int | None = None
    wire: str = "exact"
    kernels: str = "generated"
    strict: bool = False
    verify: bool = True
    states: StateRecipe = field(default_factory=StateRecipe)
    mode: str | None = None
    inductor: tuple[tuple[str, Any], ...] = ()
    plan: Edits | None = None
    schedule: Schedule | None = None
    watch: str | None = None
    dump: str | None = None

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Options from what torch.compile passes on. Raises `OptionError` naming the option and the nearest name."""
        given = dict(options or {})
        names = [f.name for f in fields(Options)]
        for name in given:
            if name not in names:
                raise unknown_name("option", name, names)
        given = with_level(given)
        if mode is not None:
            given["mode"] = mode
        if "recipe" in given:
            given["recipe"] = Recipe.parse(given["recipe"])
        if "states" in given:
            given["states"] = StateRecipe.parse(given["states"])
        if "skip" in given:
            given["skip"] = patterns(given["skip"])
        if "operations" in given:
            given["operations"] = _operations(given["operations"])
        if "save" in given:
            given["save"] = _forms(given["save"])
        if "inductor" in given:
            if not isinstance(given["inductor"], Mapping):
                raise OptionError(
                    f"option 'inductor' maps torch._inductor.config names, and is not {given['inductor']!r}"
                )
            known = inductor_config.get_config_copy()  # type: ignore[attr-defined]
            for name in given["inductor"]:
                if name not in known:
                    raise unknown_name("setting of torch._inductor.config", name, known)
            given["inductor"] = tuple(sorted(given["inductor"].items()))
        if given.get("plan") is not None:
            given["plan"] = load_plan(given["plan"])
        given["schedule"] = Schedule.parse(given.get("schedule"))
        if given["schedule"] is not None and given.get("watch") is not None:
            raise OptionError("options 'schedule' and 'watch': a schedule measures by itself, leave 'watch' out")
        if not isinstance(given.setdefault("dump", environment.dump_folder()), (str, Path, type(None))):
            raise OptionError(f"option 'dump' is the path of a folder, and is not {given['dump']!r}")
        given["dump"] = dump_folder(Path(given["dump"]).absolute()) if given["dump"] else None
        parsed = Options(**given)
        parsed._check()
        return parsed

    def _check(self) -> None:
        for name, value, valid in (
            ("select", self.select, SELECTIONS),
            ("executor", self.executor, EXECUTORS),
            ("kernels", self.kernels, KERNELS),
            ("wire", self.wire, WIRES),
        ):
            if value not in valid:
                raise unknown_name(name, value, valid)
        if self.mode is not None and self.mode not in MODES:
            raise unknown_name("mode", self.mode, MODES)
        if not isinstance(self.watch, (str, type(None))):
            raise OptionError(f"option 'watch' is a name for statistics, and is not {self.watch!r}")
        if not isinstance(self.save_min_bytes, int) or isinstance(self.save_min_bytes, bool) or self.save_min_bytes < 0:
            raise OptionError(f"option 'save_min_bytes' is a number of bytes, not {self.save_min_bytes!r}")
        _check_budget(self.activation_budget)
        _check_chunks(self.chunk_loss)
        for name in ("lm_head", "fold_masks", "strict", "verify"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"option {name!r} is True or False, not {getattr(self, name)!r}")

    def __str__(self) -> str:
        """What differs from the defaults, for people to read; `repr` has everything."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("recipe", "dump", "plan")]
        shown = [f"recipe={self.recipe.name}"]
        shown += [f"{name}={value!r}" for name, value in changed if value != getattr(Options(), name)]
        return ", ".join([*shown, *([f"plan={self.plan.name}"] if self.plan else [])])

    def skips(self, path: str) -> str | None:
        """The first pattern of `skip` that names the module `path`, one of its ancestors, or a run of components."""
        return matching(self.skip, path)

    def saves(self, path: str) -> tuple[str, str]:
        """The first pattern of `save` that names the module `path`, and its form."""
        return next(((pattern, form) for pattern, form in self.save if _names(pattern, path)), ("*", "fp8"))


def matching(given: Sequence[str], path: str) -> str | None:
    """The first of the `given` patterns that names the module `path`, one of its ancestors, or a run of components."""
    return next((pattern for pattern in given if _names(pattern, path)), None)


def _names(pattern: str, path: str) -> bool:
    return any(fnmatch.fnmatchcase(path, p) for p in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"))


def _check_budget(budget: Any) -> None:
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise OptionError(f"option 'activation_budget' is a number of bytes or a share, not {budget!r}")
    if isinstance(budget, float) and not 0.0 <= budget <= 1.0:
        raise OptionError(f"option 'activation_budget' as a share lies between 0.0 and 1.0, not at {budget!r}")
    if isinstance(budget, int) and budget <= 1:
        raise OptionError(f"option 'activation_budget': {budget!r} bytes? A share is a float: {float(budget)!r}")


def _check_chunks(chunks: Any) -> None:
    if chunks == "auto" or isinstance(chunks, bool):
        return
    if not isinstance(chunks, int):
        raise OptionError(f"option 'chunk_loss' is \"auto\", True, False or a number of rows, not {chunks!r}")
    if chunks < 1:
        raise OptionError(f"option 'chunk_loss': chunks of {chunks} rows? False leaves logits whole")


def _forms(value: str | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    given = dict(value) if isinstance(value, Mapping) else {"*": value}
    for pattern, form in given.items():
        if form not in SAVED_FORMS:
            raise unknown_name("form of saved activations", form, SAVED_FORMS)
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(f"option 'save' maps module path patterns (strings), not {pattern!r}")
    return tuple(given.items())


def _operations(value: str | Sequence[str]) -> tuple[str, ...]:
    named = (value,) if isinstance(value, str) else value
    if not isinstance(named, Sequence) or not named:
        raise OptionError(f"option 'operations' takes some of {', '.join(OPERATIONS)}, not {value!r}")
    for name in named:
        if name not in OPERATIONS:
            raise unknown_name("operation", name, OPERATIONS)
    return tuple(name for name in OPERATIONS if name in named)


def patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    """Patterns of module paths, from one or several; raises `OptionError` for what is none."""
    if not isinstance(value, (str, Sequence)):
        raise OptionError(f"option 'skip' takes module path patterns (strings), not {value!r}")
    given = (value,) if isinstance(value, str) else tuple(value)
    for pattern in given:
        if not isinstance(pattern, str) or not pattern:
            raise OptionError(f"option 'skip' takes module path patterns (strings), not {pattern!r}")
    return given


def dump_folder(path: Path) -> str:
    """`path`, where a folder is or can be made. Raises `OptionError` elsewhere."""
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir():
        raise OptionError(f"option 'dump' is the path of a folder, and {nearest} is a file: give another one")
    if not os.access(nearest, os.W_OK):
        raise OptionError(f"option 'dump': nothing can be written to {nearest}: give another folder")
    return str(path)
