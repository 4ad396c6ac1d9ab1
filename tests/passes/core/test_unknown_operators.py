"""Operators that nobody knows: backward finds their inputs exact, and in the strides in which they came."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from saving import check, compiled, gradients, is_fp8, noise, ratio, rows, step
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fp8compile import ops
from fp8compile.passes.core import operators
from fp8compile.passes.core.compilation import aten, value
from fp8compile.passes.core.stride_demands import ALIGNED, EXACT, RECORDED, ROWS, broken_strides, record
from fp8compile.passes.lower.keep_strides import keep_strides
from fp8compile.passes.save.save_as_fp8 import _wasteful_slices

pytestmark = pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
D, TOKENS, HEADS = 64, 64, 2
STRIDES: dict[str, set[Any]] = {}  # what the operators below have seen


def _seen(name: str, *tensors: Tensor) -> None:
    STRIDES.setdefault(name, set()).add(tuple(tuple(t.stride()) for t in tensors))


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.float() @ k.float().mT / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.float()).to(q.dtype).contiguous()


@torch.library.custom_op("fp8tests::mix", mutates_args=())
def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ) v, under a name that says nothing of it."""
    _seen("mix", q, k, v)
    return _mix(q, k, v)


@mix.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("fp8tests::unmix", mutates_args=())
def unmix(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    _seen("unmix", q, k, v)
    g, a, b, c = (t.float() for t in (grad, q, k, v))
    p = (a @ b.mT / a.shape[-1] ** 0.5).softmax(-1)
    dp = g @ c.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / a.shape[-1] ** 0.5
    return tuple(t.to(q.dtype).contiguous() for t in (ds @ b, ds.mT @ a, p.mT @ g))  # type: ignore[return-value]


@unmix.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    empty = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return empty, torch.empty_like(empty), torch.empty_like(empty)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return unmix(grad.contiguous(), *ctx.saved_tensors)


mix.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
UNKNOWN = {f"read by fp8tests.{name}, which is not known to bear rounding" for name in ("mix", "unmix")}


class Mixer(nn.Module):
    """Projections, what is done with them before they are mixed, the operator, and a projection."""

    def __init__(self, before: Callable[[Tensor], Tensor], again: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.before, self.again = before, again
        with torch.no_grad():
            self.up.weight.mul_(5)  # logits of some 10: rounded, they are others

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.again else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        q, k, v = (self.before(t) for t in self.up(x).chunk(3, -1))
        return self.down(mix(q, k, v).reshape(TOKENS, -1))


BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "scaled": lambda t: (t * 1.5).contiguous(),
    "views": lambda t: t.view(TOKENS, HEADS, -1).transpose(0, 1).unsqueeze(0).squeeze(0),
    "views_of_views": lambda t: torch.cat((t, t), -1).unflatten(-1, (2 * HEADS, -1)).permute(1, 0, 2)[::2],
    "pointwise_between_views": lambda t: F.silu(t.view(TOKENS, HEADS, -1)).transpose(0, 1).contiguous(),
    "copied": lambda t: torch.cat((t[:, 32:], -t[:, :32]), -1).clone(),
}


@pytest.mark.parametrize(
    ("before", "again"), [*((name, False) for name in BEFORE), ("scaled", True), ("pointwise_between_views", True)]
)
def test_what_an_unknown_operator_reads_is_exact(before: str, again: bool) -> None:
    """Gradients are as near as BF16's, and both it and its backward have found the strides that they find eagerly."""
    torch.manual_seed(0)
    model, x = Mixer(BEFORE[before], again).bfloat16(), noise(TOKENS, D)
    STRIDES.clear()
    bf16 = step(model, model, [x])
    eager = {name: set(found) for name, found in STRIDES.items()}
    STRIDES.clear()
    got = step(model, compiled(model, kernels="inductor"), [x])
    assert eager == STRIDES
    wide = copy.deepcopy(model).float()
    exact = step(wide, wide, [x.float()])
    # x and the mixed values are rounded (31 dB each) for weight gradients: up's reads x beside the exact rest
    check(got, exact, bf16, ratio(25.0))
    reasons = {row.reason for row in rows()}
    assert again or reasons & UNKNOWN, reasons
    assert again or any(is_fp8(row) for row in rows())  # what all is computed from again is exact, too


def test_matmuls_in_fp8_leave_the_strides_alone() -> None:
    torch.manual_seed(0)
    model = Mixer(BEFORE["itself"]).bfloat16()
    STRIDES.clear()
    step(model, model, [noise(TOKENS, D)])
    eager = {name: set(found) for name, found in STRIDES.items()}
    STRIDES.clear()
    step(model, compiled(model, skip=()), [noise(TOKENS, D)])
    assert eager == STRIDES


class Biased(nn.Module):
    """Attention with a trainable bias that is looked up, as T5's: what `bias` makes of [n, n, heads]."""

    def __init__(self, bias: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Embedding(32, 4)
        self.bias = bias
        with torch.no_grad():
            self.table.weight.mul_(3)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(TOKENS)
        q, k, v = (t.view(2, TOKENS, 4, 16).transpose(1, 2) for t in self.up(x).chunk(3, -1))
        bias = self.bias(self.table((at[:, None] - at).abs() % 32))
        return self.down(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


def permuted(t: Tensor) -> Tensor:
    return t.permute(2, 0, 1).unsqueeze(0)


def lowest(t: Tensor) -> Tensor:
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return torch.where(causal, permuted(t), torch.finfo(t.dtype).min)


BIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "permuted": permuted,
    "contiguous": lambda t: permuted(t).contiguous(),
    "expanded": lambda t: permuted(t).expand(2, -1, -1, -1),
    "one_head_for_all": lambda t: permuted(t)[:, :1].expand(2, 4, -1, -1),
    "masked": lowest,
    "masked_and_expanded": lambda t: lowest(t).expand(2, -1, -1, -1).contiguous(),
    "padded": lambda t: F.pad(permuted(t), (0, 8))[..., :TOKENS],
}


class AllBiased(nn.ModuleDict):
    """A model for each bias, compiled as one."""

    def __init__(self, before: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        super().__init__({name: Biased(lambda t, bias=bias: before(bias(t))) for name, bias in BIASES.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in self.values()])


def test_gradients_of_a_bias_are_near() -> None:
    """It stands in the exponent beside queries and keys; in groups with minus infinity nothing of it would be left."""
    torch.manual_seed(0)
    model = AllBiased().bfloat16()
    x = noise(2, TOKENS, D)
    exact = copy.deepcopy(model).float()
    want, bf16 = step(exact, exact, [x.float()]), step(model, model, [x])
    got = step(model, compiled(model, kernels="inductor"), [x])
    assert gradients(got).keys() == gradients(want).keys()
    assert all(f"{bias}.table.weight" in got for bias in BIASES)
    # v and the output are rounded; the gradient of the scores is a difference of what is computed from them
    check(got, want, bf16, ratio(17.0))


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention as a GPU traces it where a bias is given."""
    bias = bias.expand(*q.shape[:3], k.shape[2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[0]


def test_the_bias_of_attention_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """On graphs as a GPU would trace them, verified after every pass, after the cut, and after each lowering step."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", efficient)
    torch.compiler.reset()
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AllBiased(Tensor.contiguous)
        finally:
            torch.set_default_dtype(before)
        x = torch.empty(2, TOKENS, D, dtype=torch.bfloat16, requires_grad=True)
        compiled(model, skip=())(x).sum().backward()
    biases = [row for row in rows() if row.reason == "added in the exponent of attention"]
    assert {row.path.split(".")[0] for row in biases} == BIASES.keys()
    assert not any(is_fp8(row) for row in rows() if "table" in row.path)


def test_every_operator_of_the_tables_exists() -> None:
    """A name with a slip of the pen in it would never be met."""
    known = {schema.name for schema in torch._C._jit_get_all_schemas()} | {"flex_attention", "flex_attention_backward"}
    missing = (operators.HARMLESS | operators.STEEP | operators.PARTLY.keys()) - known
    others = ("torchvision::", "torch_attn::")  # registered when they are imported
    newer = {"aten::_scaled_mm_v2", "aten::_scaled_grouped_mm_v2", "aten::_unsafe_masked_index"}
    assert not {name for name in missing - newer if not name.startswith(others)}


def traced(**strides: tuple[int, ...]) -> fx.Graph:
    """The backward of efficient attention, of inputs that are computed, with these strides."""
    graph = fx.Graph()
    names = [a.name for a in aten._scaled_dot_product_efficient_attention_backward.default._schema.arguments][:9]
    with FakeTensorMode():
        nodes = []
        for name in names:
            shape = (2, 4, 64, 64) if not name.startswith("philox") else ()
            shape = shape[:3] if name == "logsumexp" else shape
            x = torch.empty_strided(shape, strides.get(name, torch.empty(shape, device="meta").stride()))
            source = graph.placeholder(name)
            source.meta["val"] = x
            nodes.append(graph.call_function(aten.mul.Tensor, (source, 2)))
            nodes[-1].meta["val"] = x
        call = graph.call_function(
            aten._scaled_dot_product_efficient_attention_backward.default, (*nodes, 0.0, [True] * 4)
        )
        call.meta["val"] = (value(nodes[0]),) * 4
        graph.output(call)
    return graph


def test_inductor_is_told_how_attention_finds_its_inputs() -> None:
    graph = traced()
    keep_strides(graph)
    call = next(n for n in graph.nodes if operators.is_attention(n.target))
    kept = [a for a in call.args[:7] if isinstance(a, fx.Node)]
    assert all("force_stride_order" in str(a.target) for a in kept[:6]), kept
    assert [a.args[1] for a in kept[:6]] == [value(a).stride() for a in kept[:6]]


ACROSS = (16384, 1, 256, 4)  # as a permuted embedding lies


@pytest.mark.parametrize(
    ("argument", "strides", "broken"),
    [
        ("attn_bias", ACROSS, True),
        ("attn_bias", (0, 4096, 64, 1), False),  # expanded: rows lie in memory as rows
        ("attn_bias", (0, 4225, 65, 1), True),  # rows that were filled up to multiples of 16 no longer are
        ("query", (16900, 4225, 65, 1), False),
        ("query", (16384, 64, 256, 1), False),
        ("key", (16384, 1, 256, 4), True),
        ("out", (16384, 64, 256, 1), True),  # it is read as attention left it
    ],
)
def test_a_demand_that_is_broken_is_found(argument: str, strides: tuple[int, ...], broken: bool) -> None:
    graph = traced()
    record(graph)
    call = next(n for n in graph.nodes if operators.is_attention(n.target))
    names = [a.name for a in call.target._schema.arguments]
    given = call.args[names.index(argument)]
    with value(given).fake_mode:
        given.meta["val"] = torch.empty_strided((2, 4, 64, 64), strides)
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    for g in (graph, copied):  # what was recorded goes along with the node
        assert bool(broken_strides(g)) == broken
        assert not broken or argument in next(iter(broken_strides(g).values()))


def test_demands_are_those_of_the_table() -> None:
    graph = traced()
    record(graph)
    call = next(n for n in graph.nodes if operators.is_attention(n.target))
    demands = {name: demand for name, (demand, _) in call.meta[RECORDED].items()}
    assert (demands["['query']"], demands["['attn_bias']"]) == (ROWS, ALIGNED)
    assert demands["['out']"] == demands["['grad_out_']"] == EXACT
    assert operators.takes_any_strides(ops.quantize)
    assert operators.takes_any_strides(aten.mul.Tensor)
    assert not operators.takes_any_strides(aten.as_strided.default)
    assert not operators.takes_any_strides(torch.ops.fp8tests.mix.default)


@pytest.mark.parametrize("reader", [aten._scaled_dot_product_efficient_attention_backward.default, None])
def test_a_bias_whose_rows_were_filled_up_is_kept_as_it_lies(reader: Any) -> None:
    """torch pads its rows to multiples of 16, and attention looks at where they begin; a copy would leave that out."""
    graph = traced()
    call = next(n for n in graph.nodes if operators.is_attention(n.target))
    bias = call.args[4]
    with value(bias).fake_mode, graph.inserting_before(call):
        whole = graph.call_function(aten.constant_pad_nd.default, (bias, [0, 200]))
        whole.meta["val"] = torch.empty(2, 4, 64, 264)
        part = graph.call_function(aten.slice.Tensor, (whole, 3, 0, 64))
        part.meta["val"] = value(whole)[..., :64]
        view = graph.call_function(aten.expand.default, (part, [2, 4, 64, 64]))
        view.meta["val"] = value(part)
    if reader is not None:
        call.replace_input_with(bias, view)
    assert _wasteful_slices([part], 0) == (set() if reader is not None else {part})
