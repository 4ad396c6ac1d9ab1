"""Uses that once gave wrong numbers, crashed or lied, kept as they were found."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile

LEAST = 20.0  # dB: one or two matmuls of E4M3 operands (31 dB a cast) keep 25 or more


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="fp8", options={"select": "all", "executor": "eager", "strict": True, **options})


def linear(n: int = 64, **kwargs: Any) -> nn.Linear:
    return nn.Linear(32, n, **kwargs).bfloat16()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


class Holder(nn.Module):
    """A module that runs a function of itself."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def test_as_strided_of_a_merged_part_reads_its_own_memory() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        left, right = m.a(x), m.b(x)
        return torch.as_strided(left, (8, 8), (64, 1)) + torch.as_strided(right.view(64, 64), (8, 8), (64, 1))

    model, x = Holder(run, a=linear(), b=linear()), noise(64, 32)
    assert sqnr(model(x), compiled(model)(x)) > LEAST


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "patches": lambda y: y.flatten(2).transpose(1, 2),
    "channels_last": lambda y: y.permute(0, 2, 3, 1),
    "plain": lambda y: y,
}


def test_outputs_keep_their_strides() -> None:
    convolutions = {name: nn.Conv2d(16, 32, 4, 4).bfloat16() for name in VIEWS}
    model = Holder(
        lambda m, *xs: [view(getattr(m, name)(x)) for (name, view), x in zip(VIEWS.items(), xs, strict=True)],
        **convolutions,
    )
    inputs = [noise(2, 16, 16, 16) for _ in VIEWS]
    exact = copy.deepcopy(model).float()(*(x.float() for x in inputs))  # not every CPU's BF16 is right here
    plain = torch.compile(model, backend="aot_eager")(*inputs)
    for name, expected, usual, actual in zip(VIEWS, exact, plain, compiled(model)(*inputs), strict=True):
        assert actual.stride() == usual.stride(), name
        assert sqnr(expected, actual) > LEAST, name


def test_merged_outputs_keep_their_strides() -> None:
    model = Holder(lambda m, x: (m.a(x).permute(2, 0, 1), m.b(x)), a=linear(), b=linear())
    x = noise(2, 16, 32)
    for expected, actual in zip(model(x), compiled(model)(x), strict=True):
        assert actual.stride() == expected.stride()


@torch.library.custom_op("fp8compile_test::flat_sum", mutates_args=())
def flat_sum(x: Tensor) -> Tensor:
    """An operator whose kernel takes its input to be contiguous, as many do."""
    return torch.as_strided(x, (x.numel(),), (1,)).float().sum().reshape(1)


flat_sum.register_fake(lambda x: x.new_empty(1, dtype=torch.float32))


def test_an_operator_of_the_users_sees_the_strides_it_saw() -> None:
    model = Holder(lambda m, x: (flat_sum(m.a(x).detach()), m.b(x)), a=linear(), b=linear())
    x = noise(16, 32)
    assert sqnr(model(x)[0], compiled(model)(x)[0]) > LEAST


def test_dropout_in_a_checkpoint_has_one_mask() -> None:
    model = Holder(lambda m, x: checkpoint(lambda x: F.dropout(m.a(x), 0.5), x, use_reentrant=False), a=linear())
    out = compiled(model)(noise(16, 32).requires_grad_())
    out.sum().backward()
    kept = 2.0 * (out != 0).sum(0)  # the bias's gradient counts what forward kept, scaled by 1 / (1 - p)
    assert torch.equal(model.a.bias.grad.float(), kept.float())


def test_norms_and_whole_sums_compile() -> None:
    model, x = Holder(lambda m, x: m.a(x).float().norm() + m.a(x).sum(), a=linear()), noise(16, 32)
    assert sqnr(model(x), compiled(model)(x)) > LEAST
    assert fp8compile.last_compile().converted


def test_transposed_outputs_whose_gradients_are_tangents() -> None:
    model = Holder(lambda m, x: (m.a(x).t(), m.b(x).t()), a=linear(), b=linear())
    x = noise(16, 32)
    for out, plain in zip(compiled(model)(x), model(x), strict=True):
        assert sqnr(plain, out) > LEAST
    sum(o.sum() for o in compiled(model)(x)).backward()
    assert model.a.weight.grad.isfinite().all()


def test_addmm_with_one_bias_for_all() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(noise(32, 48) / 6) for _ in range(2))
            self.bias = nn.Parameter(noise(1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x, self.a) * torch.addmm(self.bias, x, self.b)

    model, x = Shared(), noise(16, 32)
    assert sqnr(model(x), compiled(model)(x)) > LEAST


def test_two_matmuls_of_a_module_have_two_histories() -> None:
    model = Holder(lambda m, x: m.a(m.a(x) * 1e-5) * 1e5, a=nn.Linear(32, 32, bias=False).bfloat16())
    recipe = {"base": "tensorwise", "output": {"left": {"delayed": True}}}
    step, x = compiled(model, recipe=recipe), noise(16, 32)
    for _ in range(3):
        out = step(x.requires_grad_())
        out.sum().backward()
    assert sqnr(model(x), out) > LEAST


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_autograd(autocast: bool) -> None:
    """With autocast the graph of backward is compiled within it: what it is given is not printed to make its key."""
    model, x = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 320), nn.GELU(), nn.Linear(320, 32)), noise(16, 32).float()
    exact = copy.deepcopy(model)
    exact(x).square().sum().backward()

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().sum()
            loss.backward()
        return loss

    model.to(torch.float32 if autocast else torch.bfloat16)
    with torch._dynamo.config.patch(compiled_autograd=True):
        loss = compiled(step, save_min_bytes=0)(x if autocast else x.bfloat16())
    assert sqnr(exact(x).float().square().sum(), loss) > LEAST
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert sqnr(q.grad, p.grad) > LEAST


def test_learned_queries_attend_in_bf16_and_products_of_weights_stay() -> None:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(noise(1, 16, 32))
            self.q, self.k = linear(32), linear(32)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(self.queries).expand(x.shape[0], -1, -1)
            return (q @ self.k(x).transpose(1, 2)).softmax(-1)

    compiled(Perceiver())(noise(4, 16, 32).requires_grad_()).sum().backward()
    rows = {(r.path, r.role, r.decision, r.reason) for r in fp8compile.last_compile().matmuls if r.role != "grad_input"}
    assert ("k", "output", "fp8", "every matmul that can run") in rows
    assert ("q", "other", "bf16", "both operands are weights") in rows
    assert not [r for r in fp8compile.last_compile().converted if r.kind == "bmm"]


def test_learned_queries_for_a_batch_of_any_size() -> None:
    """As in a pooling head: the queries are repeated as often as a size says that only the call knows."""

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.q, self.k = nn.Parameter(noise(1, 1, 32)), linear(32), linear(32)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(self.query.repeat(x.shape[0], 1, 1)) @ self.k(x).transpose(1, 2)

    model = Pool()
    run = torch.compile(
        model, backend="fp8", dynamic=True, options={"select": "all", "executor": "eager", "strict": True}
    )
    for batch in (4, 6):
        x = noise(batch, 16, 32)
        assert sqnr(model(x), run(x)) > LEAST
    assert fp8compile.last_compile().converted


class Queries(nn.Module):
    """Learned queries that attend to each other before they see the input, as those of a detector do."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.queries, self.attention = nn.Parameter(noise(1, 2, 16, 32)), attention
        self.qkv, self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(self.queries) for layer in self.qkv)
        made = F.scaled_dot_product_attention(q, k, v) if self.attention else torch.cummax(q * k + v, -1)[0]
        return self.out(made) + self.norm(x)


@pytest.mark.parametrize("attention", [True, False])
def test_what_an_operator_with_several_outputs_makes_of_weights_is_no_weight(attention: bool) -> None:
    model, x = Queries(attention), noise(4, 2, 16, 32)
    out = compiled(model)(x)
    assert sqnr(model(x), out) > LEAST
    out.float().square().mean().backward()
    roles = {r.path: r.role for r in fp8compile.last_compile().matmuls if r.role in ("output", "other")}
    assert roles == {"qkv.0": "other", "qkv.1": "other", "qkv.2": "other", "out": "output"}


UPDATES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], bool]] = {  # and whether it is a weight
    "update": (lambda w, a, b, m: w + 0.5 * (b @ a), True),
    "two updates": (lambda w, a, b, m: w + b @ a + (a.t() @ b.t()).t(), True),
    "scaled rows": (lambda w, a, b, m: (w + b @ a) * m, True),
    "magnitude over a norm": (lambda w, a, b, m: m * (w + b @ a) / (w + b @ a).norm(dim=1, keepdim=True), True),
    "product": (lambda w, a, b, m: b @ a, False),
    "scaled product": (lambda w, a, b, m: (b @ a) * m, False),
    "gate": (lambda w, a, b, m: (w + b @ a) * torch.sigmoid(b @ a), False),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_low_rank_update_of_a_weight_is_a_weight(name: str) -> None:
    compute, is_weight = UPDATES[name]

    class Lora(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(noise(64, 32) / 6, requires_grad=False)
            self.a, self.b = nn.Parameter(noise(16, 32) / 6), nn.Parameter(noise(64, 16) / 4)
            self.m, self.down = nn.Parameter(1 + noise(64, 1) / 4), nn.Linear(64, 32).bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.linear(x, compute(self.weight, self.a, self.b, self.m)))

    model, x = Lora(), noise(16, 32)
    out = compiled(model)(x)
    assert sqnr(model(x), out) > LEAST
    out.float().square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    rows = [r for r in fp8compile.last_compile().matmuls if r.role in ("output", "other")]
    (layer,) = [r for r in rows if (r.m, r.n, r.k) == (16, 64, 32)]
    assert (layer.role, layer.decision) == (("output", "fp8") if is_weight else ("other", "bf16"))
    assert is_weight or "a product of parameters" in layer.reason
    model.zero_grad()
    model(x).float().square().sum().backward()
    for n, p in model.named_parameters():
        assert p.grad is None or sqnr(p.grad, found[n]) > 10, n


def test_the_last_layer_of_a_block_is_no_head() -> None:
    model = Holder(lambda m, x: x + m.output(F.gelu(m.fc(x))), fc=linear(), output=nn.Linear(64, 32).bfloat16())
    compiled(model)(noise(16, 32))
    assert {r.path: r.decision for r in fp8compile.last_compile().matmuls} == {"fc": "fp8", "output": "fp8"}


def test_a_weight_that_also_depends_on_buffers_is_a_weight() -> None:
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 64))
    compiled(model)(torch.randn(16, 32)).sum().backward()
    assert [r.role for r in fp8compile.last_compile().converted] == ["output", "grad_weight"]


@pytest.mark.parametrize("kind", ["matrix_exp", "cayley", "householder"])
def test_a_weight_that_is_made_orthogonal_stays_so(kind: str) -> None:
    """It is a product with a buffer; the layer that it is made for is no less exact than with another product."""
    plain = nn.utils.parametrizations.orthogonal(nn.Linear(64, 64, bias=False), orthogonal_map=kind)
    model = Holder(lambda m, x: (m.second(m.first(x)), m.first.weight), first=plain, second=nn.Linear(64, 64))
    _, weight = compiled(model)(torch.randn(32, 64))
    assert float((weight @ weight.T - torch.eye(64)).detach().norm()) < 1e-4
    assert {r.path for r in fp8compile.last_compile().converted if r.role == "output"} == {"second"}


def test_a_model_that_is_given_nothing_takes_a_buffer_for_data() -> None:
    model = Holder(lambda m: m.layer(m.data), layer=nn.Linear(32, 64))
    model.register_buffer("data", torch.randn(16, 32))
    compiled(model)().sum().backward()
    assert [r.role for r in fp8compile.last_compile().converted] == ["output", "grad_weight"]


def test_results_may_be_written_to_in_place() -> None:
    """From the second call on as from the first: none is a view of memory that others are views of as well."""
    model = Holder(lambda m, x: (m.down(h := F.gelu(m.up(x))), h), up=linear(), down=nn.Linear(64, 32).bfloat16())
    run = compiled(model)
    for _ in range(3):
        out, hidden = run(noise(16, 32))
        hidden.mul_(2)
        (out.float().sum() + hidden.float().sum()).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_plain_tensors_as_weights_are_said_to_be_left() -> None:
    w = noise(32, 64).requires_grad_()
    with pytest.warns(fp8compile.Fp8Warning, match=r"NOTHING was converted.*nn\.Parameter"):
        compiled(lambda x: x @ w)(noise(16, 32)).sum().backward()


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_an_expert_without_tokens_and_rows_that_a_mask_chooses(executor: str) -> None:
    """The number of rows is the mask's: what chooses them runs once, and not in backward again."""
    count = 2 if executor == "eager" else 1  # each kernel of C++ takes a second to compile
    experts = nn.ModuleList([nn.Linear(32, 32).bfloat16() for _ in range(count)])
    others = {"a": linear(32), "b": linear()} if executor == "eager" else {}

    def run(m: Any, x: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(x)
        for i, expert in enumerate(m.experts):
            index = torch.where(choice == i)[0]
            out = out.index_add(0, index, expert(x[index]))
        chosen = (m.a(x) if others else out)[x[:, 0] > 0]
        return out, F.gelu(m.b(chosen) if others else chosen)

    model, x = Holder(run, experts=experts, **others), noise(64, 32)
    plain = copy.deepcopy(model)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        step = compiled(model, executor=executor, save_min_bytes=0)
        for choice in (torch.arange(64) % 2, torch.full((64,), 2 - count)):  # the last expert gets none
            found = []
            for m, call in ((model, step), (plain, plain)):
                m.zero_grad(set_to_none=True)
                out, chosen = call(x, choice)
                (out.float().sum() + chosen.float().square().sum()).backward()
                found.append((out, chosen, *(p.grad for p in m.parameters())))
            for got, wanted in zip(*found, strict=True):
                assert got.isfinite().all()
                assert torch.equal(got, wanted) or sqnr(wanted, got) > LEAST


@pytest.mark.parametrize("recipe", ["mixed", "blockwise"])
def test_chosen_rows_that_are_filled_up_are_as_many_again(recipe: str) -> None:
    """Rows of a result in groups, or columns of it: only the data knows how many there are."""
    runs: list[Any] = [lambda m, x: m.a(x[x[:, 0] > 0]), lambda m, x: m.a.weight @ x[x[:, 0] > 0].t()]
    for run in runs:
        torch.compiler.reset()
        model, x = Holder(run, a=linear(48)), noise(90, 32)
        found = []
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            for call in (compiled(model, recipe=recipe), model):
                model.zero_grad()
                out = call(x)
                out.float().square().sum().backward()
                found.append((out, model.a.weight.grad))
        for got, wanted in zip(*found, strict=True):
            assert got.shape == wanted.shape
            assert sqnr(wanted, got) > LEAST
        assert {m.decision for m in fp8compile.last_compile().matmuls} == {"fp8"}


def test_optimizer_steps_and_models_without_matmuls_are_quiet() -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 32)).sum().backward()
    before = model.weight.detach().clone()
    torch.compile(optimizer.step, backend="fp8", options={"executor": "eager", "strict": True})()
    assert not torch.equal(before, model.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "rows", "recipe"),
    [
        ((64, 64, 64), 32, "tensorwise"),  # tiles of BF16 that are read across, several in a kernel
        ((147, 5), 7, "blockwise"),  # columns that are padded, saved in groups, and no whole groups of 128
    ],
    ids=["transposed", "groups"],
)
def test_inductor_on_a_cpu_computes_what_eager_does(sizes: tuple[int, ...], rows: int, recipe: str) -> None:
    """What Inductor's C++ gets wrong is kept out of its way."""
    layers = [nn.Linear(k, n, bias=i % 2 == 0) for i, (k, n) in enumerate(itertools.pairwise(sizes))]
    model = Holder(
        lambda m, x: m.last(F.silu(m.inner(x))), inner=nn.Sequential(*layers[:-1]), last=layers[-1]
    ).bfloat16()  # fmt: skip
    x, found = noise(rows, sizes[0]), []
    for run in (model, compiled(model, executor="inductor", save_min_bytes=0, recipe=recipe)):
        model.zero_grad()
        run(x).float().square().mean().backward()
        found.append([p.grad for p in model.parameters()])
    for expected, actual in zip(*found, strict=True):
        assert sqnr(expected, actual) > 18


@pytest.mark.parametrize("executor", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_jagged_tensors(executor: str) -> None:
    """As many rows as the sequences have together: a symbolic number, padded to a multiple of 16."""
    behind = {"b": nn.Linear(128, 64).bfloat16()} if executor == "eager" else {}
    model = Holder(lambda m, x: m.b(F.gelu(m.a(x))) if behind else F.gelu(m.a(x)), a=linear(128), **behind)
    plain, step = copy.deepcopy(model), compiled(model, executor=executor, save_min_bytes=0)
    for lengths in ((5, 11, 16), (3, 4) if executor == "eager" else (3, 4, 2)):  # another number is compiled anew
        found = []
        torch.manual_seed(1)
        x = torch.nested.nested_tensor([noise(n, 32) for n in lengths], layout=torch.jagged)
        for m, run in ((model, step), (plain, plain)):
            m.zero_grad()
            run(x).values().float().square().sum().backward()
            found.append([p.grad for p in m.parameters()])
        for actual, expected in zip(*found, strict=True):
            assert sqnr(expected, actual) > LEAST


@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
@pytest.mark.parametrize("n", [128, 300])  # torch counts in UInt8, and in UInt16
def test_an_identity_in_a_graph_that_runs_node_by_node(n: int) -> None:
    model, x = Holder(lambda m, x: m.a(x) @ (torch.eye(n) + 0.5).to(x.dtype), a=linear(n)), noise(32, 32)
    torch.testing.assert_close(compiled(model, skip="*")(x), model(x), rtol=0, atol=0)
