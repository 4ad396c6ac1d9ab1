"""Causal attention: torch's kernels in BF16, and what a forward in FP8 would gain.

    python -m benchmarks.micro.attention --json FILE      one H100 or H200
    python -m benchmarks.micro.attention --tiny           tiny sizes, on a CPU: no times, and torch's kernel alone

Heads of Llama-3-8B (32 of queries, 8 of keys and values, 128 features), random data. Milliseconds are medians of device
times; TFLOP/s count the half of the scores that is not masked, and 2.5 times as much backward.

cuDNN, Flash    torch's own, told of groups of heads
Triton          the forward below, of the best of three tiles: in BF16, and with payloads of E4M3 for queries, keys,
                values and probabilities, whose scale is one; casts of the inputs are not counted
error           |output − cuDNN's| / |cuDNN's| of these, in norms; a tile that is further off than WRONG is left out

`--help` and runs.py have the other options.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.harness import runs
from benchmarks.harness.columns import Column, Row, figure
from benchmarks.harness.measuring import device_milliseconds, intervals
from benchmarks.harness.processes import Case
from benchmarks.harness.runs import Benchmark

QUERIES, KEYS, WIDTH = 32, 8, 128
SIZES = {"2 × 8192": (2, 8192), "1 × 16384": (1, 16384), "1 × 32768": (1, 32768)}
KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "Flash": SDPBackend.FLASH_ATTENTION}
TILES = ((64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 3))  # queries and keys of a tile, warps, stages
WRONG = 0.1  # more than rounding to E4M3 costs
SLEEP = 2_000_000  # cycles, about a millisecond: longer than the host takes to queue a launch
Tried = tuple[float, float, tuple[int, ...]]  # milliseconds, error and tile


# ---- a forward in Triton --------------------------------------------------------------------------------------------


@triton.jit
def walk(total, rest, largest, queries, keys, values, row_k, row_v, start, end, rows, scale,
         TILE: tl.constexpr, FP8: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip  # noqa: N803
    """Join tiles of keys and values from `start` to `end` onto a tile of outputs, with sums and maxima of its rows."""
    for first in range(start, end, TILE):
        scores = tl.dot(queries, tl.trans(keys.load([row_k + first, 0]))) * scale
        if MASKED:
            columns = first + tl.arange(0, TILE)
            scores = tl.where(rows[:, None] >= columns[None, :], scores, -1e6)
        now = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.math.exp2(scores - now[:, None])
        faded = tl.math.exp2(largest - now)
        rest = rest * faded + tl.sum(shares, 1)
        total = total * faded[:, None]
        if FP8:
            tile = tl.trans(values.load([row_v, first]))
        else:
            tile = values.load([row_k + first, 0])
        total = tl.dot(shares.to(tile.dtype), tile, total)
        largest = now
    return total, rest, largest


@triton.jit
def forward(q, k, v, out, length, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,  # noqa: N803
            ROWS: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr):  # fmt: skip  # noqa: N803
    """Attend from a tile of queries to all keys that lie before them; the longest rows first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    shared = head // HEADS * (HEADS // GROUP) + head % HEADS // GROUP
    row_k, row_v = shared * length, shared * WIDTH
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    queries = q.load([head * length + first, 0])
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    rest, largest = tl.zeros([ROWS], tl.float32), tl.full([ROWS], -1e30, tl.float32)
    total, rest, largest = walk(
        total, rest, largest, queries, k, v, row_k, row_v, 0, first, rows, scale, TILE, FP8, False
    )
    total, rest, largest = walk(
        total, rest, largest, queries, k, v, row_k, row_v, first, first + ROWS, rows, scale, TILE, FP8, True
    )
    out.store([head * length + first, 0], (total / rest[:, None]).to(tl.bfloat16))


def attend(q: Tensor, k: Tensor, v: Tensor, tile: tuple[int, int, int, int], out: Tensor) -> None:
    """Fill `out` [b, h, s, d] in BF16; q, k, v [b, h, s, d] in BF16 or E4M3, v of E4M3 as [b, h, d, s].

    The queries of a tile must be a multiple of its keys, and s of both.
    """
    rows, keys, warps, stages = tile
    b, heads, length, width = q.shape
    is_fp8 = q.dtype == torch.float8_e4m3fn
    of_values = [width, keys] if is_fp8 else [keys, width]

    def described(x: Tensor, block: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.reshape(-1, x.shape[-1]), block)

    how: Any = {
        "HEADS": heads, "GROUP": heads // k.shape[1], "WIDTH": width, "ROWS": rows, "TILE": keys, "FP8": is_fp8,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    given = described(q, [rows, width]), described(k, [keys, width]), described(v, of_values)
    forward[(length // rows, b * heads)](
        *given, described(out, [rows, width]), length, width**-0.5 / math.log(2), **how
    )


# ---- what is measured -----------------------------------------------------------------------------------------------


def inputs(batch: int, length: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [b, h, s, d] of random data, in BF16."""
    heads = (QUERIES, KEYS, KEYS)
    return tuple(torch.randn(batch, n, length, width, device=device).bfloat16() for n in heads)  # type: ignore[return-value]


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by torch, told of groups of heads."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def measure(case: Case) -> dict[str, Any]:
    """Return milliseconds and TFLOP/s of one kernel at one size, and its error. Raises where no tile is right."""
    if case.tiny:
        q, k, v = inputs(1, 64, 32, case.device)
        return {"ms": statistics.median(intervals(lambda: by_torch(q, k, v), 2, "cpu"))}
    batch, length = SIZES[case.model]
    q, k, v = inputs(batch, length, WIDTH, case.device)
    tera = 2e-9 * batch * QUERIES * length**2 * WIDTH  # 4 operations, of half of the scores; ms to TFLOP/s
    with sdpa_kernel(KERNELS.get(case.system, SDPBackend.CUDNN_ATTENTION)):
        if case.system in KERNELS:
            return _both_directions(q, k, v, tera)
        right = by_torch(q, k, v).float()
    if case.system == "Triton FP8":
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v.transpose(-1, -2).contiguous()))
    out = torch.empty(right.shape, dtype=torch.bfloat16, device=case.device)
    found = []
    for tile in TILES:
        out.fill_(torch.nan)
        ms = device_milliseconds(lambda tile=tile: attend(q, k, v, tile, out), 15, SLEEP)
        found.append((ms, ((out.float() - right).norm() / right.norm()).item(), tile))
    ms, error, tile = fastest(found)
    return {"ms": ms, "rate": tera / ms, "error": error, "tile": str(tile)}


def fastest(found: Sequence[Tried]) -> Tried:
    """Return the fastest of the tiles that were tried whose output is right. Raises RuntimeError where none is."""
    right = [tried for tried in found if tried[1] < WRONG]  # which NaN is not
    if not right:
        raise RuntimeError(f"no tile gives what cuDNN does: {found}")
    return min(right)


def _both_directions(q: Tensor, k: Tensor, v: Tensor, tera: float) -> dict[str, Any]:
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = by_torch(*leaves)
    gradient = torch.randn_like(out)
    with torch.no_grad():
        ms = device_milliseconds(lambda: by_torch(*leaves), 15, SLEEP)

    def differentiate() -> object:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    backward = device_milliseconds(differentiate, 15, SLEEP)
    return {"ms": ms, "rate": tera / ms, "backward_ms": backward, "backward_rate": 2.5 * tera / backward}


COLUMNS: tuple[Column, ...] = (
    figure("forward, ms", "ms", ".3f"),
    figure("TFLOP/s", "rate", ".0f"),
    figure("backward, ms", "backward_ms", ".3f"),
    figure("TFLOP/s backward", "backward_rate", ".0f"),
    figure("error", "error", ".4f"),
)
BENCHMARK = Benchmark(
    "attention",
    {size: [*KERNELS, "Triton BF16", "Triton FP8"] for size in SIZES},
    measure,
    COLUMNS,
    baseline="cuDNN",
    axes=(("ms", "forward, ms"), ("rate", "TFLOP/s")),
    alone=False,
)


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Print the table; see the top of this file."""
    return runs.main(BENCHMARK, __doc__, arguments)


if __name__ == "__main__":
    main()
