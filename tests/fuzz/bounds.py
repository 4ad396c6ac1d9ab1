"""How far two steps of one model may lie apart, tensor by tensor, and why.

All is noise over signal, Σ(x − reference)² / Σ reference². In any step, a tensor's error is that of its roundings,
carried through the model. How a model carries errors (its conditioning) is measured on eager PyTorch:

    b    BF16 eager against FP64: 16-bit roundings (FP32's, in an FP32 model)
    r    eager with FP8's roundings against FP64 (`rounded.py`), the mean of some draws

FP8 against exact.  A recipe rounds what `r` rounds, or less, each with errors of the same size: a cast to E4M3 leaves
steps of 2^-3 of a value's power of two, errors spread evenly within a step, so (2^-3)²/12 over a mean square of 7/3:
5.6e-4, 32.5 dB; E5M2 four times as much. It may round at other places, and a rounded value that is used twice errs
twice in the same direction: in amplitude, not in power, a factor of two. Merged weights share a scale, so the smaller
one's rounding is coarser, by the square of their ratio in the worst case: up to two bits among layers initialised alike
are a factor of 16 for what falls to subnormals, seldom all of a tensor. SLACK takes these together as 10 (the same as
of saved activations alone). Beside it stands what two casts of the tensor itself leave where eager rounds nothing that
matters (FLOOR), and four times b: BF16 at other places is another draw, and doubled in amplitude where it falls twice.

Generated against inductor.  They cast the same values with the same scales, in another order of roundings: a region
keeps FP32 where the other rounds each operator to BF16. So both err by b, independently: 2 b, four times in power for
what falls twice. And a value that moved by δ before a cast takes the next code with probability |δ| / step, which moves
it by a step: |δ|·step in power. For k roundings to BF16, |δ| = 2^-9·√k/√3 of a power of two: over a mean square of
7/3, 2^-9·2^-3·√k/√3/(7/3) = 6e-5 √k, beside 5.6e-4 of the cast itself: k = 25 gives half of r. FLIPS is that, twice.
In an FP32 model δ is 2^-24: flips are one code in 100,000, and what is left is b. A single flip in a small tensor still
shows: a mismatch counts only if it comes again with other data (`judge.py`). Matmuls of blocks return BF16 in any
model: quotients of two such values often lie exactly between two codes, and δ decides.

A sum of n squares scatters by √(2/n): three of these are allowed. Tensors that BF16 itself gets wrong by more than
CONDITIONED are zero but for rounding: they must be finite, and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .stepping import Step

CAST = (2.0**-3) ** 2 / 12 / (7 / 3)  # 5.6e-4
SLACK, FLOOR = 10.0, 6 * CAST
FLIPS, LEAST = 1.0, 1e-9
CONDITIONED = 10**-2.5


def noise(reference: Tensor, x: Tensor) -> float:
    """Σ(x − reference)² / Σ reference²; infinite where x is not finite or nothing was to be there."""
    wide = reference.double()
    signal, error = wide.square().sum().item(), (x.double() - wide).square().sum().item()
    if error == 0:
        return 0.0
    return error / signal if signal > 0 and math.isfinite(error) else math.inf


def decibels(ratio: float) -> str:
    """Noise over signal as dB of signal over noise."""
    return f"{-10 * math.log10(ratio):.1f} dB" if 0 < ratio < math.inf else ("exact" if ratio == 0 else "not finite")


@dataclass(frozen=True)
class References:
    """Steps of eager PyTorch with the same data: in FP64, in the model's precision, and with FP8's roundings."""

    exact: Step
    plain: Step
    rounded: Sequence[Step]
    is_wide: bool  # an FP32 model, and no matmul that returns BF16: no rounding to BF16 anywhere

    def of(self, name: str) -> tuple[float, float]:
        """b and r of a tensor."""
        want = self.exact[name]
        drawn = [noise(want, step[name]) for step in self.rounded]
        return noise(want, self.plain[name]), sum(drawn) / len(drawn)

    def against_exact(self, name: str) -> float:
        """The noise that a step in FP8 may have against FP64."""
        b, r = self.of(name)
        return (4 * b + SLACK * r + FLOOR) * self._scatter(name)

    def between(self, name: str) -> float:
        """The noise that two ways of running the same plan may have against each other."""
        b, r = self.of(name)
        return (8 * b + LEAST + (0 if self.is_wide else FLIPS * r + FLOOR / 10)) * self._scatter(name)

    def is_off(self, name: str, x: Tensor) -> bool:
        """Whether a step without FP8 is further off than roundings to 16 bits, at other places and doubled, explain."""
        b, _ = self.of(name)
        return noise(self.exact[name], x) > (8 * b + LEAST) * self._scatter(name)

    def is_compared(self, name: str) -> bool:
        """Whether BF16 gets this tensor right, and its roundings leave something of it."""
        b, r = self.of(name)
        return b < CONDITIONED and r < 0.05 and bool(self.exact[name].any())

    def _scatter(self, name: str) -> float:
        return 1 + 3 * math.sqrt(2 / self.exact[name].numel())


def wrong(references: References, steps: dict[str, Step]) -> dict[str, str]:
    """What is wrong with `steps` (by the way in which each ran): a sentence for each way, tensor and comparison."""
    found: dict[str, str] = {}
    base = steps.get("inductor", {})
    for way, step in steps.items():
        different = step.keys() ^ references.plain.keys()
        if different:
            found[way] = f"{way}: {', '.join(sorted(different))} missing, or there and not in eager PyTorch"
        for name in sorted(step.keys() & references.plain.keys()):
            complaint = _by_itself(references, name, step[name])
            if complaint:
                found[f"{way} {name}"] = f"{way}: {name} {complaint}"
            elif way != "inductor" and name in base and references.is_compared(name):
                apart, limit = noise(base[name], step[name]), references.between(name)
                if apart > limit:
                    text = f"{name} is {decibels(apart)} from inductor's, needs {decibels(limit)}"
                    found[f"{way} {name} apart"] = f"{way}: {text}"
    return found


def closest(references: References, steps: dict[str, Step]) -> float:
    """Which share of its bound the worst tensor takes: how much room the bounds leave."""
    base = steps.get("inductor", {})
    shares = [0.0]
    for step in steps.values():
        for name in filter(references.is_compared, step.keys() & base.keys() & references.exact.keys()):
            shares.append(noise(references.exact[name], step[name]) / references.against_exact(name))
            shares.append(noise(base[name], step[name]) / references.between(name))
    return max(shares)


def _by_itself(references: References, name: str, x: Tensor) -> str:
    """What is wrong with a tensor beside eager PyTorch's; "" if nothing."""
    plain = references.plain[name]
    if x.shape != plain.shape or x.dtype != plain.dtype:
        return f"is {x.dtype}{list(x.shape)}, not {plain.dtype}{list(plain.shape)}"
    if not plain.isfinite().all():
        return ""
    if not x.isfinite().all():
        return f"has {int((~x.isfinite()).sum())} of {x.numel()} numbers that are not finite"
    got, limit = noise(references.exact[name], x), references.against_exact(name)
    if not references.is_compared(name) or got <= limit:
        return ""
    b, r = map(decibels, references.of(name))
    return f"{decibels(got)}, needs {decibels(limit)} (eager: {b}, with FP8's roundings {r})"
