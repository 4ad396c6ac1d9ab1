"""Where a mixture's tokens go: the share of them that each expert of a layer meets, and how trainings differ in it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mixture import Experts

Shares = Sequence[Sequence[float]]  # of each layer's experts


@contextmanager
def counted(model: nn.Module) -> Iterator[Callable[[], Shares]]:
    """Count the tokens that experts meet while the model runs as it is; yields what returns their shares."""
    met: list[Tensor] = []

    def note(layer: Experts, number: int) -> Callable[..., None]:
        def hook(router: nn.Module, given: Any, scores: Tensor) -> None:
            chosen = scores.float().softmax(-1).topk(layer.top_k)[1].flatten()
            met[number] += torch.bincount(chosen, minlength=layer.experts).to(met[number])

        return hook

    layers = [module for module in model.modules() if isinstance(module, Experts)]
    met += [torch.zeros(layer.experts, dtype=torch.float64) for layer in layers]
    hooks = [layer.router.register_forward_hook(note(layer, n)) for n, layer in enumerate(layers)]
    try:
        yield lambda: [(m / m.sum()).tolist() for m in met]
    finally:
        for hook in hooks:
            hook.remove()


def moved(a: Shares, b: Shares) -> float:
    """Return the least share of tokens that can meet other experts in one training than in another: mean of layers."""
    return statistics.mean(
        sum(abs(x - y) for x, y in zip(*layers, strict=True)) / 2 for layers in zip(a, b, strict=True)
    )


def table(runs: Mapping[tuple[str, int], Shares]) -> str:
    """Return, for people, the routing of runs by (configuration, seed); "" where none has experts."""
    lines = [f"{'routing':<25}{'seeds':>5}{'least':>9}{'most':>9}{'moved beside BF16':>20}"]
    for name in dict.fromkeys(name for name, _ in runs):
        mine = {seed: shares for (other, seed), shares in runs.items() if other == name}
        least, most = (statistics.mean(pick(layer) for s in mine.values() for layer in s) for pick in (min, max))
        moves = [moved(shares, runs["BF16", seed]) for seed, shares in mine.items() if ("BF16", seed) in runs]
        text = f"{statistics.mean(moves):.1%}" if moves and name != "BF16" else "-"
        lines.append(f"{name:<25}{len(mine):>5}{least:>9.1%}{most:>9.1%}{text:>20}")
    return "\n".join(lines) if runs else ""
