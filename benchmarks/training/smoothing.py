"""Would smoothing per channel keep a SwiGLU's down projection in FP8, where single channels dominate? Emulated.

    python -m benchmarks.training.smoothing [--tokens 512] [--channels 2048] [--outputs 256] [--seeds 3]

Smooth-SwiGLU (arXiv 2409.12517, §4.4) divides channel j of the product x by s_j, its amax over tokens here rounded to a
power of two, and multiplies column j of the weight by it: x @ wᵀ stays the same. "half" takes SmoothQuant's
s_j = √(amax of x_j / amax of w_j) (arXiv 2211.10438, α = ½) instead. Only the output matmul contracts channels: of the
other two grad_input does not read x, and in grad_weight channels are rows, which row scales separate.

Channels are SwiGLUs of normal numbers; one in a thousand is `growth` times the others, for all tokens or for one in a
hundred. The weight of such a channel is zero (ignored), `1/growth` of the others (shrunk), or as large as they are
(equal). Of x @ wᵀ it shows SQNR in dB (output), and with the outlier channels left out of signal and noise: what the
other channels still say (others). The last row trains the model of `benchmarks/training/adaptive.py` whose SwiGLU
grows, with that cast of its down projection's output matmul and all else in BF16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.training import adaptive

LARGEST, GROUP = 448.0, 128
Cast = Callable[[Tensor], Tensor]


def quantized(x: Tensor, amax: Tensor) -> Tensor:
    """x in E4M3 and back under scales of `amax`, as the numerics contract has them."""
    scale = torch.where(amax > 0, amax / LARGEST, 1.0)
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def tensor(x: Tensor) -> Tensor:
    return quantized(x, x.abs().max())


def row(x: Tensor) -> Tensor:
    return quantized(x, x.abs().amax(1, keepdim=True))


def group(x: Tensor) -> Tensor:
    groups = x.unflatten(1, (-1, GROUP))
    return quantized(groups, groups.abs().amax(2, keepdim=True)).flatten(1)


# name -> (share of the way from the weight to the activation that s goes, cast of x, cast of w); None: s = 1
CASTS: dict[str, tuple[float | None, Cast, Cast]] = {
    "row × tensor": (None, row, tensor),
    "group × group": (None, group, group),
    "smooth, row × tensor": (1.0, row, tensor),
    "half, row × tensor": (0.5, row, tensor),
    "half, group × group": (0.5, group, group),
}


def smoothing(x: Tensor, w: Tensor, share: float | None) -> Tensor:
    """s_j of every channel, a power of two."""
    of_x, of_w = (t.abs().amax(0).clamp(min=2.0**-40) for t in (x, w))
    if share is None:
        return torch.ones_like(of_x)
    return torch.exp2((of_x if share == 1 else (of_x / of_w).sqrt()).log2().round())


def cast(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """x and w as the matmul sees them, s divided out again (which is exact)."""
    share, of_x, of_w = CASTS[name]
    s = smoothing(x, w, share)
    return of_x(x / s) * s, of_w(w * s) / s


def decibels(signal: Tensor, noise: Tensor) -> float:
    return float(10 * torch.log10(signal.double().square().sum() / noise.double().square().sum()))


def cases(tokens: int, channels: int, outputs: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, x, w, which channels are outliers)."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    x = F.silu(normal(tokens, channels)) * normal(tokens, channels)
    w = normal(outputs, channels) / channels**0.5
    chosen = torch.zeros(channels, dtype=torch.bool)
    chosen[torch.randperm(channels, generator=random)[: max(1, channels // 1000)]] = True
    rare = torch.rand(tokens, 1, generator=random) < 0.01
    for growth in (1e2, 1e4, 1e6):
        for where, when in (("all tokens", torch.ones_like(rare)), ("1 in 100", rare)):
            grown = torch.where(chosen & when, x * growth, x).bfloat16().float()
            for kind, factor in (("ignored", 0.0), ("shrunk", 1 / growth), ("equal", 1.0)):
                weight = torch.where(chosen, w * factor, w).bfloat16().float()
                yield f"{growth:.0e}, {where}, {kind}", grown, weight, chosen


def measure(x: Tensor, w: Tensor, outliers: Tensor) -> dict[str, tuple[float, float]]:
    """(SQNR of the output, of what the other channels give of it) in dB, by cast."""
    found, others = {}, ~outliers
    for name in CASTS:
        a, b = cast(x, w, name)
        exact, got = x.double() @ w.double().t(), a.double() @ b.double().t()
        rest, rest_got = (p.double()[:, others] @ q.double()[:, others].t() for p, q in ((x, w), (a, b)))
        found[name] = decibels(exact, got - exact), decibels(rest, rest_got - rest)
    return found


class Down(adaptive.SwiGLU):
    """The model of `benchmarks/training/adaptive.py` whose SwiGLU grows; its down projection's output matmul is
    cast."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate(x)) * (self.up(x) * self.growth)
        out = self.down(x)
        if self.name not in CASTS:
            return out
        w = (self.down.weight * self.down.mask).bfloat16().float()
        a, b = cast(x.float(), w, self.name)
        return out + (a @ b.t() - x.float() @ w.t()).to(out.dtype).detach()


def trained(name: str, seed: int, steps: int = 240) -> float:
    """Return the held-out loss of `Down`, trained as `benchmarks/training/adaptive.py` does, all else in BF16."""
    torch.manual_seed(seed)
    model = Down(name)
    opt = torch.optim.Adam(model.parameters(), lr=model.lr, eps=1e-20)
    teacher, losses = adaptive.Teacher(model.classes, model.noise, seed), []
    for step in range(steps):
        model.at(step, steps)
        for settings in opt.param_groups:
            settings["lr"] = model.lr * (1 - step / steps)
        x, y = teacher.batch()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = (out.float() - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses[steps * 4 // 5 :]).mean())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 512), ("channels", 2048), ("outputs", 256), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    print("| growth, where, weight | " + " | ".join(CASTS) + " |")
    print("|" + " --- |" * (len(CASTS) + 1))
    for case, x, w, outliers in cases(given.tokens, given.channels, given.outputs):
        found = measure(x, w, outliers)
        print(f"| {case} | " + " | ".join(f"{o:.1f} · {r:.1f}" for o, r in found.values()) + " |", flush=True)
    bf16 = [trained("", seed) for seed in range(given.seeds)]
    gaps = [[trained(name, seed) / bf16[seed] - 1 for seed in range(given.seeds)] for name in CASTS]
    print("| trained: held-out loss to BF16's | " + " | ".join(f"{min(g):+.2%} … {max(g):+.2%}" for g in gaps) + " |")


if __name__ == "__main__":
    main()
