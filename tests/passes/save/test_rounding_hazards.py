"""Which values backward may see rounded: a table of functions f in down(f(up(x))), and what FP8 does to gradients.

A reason in the table is that of the one activation that keeps its precision; none means that all are saved as FP8.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from saving import Step, check, compiled, gradients, is_fp8, noise, ratio, rounded, rows, step
from torch import Tensor, nn

from fp8compile.plan.rows import Saved

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
D, INNER, TOKENS = 64, 128, 64

# A gradient reads two rounded tensors (31.5 dB each: 28.5), through a function of degree three at most, which makes the
# error of what it reads three times larger (9.5 dB; f'' of x³ is 2 f' / x, weighted by the large values).
NEAR = 19.0


class Between(nn.Module):
    """down(f(up(x)))."""

    def __init__(self, f: Callable[[Tensor], Tensor], gain: float = 1.0, bias: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.f = nn.Linear(D, INNER), nn.Linear(INNER, D), f
        with torch.no_grad():
            self.up.weight.mul_(gain * math.sqrt(3))  # f reads values of standard deviation `gain`
            self.up.bias.add_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.f(self.up(x)))


class SideBySide(nn.Module):
    """Models that have nothing in common, compiled as one, each with an input and an output of its own."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(model(x) for model, x in zip(self.models, xs, strict=True))


class Found:
    """A training step saved as FP8, in BF16 and in FP32, and what was saved."""

    def __init__(self, model: Between, x: Tensor, got: Step, rows: list[Saved], offset: float = 0.0) -> None:
        self.model, self.x, self.got, self.rows = model, x, got, rows
        exact = copy.deepcopy(model).float()
        self.exact, self.bf16 = step(exact, exact, [x.float()], offset), step(model, model, [x], offset)

    @staticmethod
    def of(*functions: tuple[Callable[[Tensor], Tensor], dict[str, float]], offset: float = 0.0) -> list[Found]:
        """Of each function with what `Between` is told of it, in one compilation."""
        models = []
        for f, kind in functions:
            torch.manual_seed(0)
            models.append(Between(f, **kind).bfloat16())
        whole, x = SideBySide(models), noise(TOKENS, D)
        # regions keep FP32 between operators: without them what is not rounded to FP8 is what eager computes
        got, saved = step(whole, compiled(whole, kernels="inductor"), [x] * len(models), offset), rows()
        found = []
        for i, model in enumerate(models):
            prefix = f"models.{i}."
            own = {f"{kind} 0": got[f"{kind} {i}"] for kind in ("output", "input")}
            own |= {name.removeprefix(prefix): t for name, t in got.items() if name.startswith(prefix)}
            found.append(Found(model, x, own, [r for r in saved if f"{r.path}.".startswith(prefix)], offset))
        return found

    def near(self) -> None:
        check(self.got, self.exact, self.bf16, ratio(NEAR))


def pair(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """f of a tensor and itself in another order."""
    return lambda h: f(h, h.flip(-1))


def heads(h: Tensor) -> Tensor:
    return h.view(4, 16, 4, 32).transpose(1, 2)


def attention(h: Tensor) -> Tensor:
    q, k, v = heads(h), heads(h.roll(7, -1)), heads(h.flip(-1))
    return ((q @ k.transpose(-1, -2) / 32**0.5).softmax(-1) @ v).transpose(1, 2).reshape(TOKENS, INNER)


def table(x: Tensor) -> Tensor:
    return torch.arange(16.0, dtype=x.dtype) / 8


def temperature(h: Tensor, t: float) -> Tensor:
    """exp of a number that no constant folding knows."""
    return torch.exp(t * torch.ones_like(h[0, :1]).cumsum(0))


LOGITS = "in an exponent"
EXPONENT, ANGLE, DIVISOR = "in an exponent", "an angle", "divided by, and may round to zero"
COMPARED, RSQRT = "compared: rounding could turn the answer", "rsqrt of what may round to zero"
DIFFERENCE = "taken off another tensor: where they are near, only rounding would be left"
WIDE = "an exponential that is multiplied by another: small numbers in it count, and would be zeros"
EQ, ROUND = (f"read by {op}, whose answer rounding could turn" for op in ("eq", "round"))

ALL_FP8: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda h: F.relu(h).square(),
    "leaky_relu": F.leaky_relu,
    "prelu": lambda h: F.prelu(h, torch.tensor(0.2, dtype=h.dtype)),
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "arctangent": torch.atan,
    "hyperbolic_area": torch.asinh,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "softshrink": F.softshrink,
    "threshold": lambda h: F.threshold(h, 0.3, 0.0),
    "clamp": lambda h: h.clamp(-0.5, 0.7),
    "softmax": lambda h: h.softmax(-1),
    "softmax_by_hand": lambda h: (lambda e: e / e.sum(-1, keepdim=True))(torch.exp(h - h.amax(-1, keepdim=True))),
    "exp": torch.exp,
    "learned_scales": lambda h: (h * temperature(h, 0.7)) * temperature(h, 1.3) * h.sigmoid(),
    "expm1": torch.expm1,
    "exp2": torch.exp2,
    "power_of_two": lambda h: 2.0**h,
    "tan": lambda h: torch.tan(0.3 * h),
    "log_of_a_shifted_magnitude": lambda h: torch.log(h.abs() + 0.01),
    "log1p_of_a_magnitude": lambda h: torch.log1p(h.abs()),
    "reciprocal": lambda h: 1 / (0.2 + h.abs()),
    "reciprocal_of_itself": lambda h: 1 / h,
    "softsign": lambda h: h / (1 + h.abs()),
    "inverse_root": lambda h: h / torch.sqrt(h * h + 1),
    "inverse_root_by_rsqrt": lambda h: h * torch.rsqrt(h * h + 1),
    "unit_vectors": lambda h: h / h.norm(dim=-1, keepdim=True),
    "normalize": lambda h: F.normalize(h, dim=-1),
    "unit_sum": lambda h: h / h.abs().sum(-1, keepdim=True),
    "layer_norm": lambda h: F.layer_norm(h, (INNER,)),
    "rms_norm": lambda h: F.rms_norm(h, (INNER,)),
    "group_norm": lambda h: F.group_norm(h, 8),
    "batch_norm": lambda h: F.batch_norm(h, None, None, training=True) * (1 + h),
    "straight_through": lambda h: h + (torch.floor(h * 4) / 4 - h).detach(),
    "maximum_of_two": pair(torch.maximum),
    "larger_half": lambda h: torch.maximum(*h.repeat(1, 2).chunk(2, -1)),
    "where_positive": lambda h: torch.where(h > 0, h, 0.1 * h.square()),
    "times_positive": lambda h: h * (h > 0),
    "where_above": lambda h: torch.where(h > 0.37, h, 0.1 * h),
    "magnitude": torch.abs,
    "times_sign": lambda h: h * h.sign(),
    "largest_doubled": lambda h: torch.where(h == h.amax(-1, keepdim=True), h * 2, h * 0.5),
    "topk_gate": lambda h: torch.zeros_like(h).scatter(-1, h.topk(32, -1).indices, 1.0) * h,
    "add_topk": lambda h: h + h.topk(4, -1).values.sum(-1, keepdim=True),
    "add_argmax": lambda h: h + h.gather(-1, h.argmax(-1, keepdim=True)),
    "sort": lambda h: h.sort(-1).values,
    "median": lambda h: h - h.median(-1, keepdim=True).values,
    "cumulative_sum": lambda h: 0.2 * h.cumsum(-1),
    "cumulative_maximum": lambda h: h.cummax(-1).values,
    "looked_up": lambda h: h * table(h)[(h * 3).long().clamp(0, 15)],
    "buckets": lambda h: h * torch.bucketize(h, torch.tensor([-0.5, 0.0, 0.5], dtype=h.dtype)).to(h.dtype),
    "power_minus_one": lambda h: (h.abs() + 0.05) ** -1,
    "power_minus_half": lambda h: (h * h + 0.01) ** -0.5,
    "cube": lambda h: h**3,
    "root": lambda h: torch.sqrt(h * h + 0.01),
    "gated_by_chunk": lambda h: (lambda a, b: torch.cat([F.silu(a) * b] * 2, -1))(*h.chunk(2, -1)),
    "glu": lambda h: F.glu(h.repeat(1, 2)),
    "quotient": pair(lambda a, b: a / (b.square() + 0.1)),
    "unit_differences": pair(lambda a, b: F.normalize(a - b, dim=-1)),
    "attention": attention,
    "not_a_number": lambda h: torch.where(h.isnan(), 0, h * h),
    "sign_with_the_gradient_of_tanh": lambda h: (h.sign() - h.tanh()).detach() + h.tanh(),
}
KEPT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "gaussian_around_a_number": (lambda h: torch.exp(-((h - 0.5) ** 2)), "in an exponent"),
    "softplus": (F.softplus, COMPARED),
    "mish": (F.mish, COMPARED),
    "hardswish": (F.hardswish, COMPARED),
    "elu": (F.elu, EXPONENT),
    "log_sigmoid": (F.logsigmoid, EXPONENT),
    "log_softmax": (lambda h: h.log_softmax(-1), EXPONENT),
    "minus_logsumexp": (lambda h: h - h.logsumexp(-1, keepdim=True), EXPONENT),
    "hyperbolic_sine": (torch.sinh, EXPONENT),
    "sine": (torch.sin, ANGLE),
    "cosine": (torch.cos, ANGLE),
    "log_of_a_sigmoid": (lambda h: torch.log(torch.sigmoid(h)), DIVISOR),
    "gaussian": (lambda h: torch.exp(-h * h), EXPONENT),
    "gaussian_of_a_difference": (pair(lambda a, b: torch.exp(-((a - b) ** 2))), EXPONENT),
    "laplacian": (lambda h: torch.exp(-h.abs()), EXPONENT),
    "arcsine": (lambda h: torch.asin(0.9 * h.tanh()), RSQRT),
    "over_the_largest": (lambda h: h / h.abs().amax(-1, keepdim=True), EQ),
    "times_the_largest_token": (lambda h: h * h.amax(0, keepdim=True), EQ),
    "square_above": (lambda h: torch.where(h > 0.37, h.square(), h * h.square()), COMPARED),
    "times_rounded": (lambda h: h * torch.round(h), ROUND),
    "magnitude_to_the_half": (lambda h: h.abs() ** 0.5, DIVISOR),
    "deviation": (lambda h: h / h.std(-1, keepdim=True), EQ),
    "sinc": (torch.sinc, EQ),
    "angle_of_two": (pair(torch.atan2), EQ),
    "power_in_a_hyperbolic_tangent": (lambda h: h * torch.tanh(2.0 ** (9 * h)), EXPONENT),
    "product_with_difference": (pair(lambda a, b: a * (a - b)), DIFFERENCE),
    "difference_of_tokens": (lambda h: h * (h - h.roll(1, 0)), DIFFERENCE),
    "differences_of_pairs": (lambda h: (h[:8, None] - h[None, :8]).square().sum((0, 1)) * h, DIFFERENCE),
}


FUNCTIONS = ALL_FP8 | {name: f for name, (f, _) in KEPT.items()}
TOGETHER = 8  # in a compilation


@functools.cache
def batch(number: int) -> dict[str, Found]:
    names = list(FUNCTIONS)[number * TOGETHER : (number + 1) * TOGETHER]
    return dict(zip(names, Found.of(*((FUNCTIONS[name], {}) for name in names)), strict=True))


@functools.cache
def found_among(names: tuple[str, ...]) -> dict[str, Found]:
    """Some of `HAZARDS` and `SAFE`, compiled as one."""
    kinds = SAFE | {name: hazard for name, (hazard, _) in HAZARDS.items()}
    return dict(zip(names, Found.of(*(kinds[name] for name in names)), strict=True))


def found(name: str) -> Found:
    return batch(list(FUNCTIONS).index(name) // TOGETHER)[name]


def found_alone(f: Callable[[Tensor], Tensor], offset: float = 0.0, **kind: float) -> Found:
    return Found.of((f, kind), offset=offset)[0]


def activations(r: Found) -> list[Saved]:
    """Rows of activations between the layers: no masks, no indices, no statistics, not the model's input."""
    floats = [row for row in r.rows if "float" in row.dtype and not row.node.startswith("primals")]
    return [row for row in floats if math.prod(row.shape) >= TOKENS * D]


@pytest.mark.parametrize("name", ALL_FP8)
def test_all_of_it_is_saved_as_fp8(name: str) -> None:
    kept = activations(found(name))
    assert kept
    assert {row.form for row in kept if not is_fp8(row)} == set()


@pytest.mark.parametrize("name", KEPT)
def test_what_rounding_would_spoil_keeps_its_precision(name: str) -> None:
    if name == "log_sigmoid" and torch.__version__ < "2.13":
        pytest.skip("older releases of torch decompose it in another way, and another value is kept")
    kept = [row for row in activations(found(name)) if not is_fp8(row)]
    assert {row.reason for row in kept if row.reason != "made for backward alone"} == {KEPT[name][1]}
    assert kept[0].form == "bfloat16"


@pytest.mark.parametrize("name", [*ALL_FP8, *KEPT])
def test_gradients_are_near(name: str) -> None:
    found(name).near()


@pytest.mark.parametrize("name", [*ALL_FP8, *KEPT])
def test_the_forward_half_is_not_touched(name: str) -> None:
    r = found(name)
    assert r.got["output 0"].dtype == r.bf16["output 0"].dtype
    # Inductor's decompositions keep FP32 where eager rounds to BF16: 2^-9 of a value, seldom
    assert sqnr(r.bf16["output 0"], r.got["output 0"]) > 40


# Where the input of f is what is saved, backward is that of a model whose f reads the rounded input.
FROM_ITS_INPUT = [
    "silu", "gelu", "gelu_tanh", "leaky_relu", "prelu", "tanhshrink", "erf", "arctangent", "hyperbolic_area",
    "log_of_a_shifted_magnitude", "log1p_of_a_magnitude", "reciprocal", "softsign", "inverse_root",
    "times_positive", "magnitude", "times_sign", "power_minus_one", "power_minus_half", "cube", "root",
    "not_a_number", "sign_with_the_gradient_of_tanh",
]  # fmt: skip


@pytest.mark.parametrize("name", FROM_ITS_INPUT)
def test_backward_computes_from_what_was_rounded(name: str) -> None:
    r = found(name)
    assert [row.node.rstrip("_0123456789") for row in activations(r) if is_fp8(row)] == ["addmm"]
    for key, want in from_rounded(r).items():
        # both compute in BF16: the noise of either
        allowed = 4 * ratio(sqnr(r.exact[key], r.bf16[key])) + ratio(50)
        assert ratio(sqnr(want, r.got[key])) < allowed * (1 + 2 * math.sqrt(2 / want.numel())), key


def from_rounded(r: Found) -> Step:
    """The step with x and up(x) as backward has them, in FP32."""
    m = copy.deepcopy(r.model).float()
    h = rounded(r.model.up(r.x).detach()).float().requires_grad_()
    y = m.f(h)
    g = noise(TOKENS, D, seed=11).float()
    (dh,) = torch.autograd.grad(y, h, g @ m.down.weight.detach())
    dh = dh.detach()
    return {
        "down.weight": g.T @ y.detach(),
        "up.weight": dh.T @ rounded(r.x).float(),
        "up.bias": dh.sum(0),
        "input 0": dh @ m.up.weight.detach(),
    }


def sdpa(h: Tensor) -> Tensor:
    q, k, v = heads(h), heads(h.roll(7, -1)), heads(h.flip(-1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(TOKENS, INNER)


def entropy(h: Tensor) -> Tensor:
    p = h.softmax(-1)
    return -p * torch.log(p + 1e-8)


EDGES = torch.arange(TOKENS) * 7 % (TOKENS - 1)


def recurrence(h: Tensor) -> Tensor:
    """h_t = a_t h_{t-1} + b_t, in parallel."""
    a, b = h.chunk(2, -1)
    logs = F.logsigmoid(a.float()).cumsum(0)
    return ((b * torch.exp(-logs)).cumsum(0) * torch.exp(logs)).to(h.dtype).repeat(1, 2)


def attention_with_decays(h: Tensor) -> Tensor:
    """Linear attention whose weights decay over time, by a factor for each feature."""
    logs = F.logsigmoid(h.roll(1, -1).float()).cumsum(0)
    weights = (h * torch.exp(logs)) @ (h.flip(-1) * torch.exp(-logs)).transpose(0, 1)
    return (weights.tril() / 8).to(h.dtype) @ h


Hazard = tuple[Callable[[Tensor], Tensor], dict[str, float]]
SOFTMAX = "the gradients of logits of 25 are differences of near numbers: values are rounded"
MEAN = "x itself is saved, as torch rounds the mean for backward on a CPU; exact means leave (x - mean) * rstd"
MEANS = "backward reads x itself, with its mean: what is left of c2 * x + c3 is then all rounding"
HAZARDS: dict[str, tuple[Hazard, str]] = {
    "attention_with_logits_of_25": ((sdpa, {"gain": 5.0}), SOFTMAX),
    "layer_norm_of_a_large_mean": ((lambda h: F.layer_norm(h, (INNER,)), {"bias": 10.0}), MEAN),
    "group_norm_of_a_large_mean": ((lambda h: F.group_norm(h, 8), {"bias": 10.0}), MEANS),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.xfail(strict=True, reason=why)) for n, (_, why) in HAZARDS.items()]
)
def test_gradients_stay_near_where_rounding_is_dangerous(name: str) -> None:
    r = found_among(tuple(HAZARDS))[name]
    # BF16 is good here: what is lost is FP8's
    assert min(sqnr(r.exact[key], r.bf16[key]) for key in gradients(r.exact)) > 18
    r.near()


# The same functions where nothing is dangerous, and neighbours of theirs that hold.
SAFE: dict[str, Hazard] = {
    "difference_of_tokens_with_a_mean": (lambda h: h * (h - h.roll(1, 0)), {"bias": 10.0}),
    "edges_of_nodes_with_a_mean": (lambda h: (h[EDGES] - h[EDGES + 1]).square() + h, {"bias": 10.0}),
    "lerp_of_tokens_with_a_mean": (lambda h: torch.lerp(h, h.roll(1, 0), h.tanh()), {"bias": 10.0}),
    "recurrence_by_exponentials": (recurrence, {}),
    "attention_with_decays": (attention_with_decays, {}),
    "product_of_powers": (pair(lambda a, b: 2.0 ** (9 * a) * (b * 2.0 ** (-9 * a))), {}),
    "quotient_of_powers": (pair(lambda a, b: b * torch.exp2(9 * a) / torch.exp2(9 * a + b)), {}),
    "reciprocal_of_a_sigmoid": (lambda h: 1 / (torch.sigmoid(h) + 1e-6), {"gain": 5.0}),
    "reciprocal_of_an_exponential": (lambda h: 1 / (torch.exp(h) + 1e-6), {"gain": 5.0}),
    "sigmoid_with_a_bias": (torch.sigmoid, {"bias": 3.0}),
    "tanh_with_a_bias": (torch.tanh, {"bias": 3.0}),
    "attention_with_logits_of_4": (sdpa, {"gain": 2.0}),
    "logcumsumexp": (lambda h: h.logcumsumexp(-1), {"gain": 5.0}),  # no known operator: what it reads is exact
    "bell_far_away": (lambda h: torch.exp(-50 * (h - 0.5) ** 2), {"gain": 0.02}),
    "entropy": (entropy, {"gain": 3.0}),
    "attention_with_small_logits": (sdpa, {"gain": 1.0}),
    "attention_of_keys_with_a_mean": (sdpa, {"bias": 2.0}),  # an error of the output times that mean is in q's gradient
    "attention_by_hand_with_large_logits": (attention, {"gain": 3.0}),
    "silu_with_a_bias": (F.silu, {"bias": 3.0}),
    "gelu_with_a_bias": (F.gelu, {"bias": -3.0}),
    "rms_norm_of_a_large_mean": (lambda h: F.rms_norm(h, (INNER,)), {"bias": 10.0}),
    "softmax_of_large_logits": (lambda h: h.softmax(-1), {"gain": 5.0}),
    "softmax_with_a_gradient_that_hardly_varies": (lambda h: h.softmax(-1), {"gain": 3.0, "offset": 10.0}),
    "exp_of_large_numbers": (torch.exp, {"gain": 3.0, "bias": 20.0}),
    "silu_of_tiny_numbers": (F.silu, {"gain": 1e-4}),
    "log_of_a_softplus": (lambda h: torch.log(F.softplus(h) + 1e-6), {"gain": 5.0}),
}


@pytest.mark.parametrize("name", SAFE)
def test_gradients_stay_near_where_rounding_does_no_harm(name: str) -> None:
    f, kind = SAFE[name]
    if "offset" in kind:
        found_alone(f, **kind).near()
        return
    alike = [n for n, (_, kind) in SAFE.items() if "offset" not in kind]
    start = alike.index(name) // TOGETHER * TOGETHER
    found_among(tuple(alike[start : start + TOGETHER]))[name].near()


def test_a_vector_may_be_saved() -> None:
    found_alone(lambda h: h * F.cosine_similarity(h, h.roll(1, 0), dim=-1)[:, None]).near()


def test_a_cross_entropy_in_the_graph_keeps_its_logits() -> None:
    torch.manual_seed(0)
    model, labels = Between(F.gelu).bfloat16(), torch.arange(TOKENS) % D
    x = noise(TOKENS, D)

    def loss(m: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        return lambda x: F.cross_entropy(m(x).to(dtype), labels)

    exact = copy.deepcopy(model).float()
    wide = step(exact, loss(exact, torch.float32), [x.float()])
    for dtype in (torch.bfloat16, torch.float32):
        torch.compiler.reset()
        plain = step(model, loss(model, dtype), [x])
        got = step(model, compiled(loss(model, dtype)), [x])
        check(got, wide, plain, ratio(NEAR))
        logits = [row for row in rows() if row.shape == (TOKENS, D) and not row.node.startswith("primals")]
        assert {(is_fp8(row), row.reason) for row in logits} == {(False, LOGITS)}
