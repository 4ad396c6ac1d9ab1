"""Loss scaling at every level: what GradScaler sees, what a skipped step leaves untouched, and that runs go on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import delayed
from fp8compile.levels import LEVELS

RUN = {"select": "all", "executor": "eager", "strict": True}
CAST = {"delayed": {"history": 4}}
DELAYED = {
    "base": "tensorwise",
    **{role: {"left": CAST, "right": CAST} for role in ("output", "grad_input", "grad_weight")},
}


class Run:
    """A small model under FP16 autocast with AdamW and a GradScaler; `compiled`: its step is compiled as well."""

    def __init__(self, level: str, compiled: bool, scaler: torch.amp.GradScaler, recipe: Any = "mixed") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.LayerNorm(128), nn.Linear(128, 64))
        self.step = torch.compile(self.model, backend="fp8", options={**RUN, "level": level, "recipe": recipe})
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if compiled:
            options = {"level": level, "executor": "eager", "strict": True}
            self.opt.step = torch.compile(self.opt.step, backend="fp8", options=options)
        self.scaler = scaler

    def train(self, batch: int, factor: float = 1.0, unscale: bool = False) -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(batch))
        with torch.autocast("cpu", torch.float16):
            out = self.step(x)
        loss = (out.float() * factor).square().mean()
        self.scaler.scale(loss).backward()
        if unscale:
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def everything(self) -> dict[str, Tensor]:
        """Parameters, states with all their parts, and histories."""
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for i, state in enumerate(self.opt.state.values()):
            for name, value in state.items():
                parts = ("payload", "side", "counter", "low") if isinstance(value, fp8compile.FP8State) else ("data",)
                for part in parts:
                    if (tensor := getattr(value, part)) is not None:
                        found[f"{i}.{name}.{part}"] = tensor.detach().clone()
        return found | {f"history {key}": x for key, x in delayed.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of what differs."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def dynamic() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def static() -> torch.amp.GradScaler:
    """Skips what overflows, and (all but) keeps its scale."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2**31 - 1, backoff_factor=1 - 2.0**-20)


def step_name(value: object) -> str | None:
    return ("compiled_step" if value else "eager_step") if isinstance(value, bool) else None


# Every two of a level, a scaler and a kind of step are met together.
@pytest.mark.parametrize(
    ("level", "scaler", "compiled"),
    [
        ("O1", static, True),
        ("O1", dynamic, False),
        ("O2", static, False),
        ("O2", dynamic, True),
        ("O3", static, True),
        ("O3", dynamic, False),
    ],
    ids=step_name,
)
def test_an_overflow_is_seen_and_changes_nothing(level, scaler, compiled):
    run = Run(level, compiled, scaler(), DELAYED)
    for batch in range(2):
        run.train(batch)
    before = run.everything()
    assert sum(name.startswith("history") for name in before) == 10  # five matmuls
    run.train(2, factor=1e3)  # the gradients of FP16 results: 1024 · 1e6 · 2 y / 2048 > 65 504
    assert run.scaler.get_scale() == pytest.approx(512.0 if scaler is dynamic else 1024.0, rel=1e-5)
    assert same(before, run.everything()) == []
    run.train(3)
    changed = set(same(before, run.everything()))
    assert {n for n in before if n.startswith("history")} <= changed
    assert {n for n, _ in run.model.named_parameters()} <= changed
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


@pytest.mark.parametrize(("level", "compiled"), [("O1", True), ("O2", False), ("O3", True)], ids=step_name)
def test_scaled_training_is_training(level, compiled):
    """Against the same run in FP32 without any scaling; a factor of two is exact in all formats in use."""
    run = Run(level, compiled, dynamic())
    twin = copy.deepcopy(run.model)
    opt = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    start = {name: p.detach().clone() for name, p in twin.named_parameters()}
    for batch in range(5):
        run.train(batch, unscale=batch % 2 == 1)
        loss = twin(torch.randn(32, 64, generator=torch.Generator().manual_seed(batch))).square().mean()
        loss.backward()
        if batch % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    for (name, p), q in zip(run.model.named_parameters(), twin.parameters(), strict=True):
        moved, wanted = p.detach() - start[name], q.detach() - start[name]
        cosine = torch.nn.functional.cosine_similarity(moved.flatten(), wanted.flatten(), dim=0)
        # An Adam step is nearly the sign of a gradient: what rounding flips are the smallest ones, a few percent
        assert cosine > 0.95, (name, float(cosine))


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_scale_changes_no_gradient_but_by_fp16(level):
    """Current scaling makes FP8 payloads independent of a power of two; what FP16 loses below 6e-8 comes back."""
    run = Run(level, False, dynamic())
    x, found = torch.randn(32, 64), {}
    for factor in (1.0, 2.0**10):
        with torch.autocast("cpu", torch.float16):
            out = run.step(x)
        (out.float().square().mean() * factor).backward()
        found[factor] = [p.grad / factor for p in run.model.parameters() if p.grad is not None]
        run.model.zero_grad(set_to_none=True)
    for small, large in zip(*found.values(), strict=True):
        # gradients of about 1e-3 / 32: some of their parts are subnormal in FP16 without a scale, a part in 100
        torch.testing.assert_close(small, large, rtol=0.05, atol=float(large.abs().max()) * 0.02)


def test_histories_of_a_pass_that_overflows_late_are_undone_in_forward_too():
    """The overflow is in backward; what forward had recorded by then was finite."""
    run = Run("O2", False, dynamic(), DELAYED)
    for batch in range(2):
        run.train(batch)
    before = delayed.state_dict()
    run.train(2, factor=1e3)
    raw = {key: x.clone() for key, x in delayed._histories.items()}
    assert any(not torch.equal(raw[key], x) for key, x in before.items())  # it had been recorded, and
    assert same(before, delayed.state_dict()) == []  # is not there for those who ask
    run.train(3)
    for key, x in delayed.state_dict().items():
        assert torch.equal(x[1:], before[key][:-1]), key  # nor for the next step


def test_accumulated_passes_lose_only_the_one_that_overflowed():
    key, inf = "model0/fc/output/left", float("inf")
    for amax in (1.0, 2.0, inf, 3.0):
        delayed.scale(torch.tensor(amax), key, "e4m3", 4, 0)
    assert delayed.state_dict()[key].tolist() == [3.0, 2.0, 1.0, 0.0]
