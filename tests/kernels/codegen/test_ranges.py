"""What is known of values whatever the data, against values of random data; and what kernels make of it."""

from __future__ import annotations

import math

import pytest
import torch
from pipelines import look_after_stage
from torch import Tensor, nn

from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.spec import ranges
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.kernels.reference import region_reference
from fp8compile.passes.core.stages import HalfGraph, Stage
from fp8compile.passes.regions.region_graph import regions_of, spec_of

CONSTANT_ONE = Value("constant", (), (1.0,))
LOADS = (Value("load", (), (0,)), Value("load", (), (1,)))
# What is computed of two loaded values: a name, values after the loads, the least that the last of them can be.
CASES = [
    ("1 + exp(-x)", (Value("neg", (0,)), Value("exp", (2,)), CONSTANT_ONE, Value("add", (3, 4))), 1.0),
    ("x²", (Value("mul", (0, 0)),), 0.0),
    ("x · y", (Value("mul", (0, 1)),), -math.inf),
    ("|x| · exp(y)", (Value("abs", (0,)), Value("exp", (1,)), Value("mul", (2, 3))), 0.0),
    ("max(x, 1)", (CONSTANT_ONE, Value("maximum", (0, 2))), 1.0),
    ("min(|x|, 1)", (Value("abs", (0,)), CONSTANT_ONE, Value("minimum", (2, 3))), 0.0),
    (
        "FP16 of exp(x) + 1e-9",
        (Value("exp", (0,)), Value("constant", (), (1e-9,)), Value("add", (2, 3)), Value("round", (4,), ("float16",))),
        0.0,
    ),
    (
        "max(x, 0.5) where x < y, else exp(y)",
        (
            Value("lt", (0, 1)),
            Value("constant", (), (0.5,)),
            Value("maximum", (0, 3)),
            Value("exp", (1,)),
            Value("where", (2, 4, 5)),
        ),
        0.0,
    ),
    ("x - |y|", (Value("abs", (1,)), Value("sub", (0, 2))), -math.inf),
    (
        "1 + |x| / x²",
        (Value("abs", (0,)), Value("mul", (0, 0)), Value("div", (2, 3)), CONSTANT_ONE, Value("add", (4, 5))),
        1.0,
    ),
]


@pytest.mark.parametrize(("name", "more", "least"), CASES, ids=[name for name, *_ in CASES])
def test_no_value_lies_below_what_is_known_of_it(name: str, more: tuple[Value, ...], least: float) -> None:
    values = (*LOADS, *more)
    last = len(values) - 1
    known = ranges.ranges_of(values)[last]
    assert known.least == least
    assert ranges.is_normal(known) == (least >= ranges.SMALLEST_NORMAL)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(16, 64, generator=generator) * 100 for _ in range(2)]
    specs = tuple(Input(n, "float32", ((16, 64),), ((64, 1),)) for n in range(2))
    region = Region((Part(16, 64, specs, values, (Store(0, last, 64),)),), (Buffer((16, 64), "float32"),))
    schedule = choose_schedule.choose(region)
    result = region_reference.run(region, schedule, inputs, [])[0]
    assert not (result < least).any()
    assert not (known.unsigned and result.signbit().any())
    assert not (known.positive and (result <= 0).any())


def test_a_scale_of_other_elements_is_no_bound() -> None:
    """is_within holds for the amax of what is cast, and not for one that came from elsewhere."""
    own = (*LOADS, Value("row_amax", (0,)), Value("scale", (2,), ("e4m3",)))
    assert ranges.is_within((*own, Value("quantize", (0, 3), ("e4m3",))), 4)
    assert not ranges.is_within((*own, Value("quantize", (1, 3), ("e4m3",))), 4)
    assert not ranges.is_within((*LOADS, Value("quantize", (0, 1), ("e4m3",))), 2)


class Gated(nn.Module):
    def __init__(self, approximate: str, uses: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.approximate, self.uses = approximate, uses

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.uses == 2:  # a tanh that something else needs as well
            t = torch.tanh(h)
            return self.down((1 + t) * t)
        return self.down(nn.functional.gelu(h, approximate=self.approximate))


@pytest.mark.parametrize(
    ("approximate", "uses", "expected"),
    [("tanh", 1, "one_plus_tanh"), ("none", 1, "one_plus_erf"), ("none", 2, "tanh")],
)
def test_one_plus_a_sigmoid_is_one_operation(
    approximate: str, uses: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    def look(c: HalfGraph) -> None:
        found.update(v.op for node in regions_of(c.graph) for part in spec_of(node)[0].parts for v in part.values)

    look_after_stage(monkeypatch, Stage.HALF, look)
    torch.manual_seed(0)
    model = Gated(approximate, uses).bfloat16()
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    options = {"executor": "eager", "select": "all", "strict": True}
    with torch.no_grad():
        out = torch.compile(model, backend="fp8", options=options)(x).float()
        error = (out - model(x).float()).norm() / out.norm()
    assert expected in found
    assert found.isdisjoint({"tanh", "erf", "one_plus_tanh", "one_plus_erf"} - {expected})
    assert error < 0.06
