"""FP8 matmuls of few rows: a model that decodes one token of each sequence reads its weights, and that is all.

    out [M, N] = (a [M, K] · scale_a) @ (b [N, K] · scale_b)ᵀ + bias        M ≤ 64, scales of rows or of tensors

A tile of the weight's rows is the left operand of the matmul unit, and the few rows of `a` are its columns. Where the
weight has few tiles, K is split: programs of a tile leave partial sums, and the last that arrives adds them in their
order, so that results do not depend on who was last. `benchmarks/serving/inference.py` has what tokens take with it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import triton
import triton.language as tl

from fp8compile.formats import ceil_div

ARGUMENTS = ("a", "b", "scale_a", "scale_b", "bias", "out", "partial", "arrived")
WRITTEN = ARGUMENTS[5:]
COLUMNS, DEPTH = 64, 256  # rows of the weight, and elements of K, that a program multiplies at a time
WARPS, STAGES = 4, 4
PROGRAMS = 106  # at least, as far as K can be split: four fifths of the multiprocessors of an H100
MOST_PARTS = 16
EXACT = 128  # elements of K after which sums leave the matmul unit, whose own precision is less than FP32's


@triton.jit
def few_rows(
    a, b, scale_a, scale_b, bias, out, partial, arrived,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, IMPRECISE: tl.constexpr,  # noqa: N803
    ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, HAS_BIAS: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute one tile of columns of `out`, over one part of K. LANES: M rounded up to what the matmul unit takes."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.arange(0, LANES)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((COLUMNS, LANES), tl.float32)
    for first in tl.range(part * DEPTH, K, DEPTH * PARTS):
        here = first + k
        some, few = n[:, None] < N, m[None, :] < M
        if K % DEPTH != 0:
            some, few = some & (here[None, :] < K), few & (here[:, None] < K)
        weight = tl.load(b + n[:, None].to(tl.int64) * K + here[None, :], mask=some, other=0.0)
        rows = tl.load(a + m[None, :] * K + here[:, None], mask=few, other=0.0)
        total = tl.dot(weight, rows, total, max_num_imprecise_acc=IMPRECISE)
    is_mine = True
    if PARTS > 1:
        at = m[None, :] * (tl.num_programs(0) * COLUMNS) + n[:, None]
        stride = LANES * tl.num_programs(0) * COLUMNS
        tl.store(partial + part * stride + at, total)
        tl.debug_barrier()
        is_mine = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
        if is_mine:
            total = tl.zeros((COLUMNS, LANES), tl.float32)
            for other in tl.static_range(PARTS):
                total += tl.load(partial + other * stride + at, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_mine:
        scale = tl.load(scale_a + m * ROWS_A, mask=m < M, other=0.0)[None, :]
        scale = scale * tl.load(scale_b + n * ROWS_B, mask=n < N, other=0.0)[:, None]
        total = total * scale
        if HAS_BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + m[None, :] * N + n[:, None], total.to(tl.bfloat16), mask=(m[None, :] < M) & (n[:, None] < N))


@dataclass(frozen=True)
class Launch:
    """Describe the launch of a matmul of these sizes: what the kernel knows when it is compiled."""

    M: int
    N: int
    K: int
    PARTS: int
    IMPRECISE: int
    ROWS_A: int
    ROWS_B: int
    HAS_BIAS: bool
    LANES: int
    COLUMNS: int = COLUMNS
    DEPTH: int = DEPTH

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the numbers of programs: tiles of columns, parts of K."""
        return self.tiles, self.PARTS, 1

    @property
    def tiles(self) -> int:
        """Return how many counts `arrived` has: INT32, zero before and after."""
        return ceil_div(self.N, self.COLUMNS)

    @property
    def partial(self) -> int:
        """Return how many FP32 numbers `partial` has, of any value before."""
        return self.PARTS * self.LANES * self.tiles * self.COLUMNS if self.PARTS > 1 else 1

    @property
    def constants(self) -> dict[str, Any]:
        """Return the arguments that are constants of the kernel."""
        return asdict(self)


def launch_of(
    m: int, n: int, k: int, granularity_a: str, granularity_b: str, has_bias: bool, fast_accumulation: bool
) -> Launch:
    """Return how a matmul [m, k] @ [n, k]ᵀ is launched; granularities are "row" or "tensor"."""
    parts = 1
    while ceil_div(n, COLUMNS) * parts < PROGRAMS and 2 * parts * DEPTH <= k and parts < MOST_PARTS:
        parts *= 2
    imprecise = DEPTH if fast_accumulation else EXACT
    rows_a, rows_b = (int(granularity == "row") for granularity in (granularity_a, granularity_b))
    lanes = 1 << (max(m, 16) - 1).bit_length()
    return Launch(m, n, k, parts, imprecise, rows_a, rows_b, has_bias, lanes)
