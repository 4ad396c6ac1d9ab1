"""Weights that are cast once a step (option `keep_casts`): the bits of casts in every batch, whoever writes weights."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import ZOO
from ranks import Ranks
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import ops
from fp8compile.backend import _for_a_captured_step
from fp8compile.errors import FreedWeightError
from fp8compile.options import Options
from fp8compile.passes.core.compilation import KEPT
from fp8compile.passes.core.walk import walk
from fp8compile.passes.lower.split_weight_casts import KeptValue
from fp8compile.torch_hooks import inner_compiler, kept_casts

EAGER = {"select": "all", "executor": "eager", "strict": True, "save_min_bytes": 0}
INDUCTOR = {**EAGER, "executor": "inductor"}
BATCHES, STEPS = 3, 3
RUNS = BATCHES + STEPS - 1  # of the casts of a graph: in each batch until an optimizer has stepped, then once a step


class Layers(nn.Module):
    """Two matmuls of one input, which become one, behind a third; a weight that is used twice, once as it is."""

    def __init__(self, wraps: Callable[..., Any] = lambda run, x: run(x)) -> None:
        super().__init__()
        self.up, self.a, self.b = nn.Linear(48, 64), nn.Linear(64, 32), nn.Linear(64, 32)
        self.norm, self.wraps = nn.LayerNorm(32), wraps

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wraps(lambda x: nn.functional.gelu(self.up(x)), x)
        return self.norm(self.a(hidden) * self.b(hidden)) + self.a.weight.float().mean()


def rows(seed: int = 0, count: int = 64) -> Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()


def of_parts(**wraps: Any) -> Layers:
    torch.manual_seed(0)
    return Layers(**wraps).bfloat16()


def kept() -> list[Tensor]:
    """What is kept now, but of weights that other tests have freed, which stays."""
    values = kept_casts._values.by_key.values()
    return [x.tensor for x in values if x.tensor is not None and not x.is_of_freed]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each run of a graph of casts was given."""
    ran: list[int] = []
    made = kept_casts.KeptCasts.__init__

    def counted(self: kept_casts.KeptCasts, run: Callable[[list[Tensor]], Any], *given: Any, **settings: Any) -> None:
        def counting(weights: list[Tensor]) -> Any:
            ran.append(len(weights))
            return run(weights)

        made(self, counting, *given, **settings)

    monkeypatch.setattr(kept_casts.KeptCasts, "__init__", counted)
    return ran


Step = Callable[[nn.Module, torch.optim.Optimizer], Any]


def trained(
    model: nn.Module, options: dict[str, Any], step: Step, opt: Callable[..., torch.optim.Optimizer] | None = None
) -> list[Tensor]:
    """Return losses, gradients and weights of some steps of `BATCHES` batches each."""
    torch._dynamo.reset()
    run = torch.compile(model, backend="fp8", options=options)
    optimizer = (opt or torch.optim.SGD)(model.parameters(), lr=0.1)
    found = []
    for i in range(STEPS):
        for j in range(BATCHES):
            loss = run(rows(i * BATCHES + j)).float().square().mean()
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        step(model, optimizer)
        found += [p.detach().clone() for p in model.parameters()]
    return found


def plain(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    opt.step()
    opt.zero_grad()


def compare(step: Step = plain, make: Callable[[], nn.Module] = of_parts, **given: Any) -> None:
    """Compare steps with kept casts and without, bit for bit."""
    opt = given.pop("opt", None)
    options = {**EAGER, **given}
    theirs = trained(make(), options, step, opt)
    mine = trained(make(), {**options, "keep_casts": True}, step, opt)
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert torch.equal(a, b), i


@pytest.mark.parametrize("recipe", ["mixed", "tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_bits_are_those_of_casts_in_every_batch(executor: str, recipe: str, casts: list[int]) -> None:
    compare(executor=executor, recipe=recipe)
    assert casts == [3] * RUNS


class Checkpointed(nn.Module):
    """Layers of which nothing is kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = of_parts()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("make", [of_parts, Checkpointed])
def test_backward_reads_what_is_kept(make: Callable[[], nn.Module]) -> None:
    """Its payloads are handed on; nothing of a weight is cast there, not where a checkpoint runs again either."""
    model = make()
    graphs: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        split = torch._functorch.partitioners._extract_fwd_bwd_modules
        patch.setattr(
            torch._functorch.partitioners,
            "_extract_fwd_bwd_modules",
            lambda *args, **given: graphs.append(found := split(*args, **given)) or found,
        )
        torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})(rows(count=80)).sum().backward()
    ((_, backward),) = graphs
    read = {n for cast in backward.graph.find_nodes(op="call_function", target=ops.quantize) for n in walk([cast])}
    assert any("tangents" in n.name for n in read)  # gradients are cast there
    given = [n.meta["val"] for n in read if n.op == "placeholder"]
    assert not [x for x in given if x.dtype == torch.bfloat16 and x.shape in {(64, 48), (32, 64), (64, 64)}]
    payloads = [x for x in kept() if x.dim() == 2]
    assert sum(x.dtype == torch.float8_e4m3fn for x in payloads) == 3  # up by rows; a with b by rows and by columns


@torch.no_grad()
def clipped(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    plain(model, opt)


@torch.no_grad()
def by_hand(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p -= 0.1 * p.grad
        p.grad = None


def through_data(zero: Callable[[Tensor], Any]) -> Step:
    """A step as old loops take it: torch counts no write to the weight. zero: what becomes of its gradient."""

    def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.data.sub_(0.1 * p.grad)
            p.grad = zero(p.grad)

    return step


class ThroughData(torch.optim.Optimizer):
    """An optimizer of a user that leaves gradients, and writes in a way that torch does not count."""

    def __init__(self, params: Any, lr: float):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad)


def averaged_between(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """An evaluation by other weights, which are written and taken back uncounted."""
    plain(model, opt)
    before = [p.detach().clone() for p in model.parameters()]
    run = torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})
    with torch.no_grad():
        run(rows(7))
        for p in model.parameters():
            p.data.mul_(0.5)
        assert torch.equal(run(rows(7)), torch.compile(copy.deepcopy(model), backend="fp8", options=EAGER)(rows(7)))
        for p, x in zip(model.parameters(), before, strict=True):
            p.data.copy_(x)


STEPS_OF: dict[str, Step] = {
    "zeroed": lambda model, opt: (opt.step(), opt.zero_grad(set_to_none=False)),
    "clipped": clipped,
    "by hand": by_hand,
    "through .data": through_data(lambda _: None),
    "through .data, gradients zeroed": through_data(torch.zero_),
    "through .data, gradients zeroed so, too": through_data(lambda g: (g.data.zero_(), g)[1]),
    "through .data, other gradients": through_data(torch.zeros_like),
    "through .data, gradients stay": through_data(lambda g: g),
    "an evaluation": averaged_between,
    "loaded": lambda model, opt: model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()}),
    "other memory": lambda model, opt: [setattr(p, "data", p.data * 0.9) for p in model.parameters()],
    "gradients stay": lambda model, opt: opt.step(),
}


@pytest.mark.parametrize("name", STEPS_OF)
def test_written_weights_are_cast_again(name: str, casts: list[int]) -> None:
    compare(STEPS_OF[name])
    assert len(casts) >= STEPS


@pytest.mark.parametrize(
    "opt",
    [
        lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
        ThroughData,
    ],
)
@pytest.mark.parametrize("keeps", [False, True])
def test_optimizers_write_weights(opt: Any, keeps: bool, casts: list[int]) -> None:
    compare((lambda _, opt: opt.step()) if keeps else plain, opt=opt)
    assert casts == [3] * RUNS


def test_a_compiled_optimizer_writes_weights(casts: list[int]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(48, 128), nn.GELU(), nn.Linear(128, 64)).bfloat16()

    steps: dict[int, Any] = {}

    def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        step = steps.setdefault(id(opt), torch.compile(opt.step, backend="fp8", options={"executor": "eager"}))
        step()
        opt.zero_grad()

    compare(step, make, opt=torch.optim.AdamW)
    assert casts == [2] * RUNS


def _step_of(opt: torch.optim.Optimizer, p: Tensor) -> None:
    opt.step()
    opt.zero_grad()


def test_a_step_in_backward_writes_weights(casts: list[int]) -> None:
    def make() -> nn.Module:
        model = of_parts()
        for p in model.parameters():
            opt = torch.optim.SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(functools.partial(_step_of, opt))
        return model

    compare(lambda model, opt: None, make)
    assert casts == [3] * STEPS * BATCHES


class Written(nn.Module):
    """A model that writes a weight of its own when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = of_parts()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.up.weight.mul_(0.9)  # pyright: ignore[reportCallIssue]
        return self.inner(x)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_model_writes_its_weights(executor: str) -> None:
    compare(make=Written, executor=executor)


def test_weights_that_are_trained_are_not_freed() -> None:
    model = of_parts()
    torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})(rows()).sum().backward()
    with pytest.raises(FreedWeightError, match="no weight of this model is only cast"):
        fp8compile.free_weights(model)


@pytest.mark.parametrize("graphs", [False, True])
def test_two_forwards_come_before_their_backwards(graphs: bool) -> None:
    def losses(options: dict[str, Any]) -> list[Tensor]:
        torch._dynamo.reset()
        model = of_parts()
        run = torch.compile(model, backend="fp8", options=options)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for i in range(STEPS):
            several = [run(rows(i * 2 + j)).float().square().mean() for j in range(2)]
            for loss in several:
                loss.backward()
            found += [*several, *(p.grad for p in model.parameters())]
            plain(model, opt)
        return found

    options = {**EAGER, **({"inductor": {"triton.cudagraphs": True}} if graphs else {})}
    for a, b in zip(losses({**options, "keep_casts": True}), losses(EAGER), strict=True):
        assert torch.equal(a, b)


def zeroed_between(options: dict[str, Any]) -> list[Tensor]:
    """Gradients are zeroed between forward and backward, and weights written through `.data`."""
    model, found = of_parts(), []
    run = torch.compile(model, backend="fp8", options=options)
    for i in range(4):
        loss = run(rows(i)).float().square().mean()
        found.append(loss.detach())
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            p.data.sub_(p.grad)  # pyright: ignore[reportArgumentType]
    return found


def cast_by_two_recipes(options: dict[str, Any]) -> list[Tensor]:
    model, found = of_parts(), []
    runs = [torch.compile(model, backend="fp8", options={**options, "recipe": r}) for r in ("mixed", "rowwise")]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(4):
        for run in runs:
            loss = run(rows(i)).float().square().mean()
            found.append(loss.detach())
            loss.backward()
        plain(model, opt)
    return found


def targets(options: dict[str, Any]) -> list[Tensor]:
    """A model that is run without gradients by what is compiled with them, and follows another through `.data`."""
    model = of_parts()
    torch.compile(model, backend="fp8", options=options)(rows()).sum().backward()
    plain(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    compiled, found = torch.compile(run, backend="fp8", options=options), []
    for i in range(3):
        found.append(compiled(rows(i)))
        for p in model.parameters():
            p.data.mul_(0.7)
    return found


def stepped_between_backwards(options: dict[str, Any]) -> list[Tensor]:
    """A weight that is not cast is written by a kernel that torch does not count: autograd must not be told either."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(48, 64), nn.LayerNorm(64)).bfloat16(), []
    run = torch.compile(model, backend="fp8", options=options)
    opt = torch.optim.AdamW(model.parameters(), fused=True)
    for i in range(3):
        out = run(rows(i))
        out.float().square().mean().backward(retain_graph=True)
        plain(model, opt)
        out.float().abs().mean().backward()
        found.append(out.detach())
    return found


def gradients_cleared_by_a_hook(options: dict[str, Any]) -> list[Tensor]:
    """What an optimizer's own hooks do comes before what is done after all steps."""
    model, found = of_parts(), []
    run = torch.compile(model, backend="fp8", options=options)
    opt = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for i in range(4):
        for j in range(2):
            run(rows(2 * i + j)).float().square().mean().backward()
        opt.step()
        found += [p.detach().clone() for p in model.parameters()]
        if i == 0:
            opt.register_step_post_hook(lambda opt, args, kwargs: opt.zero_grad())
        opt.zero_grad()
    return found


class Forgetful(torch.optim.Optimizer):
    """It writes through `.data`, and leaves no gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(0.1 * p.grad)
                p.grad = None


def gradients_cleared_by_the_step(options: dict[str, Any]) -> list[Tensor]:
    model, found = of_parts(), []
    run = torch.compile(model, backend="fp8", options=options)
    opt = Forgetful(model.parameters())
    for i in range(4):
        for j in range(2):
            run(rows(2 * i + j)).float().square().mean().backward()
        if i == 0:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        opt.step()
        found += [p.detach().clone() for p in model.parameters()]
    return found


class Scaled(nn.Module):
    """A weight that is computed before it is cast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.scale = nn.Parameter(torch.randn(64, 48) * 0.1), nn.Parameter(torch.rand(64, 1) + 0.5)
        self.down, self.up = nn.Parameter(torch.randn(16, 48) * 0.1), nn.Parameter(torch.randn(64, 16) * 0.1)
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.up @ self.down
        weight = self.scale * weight / weight.norm(dim=1, keepdim=True)
        return self.last(nn.functional.gelu(nn.functional.linear(x, weight)))


def computed_weights(options: dict[str, Any]) -> list[Tensor]:
    model, found = Scaled().bfloat16(), []
    run = torch.compile(model, backend="fp8", options=options)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        for j in range(2):
            run(rows(2 * i + j)).float().square().mean().backward()
        found += [p.grad for p in model.parameters()]
        plain(model, opt)
    return found


LOOPS = [
    zeroed_between, cast_by_two_recipes, targets, stepped_between_backwards, computed_weights,
    gradients_cleared_by_a_hook, gradients_cleared_by_the_step,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: Callable[[dict[str, Any]], list[Tensor]]) -> None:
    found = []
    for keep in (True, False):
        torch._dynamo.reset()
        found.append(loop({**EAGER, "keep_casts": keep}))
    for i, (mine, theirs) in enumerate(zip(*found, strict=True)):
        assert torch.equal(mine, theirs), i


def test_a_model_is_called_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    note_casts = kept_casts.note_casts
    monkeypatch.setattr(kept_casts, "note_casts", lambda weights: (time.sleep(1e-3), note_casts(weights)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 512), nn.Linear(512, 512), nn.Linear(512, 48)).bfloat16()
    run = torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})
    expected, wrong = run(rows()), list[Any]()

    def work() -> None:
        try:
            wrong.extend(i for i in range(100) if not torch.equal(run(rows()), expected))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def doubling() -> kept_casts.KeptCasts:
    return kept_casts.KeptCasts(lambda w: [w[0] * 2, w[1] * 3], [KeptValue("a", (0,)), KeptValue("b", (1,))])


def test_weights_that_take_turns_behind_the_same_first_one_are_not_noted_for_ever() -> None:
    first, *others = (nn.Parameter(torch.randn(4, 4), requires_grad=False) for _ in range(3))
    graph = doubling()
    for i in range(40):
        graph([first, others[i % 2]])
    assert len(kept_casts._values.unchanged) <= len(others)


def test_weights_that_come_and_go_are_not_noted_for_ever() -> None:
    graph, counts, before = doubling(), [], set(kept_casts._values.by_key)
    for i in range(40):
        graph([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        if i in (20, 39):
            gc.collect()
            counts.append(len(weakref.finalize._registry))  # of which others may end meanwhile
    assert counts[1] <= counts[0]
    assert before >= set(kept_casts._values.by_key)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(executor: str, reentrant: bool, casts: list[int]) -> None:
    """What a checkpoint runs again reads the casts that are kept."""
    compare(make=lambda: of_parts(wraps=lambda run, x: checkpoint(run, x, use_reentrant=reentrant)), executor=executor)
    assert len(casts) >= STEPS


def test_parameters_in_fp32_under_autocast(casts: list[int]) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = Layers()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x.float())

    compare(make=Cast, executor="inductor")
    assert casts == [3] * RUNS


def test_layers_that_share_a_graph(casts: list[int]) -> None:
    """Each has casts of its own; one whose weights do not train has none that are kept."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(48, 48)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.gelu(self.linear(x))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer() for _ in range(4))).bfloat16()
        model[1].requires_grad_(False)
        return model

    def run(options: dict[str, Any]) -> list[Tensor]:
        torch._dynamo.reset()
        model = make()
        for layer in model:
            layer.compile(backend="fp8", options=options)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for i in range(STEPS):
            for j in range(BATCHES):
                loss = model(rows(i * BATCHES + j)).float().square().mean()
                loss.backward()
                found.append(loss.detach())
            plain(model, opt)
        return found

    assert all(map(torch.equal, run({**EAGER, "keep_casts": True}), run(EAGER)))
    assert casts == [1, 1, 1] * RUNS


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "cnn", "mixtral", "t5", "shared_module", "checkpoint"])
def test_models_of_the_zoo(name: str) -> None:
    """Two steps of two batches: the same losses and gradients."""

    def run(options: dict[str, Any]) -> list[Tensor]:
        torch._dynamo.reset()
        case = ZOO[name]()
        given = {**options, "skip": list(case.skip)} if case.skip else options
        model = torch.compile(case.model, backend="fp8", options=given)
        opt = torch.optim.SGD([p for p in case.model.parameters() if p.requires_grad], lr=0.01)
        found = []
        for _ in range(2):
            for _ in range(2):
                loss = case.loss(model(**case.inputs))
                loss.backward()
                found.append(loss.detach())
            found += [p.grad.clone() for p in case.model.parameters() if p.grad is not None]
            plain(case.model, opt)
        return found

    assert all(map(torch.equal, run({**EAGER, "keep_casts": True}), run(EAGER)))


def held() -> list[weakref.ref[Tensor]]:
    return list(map(weakref.ref, kept()))


def test_memory_is_freed_with_the_model() -> None:
    model: Any = of_parts()
    torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})(rows()).sum().backward()
    found = held()
    assert found
    del model
    torch._dynamo.reset()
    gc.collect()
    assert not [x for x in found if x() is not None]


def test_memory_is_freed_with_the_last_graph_that_reads_it() -> None:
    """Of a model that is compiled anew with other casts, say."""
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    graphs = [kept_casts.KeptCasts(lambda w: [w[0] * 2], [KeptValue("doubled", (0,))]) for _ in range(2)]
    first, second = (graph([weight])[0] for graph in graphs)
    assert first is second
    found = weakref.ref(first)
    del first, second
    graphs.pop()
    gc.collect()
    assert found() is not None
    graphs.pop()
    gc.collect()
    assert found() is None


def test_old_payloads_are_freed_before_new_ones_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_parts()
    run = torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})
    run(rows()).sum().backward()
    found = held()
    alive: list[int] = []
    stand_ins = kept_casts.stand_ins
    monkeypatch.setattr(
        kept_casts, "stand_ins", lambda w: (alive.append(sum(x() is not None for x in found)), stand_ins(w))[1]
    )
    plain(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run(rows())
    assert alive == [0]


def test_what_cannot_be_computed_again_is_not_taken_for_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory was too small for a moment, in which a weight lay elsewhere: the next call casts."""
    model = of_parts()
    run = torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": True})
    for _ in range(2):
        run(rows()).sum().backward()
        plain(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = run(rows())
    before = model.up.weight.data
    model.up.weight.data = before * 2

    def fails(weights: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(kept_casts, "stand_ins", fails)
        with pytest.raises(torch.OutOfMemoryError):
            run(rows())
    model.up.weight.data = before
    assert torch.equal(run(rows()), expected)


def test_backward_does_not_write_into_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lets backward write into the memory of activations, for which it takes payloads that forward hands on."""
    compiles, seen = inner_compiler.compile_fx_inner, list[tuple[int, int, int]]()

    def spied(gm: Any, inputs: Any, **settings: Any) -> Any:
        if settings.get("is_backward"):
            given = [bool(n.meta.get(KEPT)) for n in gm.graph.find_nodes(op="placeholder")]
            donated = TracingContext.get().fw_metadata.bw_donated_idxs
            seen.append((sum(given), len(donated), sum(given[i] for i in donated)))
        return compiles(gm, inputs, **settings)

    monkeypatch.setattr(inner_compiler, "compile_fx_inner", spied)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).bfloat16()
    run = torch.compile(model, backend="fp8", options={**INDUCTOR, "keep_casts": True})
    x = torch.randn(64, 64).bfloat16()
    run(x).float().square().sum().backward()
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    run(x).float().square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    run(x).float().square().sum().backward()
    ((given, donated, both),) = seen
    assert given >= 3
    assert donated
    assert not both
    values = kept()
    before = [x.clone() for x in values]
    for _ in range(2):
        run(x).float().square().sum().backward()
    assert all(a is b for a, b in zip(kept(), values, strict=True))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(values, before, strict=True))


def test_memory_that_a_replay_reads_stays(casts: list[int]) -> None:
    """Where CUDA graphs are asked for, payloads are computed again into the memory that they have."""
    model = of_parts()
    run = torch.compile(
        model, backend="fp8", options={**EAGER, "keep_casts": True, "inductor": {"triton.cudagraphs": True}}
    )
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    places = []
    for i in range(3):
        run(rows(i)).sum().backward()
        places.append([x.data_ptr() for x in kept()])
        plain(model, opt)
    assert places[0] == places[1] == places[2]
    assert casts == [3] * 3


def test_the_report_says_what_is_kept() -> None:
    explanation = fp8compile.explain(of_parts(), rows(), options={**EAGER, "keep_casts": True})
    assert "11.01 KiB of casts are kept until a weight is written" in str(explanation)
    assert "of casts are kept" not in str(fp8compile.explain(of_parts(), rows(), options=EAGER))


def test_a_captured_step_casts_by_itself() -> None:
    assert not _for_a_captured_step(Options.parse({"keep_casts": True})).keep_casts


def _on_ranks(rank: int) -> list[list[Tensor]]:
    found = []
    for keep in (True, False):
        torch._dynamo.reset()
        model: Any = DistributedDataParallel(of_parts())
        run = torch.compile(model, backend="fp8", options={**EAGER, "keep_casts": keep})
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        out = []
        for i in range(STEPS):
            for j in range(BATCHES):
                waits = model.no_sync() if j < BATCHES - 1 else contextlib.nullcontext()
                with waits:
                    loss = run(rows(10 * i + 2 * j + rank)).float().square().mean()
                    loss.backward()
                out.append(loss.detach())
            plain(model, opt)
            out += [p.detach().clone() for p in model.parameters()]
        found.append(out)
    return found


def test_ranks_accumulate() -> None:
    for mine, theirs in Ranks().run(_on_ranks):
        assert all(map(torch.equal, mine, theirs))


def test_a_dump_shows_the_graph_of_casts(tmp_path: Path) -> None:
    given = {**EAGER, "keep_casts": True, "dump": str(tmp_path)}
    torch.compile(of_parts(), backend="fp8", options=given)(rows()).sum().backward()
    assert [x for x in tmp_path.rglob("*weights*") if x.is_file()]
