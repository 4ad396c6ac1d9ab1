"""Whole steps in one CUDA graph train as the same steps do without: losses, parameters, states."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ZOO
from poison import poison_free_memory
from torch import nn

import fp8compile
from fp8compile.plan.reasons import Reason
from tests.gpu.test_zoo import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:fp8. the GPU waits for the host")]

STEPS = 8
Step = Callable[..., torch.Tensor]
# Their steps ask the host, which a graph cannot: the text of the error.
CANNOT = {"whisper": "draws random numbers on the host"}  # for LayerDrop, also where none is dropped


class Mlp(nn.Module):
    """Layers of which two are worth FP8, with dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 512), nn.GELU(), nn.Dropout(dropout), nn.Linear(512, 256), nn.LayerNorm(256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class Training:
    """A model on the GPU, compiled, with compiled AdamW; `step` takes a batch."""

    def __init__(
        self,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
        unscale: bool = False,
        make: Callable[[float], nn.Module] = Mlp,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        torch.compiler.reset()
        self.model = make(dropout).cuda().to(dtype)
        self.run = torch.compile(self.model, backend="fp8", options={"select": "all", "strict": True, **options})
        self.opt: Any = torch.optim.AdamW(
            self.model.parameters(), lr=torch.tensor(1e-2, device="cuda"), capturable=True
        )
        if unscale:
            fp8compile.prepare_optimizer(self.opt, unscale=True)
            self.opt.step = torch.compile(self.opt.step, backend="fp8")
        self.update: Any = self.opt.step if unscale else torch.compile(self.opt.step, backend="fp8")

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x).float().square().mean()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.update()
        self.opt.zero_grad()
        return loss

    def captured(self, step: Step | None = None, *more: Any) -> Step:
        return fp8compile.capture_step(step or self.step, self.model, self.opt, *more)

    def tensors(self) -> list[torch.Tensor]:
        found = [p.detach() for p in self.model.parameters()]
        for p in self.model.parameters():
            found += [x.dequantize() if isinstance(x, fp8compile.FP8State) else x for x in self.opt.state[p].values()]
        return found


def batches(rows: tuple[int, ...] = (128,) * STEPS, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 256, generator=generator).to("cuda", dtype) for n in rows]


def graphs(step: Any) -> int:
    return len(step.captured.recordings)


def assert_same(mine: Training, theirs: Training) -> None:
    for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(a, b)


def test_bit_for_bit() -> None:
    mine, given = Training(), batches()
    run = mine.captured()
    found = [run(x) for x in given]
    theirs = Training()
    expected = [theirs.step(x) for x in given]
    assert graphs(run) == 1
    assert torch.equal(torch.stack(found), torch.stack(expected))  # results are copies: an earlier one has its value
    assert_same(mine, theirs)


def test_a_rate_that_was_a_float() -> None:
    """It is rounded to FP32, as a tensor is."""
    found = []
    for is_captured in (True, False):
        t = Training()
        t.opt.param_groups[0]["lr"] = 1e-2
        run = t.captured() if is_captured else t.step
        found.append(torch.stack([run(x) for x in batches()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_the_host_launches_once() -> None:
    mine, given = Training(), batches((128,) * 5)
    run = mine.captured()
    for x in given[:4]:
        run(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        run(given[4])
    launched = [e.name for e in recorded.events() or () if "aunch" in e.name]
    assert sum("GraphLaunch" in name for name in launched) <= 1
    assert sum("LaunchKernel" in name for name in launched) <= 3  # copies of the batch and of the loss


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    losses = []
    for is_captured in (False, True):
        torch.compiler.reset()
        torch.manual_seed(0)
        case = on_gpu(name)
        model = torch.compile(case.model, backend="fp8", options={"select": "all", "strict": True, "skip": case.skip})
        opt = torch.optim.AdamW(case.model.parameters(), lr=1e-3, capturable=True)
        update = torch.compile(opt.step, backend="fp8")

        def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
            found = model(**batch)  # noqa: B023
            found = found if isinstance(found, torch.Tensor) else found.logits
            loss = found.float().square().mean()
            loss.backward()
            update()  # noqa: B023
            opt.zero_grad()  # noqa: B023
            return loss.detach()

        run: Any = fp8compile.capture_step(step, case.model, opt) if is_captured else step
        if is_captured and name in CANNOT:
            for _ in range(3):
                run(case.inputs)
            with pytest.raises(fp8compile.CaptureError, match=CANNOT[name]):
                run(case.inputs)
            return
        losses.append(torch.stack([run(case.inputs) for _ in range(6)]).cpu())
        assert not is_captured or graphs(run) == 1
    assert losses[0].isfinite().all()
    # Kernels that add in no fixed order (embeddings, scatter) differ in the last bits of BF16.
    torch.testing.assert_close(losses[1], losses[0], rtol=0.02, atol=1e-3)


class Convolutions(nn.Module):
    """Channels last, so that the optimizer updates copies of the large weights."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        convolutions = nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 16, 3, padding=1)
        self.layers = nn.Sequential(convolutions[0], nn.GELU(), nn.Dropout(dropout), convolutions[1])
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x.view(len(x), 16, 4, 4)).reshape(x.shape)


def test_parameters_that_are_laid_out_in_another_way() -> None:
    """Between replays, a step of another batch size updates them from tables of its own."""
    given = batches((128, 128, 128, 128, 128, 96, 128, 96, 128, 128))
    mine = Training(make=Convolutions)
    run = mine.captured()
    found = []
    for x in given:
        found.append(run(x) if len(x) == 128 else mine.step(x).detach().clone())
        poison_free_memory()
    theirs = Training(make=Convolutions)
    expected = [theirs.step(x).detach().clone() for x in given]
    assert graphs(run) == 1
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-3, atol=1e-4)
    for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
        assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()


def test_accumulation() -> None:
    def accumulated(t: Training) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros((), device="cuda")
            for part in x.chunk(4):
                loss = t.loss(part) / 4
                loss.backward()
                total += loss.detach()
            t.update()
            t.opt.zero_grad()
            return total

        return step

    given = batches((512,) * STEPS)
    mine = Training()
    run = mine.captured(accumulated(mine))
    found = torch.stack([run(x) for x in given])
    theirs = Training()
    step = accumulated(theirs)
    assert torch.equal(found, torch.stack([step(x) for x in given]))
    assert graphs(run) == 1
    assert_same(mine, theirs)


def test_microbatches_and_updates_captured_apart() -> None:
    """Two graphs, one of microbatches that adds to gradients, one of the update that empties them in place."""

    def parts(t: Training, wrap: Callable[..., Step]) -> tuple[Step, Step]:
        def microbatch(x: torch.Tensor) -> torch.Tensor:
            loss = t.loss(x)
            loss.backward()
            return loss.detach()

        def update() -> None:
            t.update()
            t.opt.zero_grad(set_to_none=False)

        return wrap(microbatch), wrap(update)

    def train(t: Training, wrap: Callable[..., Step]) -> torch.Tensor:
        for p in t.model.parameters():
            p.grad = torch.zeros_like(p)
        microbatch, update = parts(t, wrap)
        found = []
        for i, x in enumerate(batches((128,) * 16)):
            found.append(microbatch(x))
            if i % 2:
                update()
        return torch.stack(found)

    mine = Training()
    found = train(mine, lambda step: mine.captured(step))
    theirs = Training()
    assert torch.equal(found, train(theirs, lambda step: step))
    assert_same(mine, theirs)


def test_lengths_by_turns() -> None:
    given = batches((128, 192, 128, 192, 256, 128, 192, 256, 256, 192, 128, 256, 192, 128, 256))
    mine = Training()
    run = mine.captured()
    found = torch.stack([run(x) for x in given])
    theirs = Training()
    assert torch.equal(found, torch.stack([theirs.step(x) for x in given]))
    assert graphs(run) == 3
    assert_same(mine, theirs)


def test_gradients_may_be_read_after_the_step() -> None:
    """zero_grad at the beginning of the step; lengths by turns: each has gradients of its own."""

    def step_of(t: Training) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            t.opt.zero_grad()
            loss = t.loss(x)
            loss.backward()
            t.update()
            return loss.detach()

        return step

    given = batches((128, 192) * 6)
    found = []
    for is_captured in (True, False):
        t = Training()
        step = t.captured(step_of(t)) if is_captured else step_of(t)
        norms = []
        for x in given:
            step(x)
            norms.append(torch.stack([p.grad.float().norm() for p in t.model.parameters()]))
        found.append(torch.stack(norms))
    assert torch.equal(*found)


def test_schedulers() -> None:
    found = []
    for is_captured in (True, False):
        t = Training()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(t.opt, STEPS)
        run = t.captured() if is_captured else t.step
        losses = []
        for x in batches():
            losses.append(run(x))
            scheduler.step()
        found.append(torch.stack(losses))
    assert torch.equal(*found)
    t = Training()
    run = t.captured()
    for x in batches():
        run(x)
    before = [p.detach().clone() for p in t.model.parameters()]
    t.opt.param_groups[0]["lr"] = 0.0
    run(batches()[0])
    assert all(map(torch.equal, t.model.parameters(), before))
    t.opt.param_groups[0]["lr"] = 1e-2
    run(batches()[0])
    assert not any(map(torch.equal, t.model.parameters(), before))
    assert graphs(run) == 1


@pytest.mark.parametrize("dropout", [0.5])
def test_dropout_differs_in_each_replay(dropout: float) -> None:
    t = Training(dropout)
    t.opt.param_groups[0]["lr"] = 0.0
    run = t.captured()
    x = batches()[0]
    assert len({run(x).item() for _ in range(10)}) == 10


def test_loss_scales_with_an_overflow() -> None:
    found = []
    for is_captured in (True, False):
        t = Training(dtype=torch.float32, unscale=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3)

        def step(x: torch.Tensor, t: Training = t, scaler: Any = scaler) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss = t.loss(x)
            scaler.scale(loss).backward()
            scaler.step(t.opt)
            scaler.update()
            t.opt.zero_grad()
            return loss.detach()

        run = fp8compile.capture_step(step, t.model, t.opt, scaler) if is_captured else step
        given = batches(dtype=torch.float32)
        given[6][3, 5] = torch.inf
        losses = torch.stack([run(x) for x in given])
        found.append((losses.nan_to_num(7.0), scaler.get_scale(), t))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] != 2.0**10
    assert_same(found[0][2], found[1][2])


def test_loaded_checkpoints() -> None:
    found = []
    for is_captured in (True, False):
        t = Training()
        run = t.captured() if is_captured else t.step
        given = batches((128,) * 12)
        losses = [run(x) for x in given[:5]]
        saved = copy.deepcopy((t.model.state_dict(), t.opt.state_dict()))
        losses += [run(x) for x in given[5:7]]
        t.model.load_state_dict(saved[0])
        t.opt.load_state_dict(saved[1])
        losses += [run(x) for x in given[5:12]]
        found.append((torch.stack(losses), t))
    assert torch.equal(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])


def test_what_asks_the_host_is_refused_and_training_goes_on() -> None:
    mine = Training()
    seen: list[float] = []

    def asking(x: torch.Tensor) -> torch.Tensor:
        loss = mine.step(x)
        seen.append(loss.item())
        return loss

    run = mine.captured(asking)
    given = batches((128,) * 7)
    for x in given[:3]:
        run(x)
    with pytest.raises(fp8compile.CaptureError, match="captur"):  # as CUDA says it
        run(given[3])
    for x in given[3:]:
        mine.step(x)
    theirs = Training()
    for x in given:
        theirs.step(x)
    assert_same(mine, theirs)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn(8, device="cuda").isfinite().all()  # the generator knows that the capture is over
    again = mine.captured()
    for x in given:
        again(x)
    assert graphs(again) == 1


def test_slices_of_a_batch() -> None:
    """Their strides are not those of copies: nothing is compiled while a graph is captured."""
    mine, given = Training(), [torch.cat([x, x], 1)[:, :256] for x in batches()]
    run = mine.captured()
    found = [run(x) for x in given]
    theirs = Training()
    torch.testing.assert_close(torch.stack(found), torch.stack([theirs.step(x) for x in given]))
    assert graphs(run) == 1


class Abreast(nn.Module):
    """Layers that read the same: FP8 is faster on a GPU, and launches more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in (0, 3):
            x = x + sum(layer(x) for layer in self.layers[n : n + 3])
        return x


def test_a_short_step_is_compiled_for_a_graph() -> None:
    """Its host is no reason to leave it in BF16: as with mode="reduce-overhead"."""
    codes = []
    for is_captured in (False, True):
        torch.compiler.reset()
        model = Abreast().cuda().bfloat16()
        run = torch.compile(model, backend="fp8")
        opt = torch.optim.AdamW(model.parameters(), capturable=True)

        def step(x: torch.Tensor, run: Any = run, opt: Any = opt) -> torch.Tensor:
            loss = run(x).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss

        step = fp8compile.capture_step(step, model, opt) if is_captured else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(5):
                step(torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16))
        codes.append({m.code for m in fp8compile.last_compile().plans[0].matmuls})
    assert codes == [{Reason.HOST}, {Reason.FASTER}]


@pytest.mark.parametrize("is_pinned", [False, True])
def test_batches_on_the_host(is_pinned: bool) -> None:
    """One piece of memory holds them all: it is written while the last step runs."""
    found = []
    for is_captured in (True, False):
        t, batch = Training(), torch.empty(128, 256, dtype=torch.bfloat16, pin_memory=is_pinned)

        def step(x: torch.Tensor, t: Training = t) -> torch.Tensor:
            return t.step(x.cuda())

        run = t.captured(step) if is_captured else step
        losses = []
        for x in batches():
            batch.copy_(x)
            losses.append(run(batch))
        found.append(torch.stack(losses))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": {"base": "tensorwise", "output": {"left": {"delayed": True}}}},
        {"recipe": "blockwise"},
        {"kernels": "inductor"},
    ],
)
def test_other_recipes(options: dict[str, Any]) -> None:
    mine, given = Training(**options), batches()
    run = mine.captured()
    found = torch.stack([run(x) for x in given])
    theirs = Training(**options)
    assert torch.equal(found, torch.stack([theirs.step(x) for x in given]))
    assert graphs(run) == 1
    assert_same(mine, theirs)


def test_automatic_mode_says_why_not() -> None:
    mine = Training(adaptive="auto")
    run = mine.captured()
    first, *others = batches((128,) * 4)
    for x in others:
        run(x)
    with pytest.raises(fp8compile.CaptureError, match="adaptive"):
        run(first)


def test_torchs_own_optimizer() -> None:
    found = []
    for is_captured in (True, False):
        t = Training()
        t.opt = torch.optim.AdamW(t.model.parameters(), lr=1e-2, fused=True, capturable=True)
        t.update = t.opt.step
        run = t.captured() if is_captured else t.step
        found.append(torch.stack([run(x) for x in batches()]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)  # a rate in FP32 beside one in FP64


def test_an_optimizer_that_is_not_capturable_says_so() -> None:
    t = Training()
    t.opt = torch.optim.AdamW(t.model.parameters(), lr=1e-2, fused=False, foreach=False)
    t.update = t.opt.step
    run = t.captured()
    first, *others = batches((128,) * 4)
    for x in others:
        run(x)
    with pytest.raises(fp8compile.CaptureError, match="capturable"):
        run(first)
