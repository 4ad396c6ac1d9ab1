"""Random small models: the cut and FP8 off against BF16 eager, saving on beside a step that rounds what eager saves.

A seed makes a model, its input and its gradient. `FP8COMPILE_SEEDS=first:last` runs others than CI does.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from saving import Step, compiled, gradients, is_fp8, noise, ratio, rounded_activations, rows, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
FIRST, LAST = map(int, os.environ.get("FP8COMPILE_SEEDS", "0:10").split(":"))
BATCH, LENGTH, WIDTHS = 2, 16, (32, 64, 128)
DRAWS = 2
# A product may be saved as its factors, and a value once for two readers that eager gives one rounding each: their
# errors then add up in amplitude. Eager rounds the output where we round the input, or the other way round: 10 dB for
# the slope between them. 20 dB: two roundings and a factor of three, where eager rounds nothing that matters.
SLACK, LEAST = 10.0, 20.0


class Random(nn.Module):
    """A list of steps, drawn by a seed, over a pool of tensors [BATCH, LENGTH, width]; the last of them is returned."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.steps: list[tuple[str, Callable[[list[Tensor]], Tensor]]] = []
        self.widths = [self.draw.choice(WIDTHS)]
        self.random = False
        for _ in range(self.draw.randint(5, 10)):
            self._add(self.draw.choice(KINDS))
        self.finish = linear(sum(self.widths[-2:]), 32)
        for p in self.parameters():
            if p.dim() == 1:
                p.data.add_(0.1 * torch.randn(p.shape))

    def _add(self, kind: str) -> None:
        # the newest value twice as often: chains; others: branches and reuse
        i = self.draw.choice([len(self.widths) - 1, self.draw.randrange(len(self.widths))])
        made = getattr(self, f"_{kind}")(i, self.widths[i])
        if made is not None:
            width, run = made
            self.widths.append(width)
            self.steps.append((kind, run))

    def _layer(self, layer: nn.Module) -> nn.Module:
        self.layers.append(layer)
        return layer

    def _other(self, width: int) -> int | None:
        """Another value of this width."""
        same = [n for n, w in enumerate(self.widths) if w == width]
        return self.draw.choice(same) if len(same) > 1 else None

    def _linear(self, i: int, width: int):
        layer = self._layer(linear(width, n := self.draw.choice(WIDTHS)))
        return n, lambda pool: layer(pool[i])

    def _activation(self, i: int, width: int):
        f = self.draw.choice(ACTIVATIONS)
        return width, lambda pool: f(pool[i])

    def _norm(self, i: int, width: int):
        layer = self._layer(self.draw.choice([nn.LayerNorm, nn.RMSNorm])(width))
        return width, lambda pool: layer(pool[i])

    def _residual(self, i: int, width: int):
        other = self._other(width)
        return None if other is None else (width, lambda pool: pool[i] + pool[other])

    def _gate(self, i: int, width: int):
        other, f = self._other(width), self.draw.choice([F.silu, torch.sigmoid, torch.tanh])
        return None if other is None else (width, lambda pool: f(pool[i]) * pool[other])

    def _block(self, i: int, width: int):
        norm, up = self._layer(nn.LayerNorm(width)), self._layer(linear(width, 2 * width))
        down = self._layer(linear(width, width))
        wrapped = self.draw.random() < 0.3

        def run(x: Tensor) -> Tensor:
            a, b = up(norm(x)).chunk(2, -1)
            return x + down(F.silu(a) * b)

        if wrapped:
            return width, lambda pool: checkpoint(run, pool[i], use_reentrant=False)
        return width, lambda pool: run(pool[i])

    def _attention(self, i: int, width: int):
        norm, qkv = self._layer(nn.LayerNorm(width)), self._layer(linear(width, 3 * width))
        out, by_hand, causal = self._layer(linear(width, width)), self.draw.random() < 0.4, self.draw.random() < 0.5

        def run(pool: list[Tensor]) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv(norm(pool[i])).chunk(3, -1))
            if by_hand:
                scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
                if causal:
                    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
                mixed = scores.softmax(-1) @ v
            else:
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            return out(mixed.transpose(1, 2).flatten(2))

        return width, run

    def _concatenate(self, i: int, width: int):
        other = self.draw.randrange(len(self.widths))
        layer = self._layer(linear(width + self.widths[other], n := self.draw.choice(WIDTHS)))
        return n, lambda pool: layer(torch.cat([pool[i], pool[other]], -1))

    def _slice(self, i: int, width: int):
        if width == 32:
            return None
        half = self.draw.choice([slice(None, width // 2), slice(width // 2, None), slice(None, None, 2)])
        return width // 2, lambda pool: pool[i][..., half]

    def _tokens(self, i: int, width: int):
        layer = self._layer(linear(LENGTH, LENGTH))
        return width, lambda pool: layer(pool[i].transpose(1, 2)).transpose(1, 2)

    def _views(self, i: int, width: int):
        return width, self.draw.choice([
            lambda pool: pool[i].roll(1, 1),
            lambda pool: pool[i].reshape(LENGTH, BATCH, width).transpose(0, 1),
            lambda pool: pool[i].unflatten(-1, (4, -1)).transpose(-1, -2).flatten(2),
            lambda pool: pool[i][:, :1].expand(-1, LENGTH, -1) + pool[i],
            lambda pool: pool[i].flip(1) * 0.5,
            lambda pool: pool[i].mean(1, keepdim=True) + pool[i],
            lambda pool: (pool[i] * 1.0).mul_(0.5).add_(0.1),
        ])  # fmt: skip

    def _dropout(self, i: int, width: int):
        self.random = True
        return width, lambda pool: F.dropout(pool[i], 0.2)

    def _shared(self, i: int, width: int):
        same = [m for m in self.layers if isinstance(m, nn.Linear) and m.in_features == width]
        if not same:
            return None
        layer = self.draw.choice(same)
        return layer.out_features, lambda pool: layer(pool[i])

    def _detached(self, i: int, width: int):
        return width, lambda pool: pool[i] * pool[i].detach().sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        pool = [x]
        for _, run in self.steps:
            pool.append(run(pool))
        return self.finish(torch.cat(pool[-2:] if len(pool) > 1 else pool * 2, -1))


def linear(n: int, k: int) -> nn.Linear:
    return nn.Linear(n, k)


ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    F.gelu, F.silu, F.softplus, torch.tanh, torch.sigmoid, lambda x: F.leaky_relu(x, 0.5), lambda x: x.softmax(-1) * 8,
    lambda x: x.square() * 0.3, lambda x: x / (1 + x.abs()), lambda x: torch.exp(-x.square()), torch.sin, F.elu,
    lambda x: x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5).to(x.dtype), F.mish,
]  # fmt: skip
KINDS = [
    "linear", "linear", "activation", "activation", "norm", "residual", "residual", "gate", "block", "attention",
    "concatenate", "slice", "tokens", "views", "views", "dropout", "shared", "detached",
]  # fmt: skip


class Seed:
    """A model of a seed with its steps in BF16 and FP32."""

    def __init__(self, seed: int) -> None:
        self.model = Random(seed).bfloat16()
        self.x = noise(BATCH, LENGTH, self.model.widths[0], seed=seed)
        exact = Random(seed)
        exact.load_state_dict(self.model.state_dict())
        self.exact = step(exact, exact, [self.x.float()])
        self.bf16 = step(self.model, self.model, [self.x])

    def run(self, **options: object) -> Step:
        torch.compiler.reset()
        return step(self.model, compiled(self.model, kernels="inductor", **options), [self.x])

    def rounded(self) -> dict[str, float]:
        """Noise over signal of steps that round what eager saves, for each gradient."""
        noises = dict.fromkeys(gradients(self.bf16), 0.0)
        for draw in range(DRAWS):
            with rounded_activations(self.model, 2 ** (draw / DRAWS)):
                fake = step(self.model, self.model, [self.x])
            for name in noises:
                noises[name] += ratio(sqnr(self.bf16[name], fake[name])) / DRAWS
        return noises


def limit(found: Seed, name: str, saving: float) -> float:
    """The noise over signal that a gradient may have: of BF16, and of what saving adds.

    Dropout draws the same numbers in FP32, BF16 and in the graph. Two steps with BF16 roundings of their own differ by
    the noise of both; a gradient that is a small difference of large ones errs more, in either.
    """
    want = found.exact[name]
    return (4 * ratio(sqnr(want, found.bf16[name])) + saving) * (1 + 3 * math.sqrt(2 / want.numel()))


BAD = {17: "what a norm reads has a mean of its own for each token, from a bias: x - mean of a rounded x is rounding"}
LAYOUT = 144  # an attention's result, which lies in memory as its fake does not, is added to and viewed
SEEDS = [
    pytest.param(seed, marks=[pytest.mark.xfail(strict=True, reason=BAD[seed])] if seed in BAD else [])
    for seed in dict.fromkeys((*range(FIRST, LAST), *BAD, LAYOUT))
]


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_random_models(seed: int) -> None:
    found = Seed(seed)
    names = [n for n in gradients(found.exact) if sqnr(found.exact[n], found.bf16[n]) > 25]  # BF16 gets them right
    # The cut of torch's and none: the graph's arithmetic within BF16's roundings (50 dB) of eager's
    off = found.run(save="bf16")
    saving = found.rounded()
    bad = [f"off {n}" for n in names if ratio(sqnr(found.exact[n], off[n])) > limit(found, n, ratio(45))]
    on = found.run()
    assert any(map(is_fp8, rows())) or not rows()
    for n in names:
        if ratio(sqnr(found.exact[n], on[n])) > limit(found, n, SLACK * saving[n] + ratio(LEAST)):
            bad.append(f"on {n}: {sqnr(found.exact[n], on[n]):.1f} dB, rounded eager {-10 * math.log10(saving[n]):.1f}")
    assert not bad, (seed, [kind for kind, _ in found.model.steps], bad)
    assert sqnr(found.bf16["output 0"], on["output 0"]) > 30
    assert all(x.isfinite().all() for x in on.values())


def test_a_seed_makes_the_same_model_again() -> None:
    a, b = Random(3), Random(3)
    assert [kind for kind, _ in a.steps] == [kind for kind, _ in b.steps]
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert copy.deepcopy(a.widths) == b.widths


def test_our_cut_without_fp8_forms_is_within_bf16_rounding() -> None:
    """Patterns that name nothing leave one value in FP8: the rest goes through our cut as it is."""
    for seed in range(FIRST, FIRST + 2):
        found = Seed(seed)
        names = [n for n in gradients(found.exact) if sqnr(found.exact[n], found.bf16[n]) > 25]
        got = found.run(save={"finish": "fp8", "*": "bf16"})
        for n in names:
            more = ratio(45) if not any(map(is_fp8, rows())) else ratio(LEAST)
            assert ratio(sqnr(found.exact[n], got[n])) <= limit(found, n, more), (seed, n)
        assert fp8compile.compiles()
