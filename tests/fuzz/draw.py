"""A model drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from . import attention, layers, operators  # noqa: F401  (they enter their kinds)
from .layers import WIDTHS
from .spec import Output, Spec, Step
from .writer import KINDS

BATCHES = (1, 1, 1, 2, 3, 7, 17)
ROWS = (1, 1, 1, 2, 3, 7, 16, 17, 31, 32, 33, 64, 100, 127, 128, 129, 200, 256, 257, 300)
LENGTHS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 49, 64, 65, 100, 129)
MOST_ROWS, MOST_STEPS = 400, 6
LAYERS = ("linear", "gate", "mixture", "mlp", "packed", "lora", "low_rank_weight", "attention", "tokens")
RECIPES = ("mixed", "mixed", "mixed", "rowwise", "tensorwise", "rowwise_with_gw_hp", "blockwise")
LOSSES = (
    "square",
    "square",
    "cross_entropy",
    "cross_entropy",
    "smoothed",
    "ignoring",
    "mse",
    "bce",
    "sum",
    "cosine",
)
VIEWS = ("plain", "plain", "plain", "plain", "transposed", "first", "half", "strided", "flat", "expanded")


def draw(seed: int) -> Spec:
    """The model of `seed`: always the same one."""
    r = random.Random(seed)
    batch, length = _sizes(r)
    base = Spec(
        seed=seed,
        batch=batch,
        length=length,
        width=r.choice(WIDTHS),
        start=r.choice(("float", "float", "tokens", "patches")) if length else "float",
        precision=r.choice(("bf16", "bf16", "autocast", "fp32", "fp32")),
        input_grad=r.random() < 0.6,
        loss_inside=r.random() < 0.6,
    )
    steps: list[Step] = []
    count = r.randint(1, MOST_STEPS)
    surely = r.randrange(count)  # a model without a layer has nothing to train
    for n in range(count):
        steps.append(_step(r, base, n, LAYERS if n == surely else ()))
    outputs = _outputs(r, len(steps))
    return Spec(**{**vars(base), "steps": tuple(steps), "outputs": outputs, "options": _options(r, count)})


def _sizes(r: random.Random) -> tuple[int, int]:
    if r.random() < 0.4:
        return (r.choice((1000, 1025, 2049, 5000)) if r.random() < 0.03 else r.choice(ROWS)), 0
    batch, length = r.choice(BATCHES), r.choice(LENGTHS)
    while batch * length > MOST_ROWS:
        length = r.choice(LENGTHS)
    return batch, length


def _step(r: random.Random, spec: Spec, before: int, among: Sequence[str] = ()) -> Step:
    """A step that reads one of the values so far: the newest most often, for chains; others make branches."""
    names = [name for name in among or KINDS if spec.length or not KINDS[name].sequence]
    name = r.choices(names, [KINDS[n].weight for n in names])[0]
    kind = KINDS[name]
    newest = before if r.random() < 0.75 else r.randint(0, before)
    inputs = (newest, *(r.randint(0, before) for _ in range(kind.arity - 1)))
    return Step(name, inputs, kind.draw(r, spec), checkpoint=r.random() < 0.08, frozen=r.random() < 0.08)


def _outputs(r: random.Random, last: int) -> tuple[Output, ...]:
    values = [last, *(r.randint(0, last) for _ in range(r.choice((0, 0, 0, 1, 2))))]
    return tuple(Output(v, r.choice(VIEWS), r.choice(LOSSES), r.random() < 0.7) for v in values)


def _options(r: random.Random, steps: int) -> dict[str, Any]:
    """Options of the backend. Most models are so small that only `select="all"` converts anything."""
    options: dict[str, Any] = {"recipe": r.choice(RECIPES), "select": "all" if r.random() < 0.95 else "profitable"}
    if r.random() < 0.08:
        options["recipe"] = {"base": "tensorwise", "grad_input": {"left": {"delayed": True}}}
    if r.random() < 0.8:
        options["save_min_bytes"] = r.choice((0, 0, 1024))
    if r.random() < 0.3:
        options["save"] = r.choice(("bf16", "fp8_with_qk"))
    if r.random() < 0.15:
        options["activation_budget"] = r.choice((0.0, 0.3, 0.7, 1.0))
    if r.random() < 0.3:
        options["lm_head"] = True
    if r.random() < 0.25:
        options["chunk_loss"] = r.choice((True, False, 7))
    if r.random() < 0.1:
        options["fold_masks"] = False
    if r.random() < 0.2:
        options["skip"] = [f"layer{r.randint(1, steps)}*"]
    return options
