"""Prove by execution that a part of a graph is a cross-entropy and its gradient.

It is run on a few random rows and classes in FP64, and compared with what autograd makes of the definition. Its sizes
do not matter: every value in it has rows and classes ("logits", here [ROWS, CLASSES]), rows ("row", [ROWS, 1]) or is a
"number", so views are nothing, reductions go over classes, and all else is pointwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily  # passes run under the fake mode of the graph

from fp8compile.kernels.chunked_loss import Curve
from fp8compile.passes import fusible
from fp8compile.passes.compilation import aten, value

ROWS, CLASSES = 5, 11
SAME_ELEMENTS = fusible.RESHAPES | {aten.expand.default}
REDUCTIONS: dict[Any, Any] = {aten.amax.default: torch.amax, aten.sum.dim_IntList: torch.sum}
SCATTERS = {aten.scatter.value, aten.scatter_add.default}
Values = dict[fx.Node, Any]


def execute(inside: Iterable[tuple[fx.Node, str]], logits: fx.Node, leaves: Iterable[fx.Node]) -> Values:
    """The values of the nodes `inside`, each with its kind, in order; of random `logits` and numbers of rows."""
    with unset_fake_temporarily():
        random = torch.Generator().manual_seed(0)
        env: Values = {logits: torch.randn(ROWS, CLASSES, generator=random, dtype=torch.float64)}
        for leaf in sorted(leaves, key=lambda n: n.name):
            env[leaf] = _drawn(value(leaf), random)
        for node, kind in inside:
            env[node] = _value_of(node, kind, env)
        return env


def _drawn(like: Tensor, random: torch.Generator) -> Tensor:
    """A random number a row: a class, where integers are."""
    if like.is_floating_point():
        return torch.randn(ROWS, 1, generator=random, dtype=torch.float64)
    drawn = torch.randint(0, CLASSES, (ROWS, 1), generator=random)
    return drawn > CLASSES // 2 if like.dtype is torch.bool else drawn


def is_log_probability(env: Values, logits: fx.Node, chosen: fx.Node, curve: Curve) -> bool:
    """Whether `chosen`, a gather, is the log-softmax of `logits` (through `curve`) at its index."""
    with unset_fake_temporarily():
        return _close(env[chosen], _chosen(env[logits], env[chosen.args[2]], curve))  # type: ignore[index]


def sign_of_gradient(
    env: Values, logits: fx.Node, chosen: fx.Node, curve: Curve, cotangent: fx.Node, slope: fx.Node
) -> float:
    """The sign with which `slope` is the gradient of −Σ chosen · cotangent for `logits`; 0 where it is not."""
    with unset_fake_temporarily(), torch.enable_grad():
        given = env[logits].clone().requires_grad_()
        loss = -(_chosen(given, env[chosen.args[2]], curve) * env[cotangent]).sum()  # type: ignore[index]
        (gradient,) = torch.autograd.grad(loss, given)
        return next((sign for sign in (1.0, -1.0) if _close(env[slope], sign * gradient)), 0.0)


def _chosen(logits: Tensor, index: Tensor, curve: Curve) -> Tensor:
    return torch.log_softmax(curve.scores(logits), -1).gather(-1, index)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def _value_of(node: fx.Node, kind: str, env: Values) -> Any:
    args: Any = fx.map_arg(node.args, env.get)
    dtype = torch.float64 if value(node).is_floating_point() else value(node).dtype
    if node.target in SAME_ELEMENTS:
        return args[0].expand(ROWS, CLASSES) if kind == "logits" else args[0]
    if node.target in fusible.CONVERSIONS:
        return args[0].to(dtype)
    if node.target in REDUCTIONS:
        return REDUCTIONS[node.target](args[0], -1, keepdim=True)
    if node.target is aten.scalar_tensor.default:
        return torch.tensor(args[0], dtype=dtype)
    if node.target in (aten.full.default, aten.full_like.default):
        return torch.full((ROWS, CLASSES) if kind == "logits" else (), args[1], dtype=dtype)
    if node.target is aten.gather.default:
        return args[0].gather(-1, args[2])
    if node.target is aten.scatter.value:
        return args[0].scatter(-1, args[2], args[3])
    if node.target is aten.scatter_add.default:
        return args[0].scatter_add(-1, args[2], args[3])
    call: Any = node.target
    return call(*args, **{k: v for k, v in node.kwargs.items() if k == "alpha"})
