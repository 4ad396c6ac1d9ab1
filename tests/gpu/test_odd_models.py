"""Models that few people draw, on a GPU by Inductor: gradients beside eager ones in FP32, and the plan's choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import delayed

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:fp8. the GPU waits for the host")]

OPTIONS: dict[str, Any] = {"select": "all", "strict": True}
ROLE = {side: {"delayed": {"history": 4}} for side in ("left", "right")}
DELAYED = {"base": "tensorwise", "output": ROLE, "grad_input": ROLE, "grad_weight": ROLE}


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield
    delayed.reset()


def compiled(model: nn.Module, dynamic: bool | None = None, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(model, backend="fp8", dynamic=dynamic, options={**OPTIONS, **options})


def gradients(model: nn.Module, run: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return each parameter's gradient, dense, of the mean square of what `run` returns."""
    model.zero_grad()
    run(*inputs).float().square().mean().backward()
    return [p.grad.detach().to_dense().clone() for p in model.parameters() if p.grad is not None]


def assert_near(got: list[Tensor], wanted: list[Tensor], error: float = 0.2) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.isfinite().all()
        assert float((a.float() - b.float()).norm()) < error * float(b.float().norm())


class Tokens(nn.Module):
    """Two sparse embeddings, of tokens and of places, before layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(512, 256, sparse=True), nn.EmbeddingBag(64, 256, mode="sum", sparse=True)
        self.layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens) + self.place(tokens.view(-1, 1) % 64))


def test_sparse_gradients() -> None:
    model = Tokens().cuda()
    tokens = torch.randint(512, (256,), device="cuda")
    got = gradients(model, compiled(model), tokens)
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.is_sparse
    assert_near(got, gradients(model, model, tokens))


class Broken(nn.Module):
    """A block with a graph break, behind convolutions and a gate, and a head whose logits are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(256, 256, 3, padding=1, groups=256)
        self.up, self.gate, self.down = nn.Linear(256, 1024), nn.Linear(256, 1024), nn.Linear(1024, 256)
        self.lm_head = nn.Linear(256, 2048, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x.mT).mT
        y = self.up(x) * self.gate(x).sigmoid()
        torch._dynamo.graph_break()
        return self.lm_head(x + self.down(y))


@pytest.mark.parametrize("rows", [(8, 64), (1, 16)])
def test_a_head_behind_a_graph_break_stays_bf16(rows: tuple[int, int]) -> None:
    model = Broken().cuda().bfloat16()
    x = torch.randn(*rows, 256, device="cuda", dtype=torch.bfloat16)
    got = gradients(model, compiled(model), x)
    decisions = {row.path: row.decision for row in fp8compile.last_compile().matmuls if row.role == "output"}
    assert decisions == {"(up+gate)": "fp8", "down": "fp8", "lm_head": "bf16"}
    exact = Broken().cuda()
    exact.load_state_dict(model.state_dict())
    assert_near(got, gradients(exact, exact, x.float()))


class OnTrunk(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.own = trunk, nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.trunk(x).sin())


def test_delayed_scales_of_models_that_share_a_layer() -> None:
    """The loss of one has a weight that puts its gradients far below those of the other."""
    trunk = nn.Linear(256, 512).cuda()
    models = [OnTrunk(trunk).cuda(), OnTrunk(trunk).cuda()]
    steps = [compiled(model, recipe=DELAYED) for model in models]
    x = torch.randn(128, 256, device="cuda")
    for _ in range(3):
        for step, weight in zip(steps, (1.0, 1e-6), strict=True):
            models[1].zero_grad()
            (step(x).square().mean() * weight).backward()
    got = [p.grad.clone() for p in models[1].parameters() if p.grad is not None]
    models[1].zero_grad()
    (models[1](x).square().mean() * 1e-6).backward()
    assert_near(got, [p.grad for p in models[1].parameters() if p.grad is not None])


class Layers(nn.Module):
    """A layer with a convolution, attention and linear layers, for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.qkv = nn.Conv1d(512, 512, 3, padding=1), nn.Linear(512, 1536)
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x.mT).mT.sin()
        q, k, v = self.qkv(x).unflatten(2, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(x)))


def saved(run: Callable[..., Tensor], x: Tensor) -> int:
    """Return the bytes that lie on the GPU between forward and backward, the result's left out."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = run(x)
    kept = torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()
    y.float().square().mean().backward()
    return kept


def test_a_budget_holds_for_sizes_that_are_symbols() -> None:
    """What is kept grows with the batch; gradients are those without a budget."""
    model = Layers().cuda().bfloat16()
    kept: dict[float, list[int]] = {}
    found: dict[float, list[Tensor]] = {}
    for budget in (1.0, 0.2):
        torch.compiler.reset()
        run = compiled(model, dynamic=True, skip=["up"], save="bf16", activation_budget=budget)
        inputs = [torch.randn(batch, 256, 512, device="cuda", dtype=torch.bfloat16) for batch in (8, 16, 24)]
        run(inputs[0]).float().square().mean().backward()  # workspaces of libraries
        kept[budget] = [saved(run, x) for x in inputs]
        found[budget] = gradients(
            model, run, torch.sin(torch.arange(8 * 256 * 512).view(8, 256, 512)).cuda().bfloat16()
        )
    for few, _, many in kept.values():
        assert many == pytest.approx(3 * few, rel=0.05)
    assert kept[0.2][0] < 0.5 * kept[1.0][0], kept
    assert_near(found[0.2], found[1.0], 0.05)


class Gained(nn.Module):
    """A layer whose input may have a channel that is far larger than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("gain", torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() * self.gain)


@pytest.mark.parametrize("outlier", [0, 1, 2])
def test_the_automatic_mode_sees_each_call_of_a_step(outlier: int) -> None:
    """One call of three has an outlier channel: the layer that reads it leaves FP8, within few recompiles."""
    model = Gained().cuda().bfloat16()
    with torch.no_grad():
        model.second.weight[:, 0] = 0.0  # the channel dominates the scale, and adds nothing
    run = compiled(model, recipe="tensorwise", adaptive={"every": 8})
    for i in range(90):
        model.gain[0] = 1e6 if i % 3 == outlier else 1.0
        run(torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    rows = {(row.path, row.role): row.decision for row in fp8compile.last_compile().matmuls}
    assert rows["second", "output"] == "bf16", rows
