"""What backward unpacks for matmuls that stay in BF16: which activations, how long it takes, and what it decides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from joint import joint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import devices
from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.core.matmul_node import MatmulNode
from fp8compile.passes.matmul import host_costs, matmul_costs, select_matmuls
from fp8compile.passes.matmul.grouped_matmuls import casts_of
from fp8compile.passes.matmul.roles import find_roles
from fp8compile.passes.matmul.unpack_costs import Unpacked, find_unpacked
from fp8compile.plan.reasons import Reason
from fp8compile.plan.rows import BF16, FP8, Matmul

IS_SHORTER = host_costs.is_shorter
ROWS, WIDTH, HIDDEN = 32, 64, 128
# A byte a nanosecond, and a launch is free.
DEVICE = devices.Device(
    "test", True, bf16=1.0, fp8_tensor=2.0, fp8_row=2.0, fp8_block=2.0, fp8_group=2.0, casts=1e-3, launch=0.0,
    blockwise=True,
)  # fmt: skip


class Feedforward(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=dtype)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Three(nn.Module):
    """Three layers that read one activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.many = nn.ModuleList(nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return torch.cat([layer(h) for layer in self.many])


class LowRank(nn.Module):
    """Two layers with nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False, dtype=torch.bfloat16)
        self.second = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Attention(nn.Module):
    """One head, by an attention of torch or by matmuls."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.bfloat16)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 1, ROWS, 3 * WIDTH).split(WIDTH, -1)
        if self.fused:
            return self.out(F.scaled_dot_product_attention(q, k, v))
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def unpacked(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: object
) -> tuple[list[Unpacked], Compilation]:
    c = joint(model, torch.randn(ROWS, WIDTH, dtype=dtype), **{"save_min_bytes": 0, **options}).compilation
    c.device = DEVICE
    canonicalize.run(c)
    return find_unpacked(c, [(m, casts_of(m, c.options.recipe)) for m in find_roles(c)]), c


def milliseconds(nanoseconds: int) -> object:
    return pytest.approx(nanoseconds * 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_computed_is_written_again(dtype: torch.dtype) -> None:
    """The input of the model is kept as it is, and weights are."""
    (found,), _ = unpacked(Feedforward(dtype), dtype)
    (reader,) = found.readers
    assert (reader.role, reader.layer.k) == ("grad_weight", HIDDEN)
    assert found.milliseconds(set()) == milliseconds((1 + dtype.itemsize) * ROWS * HIDDEN)
    assert found.milliseconds({reader}) == 0


@pytest.mark.parametrize(("recipe", "written"), [("tensorwise", 1), ("rowwise", 0)])
def test_what_a_matmul_computed_is_cast_as_well(recipe: str, written: int) -> None:
    """Unless the layer that reads it casts it: to keep it, if each row has its own scale."""
    (found,), _ = unpacked(LowRank(), recipe=recipe)
    (reader,), (caster,) = found.readers, found.casters
    assert caster is reader.layer
    elements = ROWS * HIDDEN
    assert found.milliseconds(set()) == milliseconds((3 + 3) * elements)
    assert found.milliseconds({caster}) == milliseconds((3 + written) * elements)
    assert found.milliseconds({caster, reader}) == 0


@pytest.mark.parametrize(("fused", "options"), [(True, {}), (True, {"save": "fp8_with_qk"}), (False, {})])
def test_attention_reads_what_is_rounded_for_it_and_by_matmuls_all_that_it_is_made_of(
    fused: bool, options: Any
) -> None:
    """Values; queries, keys and its own output if they may be rounded. Matmuls read q, k, v, weights and output."""
    found, _ = unpacked(Attention(fused), **options)
    each = milliseconds(3 * ROWS * WIDTH)
    others = [each] * (3 if options else 0) if fused else [milliseconds(3 * ROWS * ROWS), each, each, each]
    assert sorted(x.backward for x in found) == [*others, each]
    assert all(x.always == fused for x in found)


class Changed(nn.Module):
    """A model that changes something about the activation between two layers."""

    def __init__(self, change: str) -> None:
        super().__init__()
        hidden = 100 if change == "rows_of_100" else HIDDEN
        self.change = change
        self.up = nn.Linear(WIDTH, hidden, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(hidden, WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        if self.change == "checkpointed":
            return checkpoint(lambda x: self.down(F.gelu(self.up(x))), x, use_reentrant=False)
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("change", ["rows_of_100", "checkpointed", "none"])
def test_what_is_not_kept_in_fp8_is_not_unpacked(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no group divides, and what is computed again."""
    seen: list[list[Unpacked]] = []

    def noted(c: Compilation) -> list[MatmulNode]:
        found, before, c.device = find_roles(c), c.device, DEVICE
        seen.append(find_unpacked(c, [(m, casts_of(m, c.options.recipe)) for m in found]))
        c.device = before
        return found

    monkeypatch.setattr(select_matmuls, "find_roles", noted)
    options = {"select": "all", "save_min_bytes": 0, "executor": "eager", "strict": True}
    run = torch.compile(Changed(change), backend="fp8", options=options)
    run(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
    (found,) = seen
    saved = [row for row in fp8compile.compiles()[-1].saved if row.shape[-1:] in ((100,), (HIDDEN,))]
    kept = [row for row in saved if row.form.startswith("e4m3")]
    assert (len(found), bool(kept)) == ((1, True) if change == "none" else (0, False))


def test_what_is_small_or_kept_by_request_is_not_unpacked() -> None:
    assert unpacked(Feedforward(), save_min_bytes=2 * ROWS * HIDDEN)[0]
    assert not unpacked(Feedforward(), save_min_bytes=2 * ROWS * HIDDEN + 1)[0]
    assert not unpacked(Feedforward(), save="bf16")[0]


# ---- what it decides ------------------------------------------------------------------------------------------------


def planned(model: nn.Module, monkeypatch: pytest.MonkeyPatch, device: devices.Device) -> dict[tuple[str, int], Matmul]:
    """Return the rows of the plan by role, and by the size that the layer contracts."""
    monkeypatch.setattr(matmul_costs.Costs, "milliseconds", lambda _, matmul, role: (1.0, 1.0 - GAINS[matmul.role]))
    c = joint(model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16), save_min_bytes=0, select="profitable").compilation
    c.device = device
    canonicalize.run(c)
    select_matmuls.run(c)
    return {(m.role, m.layer.k): m.row() for m in c.matmuls}


def decided(model: nn.Module, monkeypatch: pytest.MonkeyPatch, device: devices.Device) -> dict[tuple[str, int], str]:
    return {name: row.decision for name, row in planned(model, monkeypatch, device).items()}


# Milliseconds that a matmul gains in FP8, before what is unpacked.
GAINS = {"output": 0.02, "grad_input": 0.02, "grad_weight": -0.01}


def test_a_grad_weight_that_spares_more_than_it_loses_is_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    spared = 3 * ROWS * HIDDEN * 1e-6
    assert spared > -GAINS["grad_weight"]
    found = decided(Feedforward(), monkeypatch, DEVICE)
    assert found == {
        ("output", WIDTH): FP8, ("output", HIDDEN): FP8, ("grad_input", HIDDEN): FP8,
        ("grad_weight", HIDDEN): FP8, ("grad_weight", WIDTH): BF16,
    }  # fmt: skip
    rows = planned(Feedforward(), monkeypatch, DEVICE)
    remarked = [name for name, row in rows.items() if Reason.UNPACKED in row.remarks]
    assert remarked == [("grad_weight", HIDDEN)]
    fast = dataclasses.replace(DEVICE, casts=1.0)
    assert decided(Feedforward(), monkeypatch, fast)["grad_weight", HIDDEN] == BF16


def test_it_stays_where_a_grad_input_leaves_that_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both together would leave for more if nothing had to be unpacked."""
    monkeypatch.setitem(GAINS, "grad_input", -0.005)
    found = decided(Feedforward(), monkeypatch, DEVICE)
    assert found["grad_input", HIDDEN] == BF16
    assert found["grad_weight", HIDDEN] == FP8


@pytest.mark.parametrize(("loss", "decision"), [(0.003, FP8), (0.005, BF16)])
def test_what_is_unpacked_once_is_spared_once(loss: float, decision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three matmuls that read it may lose so much together, and not each."""
    spared = 3 * ROWS * HIDDEN * 1e-6
    assert (3 * loss < spared) == (decision == FP8)
    assert loss < spared
    monkeypatch.setitem(GAINS, "grad_weight", -loss)
    assert decided(Three(), monkeypatch, DEVICE)["grad_weight", HIDDEN] == decision


def test_a_step_that_unpacks_for_longer_than_it_gains_is_bf16s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which four matmuls gain, and attention by matmuls does not; a GPU that unpacks in no time gains."""
    monkeypatch.setattr(host_costs, "is_shorter", IS_SHORTER)
    monkeypatch.setattr(host_costs, "host_launches", lambda: False)
    slow, fast = (dataclasses.replace(DEVICE, casts=casts) for casts in (1e-4, 1.0))
    rows = planned(Attention(fused=False), monkeypatch, slow)
    assert rows["output", WIDTH].decision == BF16
    assert "of it to unpack" in rows["output", WIDTH].reason
    assert decided(Attention(fused=False), monkeypatch, fast)["output", WIDTH] == FP8
