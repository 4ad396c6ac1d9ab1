"""Keys and values that a model repeats for groups of queries are read as they were before, with the same results.

Training is computed by the CPU's kernel, which is told to be one that is taken there; as a GPU traces it, the graph is
that of a model that repeats nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ZOO, tokens
from pipelines import drop_pass, look_after
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from fp8compile.passes.attention import grouped_heads
from fp8compile.passes.core.compilation import Compilation, aten, value

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
BATCH, HEADS, COUNT, LENGTH, WIDTH = 2, 2, 4, 24, 16
ON_CPU = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


def heads_first(x: Tensor) -> Tensor:
    """As transformers does it: [b, h, s, d]."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, COUNT, s, d).reshape(b, h * COUNT, s, d)


def tokens_first(x: Tensor) -> Tensor:
    """As Llama's own code does it: [b, s, h, d], and transposed afterwards."""
    b, h, s, d = x.shape
    wide = x.transpose(1, 2)[:, :, :, None, :].expand(b, s, h, COUNT, d).contiguous()
    return wide.view(b, s, h * COUNT, d).transpose(1, 2)


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(COUNT, dim=1)


def interleaved_by_name(x: Tensor) -> Tensor:
    return torch.repeat_interleave(x.transpose(1, 2), repeats=COUNT, dim=-2).transpose(1, 2)


REPEATS = [heads_first, tokens_first, interleaved, interleaved_by_name]


class Attention(nn.Module):
    def __init__(self, repeat: Callable[[Tensor], Tensor]):
        super().__init__()
        self.repeat = repeat

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), mask)


class Computed(Attention):
    """Keys and values that no caller has: what a projection gives, or a rotation."""

    def __init__(self, repeat: Callable[[Tensor], Tensor]):
        super().__init__(repeat)
        g = torch.Generator().manual_seed(2)
        self.scale, self.shift = (nn.Parameter(torch.rand(1, 1, 1, WIDTH, generator=g) + 0.5) for _ in range(2))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(q, k * self.scale, v + self.shift, mask)


def inputs(queries: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS * COUNT, queries, WIDTH, generator=g)
    k, v = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=g) for _ in range(2))
    return q, k, v, torch.rand(BATCH, 1, queries, LENGTH, generator=g) < 0.8


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[fx.Node]:
    """The attentions of the graph that was compiled last, behind the pass."""
    found: list[fx.Node] = []

    def look(c: Compilation) -> None:
        found[:] = [n for n in c.graph.nodes if "_scaled_dot_product" in str(n.target)]

    look_after(monkeypatch, "grouped_heads", look)
    return found


@pytest.fixture
def in_training(monkeypatch: pytest.MonkeyPatch, calls: list[fx.Node]) -> list[fx.Node]:
    """Those, where the CPU's kernel is taken for gradients, too."""
    monkeypatch.setattr(grouped_heads, "KNOW_GROUPS", grouped_heads.KNOW_GROUPS | {ON_CPU})
    return calls


def compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(run, backend="fp8", options={"strict": True, "executor": "eager"})


def of_any_sizes(*given: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs, whose batch and lengths are symbols when they are compiled for."""
    for x in given:
        for dim in (0, 2, 3) if x.dtype == torch.bool else (0, 2):
            torch._dynamo.mark_dynamic(x, dim)
    return given


def is_grouped(calls: list[fx.Node]) -> bool:
    """Whether attention, all of it or nothing, reads keys and values with fewer heads."""
    assert calls
    (found,) = {_groups(call) for call in calls}
    return found


def _groups(call: fx.Node) -> bool:
    first = call.target._schema.arguments[0].name == "grad_out"  # type: ignore[union-attr]
    q, k, v = (value(x).shape[1] for x in call.args[first : first + 3])  # type: ignore[arg-type]
    assert k == v
    assert q in (k, k * COUNT)
    return q != k


def check(run: Callable[..., Any], *given: Tensor) -> None:
    """Compare what `run` returns with what it returns uncompiled, and the gradients of what wants any."""
    leaves = [x for x in given if x.requires_grad]
    found, expected = compiled(run)(*given), run(*given)
    torch.testing.assert_close(found, expected)
    if leaves:
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        actual, right = (torch.autograd.grad((y * weights).sum(), leaves) for y in (found, expected))
        torch.testing.assert_close(actual, right)


def trained(*wanted: bool) -> list[Tensor]:
    """Return queries, keys, values and a mask, of which some want gradients."""
    *given, mask = inputs()
    return [*(x.requires_grad_(wish) for x, wish in zip(given, wanted, strict=True)), mask]


# ---- read once -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("repeat", REPEATS)
@torch.no_grad()
def test_repeated_heads_are_read_once(repeat: Callable[[Tensor], Tensor], dynamic: bool, calls: list[fx.Node]) -> None:
    check(Attention(repeat), *(of_any_sizes(*inputs()) if dynamic else inputs()))
    assert is_grouped(calls)


@torch.no_grad()
def test_without_a_mask(calls: list[fx.Node]) -> None:
    check(Attention(heads_first), *inputs()[:3])
    assert is_grouped(calls)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, False)])
@pytest.mark.parametrize("repeat", REPEATS)
def test_gradients_are_those_of_the_copies(
    repeat: Callable[[Tensor], Tensor], wanted: tuple[bool, ...], in_training: list[fx.Node]
) -> None:
    check(Computed(repeat), *trained(*wanted))
    assert len(in_training) == 2
    assert is_grouped(in_training)


@pytest.mark.parametrize("repeat", REPEATS)
def test_gradients_of_any_sizes(repeat: Callable[[Tensor], Tensor], in_training: list[fx.Node]) -> None:
    check(Computed(repeat), *of_any_sizes(*trained(True, True, True)))
    assert is_grouped(in_training)


def test_no_copy_is_left_in_training(monkeypatch: pytest.MonkeyPatch, in_training: list[fx.Node]) -> None:
    read: list[fx.Node] = []
    look_after(monkeypatch, "select_matmuls", lambda c: read.extend(c.graph.nodes))
    compiled(Computed(heads_first))(*trained(True, True, True)).sum().backward()
    assert in_training
    repeated = (HEADS * COUNT, LENGTH)
    assert all(tuple(value(n).shape[1:3]) != repeated for n in read if isinstance(n.meta.get("val"), Tensor))


def test_the_kernel_of_the_cpu_is_not_taken_for_gradients(calls: list[fx.Node]) -> None:
    check(Computed(heads_first), *trained(True, True, True))
    assert not is_grouped(calls)


@pytest.mark.parametrize("masked", [False, True])
def test_regions_that_run_again(masked: bool, in_training: list[fx.Node]) -> None:
    """A checkpoint in the graph, and one around it, which looks at whatever is saved meanwhile."""
    *given, mask = trained(True, True, True)
    model = Computed(heads_first)
    given += [mask] * masked

    def within(*given: Tensor) -> Tensor:
        return checkpoint(model, *given, use_reentrant=False)

    check(within, *given)
    assert is_grouped(in_training)
    run, leaves = compiled(model), given[:3]
    found = torch.autograd.grad(checkpoint(run, *given, use_reentrant=False).square().sum(), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(model(*given).square().sum(), leaves))
    assert is_grouped(in_training)


class Traced(nn.Module):
    """Causal attention as a GPU traces it; by itself in groups, or behind copies of keys and values."""

    def __init__(self, kernel: str, repeat: Callable[[Tensor], Tensor]):
        super().__init__()
        self.kernel, self.repeat = kernel, repeat
        self.qkv = nn.Linear(64, (HEADS * COUNT + 2 * HEADS) * WIDTH, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        q, k, v = heads.split([HEADS * COUNT, HEADS, HEADS], 1)
        k, v = self.repeat(k), self.repeat(v)
        flags = {"cudnn": (None, True, 0.0, True), "flash": (0.0, True), "efficient": (None, True, 0.0, True)}
        attention = getattr(aten, f"_scaled_dot_product_{self.kernel}_attention")
        return attention(q, k, v, *flags[self.kernel])[0].transpose(1, 2).flatten(2)


def joint_graph(monkeypatch: pytest.MonkeyPatch, kernel: str, repeat: Callable[[Tensor], Tensor]) -> list[fx.Node]:
    """Return the nodes of the joint graph behind the pass."""
    found: list[fx.Node] = []
    with monkeypatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        look_after(patch, "select_matmuls", lambda c: found.extend(c.graph.nodes))
        compiled(Traced(kernel, repeat))(torch.empty(BATCH, LENGTH, 64, dtype=torch.bfloat16))
    return found


@pytest.mark.parametrize("repeat", REPEATS)
@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_the_graph_is_that_of_attention_in_groups(
    monkeypatch: pytest.MonkeyPatch, kernel: str, repeat: Callable[[Tensor], Tensor]
) -> None:
    found, right = (joint_graph(monkeypatch, kernel, how) for how in (repeat, lambda x: x))

    def computing(nodes: list[fx.Node]) -> list[tuple[str, Any]]:
        """What is no view, in order, with shapes and strides of what each gives."""
        views = ("permute", "squeeze", "unsqueeze", "view", "alias", "detach")
        kept = [n for n in nodes if not any(name in str(n.target) for name in views)]
        return [
            (str(n.target), (tuple(value(n).shape), value(n).stride()) if isinstance(value(n), Tensor) else None)
            for n in kept
            if n.op == "call_function"
        ]

    assert any("backward" in name for name, _ in computing(found))
    assert computing(found) == computing(right)


def test_a_kernel_that_knows_no_groups_is_given_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = joint_graph(monkeypatch, "efficient", heads_first)
    assert not is_grouped([n for n in nodes if "_scaled_dot_product" in str(n.target)])


# ---- what is no group ------------------------------------------------------------------------------------------------


def other_order(x: Tensor) -> Tensor:
    """Query head i reads head i % h."""
    return x.repeat(1, COUNT, 1, 1)


def other_order_expanded(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, None].expand(b, COUNT, h, s, d).reshape(b, h * COUNT, s, d)


def tokens_repeated(x: Tensor) -> Tensor:
    """Heads become tokens: the same sizes, and no repetition of heads."""
    b, h, s, d = x.shape
    return x.reshape(b, h * COUNT, s // COUNT, d).repeat_interleave(COUNT, 2)


def cut(x: Tensor) -> Tensor:
    """As many heads as queries have, of more: the reshape merges other dimensions."""
    b, h, s, d = x.shape
    return x[:, :, :, None].expand(b, h, s, COUNT, d).reshape(b, h * COUNT, s, d)


def batch_of_one_too(x: Tensor) -> Tensor:
    """A sequence that all of a batch share is repeated as well."""
    b, h, s, d = x.shape
    return x[:1, :, None].expand(b, h, COUNT, s, d).reshape(b, h * COUNT, s, d)


NO_GROUPS = [other_order, other_order_expanded, tokens_repeated, cut, batch_of_one_too]


@pytest.mark.parametrize("repeat", NO_GROUPS)
@torch.no_grad()
def test_what_only_looks_like_groups(repeat: Callable[[Tensor], Tensor], calls: list[fx.Node]) -> None:
    check(Attention(repeat), *inputs())
    assert not is_grouped(calls)


@pytest.mark.parametrize("repeat", NO_GROUPS)
def test_gradients_of_what_only_looks_like_groups(
    repeat: Callable[[Tensor], Tensor], in_training: list[fx.Node]
) -> None:
    check(Computed(repeat), *trained(True, True, True))
    assert not is_grouped(in_training)


@torch.no_grad()
def test_keys_alone(calls: list[fx.Node]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, heads_first(k), v, mask)

    q, k, _, mask = inputs()
    check(run, q, k, q[:, :, :1].expand(-1, -1, LENGTH, -1), mask)
    assert not is_grouped(calls)


@torch.no_grad()
def test_other_groups_of_values(calls: list[fx.Node]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, heads_first(k), v.repeat_interleave(COUNT // 2, 1))

    q, k, *_ = inputs()
    check(run, q, k, torch.randn(BATCH, 2 * HEADS, LENGTH, WIDTH))
    assert not is_grouped(calls)


@torch.no_grad()
def test_queries_that_are_the_keys(calls: list[fx.Node]) -> None:
    """What is repeated is read as queries, too: these stay as many."""

    def run(k: Tensor, v: Tensor) -> Tensor:
        q = heads_first(k)
        return scaled_dot_product_attention(q, q, heads_first(v))

    check(run, *inputs()[1:3])
    assert is_grouped(calls)


@torch.no_grad()
def test_tokens_that_are_repeated(calls: list[fx.Node]) -> None:
    """The same expansion, merged with the tokens behind it: every sequence is there four times."""

    def repeat(x: Tensor) -> Tensor:
        b, h, s, d = x.shape
        return x[:, :, None].expand(b, h, COUNT, s, d).reshape(b, h, COUNT * s, d)

    q, k, v, _ = inputs()
    mask = torch.rand(BATCH, 1, q.shape[2], COUNT * LENGTH) < 0.8
    check(lambda *given: scaled_dot_product_attention(q[:, :HEADS], *map(repeat, given), mask), k, v)
    assert not is_grouped(calls)


LAYOUTS = {  # of keys, [b, h, s, d], that fused kernels do not read, or not everywhere
    "columns first": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded along a batch": lambda x: x[:1].expand(BATCH, -1, -1, -1),
    "rows that are not aligned": lambda x: torch.cat((x, x[..., :1]), -1)[..., :WIDTH],
    "a beginning that is not aligned": lambda x: torch.cat((x, x), -1)[..., 1 : 1 + WIDTH],
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@torch.no_grad()
def test_layouts_that_kernels_do_not_read(layout: str, calls: list[fx.Node]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, heads_first(LAYOUTS[layout](k)), heads_first(v), mask)

    check(run, *inputs())
    assert not is_grouped(calls)


# ---- who else reads, or writes ---------------------------------------------------------------------------------------


def hooked(x: Tensor) -> Tensor:
    y = heads_first(x)
    y.register_hook(lambda g: g * 2)
    return y


def hooked_within(x: Tensor) -> Tensor:
    """A hook between the expansion and the reshape."""
    b, h, s, d = x.shape
    wide = x[:, :, None].expand(b, h, COUNT, s, d)
    wide.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return wide.reshape(b, h * COUNT, s, d)


@pytest.mark.parametrize("repeat", [hooked, hooked_within])
def test_hooks_see_gradients_of_the_copies(repeat: Callable[[Tensor], Tensor], in_training: list[fx.Node]) -> None:
    check(Computed(repeat), *trained(True, True, True))
    assert not is_grouped(in_training)


def test_a_hook_that_turns_a_gradient(in_training: list[fx.Node]) -> None:
    """Of as many tokens as a head has columns: the sum reads what has the same shape."""

    def repeat(x: Tensor) -> Tensor:
        y = heads_first(x)
        y.register_hook(lambda g: g.transpose(2, 3))
        return y

    q, k, v, _ = inputs()
    check(Computed(repeat), q, *(x[:, :, :WIDTH].clone().requires_grad_() for x in (k, v)))
    assert not is_grouped(in_training)


def test_a_hook_behind_the_sum(in_training: list[fx.Node]) -> None:
    def repeat(x: Tensor) -> Tensor:
        x = x * x.cos()
        x.register_hook(lambda g: g * 3)
        return heads_first(x)

    check(Computed(repeat), *trained(True, True, True))
    assert is_grouped(in_training)


def test_copies_that_are_returned_have_gradients_of_their_own(in_training: list[fx.Node]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = heads_first(k * k.cos()), heads_first(v * v.cos())
        return torch.cat((scaled_dot_product_attention(q, keys, values), keys, values), 2)

    check(run, *trained(True, True, True)[:3])
    assert not is_grouped(in_training)


def test_two_attentions_read_one_copy(in_training: list[fx.Node]) -> None:
    """Their gradients are added before they are summed over the group."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = heads_first(k * k.cos()), heads_first(v * v.cos())
        return scaled_dot_product_attention(q, keys, values) + scaled_dot_product_attention(q.cos(), keys, values)

    check(run, *trained(True, True, True)[:3])
    assert not is_grouped(in_training)


def test_a_bias_that_is_learned_has_its_gradient(in_training: list[fx.Node]) -> None:
    """No fused kernel gives it: torch computes all scores."""
    q, k, v, _ = trained(True, True, True)
    check(Computed(heads_first), q, k, v, torch.zeros(BATCH, 1, q.shape[2], LENGTH, requires_grad=True))
    assert not in_training


COPIES: dict[str, Callable[[Tensor], Tensor]] = {  # that a compiler may drop, and others
    "none": lambda x: x,
    "a view": lambda x: x[:],
    "a view of another dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "a copy of its bits": lambda x: x.view(torch.int32).clone().view(torch.float32),
    "clone": lambda x: x.clone(),
    "a conversion": lambda x: x.to(torch.float32, copy=True),
    "by way of FP64": lambda x: x.double().float(),
    "a concatenation": lambda x: torch.cat([x]),
    "a stack": lambda x: torch.stack([x])[0],
    "padding": lambda x: nn.functional.pad(x, (0, 0)),
    "written into zeros": lambda x: torch.zeros_like(x).copy_(x),
    "zeros added": lambda x: x + torch.zeros_like(x),
    "multiplied by ones": lambda x: torch.ones_like(x) * x,
    "a power": lambda x: x**1,
    "dropout": lambda x: nn.functional.dropout(x, 0.0, True),
    "every row": lambda x: x[torch.arange(x.shape[0])],
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_cache_is_written_before_backward(copy: str, in_training: list[fx.Node]) -> None:
    """What a caller has may change between forward and backward: the repeated heads were made before."""
    q, k, v, mask = trained(True, False, False)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = COPIES[copy](k), COPIES[copy](v)
        return scaled_dot_product_attention(q, heads_first(k), heads_first(v), mask)

    cache = [x.clone() for x in (k, v)]
    y = compiled(run)(q, *cache)
    for x in cache:
        x.fill_(torch.nan)
    (found,) = torch.autograd.grad(y.square().sum(), q)
    (right,) = torch.autograd.grad(run(q, k, v).square().sum(), q)
    torch.testing.assert_close(found, right)
    assert not is_grouped(in_training)


@pytest.mark.parametrize("copy", COPIES)
def test_keys_that_are_returned_are_written_before_backward(copy: str, in_training: list[fx.Node]) -> None:
    """As a cache that a model makes."""
    q, k, v, mask = trained(True, True, True)
    weight = torch.randn(WIDTH, WIDTH)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k, v = k @ weight, v @ weight
        y = scaled_dot_product_attention(q, heads_first(k), heads_first(v), mask)
        return y, COPIES[copy](k)[:, :, 1:], COPIES[copy](v)[0]

    y, *cache = compiled(run)(q, k, v)
    with torch.no_grad():
        for x in cache:
            x.fill_(7)
    found = torch.autograd.grad(y.square().sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad(run(q, k, v)[0].square().sum(), (q, k, v)))
    assert not is_grouped(in_training)


@torch.library.custom_op("tests_grouped::write", mutates_args=("cache",))
def write_op(cache: Tensor, x: Tensor) -> None:
    cache[:, :, : x.shape[2]] = x


@write_op.register_fake
def _(cache: Tensor, x: Tensor) -> None:
    return None


def put(cache: Tensor, x: Tensor, at: int) -> None:
    cache[:, :, torch.arange(x.shape[2]) + at] = x


CACHES: dict[str, Callable[[Tensor, Tensor, int], object]] = {
    "by places": put,
    "by a slice": lambda cache, x, at: cache[:, :, at : at + x.shape[2]].copy_(x),
    "by a custom operator": lambda cache, x, at: torch.ops.tests_grouped.write(cache[:, :, at:], x),
}


class Cached(nn.Module):
    """Attention to a cache which it writes first, and again behind attention."""

    def __init__(self, write: Callable[[Tensor, Tensor, int], object]):
        super().__init__()
        self.write = write
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BATCH, HEADS, 2 * LENGTH, WIDTH))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write(self.keys, k, 0)
        self.write(self.values, v, 0)
        y = scaled_dot_product_attention(q, heads_first(self.keys), heads_first(self.values))
        self.write(self.keys, k.sin(), 8)
        self.write(self.values, v.cos(), 8)
        return y


@pytest.mark.parametrize("write", CACHES)
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_cache_that_the_graph_writes(executor: str, write: str, in_training: list[fx.Node]) -> None:
    if (executor, write) == ("inductor", "by a slice") and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 its Inductor, by itself, lets attention read what is written behind it")
    q, k, v, _ = trained(True, False, False)
    model, eager = Cached(CACHES[write]), Cached(CACHES[write])
    torch.compiler.reset()
    y = torch.compile(model, backend="fp8", options={"strict": True, "executor": executor})(q, k, v)
    right = eager(q, k, v)
    torch.testing.assert_close([y, model.keys, model.values], [right, eager.keys, eager.values])
    (found,), (want,) = (torch.autograd.grad(x.square().sum(), q) for x in (y, right))
    torch.testing.assert_close(found, want)
    assert not is_grouped(in_training)


def test_a_cache_that_is_written_as_a_whole(in_training: list[fx.Node]) -> None:
    """Keys are computed for it, and attention reads what was computed."""

    def run(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
        k, v = k * k.cos(), v * v.cos()
        cache.copy_(k)
        return scaled_dot_product_attention(q, heads_first(k), heads_first(v))

    given, cache = trained(True, False, False)[:3], torch.zeros(BATCH, HEADS, LENGTH, WIDTH)
    y = compiled(run)(*given, cache)
    cache.fill_(7)
    (found,) = torch.autograd.grad(y.square().sum(), given[:1])
    (right,) = torch.autograd.grad(run(*given, cache).square().sum(), given[:1])
    torch.testing.assert_close(found, right)
    assert not is_grouped(in_training)


def by_a_method(k: Tensor) -> None:
    k.mul_(2)


def by_an_index(k: Tensor) -> None:
    k[:, :, 0] = 7


def by_an_embedding(k: Tensor) -> None:
    nn.functional.embedding(torch.arange(10), k.view(-1, WIDTH), max_norm=0.5)


WRITERS = [by_a_method, by_an_index, by_an_embedding]
ORDERS = ["before the copy", "before attention", "after attention"]


def writing(write: Callable[[Tensor], None], when: str) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = k * k.cos(), v * v.cos()
        if when == ORDERS[0]:
            write(k)
        keys, values = heads_first(k), heads_first(v)
        if when == ORDERS[1]:
            write(k)
        y = scaled_dot_product_attention(q, keys, values, mask)
        if when == ORDERS[2]:
            write(k)
        return y + k.sum() + v.sum()

    return run


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("when", ORDERS)
@torch.no_grad()
def test_what_is_written_is_read_as_it_was_when_it_was_copied(
    when: str, write: Callable[[Tensor], None], calls: list[fx.Node]
) -> None:
    check(writing(write, when), *inputs())
    assert is_grouped(calls)


@pytest.mark.parametrize("write", WRITERS[:2])
@pytest.mark.parametrize("when", ORDERS)
def test_gradients_of_what_is_written(when: str, write: Callable[[Tensor], None], in_training: list[fx.Node]) -> None:
    check(writing(write, when), *trained(True, True, True))
    assert is_grouped(in_training)


@pytest.mark.parametrize("write", WRITERS)
@torch.no_grad()
def test_an_input_that_is_written(write: Callable[[Tensor], None], calls: list[fx.Node]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = heads_first(k), heads_first(v)
        write(k)
        return scaled_dot_product_attention(q, keys, values, mask)

    (q, k, v, mask), (_, other, *_) = inputs(), inputs()
    torch.testing.assert_close(compiled(run)(q, k, v, mask), run(q, other, v, mask))
    assert torch.equal(k, other)
    assert is_grouped(calls)


# ---- which kernel ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_kernels_that_the_graph_itself_chooses(calls: list[fx.Node]) -> None:
    def run(*given: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return Attention(heads_first)(*given)

    check(run, *inputs())
    assert not calls


@torch.no_grad()
def test_groups_that_attention_is_told_of(calls: list[fx.Node]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    check(run, *inputs())
    assert is_grouped(calls)


@torch.no_grad()
def test_decoding_with_a_static_cache(monkeypatch: pytest.MonkeyPatch, calls: list[fx.Node]) -> None:
    """Llama of the zoo has groups: its cache is not copied, and logits are those of attention that copies it."""
    transformers = pytest.importorskip("transformers")
    model: Any = ZOO["llama"]().model.eval().requires_grad_(False)
    prompt = tokens()

    def decoded() -> Tensor:
        torch.compiler.reset()
        run = torch.compile(model, backend="fp8", options={"select": "all", "executor": "eager", "save_min_bytes": 0})
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(input_ids=prompt, past_key_values=cache, use_cache=True)
        return run(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True).logits

    found = decoded()
    assert len(calls) == model.config.num_hidden_layers
    assert all(map(_has_groups, calls))
    drop_pass(monkeypatch, "grouped_heads")
    assert torch.equal(found, decoded())


def _has_groups(call: fx.Node) -> bool:
    q, k, v = (value(x).shape[1] for x in call.args[:3])  # type: ignore[arg-type]
    return q > k == v
