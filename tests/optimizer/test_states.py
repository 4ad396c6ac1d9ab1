"""Optimizer states in 8 bits: exact where promised, bounded elsewhere, a fixed point, unbiased."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fp8compile.errors import OptionError
from fp8compile.kernels.reference import state_reference as states
from fp8compile.state_formats import GROUP, MINIFLOATS, parse_state_format

EXPANDED = ("log", "e4m3", "e5m2")
LINEAR = ("e4m3/linear", "e5m2/linear")
ALL = tuple(f"{name}{noise}" for name in (*EXPANDED, *LINEAR) for noise in ("", "/stochastic"))
COUNTER = torch.tensor([7], dtype=torch.int32)
OCTAVES, OCTAVE = 24, 1 << 23  # below the greatest of a group with signs there is nothing; in bits of FP32


def stored(x: Tensor, name: str, counter: Tensor = COUNTER) -> Tensor:
    return states.decode(*states.encode(x, name, counter), name)


def sample(seed: int, groups: int = 32) -> Tensor:
    """Values of a width and a size that the seed draws: from two neighbouring FP32 numbers to 60 octaves."""
    g = torch.Generator().manual_seed(seed)
    octaves = torch.rand((), generator=g) * 20
    x = torch.randn(groups, GROUP, generator=g) * torch.exp2(torch.randn(groups, GROUP, generator=g) * octaves)
    if seed % 3 == 0:
        x = x.abs()
    if seed % 4 == 0:
        width = int(2.0 ** (float(torch.rand((), generator=g)) * 22)) + 1
        x = (
            (torch.ones(groups, 1).view(torch.int32) + torch.randint(0, width, x.shape, generator=g))
            .int()
            .view(torch.float32)
        )
    return x.reshape(-1) * 2.0 ** int(torch.randint(-50, 50, (), generator=g))


@pytest.mark.parametrize("name", ALL)
def test_what_was_stored_is_stored_again_bit_for_bit(name):
    for seed in range(40):
        payload, side = states.encode(sample(seed), name, COUNTER)
        once = states.decode(payload, side, name)
        again = states.encode(once, name, COUNTER + 1)
        assert torch.equal(side.view(torch.int32), again[1].view(torch.int32))
        assert torch.equal(once.view(torch.int32), states.decode(*again, name).view(torch.int32))
        if seed % 4:  # else groups may have more codes than FP32 has numbers: several mean the same
            assert torch.equal(payload, again[0])


def test_numbers_that_agree_to_13_bits_do_not_wander():
    """Where a step of `log` is a few ULPs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randint(0, width, (4, GROUP), generator=generator) for width in range(100, 5000, 50)])
    first = kept = stored((x + 0x3F800000).int().view(torch.float32), "log")
    for _ in range(20):
        kept = stored(kept, "log")
    assert torch.equal(kept, first)


@pytest.mark.parametrize("name", EXPANDED)
def test_zeros_constants_and_ends_are_exact(name):
    torch.manual_seed(1)
    x = torch.randn(4, GROUP)
    x[0] = 0
    x[1] = -3.7e-21
    x[2, ::3] = 0
    y = stored(x, name)
    assert torch.equal(y[:2], x[:2])
    assert torch.equal(y == 0, x == 0)
    assert torch.equal(y.abs().amax(1), x.abs().amax(1))
    least = x.abs().where(x != 0, torch.inf).amin(1)
    assert torch.equal(y.abs().where(y != 0, torch.inf).amin(1), least)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_keeps_zeros_constants_and_the_greatest(name):
    x = torch.stack([torch.zeros(GROUP), torch.full((GROUP,), 0.3), torch.linspace(-1, 5, GROUP)])
    y = stored(x, name)
    assert torch.equal(y[:2], x[:2])
    assert torch.equal(y.abs().amax(1), x.abs().amax(1))


@pytest.mark.parametrize("signed", [False, True])
def test_log_error_is_within_half_a_step(signed):
    for seed in range(1, 30, 2):
        x = sample(seed)
        x = x if signed else x.abs()
        y = stored(x, "log").view(-1, GROUP)
        x = x.view(-1, GROUP)
        bits = x.abs().view(torch.int32)
        high = bits.amax(1, keepdim=True)
        stays = (bits >= high - OCTAVES * OCTAVE) | ~(x < 0).any(1, keepdim=True)
        span = (high - bits.where(stays, high).amin(1, keepdim=True)).double()
        distance = (y.abs().view(torch.int32).double() - bits.double()).abs()
        assert (distance <= 0.5001 * span / (126 if signed else 254) + 1)[stays].all()
        assert torch.equal(y.sign(), x.sign().where(stays, 0))


@pytest.mark.parametrize("name", [n for n in ALL if "linear" not in n])
def test_what_is_far_below_the_greatest_of_a_group_with_signs_is_zero(name):
    """It takes no codes from the others, which are stored as without it."""
    x = torch.randn(4, GROUP)
    for first in range(3):
        x[:, first::7] = 0
    high = x.abs().amax(1, keepdim=True)
    near, far = high * 2.0**-OCTAVES, (high * 2.0**-OCTAVES).view(torch.int32) - 1
    x[:, ::7], x[:, 1::7], x[:, 2::7] = near, -far.view(torch.float32), torch.tensor(1e-44)
    assert (x < 0).any(1).all()
    y = stored(x, name)
    assert torch.equal(y[:, ::7], near.expand(4, len(x[0, ::7])))  # the least that is kept, exactly
    assert not y[:, 1::7].any()
    assert not y[:, 2::7].any()
    x[:, 1::7], x[:, 2::7] = 0, 0
    assert torch.equal(y, stored(x, name))


@pytest.mark.parametrize("name", [n for n in ALL if "linear" not in n])
def test_a_group_without_signs_keeps_its_least(name):
    """A second moment of zero beside a first moment that is not would be a step of any size."""
    x = torch.rand(4, GROUP) + 0.1
    x[:, 0] = 1e-44
    assert torch.equal(stored(x, name)[:, 0], x[:, 0])


def test_expanded_e4m3_uses_every_octave_of_the_format():
    x = torch.exp2(torch.linspace(-3, 0, GROUP))  # three octaves on 17.8: steps of 3 bits become 18.5 bits' worth
    relative = (stored(x, "e4m3") / x - 1).abs()
    # A normal step of E4M3 is 1/8 of an octave, a group's octave is 17.75 / 3 of the format's; half a step up and down.
    assert relative[GROUP // 2 :].max() < 0.5 * math.log(2) / 8 * 3 / 17.75 * 1.5
    assert (stored(x, "e4m3/linear") / x - 1).abs().max() > 4 * relative[GROUP // 2 :].max()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_linear_codes_are_the_cast_of_torch(name):
    """An independent reference: x / scale cast by torch, to within the two ULPs by which our scale is larger."""
    fmt = MINIFLOATS[name]
    dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    x = torch.randn(64, GROUP) * torch.exp(2 * torch.randn(64, GROUP))
    payload, _ = states.encode(x, f"{name}/linear")
    scale = x.abs().amax(1, keepdim=True) / fmt.max
    cast = (x / scale).to(dtype)
    differ = payload.view(dtype).float() != cast.float()
    assert differ.float().mean() < 1e-3


@pytest.mark.parametrize("name", ALL)
def test_a_nan_makes_its_group_nan(name):
    x = torch.randn(3, GROUP)
    x[1, 5] = math.nan
    y = stored(x, name)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], stored(x[[0, 2]], name)) or "stochastic" in name
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("signed", [False, True])
def test_an_inf_is_the_greatest_number(name, signed):
    """A square that overflowed is followed by finite ones: its group must not be lost."""
    greatest = torch.finfo(torch.float32).max
    x = torch.randn(3, GROUP) if signed else torch.rand(3, GROUP)
    x[1, 5], x[1, 6] = math.inf, -math.inf if signed else math.inf
    x[2] = math.inf
    y = stored(x, name)
    assert y.isfinite().all()
    assert torch.equal(y[1, 5:7], x[1, 5:7].clamp(-greatest, greatest))
    assert torch.equal(y, stored(x.clamp(-greatest, greatest), name))
    assert (y[2] == greatest).all()


@pytest.mark.parametrize("name", ALL)
def test_tiny_and_huge_values_stay_bounded(name):
    x = torch.tensor([3e38, -3e38, 1e-38, -2e-38, 1e-45, 0.0, 1.0, 2.0**-126]).repeat(16)
    y = stored(x, name)
    assert y.isfinite().all()
    assert y.abs().max() == x.abs().max()
    assert (y[x.abs() < 2.0**-126].abs() < 1e-29).all()  # at most the next code of a group of 277 octaves
    if "linear" not in name:
        assert torch.equal(y.sign(), x.sign().where(x.abs() >= x.abs().max() * 2.0**-OCTAVES, 0))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (127,), (129,), (3, 50), (2, 3, 64)])
def test_any_size(name, shape):
    x = torch.randn(shape)
    payload, side = states.encode(x, name, COUNTER)
    assert payload.shape == x.shape
    assert side.shape == (-(-x.numel() // GROUP), 2)
    assert stored(x, name).shape == x.shape
    if x.numel() == 1:
        assert torch.equal(stored(x, name), x)


@pytest.mark.parametrize("name", [n for n in ALL if "stochastic" in n])
def test_stochastic_rounding_is_unbiased_and_reproducible(name):
    x = torch.exp2(torch.linspace(-6, 0, GROUP)) * torch.tensor([1.0, -1.0]).repeat(64)
    # of 50 groups at 40 counters: random bits are of both
    draws = torch.cat([stored(x.repeat(50), name, COUNTER + i).view(50, GROUP) for i in range(40)])
    step = draws.amax(0) - draws.amin(0)
    # The mean of n draws that differ by a step is off by step / (2 √n) in one standard deviation: five of them. Of a
    # value so near a code that none of the draws went to the other, up to 1/500 of a step, itself a sixth of x at most.
    error = (draws.double().mean(0) - x).abs()
    assert (error <= step * 5 * 0.5 / math.sqrt(2000) + x.abs() * 4e-4).all()
    assert torch.equal(stored(x, name), stored(x, name))
    assert (step > 0).float().mean() > 0.8


def test_a_drifting_map_would_be_seen():
    """v of 1000 steps: stochastic storing keeps its mean (rounded to nearest it grows by a fifth)."""
    torch.manual_seed(0)
    size = torch.exp(torch.randn(32 * GROUP))
    exact, kept = torch.zeros(32 * GROUP), torch.zeros(32 * GROUP)
    for step in range(1000):
        square = (torch.randn(32 * GROUP) * size) ** 2
        exact = 0.999 * exact + 0.001 * square
        kept = stored(0.999 * kept + 0.001 * square, "log/stochastic", COUNTER + step)
    ratio = kept / exact
    assert abs(float(ratio.mean()) - 1) < 0.012  # of 4096 elements, each ± 15 %: 0.24 % in one standard deviation
    assert ratio.std() < 0.2  # `size` spreads v over 13 octaves: steps of 3.6 %, a random walk of 1000 of them


def test_bytes_per_parameter():
    x = torch.randn(4096, 16)
    payload, side = states.encode(x, "log")
    assert 2 * (payload.nbytes + side.nbytes) / x.numel() == 2.125


def test_names():
    assert str(parse_state_format("e4m3/linear/stochastic")) == "e4m3/linear/stochastic"
    with pytest.raises(OptionError, match="Did you mean 'e4m3'"):
        parse_state_format("e4m")
    with pytest.raises(OptionError, match="no linear form"):
        parse_state_format("log/linear")
    with pytest.raises(OptionError, match="nothing to round"):
        parse_state_format("float32/stochastic")


# ---- parameters -----------------------------------------------------------------------------------------------------


def test_split_master_is_exact_but_for_upper_ties():
    x = torch.randn(1 << 18) * torch.exp(10 * torch.randn(1 << 18))
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -3.4e38, math.inf, -math.inf])])
    high, low = states.split(x)
    assert torch.equal(high.view(torch.int16), x.to(torch.bfloat16).view(torch.int16))
    back = states.join(high, low)
    is_upper_tie = (x.view(torch.int32) - high.float().view(torch.int32)) == 0x8000
    assert torch.equal(back.view(torch.int32)[~is_upper_tie], x.view(torch.int32)[~is_upper_tie])


def test_split_master_of_ties():
    even = torch.tensor([0x3F800000], dtype=torch.int32)  # 1.0, whose BF16 is even
    for missing, kept in ((0x8000, 0x7FFF), (0x7FFF, 0x7FFF), (-0x4000, -0x4000)):
        x = (even + missing).view(torch.float32)
        high, low = states.split(x)
        assert torch.equal(high, x.to(torch.bfloat16))
        assert torch.equal(states.join(high, low).view(torch.int32), even + kept)


def test_stochastic_parameters_are_unbiased():
    x = torch.linspace(1, 2, 257)[:-1] * (1 + 2.0**-9) * torch.tensor([1.0, -1.0]).repeat(128)
    many = x.repeat(50)
    draws = torch.cat([states.round_stochastically(many, COUNTER + i).float().view(50, -1) for i in range(40)])
    assert ((draws - x).abs() < 2.0**-7).all()
    assert ((draws.double().mean(0) - x).abs() < 5 * 0.5 * 2.0**-7 / math.sqrt(2000)).all()
    exact = torch.tensor([1.0, -2.5, 0.0, math.inf, -math.inf])
    assert torch.equal(states.round_stochastically(exact, COUNTER).float(), exact)
    assert states.round_stochastically(torch.tensor([math.nan]), COUNTER).isnan().all()
