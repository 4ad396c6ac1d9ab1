"""`torch.compile(model, backend="fp8", options={…})`: every option, its default, and what it means."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fp8compile import environment
from fp8compile.adaptive.settings import BUDGET, Adaptive
from fp8compile.errors import OptionError, shown, unknown_name
from fp8compile.levels import with_level
from fp8compile.optimizer.state_recipe import StateRecipe
from fp8compile.option_values import CUDA_GRAPHS, OPERATIONS, read_option, writable_folder
from fp8compile.plan.overrides import Overrides
from fp8compile.recipe import RECIPES, Recipe

RENAMED = {"schedule": "adaptive"}
KEEP_ALL = (("*", "bf16"),)  # option `save`: nothing is rounded


@dataclass(frozen=True)
class Options:
    """All options of the backend.

    level: "O1", "O2" or "O3": options under a name (`fp8compile/levels.py`); what is given beside it wins.
    recipe: a recipe's name, a `Recipe`, or {"base": name, role: {…}} (`Recipe.parse`). "auto" begins as "mixed" and
        lets the automatic mode choose casts by what they lose and cost (option `adaptive` with a `budget`).
    select: "profitable" converts the matmuls that FP8 makes faster by the cost model, and none where a short step waits
        for its host; "all" converts whatever can run.
    operations: which matmuls may become FP8: "linear" (mm, addmm, grouped), "batched" (bmm), "convolution".
    skip: patterns of module paths whose matmuls stay BF16: a path, a run of its components, or a glob over them.
    lm_head: convert the output head as well.
    chunk_loss: compute an output head and its cross-entropy in chunks of rows, so that all logits never exist: "auto"
        where they are large and it costs nothing, True wherever it can be (some losses compute logits again in
        backward), False nowhere, or how many rows a chunk has at most.
    fold_masks: an attention mask that no input takes part in, and that is causal or lets everything through, is not
        made; attention is told instead.
    executor: "inductor", or "eager" (runs the rewritten graphs node by node: quick to compile, for tests and study).
    save: how activations are kept for backward: "auto", "fp8" (payload and scales in groups of up to 128 features),
        "fp8_with_qk" (queries, keys and the output of attention too: less memory, and gradients of queries and keys
        that are less exact), "bf16" (as they are), or a mapping of module path patterns to these, the first that
        matches deciding. "auto", and what no pattern names: "fp8" in graphs with a matmul in FP8, as it is in all
        others.
    save_min_bytes: what is smaller is kept as it is.
    activation_budget: what may be kept for backward, in bytes (int), or as a share (float, 0.0 to 1.0) of what is kept
        where nothing is computed again or rounded. Below what `save` gives, matmuls and attention run again; above it,
        less is rounded. None: no budget.
    offload: with an `activation_budget`, what is beyond it is copied to the host's memory until backward, as much as
        copies carry while forward computes; matmuls and attention run again only for the rest.
    wire: activations and gradients that other ranks get for FP8 matmuls (all-gathers of sequence parallelism,
        all-to-alls of experts): "exact" casts them before they travel where no value changes and fewer bytes travel;
        "fp8" also where others of their readers then read rounded values, and all rows of experts; "bf16" never.
    kernels: "generated" makes Triton kernels of what is around FP8 casts; "inductor" leaves that to Inductor.
    one_pass_casts: a large gradient that is computed and cast by one scale is computed once: cast by a scale that every
        16th row of it predicts, and once more where that was wrong (`kernels/codegen/schedule/one_pass.py`). False:
        computed once for its amax, and once to cast it.
    frozen: a parameter that needs no gradient is a weight that nobody writes: it is cast once, and its payload and
        scales are kept beside it. Seen and cast again is what torch counts as a write, and so not one through `.data`.
        `fp8compile.freeze` sets it.
    keep_casts: parameters that are trained are cast once a step, and not once a batch, where gradients are accumulated
        over several batches: again when an optimizer has stepped, or they were written otherwise in a way that torch
        counts. Takes up to two bytes of memory for each of their elements.
    strict: raise what a pass raises, instead of compiling that graph in BF16 with a warning.
    verify: check the graph's invariants after each pass.
    states: how an optimizer's states are kept where its step is compiled (`StateRecipe.parse`).
    mode: a torch.compile mode ("reduce-overhead", "max-autotune", …).
    captured: whoever compiles this replays it as a CUDA graph, so the time of the host is no reason to leave a short
        step in BF16. `capture_step` sets it for what it compiles.
    inductor: settings of torch._inductor.config for this compilation. Graph passes among them run before ours.
    plan: decisions to carry out: a `Plan`, an `Explanation`, or a path to the JSON of one
    (`fp8compile/plan/overrides.py`).
    adaptive: "auto", or a mapping of settings (`Adaptive`): the automatic mode, in which casts change while it trains,
        on evidence.
    watch: the name under which casts are measured (`fp8compile.watch` does it all).
    dump: a folder for graphs, plan, kernels and Inductor's code (`fp8compile/insight/dump/dumps.py`).
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
    save: tuple[tuple[str, str], ...] = ()
    save_min_bytes: int = 2**20
    activation_budget: float | int | None = None
    offload: bool = False
    wire: str = "exact"
    kernels: str = "generated"
    one_pass_casts: bool = True
    frozen: bool = False
    keep_casts: bool = False
    strict: bool = False
    verify: bool = True
    states: StateRecipe = field(default_factory=StateRecipe)
    mode: str | None = None
    captured: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()
    plan: Overrides | None = None
    adaptive: Adaptive | None = None
    watch: str | None = None
    dump: str | None = None

    @property
    def replays(self) -> bool:
        """Return True if a CUDA graph launches what is compiled."""
        of_inductor = bool(dict(self.inductor).get("triton.cudagraphs"))
        return self.captured or self.mode in CUDA_GRAPHS or of_inductor

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Return options from what torch.compile passes on. Raises `OptionError` naming the option and the nearest."""
        if options is None and mode is None and not environment.dump_folder():
            return _defaults()  # asked for at the beginning of each step of an optimizer
        given = with_level(_by_name(options))
        if mode is not None:
            given["mode"] = mode
        values = {name: read_option(name, value) for name, value in given.items()}
        if "dump" not in values and (folder := environment.dump_folder()):
            values["dump"] = writable_folder("FP8COMPILE_DUMP", folder)
        if "recipe" in values and values["recipe"].is_auto:
            values["adaptive"] = _with_budget(values.get("adaptive", Adaptive()))
        elif getattr(values.get("adaptive"), "budget", 0):
            raise OptionError(
                "adaptive: a budget is of recipe 'auto', which begins as 'mixed', or with casts of your own: "
                "options={'recipe': {'base': 'auto', role: {…}}, …}"
            )
        if values.get("adaptive") is not None and values.get("watch") is not None:
            raise OptionError(
                "options 'adaptive' and 'watch': the automatic mode measures by itself, leave 'watch' out"
            )
        made = Options(**values)
        if made.offload and made.activation_budget is None:
            raise OptionError(
                "option 'offload' moves what is beyond an activation budget: set one, options={'offload': True, "
                "'activation_budget': 0.3}"
            )
        if made.offload and made.replays:
            raise OptionError(
                "options 'offload' and 'mode': a CUDA graph keeps nothing in the host's memory, leave one out"
            )
        return made

    def __str__(self) -> str:
        """Return what differs from the defaults, for people to read; `repr` has everything."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("recipe", "dump", "plan")]
        shown = [f"recipe={self.recipe.name}"]
        shown += [f"{name}={value!r}" for name, value in changed if value != getattr(Options(), name)]
        return ", ".join([*shown, *([f"plan={self.plan.name}"] if self.plan else [])])

    def skips(self, path: str) -> str | None:
        """Return the first pattern of `skip` that names the module `path`, an ancestor, or a run of its components."""
        return matching(self.skip, path)

    def saves(self, path: str) -> tuple[str, str]:
        """Return the first pattern of `save` that names the module `path`, and its form; else "" and the default."""
        return next(((pattern, form) for pattern, form in self.save if _names(pattern, path)), ("", "fp8"))


@functools.cache
def _defaults() -> Options:
    return Options()


def _with_budget(adaptive: Adaptive | None) -> Adaptive | None:
    """Return the settings of recipe "auto": with its budget, if they name none. None: casts stay as they begin."""
    return replace(adaptive, budget=BUDGET) if adaptive is not None and not adaptive.budget else adaptive


def matching(given: Sequence[str], path: str) -> str | None:
    """Return the first of the `given` patterns that names the module `path`, an ancestor, or a run of components."""
    return next((pattern for pattern in given if _names(pattern, path)), None)


def _names(pattern: str, path: str) -> bool:
    return any(fnmatch.fnmatchcase(path, p) for p in (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*"))


def _by_name(options: Any) -> dict[str, Any]:
    """Return `options` as a dict whose names are all known. Raises `OptionError`."""
    if not isinstance(options, Mapping | None):
        instead = f": options={{'recipe': {options!r}}}" if isinstance(options, str) and options in RECIPES else ""
        raise OptionError(f"options is a dict of options by name, and is not {shown(options)}{instead}")
    names = [f.name for f in fields(Options)]
    for name in options or ():
        if name in RENAMED:
            raise OptionError(f"option {name!r} is called {RENAMED[name]!r}")
        if not isinstance(name, str) or name not in names:
            raise unknown_name("option", name, names)
    return dict(options or {})
