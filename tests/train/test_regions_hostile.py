"""Models that nobody thought of: a training step with regions against the same step without, kernel by kernel.

Both steps have the same casts. They differ where a region keeps a value in FP32 that is otherwise stored in BF16, and
computes it again where it is otherwise loaded. Every region also runs as the generated kernel, interpreted, on the
tensors of the step; `trial.check` says what differs from the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import interpreter
import pytest
import torch
import torch.nn.functional as F
from fake_quantized import sqnr
from pipelines import look_after
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from two_ways import two_ways

from fp8compile import delayed, ops
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.reference import region_reference
from fp8compile.passes.core.stages import HalfGraph
from fp8compile.passes.regions.region_graph import regions_of

# A value rounded to BF16 or not before its cast lands on another code one time in 16 (2^-9 of half a step of 2^-4), and
# is then 2^-4 off: 36 dB. A gradient has passed up to ten such tensors, 10 dB, and nonlinearities cost some more.
LEAST = 20.0
D, INNER = 64, 128
BATCH, LENGTH = 2, 8  # interpreted kernels cost by the row


def noise(*shape: int, seed: int = 2, grad: bool = True, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_(grad)


class Model(nn.Module):
    """A module that runs a function of itself; what starts as ones or zeros gets some noise."""

    def __init__(self, run: Callable[..., Any], dtype: torch.dtype = torch.bfloat16, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)
        for parameter in self.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.1 * torch.randn(parameter.shape))
        self.to(dtype)

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


@dataclass
class Watch:
    """What becomes of the casts while it watches: regions, reasons, casts that are left, and kernels that are wrong."""

    regions: int = 0
    reasons: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    tried: set[Any] = field(default_factory=set)

    def half(self, c: HalfGraph) -> None:
        c.graph.lint()
        self.reasons += c.lowered.left
        self.regions += len(regions_of(c.graph))
        self.left += [str(n.target).split(".")[1] for n in c.graph.nodes if n.target in ops.CASTS]

    def reference(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(region: Any, schedule: Any, inputs: Any, sizes: Any) -> Any:
            if (region, schedule) not in self.tried:
                self.tried.add((region, schedule))
                kernel = generated.kernel_of(region, schedule, "interpreter")
                self.wrong += check_kernel.check(kernel, region, schedule, inputs, sizes)
            return run(region, schedule, inputs, sizes)

        return checked


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Watches regions, on CPUs."""
    if not interpreter.INTERPRETED:
        pytest.skip("kernels are interpreted where there is no GPU")
    interpreter.prepare()
    seen = Watch()
    look_after(monkeypatch, "combine_regions", seen.half)
    monkeypatch.setattr(region_reference, "run", seen.reference(region_reference.run))
    yield seen
    assert seen.wrong == []


def compiled(model: Callable[..., Any], recipe: Any = "mixed") -> Callable[..., Any]:
    options = {"select": "all", "executor": "eager", "strict": True, "recipe": recipe}
    return torch.compile(model, backend="fp8", options=options)


def train_step(model: nn.Module, run: Callable[..., Any], inputs: list[Tensor], repeats: int = 1) -> dict[str, Tensor]:
    """Outputs, gradients, buffers and inputs (which the model may have written) after `repeats` steps that add up."""
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs: list[Tensor] = []
    for _ in range(repeats):
        torch.manual_seed(7)
        outputs = [x for x in tree_leaves(run(*given)) if isinstance(x, Tensor)]
        sum((o.float() * noise(*o.shape, seed=11, grad=False)).sum() for o in outputs if o.requires_grad).backward()  # type: ignore[union-attr]
    found = {f"output {n}": x.detach() for n, x in enumerate(outputs)}
    found |= {f"input {n}": x.detach() for n, x in enumerate(given)}
    found |= {f"gradient of input {n}": x.grad for n, x in enumerate(given) if x.grad is not None}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: x.clone() for name, x in model.named_buffers()}


def both(build: Callable[[], nn.Module], inputs: list[Tensor], recipe: Any = "mixed", repeats: int = 1) -> None:
    """Compare the step with regions to the step without: layout, what is finite, and values."""
    torch.manual_seed(0)
    model, steps = build(), []
    start, run = copy.deepcopy(model.state_dict()), compiled(model, recipe)
    with two_ways() as ways:
        for ways.fused in (False, True):
            model.load_state_dict(start)
            model.zero_grad()
            delayed.reset()
            steps.append(train_step(model, run, inputs, repeats))
    compare(*steps)


def compare(plain: dict[str, Tensor], fused: dict[str, Tensor]) -> None:
    assert plain.keys() == fused.keys()
    for name, a in plain.items():
        b = fused[name]
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), name
        assert torch.equal(a.isfinite(), b.isfinite()), name
        a, b = (torch.where(x.isfinite(), x, 0) for x in (a, b))
        assert torch.equal(a, b) or sqnr(a, b) > LEAST, f"{name}: {sqnr(a, b):.1f} dB"


# ---- models ---------------------------------------------------------------------------------------------------------

CASES: dict[str, tuple[Callable[[], nn.Module], list[Tensor]]] = {}
TOKENS = [noise(BATCH, LENGTH, D)]


def linear(n: int, k: int, **kwargs: Any) -> nn.Linear:
    return nn.Linear(n, k, **kwargs)


def block(between: Callable[[Tensor], Tensor], norm: Callable[[], nn.Module] = lambda: nn.LayerNorm(D), n: int = INNER,
          k: int = INNER, dtype: torch.dtype = torch.bfloat16) -> Callable[[], nn.Module]:  # fmt: skip
    """x + down(between(up(norm(x))))."""
    return lambda: Model(
        lambda m, x: x + m.down(between(m.up(m.norm(x)))), dtype, norm=norm(), up=linear(D, n), down=linear(k, D)
    )


def between_layers(between: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """down(between(up(x)))."""
    return lambda: Model(lambda m, x: m.down(between(m.up(x))), up=linear(D, INNER), down=linear(INNER, D))


def behind(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """up(norm(x))."""
    return lambda: Model(lambda m, x: m.up(m.norm(x)), norm=norm(), up=linear(D, INNER))


class Rms(nn.Module):
    """An RMSNorm: in FP32 or in the input's type, times w or 1 + w."""

    def __init__(self, size: int = D, gemma: bool = False, wide: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if gemma else torch.ones(size))
        self.gemma, self.wide = gemma, wide

    def forward(self, x: Tensor) -> Tensor:
        h = x.float() if self.wide else x
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1 + self.weight.float())).to(x.dtype) if self.gemma else h.to(x.dtype) * self.weight


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(D),
    "layer_norm_plain": lambda: nn.LayerNorm(D, elementwise_affine=False),
    "layer_norm_no_bias": lambda: nn.LayerNorm(D, bias=False),
    "rms_norm": lambda: nn.RMSNorm(D),
    "rms_norm_bf16": lambda: Rms(wide=False),
    "rms_norm_gemma": lambda: Rms(gemma=True),
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda h: F.gelu(h, approximate="tanh"),
    "squared_relu": lambda h: F.relu(h).square(),
    "softcap": lambda h: 3 * torch.tanh(h / 3),
    "dropout": lambda h: F.dropout(F.gelu(h), 0.2),
    "alpha": lambda h: torch.add(h, 2.0, alpha=3) + torch.sub(h, h.sin(), alpha=2) + torch.rsub(h, 1.0, alpha=2),
    "softmax": lambda h: h.softmax(-1),
    "max_of_rows": lambda h: (lambda g: g - 0.5 * g.amax(-1, keepdim=True))(F.gelu(h)),
    "only_the_largest": lambda h: (lambda g: torch.where(g == g.amax(-1, keepdim=True), g * 2, g))(h.sin() * 1.3),
    "roll": lambda h: h + h.roll(1, 1),
    "shift": lambda h: torch.cat([h[:, :1] * 0, h[:, :-1]], 1) + h,
    "rotary": lambda h: (lambda a, b: torch.stack([a.cos() * a - b, a * b.sin() + b], -1).flatten(-2))(
        h[..., ::2], h[..., 1::2]
    ),
    "heads": lambda h: F.rms_norm(h.view(BATCH, LENGTH, 4, 32).transpose(1, 2), (32,)).transpose(1, 2).flatten(2),
    "windows": lambda h: h.view(BATCH, 2, 4, INNER).permute(0, 2, 1, 3).reshape(BATCH, LENGTH, INNER).tanh(),
    "mixer": lambda h: h.transpose(1, 2).contiguous().mul(2).transpose(1, 2).tanh(),
    "expanded": lambda h: h[:, :1].expand(-1, LENGTH, -1) * h,
    "in_place": lambda h: h.mul_(0.5).add_(1).tanh_(),
    "double": lambda h: (h.double() * 1.5).to(h.dtype),
    "squeeze_excite": lambda h: h * torch.sigmoid(h.mean(1, keepdim=True)),
    "positions": lambda h: h * torch.arange(LENGTH).view(LENGTH, 1).to(h.dtype).div(LENGTH),
    "checkpointed": lambda h: checkpoint(lambda h: F.dropout(F.gelu(h), 0.1), h, use_reentrant=False),  # type: ignore[return-value]
}
for _name, _norm in NORMS.items():
    CASES[_name] = behind(_norm), TOKENS
for _name, _activation in ACTIVATIONS.items():
    CASES[_name] = between_layers(_activation), TOKENS
CASES["block"] = block(F.gelu), [noise(4, 16, D)]
CASES["gate_by_chunk"] = block(lambda h: (lambda a, b: F.gelu(a) * b)(*h.chunk(2, -1)), n=2 * INNER), TOKENS
CASES["sliced"] = (
    lambda: Model(lambda m, x: m.down(F.gelu(m.up(x)[:, 3:7, 16:80])), up=linear(D, INNER), down=linear(64, D)),
    TOKENS,
)
CASES["float16"] = block(F.gelu, dtype=torch.float16), [noise(BATCH, LENGTH, D, dtype=torch.float16)]
CASES["float32"] = block(F.gelu, dtype=torch.float32), [noise(BATCH, LENGTH, D, dtype=torch.float32)]
CASES["one_dimension"] = block(F.gelu), [noise(D)]
CASES["four_dimensions"] = block(F.gelu), [noise(2, 3, 5, D)]
CASES["permuted_input"] = block(F.gelu), [noise(D, BATCH, LENGTH).permute(1, 2, 0).detach().requires_grad_()]
for _rows, _n, _k in ((1, 17, 48), (7, 80, 100), (3, 64, 520)):
    CASES[f"odd_{_rows}_{_n}_{_k}"] = (
        lambda n=_n, k=_k: Model(
            lambda m, x: m.down(F.gelu(m.up(m.norm(x)))), norm=nn.LayerNorm(n), up=linear(n, k), down=linear(k, n)
        ),
        [noise(_rows, _n)],
    )


def _case(*, inputs: list[Tensor] | None = None, **modules: Callable[[], Any]) -> Callable[..., Any]:
    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        build = lambda: Model(run, **{name: make() for name, make in modules.items()})  # noqa: E731
        CASES[run.__name__] = build, inputs or TOKENS
        return run

    return register


MLP: dict[str, Callable[[], Any]] = {
    "norm": lambda: nn.LayerNorm(D), "up": lambda: linear(D, INNER), "down": lambda: linear(INNER, D)
}  # fmt: skip


@_case(**MLP, qkv=lambda: linear(D, 3 * D, bias=False), out=lambda: linear(D, D), q_norm=lambda: Rms(16))
def parallel_attention(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    q, k, v = (t.view(BATCH, LENGTH, 4, 16).transpose(1, 2) for t in m.qkv(h).chunk(3, -1))
    weights = 20 * torch.tanh(m.q_norm(q) @ m.q_norm(k).transpose(-1, -2) / 80)
    weights = weights.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
    mixed = weights.float().softmax(-1).to(x.dtype) @ v
    return x + m.out(mixed.transpose(1, 2).reshape(x.shape)) + m.down(F.gelu(m.up(h)))


@_case(
    modulation=lambda: linear(D, 3 * D),
    norm=lambda: nn.LayerNorm(D, elementwise_affine=False),
    up=MLP["up"],
    down=MLP["down"],
    inputs=[noise(16, 4, D), noise(16, D, seed=4)],
)
def modulated_by_batch(m: Any, x: Tensor, condition: Tensor) -> Tensor:
    scale, shift, gate = m.modulation(F.silu(condition)).unsqueeze(1).chunk(3, -1)
    return x + gate * m.down(F.gelu(m.up(m.norm(x) * (1 + scale) + shift)))


@_case(**MLP, scale=lambda: nn.Parameter(torch.full((D,), 0.1)))
def layer_scale(m: Any, x: Tensor) -> Tensor:
    return x + m.scale * m.down(F.gelu(m.up(m.norm(x))))


@_case(
    router=lambda: linear(D, 3),
    ups=lambda: nn.ModuleList(linear(D, 48) for _ in range(2)),
    downs=lambda: nn.ModuleList(linear(48, D) for _ in range(2)),
)
def experts(m: Any, x: Tensor) -> Tensor:
    weights = m.router(x).float().softmax(-1).to(x.dtype)
    each = (weights[..., i : i + 1] * d(F.silu(u(x))) for i, (u, d) in enumerate(zip(m.ups, m.downs, strict=True)))
    return x + sum(each)


@_case(up=lambda: linear(D, INNER), norm=MLP["norm"])
def tied_and_transposed(m: Any, x: Tensor) -> Tensor:
    return F.linear(F.gelu(m.up(m.norm(x))), m.up.weight.t())


@_case(layer=lambda: linear(D, D), norm=MLP["norm"])
def shared(m: Any, x: Tensor) -> Tensor:
    return m.layer(F.gelu(m.layer(m.norm(F.gelu(m.layer(x))))))


@_case(**MLP, other=lambda: linear(INNER, D))
def several_outputs(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    h = m.norm(x)
    u = m.up(h)
    g = F.gelu(u)
    return m.down(g) + m.other(g), g, u.sin(), h, g.amax(-1, keepdim=True)


@_case(**MLP)
def graph_break(m: Any, x: Tensor) -> Tensor:
    u = m.up(m.norm(x))
    g = F.gelu(u)
    torch._dynamo.graph_break()
    return m.down(g * u)


@torch.library.custom_op("fp8compile_test::flat_sum_of_regions", mutates_args=())
def flat_sum(x: Tensor) -> Tensor:
    """An operator whose kernel takes its input to be contiguous."""
    return torch.as_strided(x, (x.numel(),), (1,)).float().sum().reshape(1)


flat_sum.register_fake(lambda x: x.new_empty(1, dtype=torch.float32))


@_case(**MLP)
def read_by_others(m: Any, x: Tensor) -> tuple[Tensor, ...]:
    g = F.gelu(m.up(m.norm(x)))
    return m.down(g), flat_sum(g.detach()), torch.as_strided(g, (8, 8), (128, 2), 3)


@_case(
    first=lambda: nn.GroupNorm(4, D), up=lambda: nn.Conv2d(D, INNER, 1), second=lambda: nn.GroupNorm(8, INNER),
    down=lambda: nn.Conv2d(INNER, D, 1), inputs=[noise(2, D, 4, 4)],
)  # fmt: skip
def convolutions(m: Any, x: Tensor) -> Tensor:
    return x + m.down(F.silu(m.second(m.up(F.silu(m.first(x))))))


# Inputs and buffers that a step writes: a region may stand behind the write of what it reads.


@_case(up=MLP["up"], down=MLP["down"], state=lambda: torch.randn(D))
def written_buffer(m: Any, x: Tensor) -> Tensor:
    h = x + m.state
    m.state.mul_(0.5).add_(x.detach().mean((0, 1)))
    return m.down(F.gelu(m.up(h)))


@_case(up=MLP["up"], down=MLP["down"], inputs=[noise(BATCH, LENGTH, D, grad=False)])
def written_input(m: Any, x: Tensor) -> Tensor:
    y = F.silu(x)
    x.add_(1.0)
    return m.down(F.gelu(m.up(y)))


def side_by_side(names: Sequence[str]) -> tuple[Callable[[], nn.Module], list[Tensor]]:
    """Models in one graph, with tokens of its own for each."""
    build = lambda: Model(  # noqa: E731
        lambda m, *inputs: [each(x) for each, x in zip(m.each, inputs, strict=True)],
        each=nn.ModuleList(CASES[name][0]() for name in names),
    )
    return build, [noise(BATCH, LENGTH, D, seed=20 + n) for n in range(len(names))]


SIMPLE = [name for name in ACTIVATIONS if name != "checkpointed"]  # a graph that has some is cut otherwise
TOGETHER = [[*NORMS], *(SIMPLE[n : n + 5] for n in range(0, len(SIMPLE), 5))]
ALONE = [name for name in CASES if not any(name in names for names in TOGETHER)]


@pytest.mark.parametrize("names", [*TOGETHER, *([name] for name in ALONE)], ids=" ".join)
def test_a_step_with_regions_is_the_step_without(names: Sequence[str], watch: Watch) -> None:
    both(*(CASES[names[0]] if len(names) == 1 else side_by_side(names)))
    assert watch.regions
    assert watch.left == watch.reasons == []


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("experts", "rowwise_with_gw_hp"),
        ("odd_7_80_100", "tensorwise"),
        ("odd_7_80_100", "rowwise"),
        ("several_outputs", "tensorwise"),
    ],
)
def test_every_recipe(name: str, recipe: str, watch: Watch) -> None:
    both(*CASES[name], recipe)
    assert watch.regions
    # what is left are scales of columns, known when all rows were read, and their amaxes where these are filled up
    assert "quantize" not in watch.left
    assert all(why.endswith("amaxes of columns, filled up") for why in watch.reasons)


@pytest.mark.parametrize(("rows", "n", "k"), [(128, 128, 128), (13, 128, 200)])
def test_groups_and_blocks_that_divide_or_do_not(rows: int, n: int, k: int, watch: Watch) -> None:
    def build() -> nn.Module:
        run = lambda m, x: x + m.down(F.silu(m.gate(m.norm(x))) * m.up(m.norm(x)))  # noqa: E731
        return Model(run, norm=Rms(n), gate=linear(n, k), up=linear(n, k), down=linear(k, n))

    both(build, [noise(rows, n)], "blockwise")
    assert watch.regions
    fits = rows % 128 == n % 128 == k % 128 == 0
    assert ("quantize" in watch.left) is not fits
    assert len(watch.reasons) == watch.left.count("quantize")  # each is said
    assert all("does not divide" in why for why in watch.reasons)


def test_delayed_scales_over_several_steps(watch: Watch) -> None:
    recipe = {"base": "tensorwise", "output": {"left": {"delayed": True}}}
    both(block(F.gelu), TOKENS, recipe, repeats=3)
    assert watch.regions
    assert watch.left == watch.reasons == []


def test_gradients_that_add_up(watch: Watch) -> None:
    both(block(F.gelu), TOKENS, repeats=3)
    assert watch.regions


def test_what_is_not_finite_stays_so(watch: Watch) -> None:
    x = noise(BATCH, LENGTH, D, grad=False)
    x[0, 3, 5], x[1, 2, 3] = float("inf"), float("nan")
    both(block(F.gelu), [x.requires_grad_()])
    assert watch.regions


def test_inference(watch: Watch) -> None:
    torch.manual_seed(0)
    model = block(F.gelu)()
    run = compiled(model)
    with torch.no_grad(), two_ways() as ways:
        ways.fused = False
        expected = run(*TOKENS)
        ways.fused = True
        assert sqnr(expected, run(*TOKENS)) > LEAST
    assert watch.regions


SIZES = [(2, 8), (5, 7)]
DYNAMIC: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], int]] = {  # which sizes, and how large the third is
    "block": (block(F.gelu), (0, 1), D),
    "modulated": (
        lambda: Model(lambda m, x: m.up(m.norm(x) * (1 + x.mean(1, keepdim=True))), norm=Rms(16), up=linear(16, 32)),
        (0, 1),
        16,
    ),
    "transposed": (
        lambda: Model(lambda m, x: m.down(F.gelu(m.up(x.transpose(1, 2)))), up=linear(D, INNER), down=linear(INNER, D)),
        (0, 2),
        D,
    ),
}


def marked(run: Callable[..., Any], dims: tuple[int, int]) -> Callable[[Tensor], Any]:
    def call(x: Tensor) -> Any:
        torch._dynamo.mark_dynamic(x, dims)
        return run(x)

    return call


@pytest.mark.parametrize(("name", "recipe"), [("block", "mixed"), ("modulated", "rowwise"), ("transposed", "rowwise")])
def test_dynamic_sizes_are_compiled_once(name: str, recipe: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    build, dims, width = DYNAMIC[name]
    monkeypatch.setattr(choose_schedule, "PROCESSORS", 2)  # with symbolic rows kernels have programs for all of them
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = build()
    run = compiled(model, recipe)
    with two_ways() as ways:
        for size in SIZES:
            shape, steps = [width] * 3, []
            shape[dims[0]], shape[dims[1]] = size
            for ways.fused in (False, True):
                model.zero_grad()
                steps.append(train_step(model, marked(run, dims), [noise(*shape)]))
            compare(*steps)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert watch.regions
    assert "quantize" not in watch.left
