"""What tests of saved activations share: FP8 groups written down again in plain torch, and steps to compare.

Nothing here comes from fp8compile but the backend under test: the format, its groups and what is rounded are said once
more. Every value is rounded as `x ≈ e4m3(x / s) · s` with `s = amax / 448` of each group of up to 128 features.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from fake_quantized import sqnr
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fp8compile

ROUNDING = 31.5  # dB that a cast to E4M3 keeps: steps of 2^-3 to 2^-4 of a value, evenly spread errors
Step = dict[str, Tensor]


def group_of(n: int) -> int | None:
    """The largest group that divides rows of `n` features."""
    return next((g for g in (128, 64, 32, 16) if n % g == 0), None)


def rounded(x: Tensor, headroom: float = 1.0) -> Tensor:
    """`x` as E4M3 in groups and back. `headroom` makes scales larger: another draw of the same noise."""
    g = group_of(x.shape[-1])
    assert g is not None
    groups = x.float().unflatten(-1, (-1, g))
    amax = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, amax * headroom / 448)
    return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2).to(x.dtype)


@contextlib.contextmanager
def rounded_activations(model: nn.Module, headroom: float = 1.0) -> Iterator[list[Tensor]]:
    """Eager saves its activations as E4M3: all that have rows of 16·n features, but parameters and by-products.

    FP32 tensors beside BF16 parameters are by-products (an lse, statistics). Yields what was rounded.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    narrow = any(p.dtype != torch.float32 for p in model.parameters())
    seen: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        held = x.untyped_storage().data_ptr() in parameters
        by_product = narrow and x.dtype == torch.float32
        if held or by_product or not x.is_floating_point() or x.dim() < 2 or group_of(x.shape[-1]) is None:
            return x
        seen.append(x)
        return rounded(x, headroom)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield seen


def compiled(run: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`run` with its activations saved as FP8 and its matmuls left, if `options` do not say otherwise."""
    defaults = {"executor": "eager", "strict": True, "select": "all", "save": "fp8", "save_min_bytes": 0, "skip": "*"}
    return torch.compile(run, backend="fp8", options=defaults | options)


def noise(*shape: int, seed: int = 2, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal activations."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def step(
    model: nn.Module, run: Callable[..., Any], inputs: Iterable[Tensor], offset: float = 0.0, seed: int = 11
) -> Step:
    """Outputs and all gradients for a random gradient (plus `offset`) of every output; random numbers start anew."""
    model.zero_grad(set_to_none=True)
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(7)
    outputs = [o for o in tree_leaves(run(*given)) if isinstance(o, Tensor)]
    sum(
        (o.float() * (offset + noise(*o.shape, seed=seed).float())).sum() for o in outputs if o.requires_grad
    ).backward()
    found = {f"output {n}": o.detach().clone() for n, o in enumerate(outputs)}
    found |= {f"input {n}": x.grad for n, x in enumerate(given) if x.grad is not None}
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients(found: Step) -> Step:
    """All but the outputs."""
    return {name: x for name, x in found.items() if not name.startswith("output")}


def same_bits(a: Step, b: Step) -> bool:
    """Whether two steps are equal, bit by bit (nan equals nan)."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and torch.equal(torch.nan_to_num(a[name], 12345.0), torch.nan_to_num(b[name], 12345.0))
        for name in a
    )


def ratio(decibels: float) -> float:
    """Noise over signal."""
    return 10 ** (-decibels / 10)


def check(got: Step, exact: Step, bf16: Step, more: dict[str, float] | float) -> None:
    """Every gradient of `got` lies within twice the noise of `bf16` plus `more` (noise over signal) of `exact`.

    What is not finite in BF16 may be anything, what is finite must stay so.
    """
    bad = []
    for name, want in gradients(exact).items():
        have, plain = got[name], bf16[name]
        if not torch.equal(have.isfinite(), plain.isfinite()):
            bad.append(f"{name}: finite elsewhere than in BF16")
        elif plain.isfinite().all():
            allowed = 2 * ratio(sqnr(want, plain)) + (more if isinstance(more, float) else more[name])
            allowed *= 1 + 2 * math.sqrt(2 / want.numel())  # a sum of n squares scatters by √(2/n)
            if ratio(sqnr(want, have)) > allowed:
                bad.append(f"{name}: {sqnr(want, have):.1f} dB, needs {-10 * math.log10(allowed):.1f}")
    assert not bad, "\n".join(bad)


def rows(plan: int = -1) -> list[fp8compile.plan.rows.Saved]:
    """The plan's rows for tensors that are saved, numbers left out."""
    return [row for row in fp8compile.compiles()[plan].saved if row.shape]


def is_fp8(row: fp8compile.plan.rows.Saved) -> bool:
    return row.form.startswith("e4m3")
