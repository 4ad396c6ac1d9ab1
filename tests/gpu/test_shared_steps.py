"""Steps of one rule for many parameters on a GPU: bits, and the first step's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import OPTIMIZERS, set_gradients
from torch import nn

import fp8compile
from fp8compile.backend import fp8
from fp8compile.kernels.optimizer.known_launch import KnownLaunch
from fp8compile.kernels.reference import state_reference
from fp8compile.optimizer.shared_step import replayed, shared_step
from fp8compile.optimizer.shared_step.replayed import Replayed
from fp8compile.optimizer.state_parts import INNER

pytestmark = pytest.mark.gpu

from fp8compile.kernels.optimizer.scattered_numbers import BLOCK, read_numbers  # noqa: E402  # imports Triton

SHAPES = ((96, 64), (64, 65), (7,), (30, 4, 50), (1,))
NAMES = ["adam_decayed", "adamw", "amsgrad", "nadam", "radam", "adamax", "rmsprop_centered", "adadelta"]
MIB = 1 << 20
LAUNCHED = {"inductor": {"triton.cudagraphs": False}}  # kernel by kernel


def make(name: str, dtypes: tuple[torch.dtype, ...]) -> torch.optim.Optimizer:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(x.to("cuda", dtype)) for dtype in dtypes for x in values]
    kind, arguments = OPTIMIZERS[name]
    return kind([{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.003}], lr=0.01, **arguments)


def tensors(opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for p in (p for group in opt.param_groups for p in group["params"]):
        found.append(p.detach())
        for x in opt.state[p].values():
            found += (
                [y for n in INNER if (y := getattr(x, n)) is not None] if isinstance(x, fp8compile.FP8State) else [x]
            )
    return found


def run(opt: torch.optim.Optimizer, step: Callable[[], Any], steps: int = 3) -> None:
    parameters = [p for group in opt.param_groups for p in group["params"]]
    for i in range(steps):
        host = [p.detach().cpu() for p in parameters]
        set_gradients(host, i)
        for p, h in zip(parameters, host, strict=True):
            p.grad = None if i == 1 and p is parameters[0] else h.grad.cuda()  # type: ignore[union-attr]
        opt.param_groups[0]["lr"] = 0.01 / (i + 1)
        step()


@pytest.mark.parametrize("name", NAMES)
def test_as_one_graph_bit_for_bit(name: str) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    mine, theirs = make(name, dtypes), make(name, dtypes)
    run(mine, torch.compile(mine.step, backend="fp8", options={"strict": True}))
    assert not shared_step._shared[mine].refusal
    run(theirs, torch.compile(theirs.step, backend=lambda gm, x: fp8(gm, x, options={"strict": True})))
    for x, y in zip(tensors(mine), tensors(theirs), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)  # says how many differ, and by how much


def replays(opt: torch.optim.Optimizer) -> list[Replayed]:
    """What launches the steps of an optimizer; none of them may have failed to capture a graph."""
    found = [x.replayed for group in shared_step._shared[opt].groups.values() for x in group.together]
    assert found
    assert not any(x.refusal for x in found if x is not None)
    return [x for x in found if x is not None]


def drawn_gradients(opt: torch.optim.Optimizer, seed: int) -> None:
    """Gradients that lie elsewhere than those before."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for p in (p for group in opt.param_groups for p in group["params"]):
        p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)


class Disturbance:
    """What happens to an optimizer between its steps, by the number of the step."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def __call__(self, opt: torch.optim.Optimizer, i: int) -> None:
        first, *others = opt.param_groups[0]["params"]
        self.held += [p.grad for p in others if i % 3]  # in two of three steps gradients come to lie elsewhere
        drawn_gradients(opt, i)
        opt.param_groups[0]["lr"] = 0.01 / (i % 4 + 1)
        state = opt.state[first]
        if i == 6:
            first.grad = None
        elif i == 7:
            opt.param_groups[1]["weight_decay"] = 0.03
        elif i == 12:
            opt.load_state_dict(opt.state_dict())
        elif i == 17:
            first.data = first.data.clone() * 2
        elif i == 19:
            moved = next((x for x in state.values() if isinstance(x, fp8compile.FP8State)), None)
            if moved is not None:
                self.held.append(moved.like(torch.Tensor.detach))  # its memory is not used again
                moved.data = moved.like(torch.clone)
        elif i == 22:
            state["step"].data = state["step"].data + 3
        elif i == 27:
            opt.param_groups[0]["lr"] = torch.tensor(0.005, device="cuda")
        elif i > 27:
            lr = opt.param_groups[0]["lr"] = torch.tensor(0.005 / i, device="cuda") if i == 33 else self.lr
            lr.mul_(0.5)
        self.lr = opt.param_groups[0]["lr"]


def test_a_parameter_that_is_transposed_where_it_lies() -> None:
    """At the same address, with the same size: updated bit for bit as one that was copied to lie in order."""
    found = []
    for change in (torch.Tensor.t, lambda x: x.t().contiguous()):
        generator = torch.Generator().manual_seed(0)
        parameters = [nn.Parameter(torch.randn(96, 96, generator=generator).cuda()) for _ in range(2)]
        opt = torch.optim.AdamW(parameters, lr=0.01)
        step = torch.compile(opt.step, backend="fp8", options={"strict": True})
        for i in range(10):
            if i == 6:
                parameters[0].data = change(parameters[0].data)
            drawn_gradients(opt, i)
            step()
        found.append(tensors(opt))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize("name", NAMES)
def test_replayed_as_launched_bit_for_bit(name: str) -> None:
    found = []
    for options in ({}, LAUNCHED):
        opt, disturb, count = make(name, (torch.float32, torch.bfloat16)), Disturbance(), 0
        step = torch.compile(opt.step, backend="fp8", options={"strict": True, **options})
        for i in range(38):
            disturb(opt, i)
            step()
            count += sum(x.graph is not None for x in replays(opt))
        assert not shared_step._shared[opt].refusal
        assert count > 20 if not options else not replays(opt)
        found.append(tensors(opt))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, LAUNCHED])
def test_a_graph_made_before_a_step_is_refused(options: dict[str, Any]) -> None:
    """By torch, as after its own step: it would read what launches, or a replay of them, have overwritten."""
    opt = make("adamw", (torch.float32,))
    step = torch.compile(opt.step, backend="fp8", options={"strict": True, **options})
    for i in range(6):
        drawn_gradients(opt, i)
        losses = [(p * p).sum() for group in opt.param_groups for p in group["params"]]
        step()
        for loss in losses:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_replayed_steps_are_unscaled_and_skipped() -> None:
    found = []
    for options in ({}, LAUNCHED):
        opt = fp8compile.prepare_optimizer(make("adamw", (torch.float32,)), unscale=True)
        opt.step = torch.compile(opt.step, backend="fp8", options=options)  # type: ignore[method-assign]
        scaler = torch.amp.GradScaler("cuda", init_scale=4096.0, growth_interval=3)
        for i in range(16):
            drawn_gradients(opt, i)
            for p in opt.param_groups[0]["params"]:
                p.grad.mul_(scaler.scale(torch.ones(1, device="cuda")))
            if i in (5, 9):
                opt.param_groups[0]["params"][1].grad[0] = torch.inf
            scaler.step(opt)
            scaler.update()
        assert bool(replays(opt)) != bool(options)
        found.append(tensors(opt))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_steps_on_another_stream_and_of_many_optimizers() -> None:
    """An optimizer a parameter, as optimizers in backward are: their graphs share memory, and give it back."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    parameters = [nn.Parameter(torch.randn(64, 64 + i, device="cuda")) for i in range(40)]
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    mine = [torch.optim.AdamW([p], lr=0.01) for p in parameters]
    theirs = [torch.optim.AdamW([p], lr=0.01) for p in copies]
    pairs = [
        (torch.compile(x.step, backend="fp8"), torch.compile(y.step, backend="fp8", options=LAUNCHED))
        for x, y in zip(mine, theirs, strict=True)
    ]
    side = torch.cuda.Stream()
    for i in range(12):
        for x, y, both in zip(mine, theirs, pairs, strict=True):
            drawn_gradients(x, i)
            drawn_gradients(y, i)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side if i in (5, 6) else torch.cuda.current_stream()):
                for step in both:
                    step()
            torch.cuda.current_stream().wait_stream(side)
    assert all(replays(x)[0].graph is not None for x in mine)
    assert torch.cuda.memory_reserved() - before < 40 * MIB
    for x, y in zip(mine, theirs, strict=True):
        for a, b in zip(tensors(x), tensors(y), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(replayed._pools) == 1
    del x, y, pairs, both, step, mine, theirs
    torch.compiler.reset()
    gc.collect()
    assert not replayed._pools


SHAPES_OF_IMAGES = ((64, 32, 3, 3), (33, 65, 5, 5), (8, 4, 3, 3), (1, 300, 4, 4), (130, 96), (33,))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values: convolutions in channels-last layout, a matrix transposed."""
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.mT.contiguous().mT if x.dim() == 2 else x


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_that_are_not_contiguous(dtype: torch.dtype, rounding: str) -> None:
    """Updated where they lie, bit for bit as contiguous ones; their gradients lie as they do, or otherwise."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in SHAPES_OF_IMAGES]
    found = []
    for layout in (turned, torch.clone):
        generator.manual_seed(1)
        parameters = [nn.Parameter(layout(x.clone())) for x in values]
        opt = torch.optim.AdamW(parameters)
        step = torch.compile(opt.step, backend="fp8", options={"strict": True, "states": {"parameters": rounding}})
        for i in range(3):
            for k, p in enumerate(parameters):
                gradient = torch.randn(p.shape, generator=generator).to("cuda", dtype)
                p.grad = None if (i, k) == (1, 0) else gradient if k == i else layout(gradient)
            step()
        (group,) = shared_step._shared[opt].groups.values()
        assert all(x.launch is not None for x in group.alike)
        assert len(group.together) == 1
        found.append(tensors(opt))
    assert not parameters[0].equal(values[0])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, check_stride=False)


@pytest.mark.parametrize("prepared", [False, True])
def test_the_first_step_of_590_million_elements(prepared: bool) -> None:
    """What it allocates beyond what it keeps: at most 64 MiB, in the first step and in later ones."""
    small = nn.Parameter(torch.randn(64, 64, device="cuda", dtype=torch.bfloat16))
    large = nn.Parameter(torch.randn(576_000, 1024, device="cuda", dtype=torch.bfloat16))
    opt = torch.optim.AdamW([small, large])
    if prepared:
        fp8compile.prepare_optimizer(opt)
    step = torch.compile(opt.step, backend="fp8", options={"strict": True})
    for p in (small, large):
        p.grad = torch.ones_like(p)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        kept = max(torch.cuda.memory_allocated(), before)
        assert torch.cuda.max_memory_allocated() - kept <= 64 * MIB
    x = opt.state[large]["exp_avg"]
    assert isinstance(x, fp8compile.FP8State)


def test_states_are_stored_and_read_by_a_kernel() -> None:
    """Bit for bit the reference, with no memory beyond the result."""
    x = torch.randn(50 * MIB + 77, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    state = fp8compile.FP8State.of(x, format="log/stochastic", salt=5)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * x.numel() + 16 * MIB
    start = x[: 1 << 20]
    codes, ends = state_reference.encode(start, "log/stochastic", torch.tensor([5], dtype=torch.int32, device="cuda"))
    assert torch.equal(state.payload[: 1 << 20], codes)
    assert torch.equal(state.side[: (1 << 20) // 128], ends)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    read = state.dequantize()
    assert torch.cuda.max_memory_allocated() - before <= 4 * x.numel() + 16 * MIB
    assert torch.equal(read[: 1 << 20], state_reference.decode(codes, ends, "log/stochastic"))


def test_what_is_launched_again_is_compiled_for_its_arguments() -> None:
    """Addresses of both alignments, other counts (1 is a constant of the code), and another dtype, in turns."""
    launch = KnownLaunch(read_numbers, (BLOCK,))
    for _ in range(2):
        for dtype in (torch.float32, torch.int64):
            for count in (1, 16, 37):
                for offset in (0, 1):
                    numbers = [torch.full((4,), i + 1, device="cuda", dtype=dtype) for i in range(count)]
                    table = torch.tensor([x.data_ptr() for x in numbers], device="cuda")
                    found = torch.full((count + 4 + offset,), -1, device="cuda", dtype=dtype)
                    launch(1, table, found[offset:], count, count + 2)
                    expected = [-1] * offset + [*range(1, count + 1), 1, 1, -1, -1]
                    assert found.tolist() == expected
    assert len(launch.known) == 12


def test_steps_of_one_parameter_each_in_backward() -> None:
    """Backward runs on a thread of autograd's, where steps are bound, captured and replayed."""
    models = [nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64), nn.LayerNorm(64)).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    in_backward, behind = ([torch.optim.AdamW([p], lr=0.01) for p in model.parameters()] for model in models)
    mine, theirs = ([torch.compile(opt.step, backend="fp8") for opt in opts] for opts in (in_backward, behind))
    for p, opt, step in zip(models[0].parameters(), in_backward, mine, strict=True):

        def hook(p: torch.Tensor, opt: torch.optim.Optimizer = opt, step: Callable[[], Any] = step) -> None:
            step()
            opt.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    runs = [torch.compile(model, backend="fp8", options={"select": "all"}) for model in models]
    for i in range(7):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).cuda()
        for forward in runs:
            forward(x).square().sum().backward()
        for opt, step in zip(behind, theirs, strict=True):
            step()
            opt.zero_grad()
        for a, b in zip(in_backward, behind, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True)), i
    states = in_backward[0].state[models[0][0].weight]
    assert any(isinstance(x, fp8compile.FP8State) for x in states.values())
