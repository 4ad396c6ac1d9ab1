"""A spec as Python source: a module of its own, which is what runs, and what a person reads.

Model         the nn.Module: forward(inputs) -> outputs, or (loss, *outputs)
inputs(seed)  its inputs on a CPU; floating-point ones in FP32
loss(…)       the loss of the outputs, where forward does not compute it
OPTIONS, PRECISION
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from . import attention, layers, operators  # noqa: F401  (they enter their kinds)
from .spec import Output, Spec
from .writer import Value, Writer, write_step

VOCABULARY, CHANNELS, PATCH = 50, 3, 2
HEAD = '''"""{title}"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

OPTIONS = {options!r}
PRECISION = {precision!r}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {names}):
{body}


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    return dict(
{made}
    )


{loss}
'''


@dataclass
class Losses:
    """Lines that compute the loss of the outputs, and the targets which they need."""

    terms: list[str] = field(default_factory=list)
    targets: dict[str, str] = field(default_factory=dict)


def source(spec: Spec, title: str = "") -> str:
    """The whole module."""
    w = Writer(spec)
    pool = [_start(w)]
    for number, step in enumerate(spec.steps, 1):
        pool.append(write_step(w, number, step, [pool[i] for i in step.inputs]))
    names, losses = [], Losses()
    for number, output in enumerate(spec.outputs):
        shape = _returned(w, number, output, pool[output.value])
        names.append(f"out{number}")
        _loss_of(losses, number, output, shape)
    total = f"{' + '.join(losses.terms)}"
    targets = {} if not spec.loss_inside else losses.targets
    w.line(f"return {f'{total}, ' if spec.loss_inside else ''}{', '.join(names)}{'' if spec.loss_inside else ','}")
    inputs = {**w.inputs, **losses.targets}
    forward = [*w.inputs, *targets]
    arguments = ", ".join(["outputs", *losses.targets, "**_"])
    function = f"def loss({arguments}):\n    ({', '.join(names)},) = outputs\n    return {total}"
    return HEAD.format(
        title=title or f"The model of seed {spec.seed}.",
        options=dict(spec.options),
        precision=spec.precision,
        init="\n".join(f"        {line}" for line in w.init) or "        self.unused = nn.Parameter(torch.zeros(1))",
        names=", ".join(forward),
        body="\n".join(f"        {line}" for line in w.body),
        made="\n".join(f"        {name}={made}," for name, made in inputs.items()),
        loss=f"LOSS_INSIDE, INPUT_GRAD = {spec.loss_inside}, {spec.input_grad}\n\n\n{function}",
    )


def _start(w: Writer) -> Value:
    spec, n = w.spec, w.spec.width
    if spec.start == "tokens":
        w.given("x", f"torch.randint({VOCABULARY}, {spec.lead}, generator=g)")
        w.line(f"v0 = {w.module(f'nn.Embedding({VOCABULARY}, {n})')}(x)")
    elif spec.start == "patches":
        height = max(h for h in range(1, math.isqrt(spec.length) + 1) if spec.length % h == 0)
        size = (spec.batch, CHANNELS, height * PATCH, spec.length // height * PATCH)
        w.given("x", f"torch.randn({size}, generator=g)")
        layer = w.module(f"nn.Conv2d({CHANNELS}, {n}, {PATCH}, stride={PATCH})")
        w.line(f"v0 = {layer}(x).flatten(2).transpose(1, 2)")
    else:
        w.given("x", f"torch.randn({(*spec.lead, n)}, generator=g)")
        w.line("v0 = x")
    return Value("v0", n)


def _returned(w: Writer, number: int, output: Output, value: Value) -> tuple[int, ...]:
    """Write the view of a value that is returned; its shape."""
    *lead, n = shape = (*w.spec.lead, value.width)
    name = value.name
    views: dict[str, tuple[str, tuple[int, ...]]] = {
        "plain": (name, shape),
        "transposed": (f"{name}.transpose(0, -1)", (n, *lead[1:], lead[0])),
        "first": (f"{name}[:1]", (1, *lead[1:], n)),
        "half": (f"{name}[..., {n // 2}:]", (*lead, n - n // 2)),
        "strided": (f"{name}[..., ::2]", (*lead, -(-n // 2))),
        "flat": (f"{name}.flatten(0, -2)", (math.prod(lead), n)),
        "expanded": (f"{name}[None].expand(2, {', '.join(['-1'] * len(shape))})", (2, *shape)),
    }
    expression, seen = views[output.view]
    w.line(f"out{number} = {expression}")
    return seen


def _loss_of(losses: Losses, number: int, output: Output, shape: tuple[int, ...]) -> None:
    out, target, n = f"out{number}", f"target{number}", shape[-1]
    rows = math.prod(shape[:-1])
    wide = f"{out}.float()" if output.upcast else out
    how = "square" if n == 1 and output.loss in ("cross_entropy", "smoothed", "ignoring", "cosine") else output.loss
    plain = {
        "square": f"{wide}.square().mean()",
        "sum": f"{wide}.sum() * {rows**-0.5:.6f}",
    }
    if how in plain:
        losses.terms.append(plain[how])
    elif how in ("cross_entropy", "smoothed", "ignoring"):
        made = f"torch.randint({n}, ({rows},), generator=g)"
        if how == "ignoring":  # never all of them: their mean would be nan
            made = f"{made}.where((torch.rand({rows}, generator=g) < 0.6) | (torch.arange({rows}) == 0), -100)"
        losses.targets[target] = made
        more = ", label_smoothing=0.1" if how == "smoothed" else ""
        losses.terms.append(f"F.cross_entropy({wide}.reshape(-1, {n}), {target}{more})")
    elif how == "bce":
        losses.targets[target] = f"torch.rand({shape}, generator=g)"
        losses.terms.append(f"F.binary_cross_entropy_with_logits({wide}, {target}.to({wide}.dtype))")
    else:
        losses.targets[target] = f"torch.randn({shape}, generator=g)"
        same = f"{target}.to({wide}.dtype)"
        losses.terms.append(
            f"F.mse_loss({wide}, {same})" if how == "mse" else f"1 - F.cosine_similarity({wide}, {same}, dim=-1).mean()"
        )
