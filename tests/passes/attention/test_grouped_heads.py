"""Keys and values that a model repeats for groups of queries are read as they were before, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ZOO, tokens
from pipelines import dynamo_graph
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fp8compile.passes.attention import grouped_heads

BATCH, HEADS, COUNT, LENGTH, WIDTH = 2, 2, 4, 24, 16


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


class Attention(nn.Module):
    def __init__(self, repeat: Callable[[Tensor], Tensor], positional: bool = False):
        super().__init__()
        self.repeat, self.positional = repeat, positional

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = self.repeat(k), self.repeat(v)
        if self.positional:
            return scaled_dot_product_attention(q, k, v, mask)
        return scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)


def inputs(queries: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, HEADS * COUNT, queries, WIDTH, generator=g)
    k, v = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, generator=g) for _ in range(2))
    return q, k, v, torch.rand(BATCH, 1, queries, LENGTH, generator=g) < 0.8


def compiled(run: Callable[..., Tensor], *given: Tensor, dynamic: bool = False) -> tuple[Tensor, list[fx.Node]]:
    """What `run` returns with the pass, and the calls of attention in its graphs."""
    calls: list[fx.Node] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        grouped_heads.run(dynamo_graph(gm))
        calls.extend(n for n in gm.graph.nodes if n.target is scaled_dot_product_attention)
        return gm.forward

    torch.compiler.reset()
    return torch.compile(run, backend=backend, dynamic=dynamic)(*given), calls


def is_grouped(call: fx.Node) -> bool:
    """Whether attention is told of groups, and reads keys and values with fewer heads."""
    read = [x.meta["example_value"].shape[1] for x in call.all_input_nodes[:3]]
    assert read == ([HEADS * COUNT, HEADS, HEADS] if call.kwargs.get("enable_gqa") else [HEADS * COUNT] * 3)
    return bool(call.kwargs.get("enable_gqa"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("repeat", [heads_first, tokens_first, interleaved, interleaved_by_name])
@torch.no_grad()
def test_repeated_heads_are_read_once(repeat: Callable[[Tensor], Tensor], positional: bool, dynamic: bool) -> None:
    model = Attention(repeat, positional)
    found, (call,) = compiled(model, *inputs(), dynamic=dynamic)
    assert is_grouped(call)
    torch.testing.assert_close(found, model(*inputs()))


@torch.no_grad()
def test_without_a_mask() -> None:
    model = Attention(heads_first)
    found, (call,) = compiled(model, *inputs()[:3])
    assert is_grouped(call)
    torch.testing.assert_close(found, model(*inputs()[:3]))


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, False)])
@pytest.mark.parametrize("repeat", [heads_first, interleaved])
def test_gradients_are_those_of_the_copies(repeat: Callable[[Tensor], Tensor], wanted: tuple[bool, ...]) -> None:
    q, k, v, mask = inputs()
    given = [x.requires_grad_(is_wanted) for x, is_wanted in zip((q, k, v), wanted, strict=True)]
    leaves = [x for x in given if x.requires_grad]
    found, (call,) = compiled(Attention(repeat), *given, mask)
    assert is_grouped(call)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((Attention(repeat)(*given, mask) * weights).sum(), leaves)
    for actual, wish in zip(torch.autograd.grad((found * weights).sum(), leaves), expected, strict=True):
        torch.testing.assert_close(actual, wish)


def test_a_bias_that_is_learned_has_its_gradient() -> None:
    """No fused kernel gives it: torch computes all scores, and repeats by itself."""
    q, k, v, _ = inputs()
    bias = torch.zeros(BATCH, 1, q.shape[2], LENGTH, requires_grad=True)
    k.requires_grad_()
    found, (call,) = compiled(Attention(heads_first), q, k, v, bias)
    assert not is_grouped(call)
    actual = torch.autograd.grad(found.square().sum(), [k, bias])
    expected = torch.autograd.grad(Attention(heads_first)(q, k, v, bias).square().sum(), [k, bias])
    torch.testing.assert_close(actual, expected)


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


@pytest.mark.parametrize("repeat", [other_order, other_order_expanded, tokens_repeated, cut])
@torch.no_grad()
def test_what_only_looks_like_groups(repeat: Callable[[Tensor], Tensor]) -> None:
    model = Attention(repeat)
    found, (call,) = compiled(model, *inputs())
    assert not is_grouped(call)
    torch.testing.assert_close(found, model(*inputs()))


@torch.no_grad()
def test_keys_alone() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, heads_first(k), v, mask)

    q, k, _, mask = inputs()
    found, (call,) = compiled(run, q, k, q[:, :, :1].expand(-1, -1, LENGTH, -1), mask)
    assert not is_grouped(call)
    assert found.isfinite().all()


def written_by_a_method(k: Tensor) -> None:
    k.mul_(2)


def written_by_an_operator(k: Tensor) -> None:
    k += 1


def written_by_an_index(k: Tensor) -> None:
    k[:, :, 0] = 7


def written_by_a_function(k: Tensor) -> None:
    torch.neg(k, out=k)


def written_by_an_activation(k: Tensor) -> None:
    nn.functional.relu(k, True)


WRITERS = [
    written_by_a_method, written_by_an_operator, written_by_an_index, written_by_a_function, written_by_an_activation,
]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
@torch.no_grad()
def test_what_is_written_after_the_copy_is_copied(write: Callable[[Tensor], None]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = heads_first(k), heads_first(v)
        write(k)
        return scaled_dot_product_attention(q, keys, values, mask)

    right = run(*inputs())
    found, (call,) = compiled(run, *inputs())
    assert not is_grouped(call)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("write", WRITERS)
@torch.no_grad()
def test_what_is_written_before_the_copy_is_read(write: Callable[[Tensor], None]) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        write(k)
        return scaled_dot_product_attention(q, heads_first(k), heads_first(v), mask)

    right = run(*inputs())
    found, (call,) = compiled(run, *inputs())
    assert is_grouped(call)
    torch.testing.assert_close(found, right)


@torch.library.custom_op("tests_grouped::write", mutates_args={"x"})
def write_op(x: Tensor) -> None:
    x.mul_(3)


@write_op.register_fake
def _(x: Tensor) -> None:
    return None


@torch.library.custom_op("tests_grouped::repeat_interleave", mutates_args=())
def repeat_interleave(x: Tensor, count: int) -> Tensor:
    return x.repeat(1, count, 1, 1)


@repeat_interleave.register_fake
def _(x: Tensor, count: int) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * count, *x.shape[2:])


HIDDEN = {  # writes into k that no name tells of
    "a custom operator": lambda k: torch.ops.tests_grouped.write(k),
    "its overload": lambda k: torch.ops.tests_grouped.write.default(k),
    "an embedding": lambda k: nn.functional.embedding(torch.arange(10), k.view(-1, WIDTH), max_norm=0.5),
    "running statistics": lambda k: nn.functional.batch_norm(
        torch.ones(8, k.numel()), k.view(-1), k.new_ones(k.numel()), training=True
    ),
    "a place by position": lambda k: nn.functional.normalize(k, 2.0, 1, 1e-12, k),
    "a number for True": lambda k: nn.functional.relu(k, 1),
}


@pytest.mark.parametrize("name", list(HIDDEN))
@torch.no_grad()
def test_writes_that_no_name_tells_of(name: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = heads_first(k), heads_first(v)
        HIDDEN[name](k)
        return scaled_dot_product_attention(q, keys, values, mask)

    right = run(*inputs())
    found, (call,) = compiled(run, *inputs())
    assert not is_grouped(call)
    torch.testing.assert_close(found, right)


@torch.no_grad()
def test_a_custom_operator_of_that_name() -> None:
    model = Attention(lambda x: torch.ops.tests_grouped.repeat_interleave(x, COUNT))
    found, (call,) = compiled(model, *inputs())
    assert not is_grouped(call)
    torch.testing.assert_close(found, model(*inputs()))


@torch.no_grad()
def test_kernels_that_the_graph_itself_chooses() -> None:
    def run(*given: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return Attention(heads_first)(*given)

    found, (call,) = compiled(run, *inputs())
    assert not is_grouped(call)
    torch.testing.assert_close(found, run(*inputs()))


@torch.no_grad()
def test_another_kernel_is_not_taken() -> None:
    """The one that computes all scores repeats by itself: it takes no less time."""
    with sdpa_kernel(SDPBackend.MATH):
        found, (call,) = compiled(Attention(heads_first), *inputs())
    assert not is_grouped(call)
    torch.testing.assert_close(found, Attention(heads_first)(*inputs()))


@torch.no_grad()
def test_decoding_with_a_static_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama of the zoo has groups: its cache is not copied, and logits are those of attention that copies it."""
    transformers = pytest.importorskip("transformers")
    model: Any = ZOO["llama"]().model.eval().requires_grad_(False)
    prompt, group = tokens(), grouped_heads._group
    grouped: list[bool] = []

    def noted(node: fx.Node) -> bool:
        grouped.append(group(node))
        return grouped[-1]

    def decoded(how: Callable[[fx.Node], bool]) -> Tensor:
        monkeypatch.setattr(grouped_heads, "_group", how)
        torch.compiler.reset()
        run = torch.compile(model, backend="fp8", options={"select": "all", "executor": "eager", "save_min_bytes": 0})
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(input_ids=prompt, past_key_values=cache, use_cache=True)
        return run(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True).logits

    assert torch.equal(decoded(noted), decoded(lambda node: False))
    assert grouped == [True] * model.config.num_hidden_layers
