"""What is right in a row of the field suite: its loss and gradients beside those of BF16 eager, within derived bounds.

Each gradient's error is a ratio of signal to noise, in dB, against the same weights and batch in BF16 eager:

    SQNR = 10 log10(Σ reference² / Σ (reference − gradient)²)

- E4M3 keeps 3 bits of a mantissa where BF16 keeps 7: one cast adds 24 dB more noise than one rounding to BF16. A
  matmul casts both of its operands (3 dB), and what it reads in backward may have been kept in FP8 as well (3 dB). So
  where a chain of BF16 operations gets a gradient right to `b` dB, the same chain in FP8 gets it to b − 30 dB.
- `b` is measured: FP32 eager beside BF16 eager, or BF16 `torch.compile` beside it where that is worse. It is 40 to 50
  dB for most gradients, 0 for those that are zero but for rounding (a key's bias under softmax), and low where a
  small error decides which expert a token takes. Below 8 dB the reference is a draw of noise itself, and where
  attention computes in FP32 inside, of less noise than that of an operation in BF16: 6 dB are for each.
- Of a gradient that BF16 gets right to 40 dB or more, 8 dB are asked for, however well BF16 does. Noise of ten
  layers' casts, each at 31 dB, comes to 18 to 21 dB. Where units of a ReLU are near zero, some are on in one and off
  in the other: with activations 3 to 5 % off, 4 % of the units, which is 14 dB. With two such nets and a product
  between them, as in a recommender, the lowest gradient of an eager step whose operands are rounded to FP8 is at 10
  dB. Such flips are rare and whole: of BF16, which has a twentieth of them, a few rows show none. A gradient that is
  half or twice what it should be has 6 or 0 dB.
- The noise of n elements is a sum of n squares, and scatters by √(2/n): two of these are allowed.

- Where b is below 8 dB, a gradient is a sum that cancels, and how much more noise FP8 makes of it depends on how many
  roundings it sums. An eager step with FP8's roundings, which nothing of fp8compile makes, has that as well: where it
  was measured, twice its noise in amplitude (6 dB) is right, if that is more than what follows.

So a gradient is right with at least min(8, b − 30) dB (b − 42 where b is below 8), less that scatter. What is not
finite where BF16 eager is, is wrong. A loss is right within 2 %: it is a mean over many tokens, whose errors of a few
percent each mostly cancel. Of one row, or of the squares of a residual that is nearly zero, they do not: 30 dB, a
factor of 32, are allowed above the error that BF16 itself has, up to 20 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

COARSER = 30.0  # dB
ENOUGH = 8.0  # dB
NOISE = 12.0  # dB
DOUBLED = 6.0  # dB
TELLING = 25.0  # dB; a gradient of which BF16 gets less right is mostly rounding
LOSS, LOSS_AT_MOST = 0.02, 0.2


@dataclass
class Reference:
    """Loss and gradients of an eager step; gradients are on the CPU, as those of several steps may not fit a GPU."""

    loss: float
    gradients: dict[str, Tensor]

    @staticmethod
    def of(model: nn.Module, loss: Tensor) -> Reference:
        """Return what a backward left in `model`."""
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return Reference(loss.item(), {name: g.to("cpu", copy=True) for name, g in gradients.items()})


@dataclass
class Comparison:
    """How far losses and gradients are from their references.

    loss_error: relative; decibels: of each parameter, the worst of all batches; elements: of each; non_finite: elements
    that are not finite, of parameters whose reference is; missing: parameters of which one side has no gradient.
    """

    loss_error: float = 0.0
    decibels: dict[str, float] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    non_finite: int = 0
    missing: list[str] = field(default_factory=list)

    def add(self, model: nn.Module, loss: Tensor, reference: Reference) -> None:
        """Compare what a backward left in `model`."""
        self.loss_error = worse(self.loss_error, relative(reference.loss, loss.item()))
        for name, parameter in model.named_parameters():
            wanted, got = reference.gradients.get(name), parameter.grad
            if wanted is None or got is None:
                self.missing += [name] if (wanted is None) != (got is None) else []
                continue
            wanted = wanted.to(got.device)
            if wanted.isfinite().all():
                self.non_finite += int((~got.isfinite()).sum())
                self.decibels[name] = min(self.decibels.get(name, math.inf), sqnr(wanted, got))
                self.elements[name] = got.numel()


def worse(a: float, b: float) -> float:
    """Return the larger error; one that is no number is the largest."""
    return math.inf if math.isnan(a) or math.isnan(b) else max(a, b)


def relative(wanted: float, got: float) -> float:
    return abs(got - wanted) / max(abs(wanted), 1e-3)


def sqnr(reference: Tensor, x: Tensor) -> float:
    """dB; inf for equal tensors, -inf where nothing of the reference is left (or it is zero, and x is not)."""
    noise = float(torch.linalg.vector_norm(reference.float() - x.float(), dtype=torch.float64))
    signal = float(torch.linalg.vector_norm(reference.float(), dtype=torch.float64))
    if noise == 0:
        return math.inf
    return 20 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def least(bf16: float, elements: int, rounded: float = math.inf) -> float:
    """Return the dB that a gradient needs, of which BF16 itself gets `bf16` dB right.

    rounded: dB of an eager step with FP8's roundings, which counts where BF16 gets little right.
    """
    scatter = 10 * math.log10(1 + 2 * math.sqrt(2 / elements))
    if bf16 >= ENOUGH:
        return min(ENOUGH, bf16 - COARSER) - scatter
    return min(bf16 - COARSER - NOISE, rounded - DOUBLED) - scatter


def too_low(
    got: Comparison, bf16: Mapping[str, float], rounded: Mapping[str, float] | None = None
) -> dict[str, tuple[float, float]]:
    """Of each wrong gradient, (the dB it has, the dB it needs), the worst first.

    bf16: what BF16 gets right of each; rounded: what an eager step with FP8's roundings does.
    """
    beside = rounded or {}
    needed = {name: least(bf16.get(name, math.inf), n, beside.get(name, math.inf)) for name, n in got.elements.items()}
    wrong = {name: (db, needed[name]) for name, db in got.decibels.items() if not db >= needed[name]}
    return dict(sorted(wrong.items(), key=lambda item: item[1][0] - item[1][1]))


def conditioning(*measured: Mapping[str, float]) -> dict[str, float]:
    """Return what BF16 gets right of each gradient: the least of what was measured of it."""
    names = dict.fromkeys(name for decibels in measured for name in decibels)
    return {name: min(d[name] for d in measured if name in d) for name in names}


def enough_for_a_loss(bf16_error: float) -> float:
    """Return the relative error that a loss may have, where BF16's has `bf16_error`."""
    return min(max(LOSS, 10 ** (COARSER / 20) * bf16_error), LOSS_AT_MOST)


def wrongs(
    got: Comparison,
    bf16: Mapping[str, float],
    bf16_loss_error: float = 0.0,
    rounded: Mapping[str, float] | None = None,
) -> list[str]:
    """Return what is wrong, in words; nothing where all is right. bf16, rounded: see `too_low`."""
    found = []
    if not got.loss_error <= enough_for_a_loss(bf16_loss_error):
        found.append(f"loss off by {100 * got.loss_error:.1f} %")
    if got.non_finite:
        found.append(f"{got.non_finite} elements of gradients are not finite")
    if got.missing:
        found.append(f"gradients missing or too many: {', '.join(got.missing[:3])}")
    low = too_low(got, bf16, rounded)
    for name, (has, needs) in list(low.items())[:1]:
        beside = f" (eager with FP8's roundings: {rounded[name]:.1f})" if rounded and name in rounded else ""
        count = f"{len(low)} of {len(got.decibels)} gradients"
        found.append(f"{count} too far off: {name} has {has:.1f} dB, needs {needs:.1f}{beside}")
    return found


def median(decibels: Iterable[float]) -> float | None:
    """Return the median, which may be infinite; None of nothing."""
    values = list(decibels)
    return statistics.median(values) if values else None
