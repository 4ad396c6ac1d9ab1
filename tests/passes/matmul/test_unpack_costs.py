"""What backward unpacks for matmuls that stay in BF16: which activations, how long it takes, and what it decides."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from joint import joint
from torch import Tensor, nn

from fp8compile import devices
from fp8compile.passes.core.compilation import Compilation
from fp8compile.passes.matmul import canonicalize, host_costs, matmul_costs, select_matmuls
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

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, 1, ROWS, 3 * WIDTH).split(WIDTH, -1)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


def unpacked(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: object
) -> tuple[list[Unpacked], Compilation]:
    c = joint(model, torch.randn(ROWS, WIDTH, dtype=dtype), **{"save_min_bytes": 0, **options}).compilation
    c.device = DEVICE
    canonicalize.run(c)
    return find_unpacked(c, find_roles(c)), c


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


def test_what_a_matmul_computed_is_cast_as_well() -> None:
    """Unless the layer that reads it casts it."""
    (found,), _ = unpacked(LowRank())
    (reader,), (caster,) = found.readers, found.casters
    assert caster is reader.layer
    elements = ROWS * HIDDEN
    assert found.milliseconds(set()) == milliseconds((3 + 3) * elements)
    assert found.milliseconds({caster}) == milliseconds((3 + 1) * elements)
    assert found.milliseconds({caster, reader}) == 0


@pytest.mark.parametrize("fused", [True, False])
def test_attention_reads_its_values_and_by_matmuls_all_that_it_is_made_of(fused: bool) -> None:
    """No attention of torch is handed a rounded query or key. A matmul is: q, k, v and the weights."""
    found, _ = unpacked(Attention(fused))
    sizes = sorted(x.backward for x in found)
    each = milliseconds(3 * ROWS * WIDTH)
    assert sizes == ([each] if fused else [milliseconds(3 * ROWS * ROWS), each, each, each])
    assert all(x.always == fused for x in found)


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


def test_a_step_that_unpacks_for_longer_than_it_gains_is_bf16s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one matmul gains, and attention by matmuls does not; a GPU that unpacks in no time gains."""
    monkeypatch.setattr(host_costs, "is_shorter", IS_SHORTER)
    monkeypatch.setattr(host_costs, "host_launches", lambda: False)
    assert sum(x.milliseconds(set()) for x in unpacked(Attention(fused=False))[0]) > GAINS["output"]
    assert decided(Attention(fused=False), monkeypatch, DEVICE)["output", WIDTH] == BF16
    fast = dataclasses.replace(DEVICE, casts=1.0)
    assert decided(Attention(fused=False), monkeypatch, fast)["output", WIDTH] == FP8
