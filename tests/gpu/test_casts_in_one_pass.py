"""Casts in one pass on a GPU: kernels against their reference, gradients of a model beside those of two passes."""

from __future__ import annotations

import one_pass_casts
import pytest
import torch
from one_pass_casts import CASES
from torch import Tensor, nn

import fp8compile
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.passes.regions import one_pass_casts as formation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("format", "sums"), [("e4m3", True), ("e5m2", False)])
def test_kernels_agree_with_the_reference(case: str, format: str, sums: bool) -> None:
    a, b = (x.cuda() for x in CASES[case])
    actual, expected = one_pass_casts.run(a, b, "cuda", format, sums)
    assert all(map(one_pass_casts.equal, actual[:3], expected[:3]))
    if sums:
        torch.testing.assert_close(actual[3].sum(0), expected[3].sum(0), rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("outlier", [0.0, 1e4, float("inf")])
def test_large_tensors(outlier: float) -> None:
    """In the tiles that are chosen for them, and not a whole number of tiles."""
    rows, cols = 8200, 4160
    a, b = (torch.randn(rows, cols, device="cuda").bfloat16() for _ in range(2))
    a[100, 3] += outlier
    sample = one_pass_casts.sample_of(rows, cols)
    (pieces,) = generated.launch(sample, choose_schedule.choose(sample), [a, b], [])
    region = one_pass_casts.casts_of(rows, cols, len(pieces))
    data, transposed, scale = generated.launch(region, choose_schedule.choose(region), [a, b, pieces], [])
    x = a.float() * b.float()
    predicted = x[8::16].abs().amax() * 8 / 448
    if outlier == 0:
        assert predicted <= scale < 2 * predicted
        assert torch.log2(scale) % 1 == 0
    else:
        assert torch.equal(scale[0], x.abs().amax() / torch.tensor(448.0, device="cuda"))
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert one_pass_casts.equal(data, codes)
    assert one_pass_casts.equal(transposed, codes.t())


class Gated(nn.Module):
    """A SwiGLU, and a GELU with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(512, 2048, bias=False), nn.Linear(512, 2048, bias=False)
        self.down = nn.Linear(2048, 512, bias=False)
        self.wide, self.narrow = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


@pytest.mark.parametrize("loss_scale", [1.0, 1e-6])
def test_gradients_are_as_near_to_bf16_as_those_of_two_passes(loss_scale: float) -> None:
    torch.manual_seed(0)
    model = Gated().cuda().bfloat16()
    x = torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(8192, 1, device="cuda") ** 8  # tokens of very different weight

    def gradients(run: nn.Module) -> list[Tensor]:
        model.zero_grad()
        ((run(x).float().square() * weights).mean() * loss_scale).backward()
        return [p.grad.float() for p in model.parameters() if p.grad is not None]

    exact = gradients(model)
    noise: list[list[float]] = []
    kernels: list[int] = []
    for one_pass in (False, True):
        torch.compiler.reset()
        options = {"select": "all", "strict": True, "one_pass_casts": one_pass}
        run = torch.compile(model, backend="fp8", options=options)
        found = gradients(run)
        again = gradients(run)
        assert all(map(torch.equal, found, again))  # nothing is kept from one step to the next
        noise.append([float((g - e).norm() / e.norm()) for g, e in zip(found, exact, strict=True)])
        rows = [k for plan in fp8compile.last_compile().plans for k in plan.kernels]
        kernels.append(sum("is_predicted" in " ".join(k.operations) for k in rows))
    assert kernels[0] == 0
    assert kernels[1] >= 2  # a repair behind each activation's backward, at least
    assert all(one < 1.1 * two + 0.002 for two, one in zip(*noise, strict=True)), noise


def test_a_wrong_prediction_in_training_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token that no sample has, whose gradient is 10,000 times that of all others."""
    monkeypatch.setattr(formation, "LEAST", 1 << 20)
    torch.manual_seed(0)
    model = Gated().cuda().bfloat16()
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    weights = torch.ones(4096, 1, device="cuda")
    weights[1000] = 1e4
    found = []
    for options in (None, {"one_pass_casts": False}, {"one_pass_casts": True}):
        torch.compiler.reset()
        model.zero_grad()
        run = model if options is None else torch.compile(model, backend="fp8", options={"select": "all", **options})
        (run(x).float().square() * weights).mean().backward()
        found.append([p.grad.float() for p in model.parameters() if p.grad is not None])
    exact, two, one = found
    for e, a, b in zip(exact, two, one, strict=True):
        assert (b - e).norm() <= 1.05 * (a - e).norm() + 1e-3 * e.norm()
