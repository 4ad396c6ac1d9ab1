"""Grouped matmuls: the experts of a mixture. Tokens lie in E groups that end at `offs`, each group has its own weight.

    output       x[T, K] @ w[E, K, N]        row t of group e times w[e]
    grad_input   dy[T, N] @ wᵀ[E, N, K]      likewise
    grad_weight  dyᵀ[N, T] @ x[T, K]         [E, N, K]: what is contracted is the tokens of a group

Which of them FP8 units can do, and with which scales. They are rewritten like others
(`passes/matmul/quantize_matmuls.py`).

Rows. torch's kernel takes E4M3 with a scale a token and one a column of each expert's weight, and nothing else, so that
is what every recipe means of tokens. It is also what is sound: nobody writes the rows behind the last group (where
tokens of other ranks' experts end up), and a scale of the whole tensor would be made of whatever lies there.

Weights have scales of rows in output, where one read finds and casts a row. grad_input needs them turned: the amaxes of
its rows would take a read of their own. Where the recipe has one scale a tensor, each expert has one there, the largest
of the amaxes that output has found.

grad_weight contracts tokens, which FP8 units read in pieces of 16: each group has to begin at a multiple of 16, and
none may be empty, or the kernel stops the program. Only the data knows where groups end. So its casts write every group
from such a place on, with zeros behind it, into buffers that suffice whatever the groups (`fp8::grouped_cast`); rows
are then columns of a group of tokens. Where the recipe has scales of rows, groups or blocks, each such column has one
of its own, and all tokens are read for their amaxes first. Where it has one of a tensor, all columns of a group have
one: the largest of the amaxes of tokens, which output and grad_input have found. These are casts of their own: a matmul
that reads the same tensor by rows of tokens casts it once more. Those of gate and up share that of their input, and
backward may be given it in place of the input, in half the bytes (`passes/save/min_cut.py`).
(All this is what torch's source says, aten/src/ATen/native/cuda/GroupMMCommon.cuh; tests/gpu/test_grouped.py tries it,
and `kernels/matmul/check_grouped.py` tries the kernel itself, once in a process, before a plan relies on it.)
"""

from __future__ import annotations

from collections.abc import Collection

from fp8compile.devices import Device
from fp8compile.formats import E4M3, ROW, TENSOR, Granularity
from fp8compile.kernels.matmul.check_grouped import why_contractions_fail, why_it_fails
from fp8compile.passes.core.compilation import value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.core.sizes import hint
from fp8compile.plan.reasons import Reason, Why
from fp8compile.recipe import Cast, Recipe, Role

GROUPED = "grouped"  # the kind of such a matmul
ROWS, ROWS_OR_ONE = (ROW,), (ROW, TENSOR)  # one: a scale an expert
FAST = ("output", "grad_input")  # sum over weights, of both signs; grad_weight sums over tokens, which may have one
LARGE, SMALL = 2048, 128  # two sizes of a group's matmul that are large, or one of its product's that is small
LONG = 2700  # tokens of a group that are contracted at the full rate
SHARE_OF_SMALL_TILES = 1 / 3
MOST_GROUPS = 1023  # torch's kernel has one thread a group to prepare them


def casts_of(matmul: MatmulNode, recipe: Recipe) -> Role | None:
    """Return how `recipe` runs the matmul; None: in its own precision.

    A grouped one takes scales of rows; grad_input's weights and what grad_weight contracts may have one an expert
    ("tensor"). Where the recipe leaves it open and it sums over weights, it accumulates fast: torch's kernel takes up
    to three times as long otherwise (`share_of_rate`), longer than in BF16.
    """
    role = recipe.role(matmul.role) if matmul.role != "other" else None
    if role is None or matmul.kind != GROUPED:
        return role
    fast = matmul.role in FAST if role.fast_accumulation is None else role.fast_accumulation
    left, right = _taken(matmul)
    return Role(_nearest(role.left, left), _nearest(role.right, right), fast)


def _taken(matmul: MatmulNode) -> tuple[tuple[Granularity, ...], tuple[Granularity, ...]]:
    """Return the granularities of both operands that a grouped matmul may have."""
    return (ROWS_OR_ONE if matmul.contracts_groups else ROWS, ROWS if matmul.role == "output" else ROWS_OR_ONE)


def _nearest(cast: Cast, taken: Collection[Granularity]) -> Cast:
    granularity = cast.granularity if cast.granularity in taken else ROW
    return Cast(granularity, power_of_two=cast.power_of_two)


def share_of_rate(matmul: MatmulNode, role: Role) -> float:
    """Return the share of the device's rate for rows that a matmul has: all of it, but for grouped ones in small tiles.

    torch's kernel takes its tiles by the size of an average group (ScaledGroupMM.cu). In those for groups of middling
    size it is slow without fast accumulation: an H200 does 190 to 370 TFLOP/s for Qwen3-30B-A3B's experts, in any role,
    where it does 500 to 1170 with it, and 540 to 730 in BF16. Few tokens to contract keep it from its rate: 2048 of a
    group 680 to 950 TFLOP/s (`benchmarks/micro/grouped_matmul.py`).
    """
    if matmul.kind != GROUPED or role.fast_accumulation:
        return 1.0
    m, n, k = (hint(size) for size in (matmul.m, matmul.n, matmul.k))
    groups = max(1, hint(matmul.groups))
    m, k = (m, k // groups) if matmul.contracts_groups else (m // groups, k)
    if sorted((m, n, k))[1] < LARGE and min(m, n) > SMALL:
        return SHARE_OF_SMALL_TILES
    return min(1.0, k / LONG) if matmul.contracts_groups else 1.0


def takes_rows_alone(matmul: MatmulNode, recipe: Recipe) -> bool:
    """Return True if the casts of a matmul are not the recipe's own."""
    own, taken = recipe.role(matmul.role), casts_of(matmul, recipe)
    return own is not None and taken is not None and (own.left, own.right) != (taken.left, taken.right)


def why_not_grouped(matmul: MatmulNode, role: Role | None, device: Device) -> Why | None:
    """Return why FP8 units cannot run a grouped matmul with these casts; None if they can."""
    text = _why_not_grouped(matmul, role)
    if text:
        return Why(Reason.GROUPED, text)
    if device.emulated:
        return None
    fails = why_contractions_fail if matmul.contracts_groups else why_it_fails
    text = fails(value(matmul.pair[0]).device) if device.grouped else f"{device.name} has no grouped FP8 matmul"
    return Why(Reason.DEVICE, text) if text else None


def _why_not_grouped(matmul: MatmulNode, role: Role | None) -> str:
    if isinstance(matmul.groups, int) and matmul.groups > MOST_GROUPS:
        return f"{matmul.groups} groups: grouped FP8 units take {MOST_GROUPS}"
    operands = [] if role is None else [(role.left, _taken(matmul)[0]), (role.right, _taken(matmul)[1])]
    if all(c.granularity in taken and c.format == E4M3 and c.delayed is None for c, taken in operands):
        return ""
    also = {"grad_input": ", weights also with one scale an expert", "grad_weight": ", or with one scale an expert"}
    what = f"E4M3 by rows{also.get(matmul.role, '')}"
    return f"grouped FP8 units take {what}, not " + " × ".join(str(c) for c, _ in operands)
