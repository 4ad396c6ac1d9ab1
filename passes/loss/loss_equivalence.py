"""Prove by execution what a part of a graph is in terms of a cross-entropy.

It is run on a few random rows and classes in FP64. Its sizes do not matter: every value in it has rows and classes
("logits", here [ROWS, n]), rows ("row", [ROWS, 1]) or is a "number", so views are nothing, reductions go over classes,
and all else is pointwise. A value of rows is then written as a sum of `TERMS`, with factors; so is a gradient, as a sum
of the gradients that autograd gives of them.

What is smooth and agrees on random values agrees. What is not (an absolute value, a logarithm of 10⁻¹² more) has to be
met: rows are drawn with normalisers of either sign and with probabilities from even ones down to 10⁻¹⁰⁰; labels and
masks are drawn independently. And all that for two numbers of classes, as factors that hold for one may be made of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily  # passes run under the fake mode of the graph

from fp8compile.kernels.loss.softmax_step import TERMS, Curve
from fp8compile.passes.core import fusible
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.node_views import first_input

ROWS, CLASSES = 9, (11, 7)
SAME_ELEMENTS = fusible.RESHAPES | {aten.expand.default}
REDUCTIONS: dict[Any, Any] = {aten.amax.default: torch.amax, aten.sum.dim_IntList: torch.sum}
MEANS = {aten.mean.dim}
SCATTERS = {aten.scatter.value, aten.scatter_add.default}
Values = dict[fx.Node, Any]
Factors = tuple[float, ...]  # one for each of `TERMS`


@dataclass(frozen=True)
class Leaf:
    """The data drawn for a value of rows: "float" numbers, "label"s, or a "mask". Leaves of one key are drawn once."""

    key: Hashable
    what: str
    opposite: bool = False


def execute(
    inside: Sequence[tuple[fx.Node, str]], logits: fx.Node, leaves: Mapping[fx.Node, Leaf], only: fx.Node | None = None
) -> list[Values]:
    """Return the values of the nodes `inside`, each with its kind, in order, for each number of `CLASSES`; of random
    `logits` and leaves. only: the one floating-point leaf that is not zero."""
    with unset_fake_temporarily():
        found = []
        for classes in CLASSES:
            random = torch.Generator().manual_seed(classes)
            env: Values = {logits: _drawn_logits(random, classes)}
            drawn: dict[Hashable, Tensor] = {}
            for node, leaf in sorted(leaves.items(), key=lambda item: item[0].name):
                if leaf.key not in drawn:
                    drawn[leaf.key] = _drawn(leaf.what, random, classes)
                env[node] = ~drawn[leaf.key] if leaf.opposite else drawn[leaf.key]
                if only is not None and node is not only and leaf.what == "float":
                    env[node] = torch.zeros_like(env[node])
            for node, kind in inside:
                env[node] = _value_of(node, kind, env, classes)
            found.append(env)
        return found


def _drawn_logits(random: torch.Generator, classes: int) -> Tensor:
    spread = torch.logspace(-1, 2, ROWS, dtype=torch.float64, device="cpu").unsqueeze(1)
    shift = 8 * torch.randn(ROWS, 1, generator=random, dtype=torch.float64, device="cpu")
    return torch.randn(ROWS, classes, generator=random, dtype=torch.float64, device="cpu") * spread + shift


def _drawn(what: str, random: torch.Generator, classes: int) -> Tensor:
    """Return a random number, label or mask for each row: [rows, 1]."""
    if what == "float":
        return torch.randn(ROWS, 1, generator=random, dtype=torch.float64, device="cpu")
    drawn = torch.randint(0, classes, (ROWS, 1), generator=random, dtype=torch.int64, device="cpu")
    return drawn > classes // 2 if what == "mask" else drawn


def factors_of_terms(trials: list[Values], node: fx.Node, logits: fx.Node, index: fx.Node, curve: Curve) -> Factors:
    """Return `node`, a value of rows, as a sum of terms of `logits` (through `curve`), labels `index`; () if it is
    none."""
    with unset_fake_temporarily():
        return _factors([env[node] for env in trials], [_terms(env[logits], env[index], curve) for env in trials])


def factors_of_gradient(
    trials: list[Values], slope: fx.Node, cotangent: fx.Node, logits: fx.Node, index: fx.Node, curve: Curve
) -> Factors:
    """Return `slope` as a sum of the gradients of the terms for `logits`, each times `cotangent`; () if it is none."""
    with unset_fake_temporarily(), torch.enable_grad():
        known = []
        for env in trials:
            given = env[logits].clone().requires_grad_()
            terms = _terms(given, env[index], curve)
            each = [torch.autograd.grad(terms[:, i].sum(), given, retain_graph=True)[0] for i in range(len(TERMS))]
            known.append(torch.stack(each, -1) * env[cotangent].unsqueeze(-1))
        return _factors([env[slope] for env in trials], known)


def _terms(logits: Tensor, index: Tensor, curve: Curve) -> Tensor:
    """Return the terms of each row: [rows, len(TERMS)]."""
    scores = curve.scores(logits)
    log_probabilities, normaliser = scores.log_softmax(-1), scores.logsumexp(-1, keepdim=True)
    chosen = log_probabilities.gather(-1, index)
    return torch.cat([chosen, log_probabilities.sum(-1, keepdim=True), normaliser, normaliser.square()], -1)


def _factors(wanted: list[Tensor], known: list[Tensor]) -> Factors:
    """Return the numbers that make `wanted` of the last dimension of `known`, the same for all of both."""
    b = torch.cat([x.reshape(-1) for x in wanted])
    a = torch.cat([x.reshape(-1, len(TERMS)) for x in known])
    if len(a) != len(b) or not b.isfinite().all():
        return ()
    sizes, size = a.abs().amax(0).clamp_min(1e-300), b.abs().amax().clamp_min(1e-300)
    shares = torch.linalg.lstsq(a / sizes, (b / size).unsqueeze(1), driver="gelsd").solution.squeeze(1)
    found = torch.where(shares.abs() < 1e-10, 0.0, shares) * size / sizes
    plain = tuple(float(f"{x:.11g}") for x in found.tolist())  # 0.1, not 0.0999999999999998
    exact = torch.tensor(plain, dtype=torch.float64, device="cpu")
    allowed = 1e-9 * (a.abs() @ exact.abs() + b.abs()) + 1e-12 * size
    return plain if bool(((a @ exact - b).abs() <= allowed).all()) else ()


def _value_of(node: fx.Node, kind: str, env: Values, classes: int) -> Any:
    args: Any = fx.map_arg(node.args, lambda n: env.get(n, n))  # sizes of views stay as they are
    dtype = torch.float64 if value(node).is_floating_point() else value(node).dtype
    if node.target in SAME_ELEMENTS:
        return args[0].expand(ROWS, classes) if kind == "logits" else args[0]
    if node.target in fusible.CONVERSIONS:
        return args[0].to(dtype)
    if node.target in REDUCTIONS:
        return REDUCTIONS[node.target](args[0], -1, keepdim=True)
    if node.target in MEANS:  # of as many classes as there are: what comes back of it is divided by that number
        return args[0].sum(-1, keepdim=True) / value(first_input(node)).shape[-1]
    if node.target is aten.scalar_tensor.default:
        return torch.tensor(args[0], dtype=dtype, device="cpu")
    if node.target in (aten.full.default, aten.full_like.default):
        return torch.full((ROWS, classes) if kind == "logits" else (), args[1], dtype=dtype, device="cpu")
    if node.target is aten.gather.default:
        return args[0].gather(-1, args[2])
    if node.target is aten.scatter.value:
        return args[0].scatter(-1, args[2], args[3])
    if node.target is aten.scatter_add.default:
        return args[0].scatter_add(-1, args[2], args[3])
    call: Any = node.target
    return call(*args, **{k: v for k, v in node.kwargs.items() if k == "alpha"})
