"""Outputs that are views of one intermediate result, whatever layout its kernel or matmul gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.descriptors import IntermediateBaseAOTOutput

from fp8compile.torch_hooks import inner_compiler
from fp8compile.torch_hooks.inductor.output_strides import VISIBLE


@contextlib.contextmanager
def views_by_strides(executor: str) -> Iterator[None]:
    """Have AOTAutograd take views by strides, not by repeating them.

    torch 2.13 frees the sizes that it repeats them with; then it asks for a shape made of whatever lies there, or
    crashes when it caches the graph. Plain Inductor does so as well.
    """
    by_inductor = {"view_replay_for_aliased_outputs": False, "enable_autograd_cache": False}
    with torch._functorch.config.patch(by_inductor if executor == "inductor" else {}):
        yield


VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "flat and transposed": lambda y: (y.flatten(0, -2), y.transpose(0, -1)),
    "halves": lambda y: tuple(y.chunk(2, -1)),
    "one row": lambda y: (y[0], y),
    "diagonal": lambda y: (y.diagonal(0, 0, 1), y.flatten()),
}


class Viewed(nn.Module):
    """A matmul with 100 columns, which FP8 units make 112 of, and views of its result."""

    def __init__(self, views: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.linear, self.views = nn.Linear(48, 100, bias=False), views

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.views(self.linear(x))


class EachViewed(nn.Module):
    """Ways to view, each of a result of its own: of an input of its own, so that no two matmuls are merged."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.each = nn.ModuleList(Viewed(VIEWS[name]) for name in names)

    def forward(self, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
        return [viewed(x) for viewed, x in zip(self.each, inputs, strict=True)]


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_views_of_one_result(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, bases = list[set[int]](), list[set[int]]()
    compile_inner = inner_compiler.compile_fx_inner

    def seen(gm: fx.GraphModule, *args: Any, **settings: Any) -> Any:
        if not settings.get("is_backward"):
            meta = gm.graph.output_node().meta
            kept.append(set(meta[VISIBLE]))
            bases.append({i for i, desc in enumerate(meta["desc"]) if isinstance(desc, IntermediateBaseAOTOutput)})
        return compile_inner(gm, *args, **settings)

    monkeypatch.setattr(inner_compiler, "compile_fx_inner", seen)
    torch.manual_seed(0)
    names = [*VIEWS] if executor == "eager" else ["flat and transposed", "one row"]
    model = EachViewed(names).bfloat16()
    inputs = [torch.randn(6, 8, 48).bfloat16() for _ in names]
    run = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "executor": executor})
    with views_by_strides(executor):
        found = run(*inputs)
        sum(o.float().square().sum() for got in found for o in got).backward()
    for name, got, wanted, viewed in zip(names, found, model(*inputs), model.each, strict=True):
        assert [(o.shape, o.stride()) for o in got] == [(o.shape, o.stride()) for o in wanted], name
        # two casts of 31 dB, 28 dB, and some room
        assert all(sqnr(w, g) > 20 for w, g in zip(wanted, got, strict=True)), name
        assert viewed.linear.weight.grad is not None, name
        assert viewed.linear.weight.grad.isfinite().all(), name
    if executor == "inductor":  # it is to keep the strides of the views, and of what they are views of
        assert kept == [{*range(2 * len(names)), *bases[0]}]
        assert bases[0] - {*range(2 * len(names))}


@pytest.mark.parametrize("columns", [7, 32])
@pytest.mark.parametrize("grad", [False, True])
def test_parts_of_one_result_share_its_memory(columns: int, grad: bool) -> None:
    """Cut in several ways, returned without what they are parts of: a write to one is seen in the others."""

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ weight
        return (*y.unbind(1), *y.chunk(2, 1), *y.split_with_sizes([3, columns - 3], 1))

    weight, x = nn.Parameter(torch.randn(48, columns)), torch.randn(16, 48)
    run = torch.compile(parts, backend="fp8", options={"select": "all", "strict": True, "executor": "eager"})
    with torch.set_grad_enabled(grad):
        got, wanted = run(x), parts(x)
    assert [(o.shape, o.stride()) for o in got] == [(o.shape, o.stride()) for o in wanted]
    assert len({o.untyped_storage().data_ptr() for o in got}) == 1
    if grad:
        torch.stack([o.sum() for o in got]).square().sum().backward()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
    got[0].detach().fill_(100.0)
    assert (got[columns].detach()[:, 0] == 100.0).all()


class WithLoss(nn.Module):
    """A model that returns its logits beside the loss that it computes of them: they are saved for backward as well.

    Without a bias they are a part of what the matmul wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(64, 100, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.down(F.gelu(x))
        loss = F.cross_entropy(y.float().flatten(0, -2), target) + y.float().square().mean()
        return loss, y, y[..., ::2]


def test_backward_does_not_overwrite_what_was_returned() -> None:
    """What is saved and lies in the memory of an output is not backward's to write to."""
    torch.manual_seed(0)
    model = WithLoss().bfloat16()
    x, target = torch.randn(2, 3, 64).bfloat16().requires_grad_(), torch.randint(100, (6,))
    options = {"select": "all", "strict": True, "lm_head": True, "chunk_loss": False, "save_min_bytes": 0}
    with views_by_strides("inductor"):
        loss, *returned = torch.compile(model, backend="fp8", options=options)(x, target)
        before = [y.clone() for y in returned]
        loss.backward()
    assert all(torch.equal(y, b) for y, b in zip(returned, before, strict=True))
    assert sqnr(model(x, target)[1], returned[0]) > 20
