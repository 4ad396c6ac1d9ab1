"""Grouped matmuls: the experts of a mixture. Tokens lie in E groups that end at `offs`, each group has its own weight.

    output       x[T, K] @ w[E, K, N]        row t of group e times w[e]
    grad_input   dy[T, N] @ wᵀ[E, N, K]      likewise
    grad_weight  dyᵀ[N, T] @ x[T, K]         [E, N, K]: what is contracted is the tokens of a group

Which of them FP8 units can do, and with which scales. They are rewritten like others
(`passes/matmul/quantize_matmuls.py`).

Rows. torch's kernel takes E4M3 with a scale a token and one a column of each expert's weight, and nothing else, so that
is what every recipe means here. It is also what is sound: nobody writes the rows behind the last group (where tokens of
other ranks' experts end up), and a scale of the whole tensor would be made of whatever lies there.

grad_weight stays as it is: FP8 units read what they contract in pieces of 16, so each group would have to begin at a
multiple of 16 tokens and none could be empty. Only the data knows, and the kernel stops the program where it is not so.
(All this is what torch's source says, aten/src/ATen/native/cuda/GroupMMCommon.cuh; tests/gpu/test_grouped.py tries it,
and `kernels/matmul/check_grouped.py` tries the kernel itself, once in a process, before a plan relies on it.)
"""

from __future__ import annotations

from dataclasses import replace

from fp8compile.devices import Device
from fp8compile.formats import ROW
from fp8compile.kernels.matmul.check_grouped import why_it_fails
from fp8compile.passes.core.compilation import value
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.plan.reasons import Reason, Why
from fp8compile.recipe import Cast, Recipe, Role

GROUPED = "grouped"  # the kind of such a matmul
MOST_GROUPS = 1023  # torch's kernel has one thread a group to prepare them
RAGGED = "contracts groups of tokens: FP8 needs multiples of 16, and only the data knows"


def casts_of(matmul: MatmulNode, recipe: Recipe) -> Role | None:
    """Return how `recipe` runs the matmul; None: in its own precision. A grouped one takes scales of rows."""
    role = recipe.role(matmul.role) if matmul.role != "other" else None
    if role is None or matmul.kind != GROUPED:
        return role
    return replace(role, left=_by_rows(role.left), right=_by_rows(role.right))


def _by_rows(cast: Cast) -> Cast:
    return Cast(ROW, power_of_two=cast.power_of_two)


def takes_rows_alone(matmul: MatmulNode, recipe: Recipe) -> bool:
    """Return True if the casts of a matmul are not the recipe's own."""
    return recipe.role(matmul.role) != casts_of(matmul, recipe)


def why_not_grouped(matmul: MatmulNode, role: Role | None, device: Device) -> Why | None:
    """Return why FP8 units cannot run a grouped matmul with these casts; None if they can."""
    text = _why_not_grouped(matmul, role)
    if text:
        return Why(Reason.GROUPED, text)
    if device.emulated:
        return None
    text = why_it_fails(value(matmul.pair[0]).device) if device.grouped else f"{device.name} has no grouped FP8 matmul"
    return Why(Reason.DEVICE, text) if text else None


def _why_not_grouped(matmul: MatmulNode, role: Role | None) -> str:
    if value(matmul.pair[1]).dim() != 3:
        return RAGGED
    if role is not None and {(c.granularity, c.format) for c in (role.left, role.right)} != {(ROW, Cast().format)}:
        return f"grouped FP8 units take E4M3 by rows, not {role.left} × {role.right}"
    if isinstance(matmul.groups, int) and matmul.groups > MOST_GROUPS:
        return f"{matmul.groups} groups: grouped FP8 units take {MOST_GROUPS}"
    return ""
