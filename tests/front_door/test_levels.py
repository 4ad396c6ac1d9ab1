"""Levels are nothing but their options; and they train, with autocast inside and outside of what is compiled."""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.errors import OptionError
from fp8compile.levels import LEVELS
from fp8compile.options import Options

PAGE = Path(__file__).parents[2] / "docs" / "levels.md"
RUN = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}


class Block(nn.Module):
    """A residual block with a batched matmul that has a weight and a patch convolution in front; autocast inside."""

    def __init__(self, inside: torch.dtype | None = None) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, stride=4)
        self.experts = nn.Parameter(torch.randn(8, 32, 32) * 0.2)
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.inside or torch.bfloat16, enabled=self.inside is not None):
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + torch.bmm(x, self.experts)
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Bare(Block):
    """The same without autocast of its own, which would end that of the caller."""

    def forward(self, x: Tensor) -> Tensor:
        return self._run(x)


def gradients(model: nn.Module, x: Tensor, outside: torch.dtype | None, options: Any = None) -> dict[str, Tensor]:
    """FP32 gradients of a step of `model`, compiled with `options` or eager, under autocast to `outside`."""
    step = model if options is None else torch.compile(model, backend="fp8", options=options)
    with torch.autocast("cpu", outside or torch.bfloat16, enabled=outside is not None):
        out = step(x)
    out.float().square().mean().backward()
    found = {name: p.grad.float() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def decibels(exact: Tensor, other: Tensor) -> float:
    return float(10 * torch.log10(exact.square().sum() / (exact - other).square().sum()))


# --- what a level is


def test_the_page_shows_the_levels_as_they_are():
    names = list(dict.fromkeys(name for level in LEVELS.values() for name in level.options))
    rows = [f"| | {' | '.join(LEVELS)} |", "|---|" + "---|" * len(LEVELS)]
    for name in names:
        cells = [f"`{level.options[name]!r}`".replace("'", '"') for level in LEVELS.values()]
        rows.append(f"| `{name}` | {' | '.join(cells)} |")
    rows.append(f"| around it | {' | '.join(level.around for level in LEVELS.values())} |")
    shown = "<!-- levels -->\n" + "\n".join(rows) + "\n<!-- end -->"
    page = PAGE.read_text()
    if os.environ.get("FP8COMPILE_ACCEPT"):
        start, end = page.index("<!-- levels -->"), page.index("<!-- end -->") + len("<!-- end -->")
        PAGE.write_text(page[:start] + shown + page[end:])
        return
    assert shown in page


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_its_options_and_nothing_else(name):
    assert replace(Options.parse({"level": name}), level=None) == Options.parse(dict(LEVELS[name].options))


def test_o3_is_what_the_options_are_by_themselves_but_for_masters():
    third, default = Options.parse({"level": "O3"}), Options()
    assert replace(third, level=None, states=replace(third.states, parameters="nearest")) == default


def test_what_is_given_beside_a_level_wins():
    parsed = Options.parse({"level": "O1", "save": "fp8", "recipe": "rowwise"})
    assert (parsed.save, parsed.recipe.name, parsed.operations) == ((("*", "fp8"),), "rowwise", ("linear",))
    assert "level='O1'" in str(parsed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "O4"}, r"unknown level 'O4'\. Valid: O1, O2, O3"),
        ({"level": "O0"}, r"unknown level 'O0'\. A model without FP8 needs no level: leave backend=\"fp8\" out"),
        ({"level": "o2"}, r"unknown level 'o2'\. Did you mean 'O2'\?"),
        ({"level": 2}, r"unknown level 2\. Did you mean 'O2'\?"),
        ({"level": ["O1"]}, r"unknown level \['O1'\]"),
        ({"operations": ["linaer"]}, r"unknown operation 'linaer'\. Did you mean 'linear'\?"),
        ({"operations": []}, "option 'operations' takes some of linear, batched, convolution"),
        ({"operations": 3}, "option 'operations' takes some of"),
    ],
    ids=str,
)
def test_a_bad_level_or_operation_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Options.parse(options)


@functools.cache
def plan_of(level: str) -> fp8compile.Plan:
    """The plan of a step of `Bare` at this level, made once."""
    torch.compiler.reset()
    gradients(Bare(), torch.randn(8, 3, 16, 16), None, {**RUN, "level": level})
    return fp8compile.compiles()[-1]


def test_operations_decide_what_may_become_fp8():
    plan = plan_of("O1")
    assert {m.kind for m in plan.converted} <= {"mm", "addmm"}
    reasons = plan.reasons()
    assert reasons["operations=linear: this one is batched"] == 3
    assert reasons["operations=linear: this one is convolution"] == 2  # pixels need no gradient
    assert plan_of("O2").reasons() == {}


@pytest.mark.parametrize(("level", "form"), [("O1", 0), ("O2", 0), ("O3", 1)])
def test_only_o3_saves_activations_in_fp8(level, form):
    assert any(row.form.startswith("e4m3") for row in plan_of(level).saved) == bool(form)


@pytest.mark.parametrize(("level", "wanted"), [("O1", "float32"), ("O2", "float32"), ("O3", "log")])
def test_a_compiled_optimizer_keeps_the_states_of_its_level(level, wanted):
    wide, narrow = (nn.Parameter(torch.randn(96, 64, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    opt = torch.optim.AdamW([wide, narrow], lr=1e-3)
    step = torch.compile(opt.step, backend="fp8", options={"level": level, "executor": "eager", "strict": True})
    for p in (wide, narrow):
        p.grad = torch.randn_like(p)
    step()
    first = [opt.state[p]["exp_avg"] for p in (wide, narrow)]
    found = [(state.format, state.low is not None) for state in first]
    assert found == [(wanted, False), (wanted, level != "O1")]


# --- autocast


# Every place is met with every type, and with the operations of O1 and those of all others.
@pytest.mark.parametrize(
    ("where", "dtype", "level"),
    [
        ("outside", torch.bfloat16, "O1"),
        ("outside", torch.float16, "O3"),
        ("inside", torch.float16, "O1"),
        ("inside", torch.bfloat16, "O3"),
        ("both", torch.float16, "O2"),
        ("both", torch.bfloat16, "O1"),
    ],
    ids=str,
)
def test_autocast_inside_and_outside(level, dtype, where):
    torch.manual_seed(0)
    model = Bare() if where == "outside" else Block(dtype)
    outside = None if where == "inside" else (torch.bfloat16 if where == "both" else dtype)
    x = torch.randn(8, 3, 16, 16)
    exact = gradients(copy.deepcopy(model), x, None) if where == "outside" else gradients(_wide(model), x, None)
    found = gradients(model, x, outside, {**RUN, "level": level})
    plan = fp8compile.last_compile()
    name = str(dtype).removeprefix("torch.")
    # torch traces backward under the autocast that surrounds the call (`backward_pass_autocast`), whatever is inside
    assert {m.dtype for m in plan.converted if where != "both" or m.role == "output"} == {name}
    # two linear layers with their gradients; from O2 on the batched matmul and the convolution, without grad_input
    wanted = {"output": 2, "grad_input": 2, "grad_weight": 2} if level == "O1" else {
        "output": 4, "grad_input": 3, "grad_weight": 4}  # fmt: skip
    found_roles = Counter(m.role for m in plan.converted)
    if (where, dtype) == ("both", torch.float16):  # weight gradients then read a BF16 copy of an FP16 activation
        assert found_roles["output"] == wanted["output"]
    else:
        assert found_roles == wanted
    for parameter, gradient in exact.items():
        # E4M3 has a rounding error of about 2^-5 / √3 of a value, 31 dB; the sum of a few such errors and what the
        # norm's backward cancels leave 20 dB
        assert decibels(gradient, found[parameter]) > 20, parameter
        assert torch.isfinite(found[parameter]).all()


def _wide(model: Block) -> Block:
    """The same weights without autocast: FP32."""
    wide = Bare()
    wide.load_state_dict(model.state_dict())
    return wide


def test_fp16_results_beyond_its_range_are_inf_and_not_clipped():
    """As in FP16 training: what GradScaler has to see."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.constant_(model.weight, 100.0)
    step = torch.compile(model, backend="fp8", options={**RUN, "level": "O2"})
    with torch.autocast("cpu", torch.float16):
        out = step(torch.full((32, 64), 100.0))  # 64 · 100 · 100 = 640 000 > 65 504
    assert out.dtype == torch.float16
    assert torch.isinf(out).all()
