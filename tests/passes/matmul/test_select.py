"""Selecting matmuls: every rule's exact reason, the cost model against its formula, padding with right values."""

from __future__ import annotations

import dataclasses
import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from models import ZOO
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp8compile
from fp8compile import devices, embedding_tables
from fp8compile.errors import Fp8Warning
from fp8compile.options import Options
from fp8compile.passes.canonical import canonicalize
from fp8compile.passes.core.compilation import Compilation, Input
from fp8compile.passes.matmul import select_matmuls
from fp8compile.plan.plan import Plan
from fp8compile.plan.rows import Matmul

EAGER = {"select": "all", "executor": "eager", "strict": True}
CPU = "a CPU has no FP8 matmul units; select='all' emulates FP8"
HEAD = "the output head (lm_head=True converts it)"


def step(model: nn.Module, *inputs: torch.Tensor, loss=lambda out: out.square().sum(), **options) -> fp8compile.Plan:
    """The plan of a compiled forward and backward."""
    loss(torch.compile(model, backend="fp8", options={**EAGER, **options})(*inputs)).backward()
    return fp8compile.last_compile().plans[-1]


def reasons(plan: fp8compile.Plan, path: str | None = None, role: str | None = None) -> set[str]:
    rows = [m for m in plan.matmuls if path in (None, m.path) and role in (None, m.role)]
    assert rows
    return {m.reason for m in rows}


def module(forward, **children) -> nn.Module:
    """A module with these children (modules or parameters) and this forward(self, *inputs)."""
    made = type("Model", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(made, name, child)
    return made


# --- what has no weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)


def test_attention_is_no_matmul_with_a_weight():
    plan = step(Attention(), torch.randn(2, 16, 32))
    others = [m for m in plan.matmuls if m.role == "other"]
    assert {(m.kind, m.decision, m.reason, m.batch) for m in others} == {
        ("bmm", "bf16", "neither operand comes from an nn.Parameter", 2)
    }
    assert len(others) == 6  # two in forward, two gradients each
    assert [m.path for m in plan.converted] == ["qkv", "out", "out", "out", "qkv"]


class StrangeGradient(torch.autograd.Function):
    """Its backward multiplies with a matrix that no forward matmul has seen."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad @ y, None


def test_a_gradient_without_a_matmul_in_forward():
    model = module(lambda self, x, y: StrangeGradient.apply(self.fc(x), y), fc=nn.Linear(32, 32))
    plan = step(model, torch.randn(16, 32), torch.randn(32, 32))
    assert reasons(plan, role="other") == {"no matmul of the forward half has these operands"}


def test_matmuls_of_the_backward_of_a_decomposition_stay():
    """They multiply by eigenvectors, which are made of a weight, and are no layer's."""

    def forward(self, x):
        values, vectors = torch.linalg.eigh(self.w + self.w.t())
        return x @ (vectors * values.exp()) @ vectors.t()

    plan = step(module(forward, w=nn.Parameter(torch.randn(32, 32) / 8)), torch.randn(64, 32))
    assert reasons(plan, role="other") == {"no matmul of the forward half has these operands"}
    assert Counter(m.role for m in plan.converted) == {"output": 2, "grad_input": 1, "grad_weight": 2}


def test_addmm_that_scales_its_terms():
    model = module(
        lambda self, x: torch.addmm(self.b, x, self.w, alpha=2),
        b=nn.Parameter(torch.zeros(32)),
        w=nn.Parameter(torch.randn(32, 32)),
    )
    plan = step(
        module(lambda self, x: self.fc(self.scaled(x)), scaled=model, fc=nn.Linear(32, 32)), torch.randn(16, 32)
    )
    (row,) = [m for m in plan.matmuls if m.kind == "addmm" and m.path == "scaled"]
    assert row.reason == "addmm with alpha or beta other than 1"


def test_a_foreign_matmul_is_left():
    model = module(
        lambda self, x, y: self.fc(x) + torch._int_mm(y, y).sum(),
        fc=nn.Linear(32, 32),
    )
    plan = step(model, torch.randn(16, 32), torch.ones(32, 32, dtype=torch.int8))
    (row,) = [m for m in plan.matmuls if m.role == "other"]
    assert row.kind == "integer matmul"
    assert row.reason.endswith("integer matmul: left as it is")


# --- dtypes


def test_double_precision_stays():
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        plan = step(nn.Linear(32, 32).double(), torch.randn(16, 32, dtype=torch.float64))
    assert reasons(plan) == {"float64 is not a dtype that FP8 can stand in for"}


def router_model() -> nn.Module:
    """BF16 linears, and a router that the model wants in FP32."""
    return module(
        lambda self, x: self.down(self.up(x) * self.router(x.float()).softmax(-1)[:, :1].bfloat16()),
        up=nn.Linear(32, 32).bfloat16(),
        down=nn.Linear(32, 32).bfloat16(),
        router=nn.Linear(32, 16),
    )


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_an_fp32_router_among_bf16_matmuls_stays():
    plan = step(router_model(), torch.randn(16, 32, dtype=torch.bfloat16), select="profitable")
    asks = "FP32 among lower-precision matmuls: the model asks for this one's precision"
    assert reasons(plan, "router") == {asks}
    assert reasons(plan, "up") == reasons(plan, "down") == {CPU}
    assert {m.dtype for m in plan.matmuls if m.path == "router"} == {"float32"}


def test_select_all_takes_the_router_too():
    plan = step(router_model(), torch.randn(16, 32, dtype=torch.bfloat16))
    assert {m.decision for m in plan.matmuls} == {"fp8"}


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_model_all_in_fp32_is_not_taken_for_a_router():
    plan = step(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(16, 32), select="profitable")
    assert reasons(plan) == {CPU}


# --- skip, heads


def test_a_skipped_matmul_names_the_pattern():
    plan = step(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(16, 32), skip=["1"])
    assert reasons(plan, "1") == {"skip='1'"}
    assert reasons(plan, "0") == {"every matmul that can run"}


class Language(nn.Module):
    def __init__(self, head: str = "lm_head", tied: bool = False):
        super().__init__()
        self.embed, self.fc = nn.Embedding(64, 32), nn.Linear(32, 32)
        self.add_module(head, nn.Linear(32, 64, bias=False))
        self.head_name = head
        if tied:
            getattr(self, head).weight = self.embed.weight

    def forward(self, tokens):
        return getattr(self, self.head_name)(self.fc(self.embed(tokens)))


TOKENS = torch.arange(32).reshape(2, 16)


def cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def test_a_head_is_known_by_its_name():
    """Each of a language model of its own, all in one graph."""
    names = ["lm_head", "head", "classifier", "embed_out", "score"]
    models = nn.ModuleDict({f"of_{name}": Language(name) for name in names})
    plan = step(
        module(lambda self, tokens: torch.stack([m(tokens) for m in self.models.values()]), models=models), TOKENS
    )
    for name in names:
        path = f"models.of_{name}.{name}"
        assert reasons(plan, path) == {HEAD}
        assert {m.role for m in plan.matmuls if m.path == path} == {"output", "grad_input", "grad_weight"}
        assert reasons(plan, f"models.of_{name}.fc") == {"every matmul that can run"}


def test_a_head_is_known_by_the_embedding_that_it_shares():
    plan = step(Language("last", tied=True), TOKENS)
    assert reasons(plan, "last") == {HEAD}


def test_a_head_is_known_by_the_cross_entropy_that_it_feeds():
    model = module(lambda self, tokens: cross_entropy(self.inner(tokens)), inner=Language("last"))
    plan = step(model, TOKENS, loss=lambda out: out)
    assert reasons(plan, "inner.last") == {HEAD}
    assert reasons(plan, "inner.fc") == {"every matmul that can run"}


SHARES = torch.softmax(torch.arange(32 * 64).reshape(2, 16, 64).sin(), -1)
ONE_HOT = F.one_hot(TOKENS, 64).float()
LOSSES = {
    "shares": lambda z: F.cross_entropy(z.flatten(0, 1), SHARES.flatten(0, 1)),
    "kl": lambda z: F.kl_div(z.log_softmax(-1), SHARES),
    "kl_of_logs": lambda z: F.kl_div((z / 2).log_softmax(-1), SHARES.log(), log_target=True),
    "by_hand": lambda z: -(SHARES * z.log_softmax(-1)).sum(-1).mean(),
    "softmax": lambda z: (z.softmax(-1) - ONE_HOT).square().mean(),
    "logsumexp": lambda z: (z.logsumexp(-1) - (z * ONE_HOT).sum(-1)).mean(),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, ONE_HOT),
    "margins": lambda z: F.multi_margin_loss(z.flatten(0, 1), TOKENS.flatten()),
    "capped": lambda z: F.cross_entropy((30 * torch.tanh(z / 30)).flatten(0, 1), SHARES.flatten(0, 1)),
}
OTHERS = {
    "over_tokens": lambda z: (z.softmax(1) * z).sum(1).square().mean(),
    "over_batch": lambda z: z.softmax(0).square().mean(),
    "largest": lambda z: z.amax(-1).square().mean(),
    "squares": lambda z: (z - ONE_HOT).square().mean(),
}


def test_a_head_is_known_by_the_loss_that_scores_it():
    """Each of a language model of its own, all in one graph."""
    losses = LOSSES | OTHERS
    models = nn.ModuleDict({name: Language("last") for name in losses})

    def forward(self, tokens):
        return sum(losses[name](model(tokens)) for name, model in self.models.items())

    plan = step(module(forward, models=models), TOKENS, loss=lambda out: out)
    for name in losses:
        assert reasons(plan, f"models.{name}.last") == ({HEAD} if name in LOSSES else {"every matmul that can run"}), (
            name
        )
        assert reasons(plan, f"models.{name}.fc") == {"every matmul that can run"}, name


def test_a_gate_that_goes_through_a_softmax_is_no_head():
    """A later matmul reads what it makes."""
    model = module(
        lambda self, x: self.out(self.up(x) * self.gate(x).softmax(-1)),
        **{name: nn.Linear(32, 32) for name in ("up", "gate", "out")},
    )
    assert reasons(step(model, torch.randn(16, 32))) == {"every matmul that can run"}


COMPUTED = {
    "halved": lambda w, s: w * 0.5,
    "scaled": lambda w, s: w * s,
    "normalized": lambda w, s: F.normalize(w, dim=-1),
    "converted": lambda w, s: w.double().float(),
}


@pytest.mark.parametrize("weight", COMPUTED.values(), ids=list(COMPUTED))
def test_a_head_is_known_by_the_embedding_that_it_is_computed_of(weight):
    def forward(self, tokens):
        return F.linear(self.fc(self.embed(tokens)), weight(self.embed.weight, self.s))

    made = module(forward, embed=nn.Embedding(64, 32), fc=nn.Linear(32, 32), s=nn.Parameter(torch.ones(32)))
    plan = step(made, TOKENS)
    assert {m.reason for m in plan.matmuls if m.path != "fc"} == {HEAD}
    assert reasons(plan, "fc") == {"every matmul that can run"}


def test_a_head_is_known_by_an_embedding_of_another_graph():
    def forward(self, tokens):
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        return self.last(self.fc(x))

    for tied in (True, False):
        model = module(forward, embed=nn.Embedding(64, 32), fc=nn.Linear(32, 32), last=nn.Linear(32, 64, bias=False))
        if tied:
            model.last.weight = model.embed.weight
        plan = step(model, TOKENS)
        assert reasons(plan, "last") == ({HEAD} if tied else {"every matmul that can run"})
        assert reasons(plan, "fc") == {"every matmul that can run"}
    table = id(model.embed.weight)
    assert table in embedding_tables._tables
    del model, plan
    torch.compiler.reset()
    gc.collect()
    assert table not in embedding_tables._tables


def test_a_last_linear_of_another_name_is_no_head():
    assert reasons(step(Language("last"), TOKENS), "last") == {"every matmul that can run"}


def test_a_layer_called_output_in_the_middle_is_no_head():
    plan = step(
        nn.Sequential(nn.ModuleDict({"output": nn.Linear(32, 32)})["output"], nn.Linear(32, 32)), torch.randn(16, 32)
    )
    assert reasons(plan) == {"every matmul that can run"}
    model = module(lambda self, x: self.fc(self.output(x)), output=nn.Linear(32, 32), fc=nn.Linear(32, 32))
    assert reasons(step(model, torch.randn(16, 32)), "output") == {"every matmul that can run"}


def test_lm_head_true_converts_the_head():
    plan = step(Language(), TOKENS, lm_head=True)
    assert [m.decision for m in plan.matmuls if m.path == "lm_head"] == ["fp8"] * 3


# --- devices


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_cpu_converts_nothing_unless_asked_to_emulate():
    plan = step(nn.Linear(32, 32), torch.randn(16, 32), select="profitable")
    assert reasons(plan) == {CPU}
    assert plan.device == "cpu"


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
@pytest.mark.parametrize("select", ["profitable", "all"])
def test_a_device_without_fp8_units_says_so(monkeypatch, select):
    why = "NVIDIA A100 has no FP8 matmul units (compute capability 8.0)"
    monkeypatch.setattr(devices, "describe", lambda _: devices.Device("NVIDIA A100", False, why_not=why))
    assert reasons(step(nn.Linear(32, 32), torch.randn(16, 32), select=select)) == {why}


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_device_without_blockwise_matmuls_says_so(monkeypatch):
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["B200"])
    plan = step(nn.Linear(32, 32), torch.randn(16, 32), recipe="blockwise")
    assert reasons(plan) == {"B200 has no block-wise FP8 matmul"}


@pytest.mark.filterwarnings("ignore::fp8compile.errors.Fp8Warning")
def test_a_matmul_without_elements():
    plan = step(nn.Linear(32, 32), torch.randn(0, 32))
    assert reasons(plan) == {"a matmul without elements"}


# --- the cost model, on graphs of fake tensors

BF16_RATE, TENSOR_RATE, ROW_RATE, BLOCK_RATE, GROUP_RATE, CASTS, LAUNCH = 700.0, 1200.0, 1150.0, 1000.0, 800.0, 2.0, 4.0
DEVICE = devices.Device(
    "test", True, bf16=BF16_RATE, fp8_tensor=TENSOR_RATE, fp8_row=ROW_RATE, fp8_block=BLOCK_RATE,
    fp8_group=GROUP_RATE, casts=CASTS, launch=LAUNCH, blockwise=True,
)  # fmt: skip


def decide(
    m: int, n: int, k: int, device: devices.Device = DEVICE, select: str = "profitable", recipe: str = "mixed",
    call=lambda x, w: x @ w.t(),
) -> list[Matmul]:  # fmt: skip
    """The plan's rows for `call` of a BF16 activation [m, k] and weight [n, k], of which nothing is allocated."""
    with FakeTensorMode():
        graph = make_fx(call)(*(torch.empty(rows, k, dtype=torch.bfloat16) for rows in (m, n))).graph
    x, w = (node.name for node in graph.find_nodes(op="placeholder"))
    c = Compilation(graph, Options.parse({"select": select, "recipe": recipe}), device, Plan())
    c.inputs = {x: Input(False), w: Input(True, "w")}
    canonicalize.run(c)
    select_matmuls.run(c)
    return c.matmuls.rows()


READS = {"mixed": (1, 2), "tensorwise": (2, 2), "rowwise": (1, 1), "blockwise": (1, 1)}  # of x and of w, to be cast


def milliseconds(
    m: int, n: int, k: int, rate: float = ROW_RATE, recipe: str = "mixed", readers: int = 1, fused: bool = False
) -> tuple[float, float]:
    """BF16 and FP8 time of x [m, k] @ w [n, k]ᵀ from the documented formula; `readers` of one role share both casts;
    x is computed by a fused kernel or not."""
    n_padded, k_padded = -(-n // 16) * 16, -(-k // 16) * 16
    reads_x, reads_w = READS[recipe]
    reads_x -= fused
    moved = (m * (2 * reads_x + 1) + n_padded * (2 * reads_w + 1)) * k_padded / readers
    kernels = (reads_x + reads_w) / readers / readers  # shared, and launched together
    bf16 = 2 * m * n * k / (BF16_RATE * 1e12) * 1e3
    work = 2 * m * n_padded * k_padded / (rate * 1e12) * 1e3
    return bf16, work + moved / (CASTS * 1e12) * 1e3 + kernels * LAUNCH * 1e-3


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(16384, 4096, 4096), (16384, 14336, 4096), (8192, 8192, 8192), (16384, 8200, 8200), (8192, 8192, 4090)],
)
def test_a_large_matmul_pays(m, n, k):
    bf16, fp8 = milliseconds(m, n, k)
    assert fp8 < bf16
    (row,) = decide(m, n, k)
    assert (row.decision, row.reason) == ("fp8", "faster by the cost model")
    assert (row.m, row.n, row.k) == (m, n, k)


@pytest.mark.parametrize(("m", "n", "k"), [(16, 16, 16), (1024, 1024, 1024), (128, 4096, 4096), (16384, 128, 4096)])
def test_a_small_matmul_does_not_pay(m, n, k):
    bf16, fp8 = milliseconds(m, n, k)
    assert fp8 > bf16
    (row,) = decide(m, n, k)
    assert (row.decision, row.reason) == ("bf16", "too small: casts would cost more than the FP8 matmul saves")


@pytest.mark.parametrize(
    ("n", "k", "which"), [(1000, 1024, "N = 1000"), (1024, 1000, "K = 1000"), (1000, 1001, "N = 1000 and K = 1001")]
)
def test_padding_that_does_not_pay_names_the_sizes(n, k, which):
    bf16, fp8 = milliseconds(1024, n, k)
    assert fp8 > bf16
    (row,) = decide(1024, n, k)
    assert row.reason == f"{which}: not a multiple of 16, and padding does not pay"


def test_select_all_does_not_ask_the_cost_model():
    (row,) = decide(16, 16, 16, select="all")
    assert (row.decision, row.reason) == ("fp8", "every matmul that can run")


@pytest.mark.parametrize(
    ("recipe", "rate"),
    [("tensorwise", TENSOR_RATE), ("mixed", ROW_RATE), ("rowwise", ROW_RATE), ("blockwise", BLOCK_RATE)],
)
def test_the_rate_is_that_of_the_coarser_granularity(recipe, rate):
    pays = [s for s in range(1024, 10240, 64) if (times := milliseconds(s, s, s, rate, recipe))[1] < times[0]]
    assert pays[0] > 1024
    assert decide(pays[0], pays[0], pays[0], recipe=recipe)[0].decision == "fp8"
    less = pays[0] - 64
    assert decide(less, less, less, recipe=recipe)[0].decision == "bf16"


def test_rows_that_lie_as_columns_are_read_twice_and_by_one_role_alone():
    rows = {row.role: row.milliseconds_fp8 for row in decide_training(8192, 4096, 2048, "rowwise", select="all")}
    m, n, k = 8192, 4096, 2048
    work, byte, launch = 2 * m * n * k / ROW_RATE * 1e-9, 1e-9 / CASTS, LAUNCH * 1e-3
    once = 2 / 2 + 1, 1 / 2  # what rows are: read once, by the two roles that read the tensor; bytes and launches
    twice = 2 * 2 + 1, 2
    gradient, activation, weight = m * n, m * k, n * k
    assert rows["output"] == pytest.approx(
        work + (activation * once[0] + weight * once[0]) * byte + (once[1] + once[1]) * launch
    )
    assert rows["grad_input"] == pytest.approx(
        work + (gradient * once[0] + weight * twice[0]) * byte + (once[1] + twice[1]) * launch
    )
    assert rows["grad_weight"] == pytest.approx(
        work + (gradient * twice[0] + activation * twice[0]) * byte + (twice[1] + twice[1]) * launch
    )


def test_a_cast_shared_by_several_matmuls_costs_each_less():
    m = k = 4096

    def pays(n: int, readers: int) -> bool:
        bf16, fp8 = milliseconds(m, n, k, readers=readers)
        return fp8 < bf16

    n = next(n for n in range(256, 8192, 16) if pays(n, 2))
    assert not pays(n, 1)
    assert [r.decision for r in decide(m, n, k)] == ["bf16"]
    assert [r.decision for r in decide(m, n, k, call=lambda x, w: (x @ w.t(), x @ w.t()))] == ["fp8", "fp8"]


def test_what_a_fused_kernel_computes_is_not_read_to_be_cast():
    m = k = 4096
    n = next(n for n in range(256, 8192, 16) if (t := milliseconds(m, n, k, fused=True))[1] < t[0])
    assert [r.decision for r in decide(m, n, k)] == ["bf16"]
    (row,) = decide(m, n, k, call=lambda x, w: torch.relu(x) @ w.t())
    assert row.decision == "fp8"
    assert row.milliseconds_fp8 == pytest.approx(milliseconds(m, n, k, fused=True)[1])


def read_by_others(dy, h):
    made = dy * h
    return made, made[:8].sin()


def columns(dy, h):
    half = dy.shape[1] // 2
    return dy[:, :half], h[:, half:]


def side_by_side(*pieces):
    return (torch.cat([x.reshape(8, len(x) // 8, -1) for x in pieces], 2).view(len(pieces[0]), -1),)


SAMPLED = 1 + 1 / 16  # reads, where a sample of the rows is read for the amax
GRADIENTS = {
    "large": (lambda dy, h: (dy,), True, SAMPLED),
    "large, with a bias": (lambda dy, h: (dy, dy.sum(0)), True, SAMPLED),
    "in two passes": (lambda dy, h: (dy,), False, 2),
    "computed": (lambda dy, h: (dy * h,), True, SAMPLED - 2),  # neither read nor written
    "computed, in two passes": (lambda dy, h: (dy * h,), False, 2 - 2),
    "computed, for others as well": (read_by_others, True, 2 - 1),
    "concatenated": (lambda dy, h: (torch.cat([dy[: len(dy) // 2], h[len(dy) // 2 :]]),), True, SAMPLED - 2),
    "side by side": (lambda dy, h: side_by_side(*columns(dy, h)), True, SAMPLED - 2),
    "side by side, of other widths": (lambda dy, h: side_by_side(dy[:, :4096], h[:, 4096:]), True, SAMPLED),
    "side by side, computed": (lambda dy, h: side_by_side(*(x * 2 for x in columns(dy, h))), True, SAMPLED),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_both_layouts_of_a_gradient_are_cast_from_one_read(gradient):
    """grad_input and grad_weight read dy, output and grad_input w: each half of the reads, and a payload its own."""
    m, n, k = 8192, 6144, 8192
    made, one_pass, reads = GRADIENTS[gradient]
    rows = {row.role: row for row in decide_training(m, n, k, made=made, one_pass_casts=one_pass)}
    assert {row.decision for row in rows.values()} == {"fp8"}
    dy, w, x = (
        2 * reads / 2 + 1,
        2 * 2 / 2 + 1,
        (2 * 1 / 2 + 1, 2 * 2 / 2 + 1),
    )  # bytes an element; x in rows, then whole
    kernels = 1 if gradient.startswith("computed") else 2
    expected = {
        "output": (m * k * x[0] + n * k * w, 1 / 2 + 2 / 2, ROW_RATE),
        "grad_input": (m * n * dy + n * k * w, kernels / 2 + 2 / 2, TENSOR_RATE),
        "grad_weight": (m * n * dy + m * k * x[1], kernels / 2 + 2 / 2, TENSOR_RATE),
    }
    for role, (moved, kernels, rate) in expected.items():
        fp8 = (2 * m * n * k / rate + moved / CASTS) * 1e-9 + kernels * LAUNCH * 1e-3
        assert rows[role].milliseconds_fp8 == pytest.approx(fp8), role


def test_a_small_gradient_and_half_of_one_in_fp8_are_spared_nothing():
    computed = GRADIENTS["computed"][0]
    small, large = (
        {row.role: row.milliseconds_fp8 or 0.0 for row in decide_training(m, 2048, 2048, made=computed, select="all")}
        for m in (2048, 8192)
    )
    work = 2 * 2048**3 / TENSOR_RATE * 1e-9
    moved = 2048**2 * ((2 * (2 - 2) / 2 + 1) + (2 * 2 / 2 + 1)) / CASTS * 1e-9  # the amax reads all of it
    assert small["grad_input"] == pytest.approx(work + moved + 1.5 * LAUNCH * 1e-3)
    assert large["grad_input"] < 4 * small["grad_input"]
    rows = {row.role: row for row in decide_training(8192, 2048, 2048, "rowwise_with_gw_hp", made=computed)}
    assert rows["grad_weight"].decision == "bf16"
    # BF16 is written for grad_weight; the weight's columns are this role's alone, and are read twice
    alone = 8192 * 2048 * (2 * (1 - 1) + 1) + 2048**2 * (2 * 2 + 1)
    times = 2 * 8192 * 2048**2 / ROW_RATE * 1e-9 + alone / CASTS * 1e-9 + 2 * LAUNCH * 1e-3
    assert rows["grad_input"].milliseconds_fp8 == pytest.approx(times)


def decide_training(
    m: int, n: int, k: int, recipe: str = "mixed", device: devices.Device = DEVICE, select: str = "profitable",
    made=lambda dy, h: (dy,), **options,
) -> list[Matmul]:  # fmt: skip
    """The plan's rows for a linear layer, with the gradients of its input and of its weight; made(tangent, saved): the
    gradient of its output, and what else is made of it."""

    def step(x, w, tangent, saved):
        dy, *others = made(tangent, saved)
        return x @ w.t(), dy @ w, dy.t() @ x, *others

    with FakeTensorMode():
        shapes = (m, k), (n, k), (m, n), (m, n)
        graph = make_fx(step)(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)).graph
    x, w, dy, _ = graph.find_nodes(op="placeholder")
    dy.target = "tangents_1"  # an incoming gradient
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.meta["seq_nr"] = 7  # of one layer
    c = Compilation(graph, Options.parse({"select": select, "recipe": recipe, **options}), device, Plan())
    c.inputs = {x.name: Input(False), w.name: Input(True, "w")}
    canonicalize.run(c)
    select_matmuls.run(c)
    return c.matmuls.rows()


@pytest.mark.parametrize(
    ("recipe", "tiles"),
    [("tensorwise", None), ("mixed", None), ("rowwise", 36), ("blockwise", 36)],
)
def test_tiles_that_do_not_fill_the_device(recipe, tiles):
    """grad_weight [768, 768] has 6 · 6 tiles for 132 multiprocessors; with tensor scales they are shared out."""
    m, n, k = 16384, 768, 768
    large = dataclasses.replace(DEVICE, processors=132)
    alone, spread = (decide_training(m, n, k, recipe, device, select="all") for device in (DEVICE, large))
    before, after = ({row.role: row.milliseconds_fp8 for row in rows} for rows in (alone, spread))
    rate = {"rowwise": ROW_RATE, "blockwise": GROUP_RATE}.get(recipe, TENSOR_RATE)
    work = 2 * m * n * k / rate * 1e-9
    more = 0 if tiles is None else work * (132 / tiles - 1)
    assert after["grad_weight"] - before["grad_weight"] == pytest.approx(more)
    if tiles:
        decisions = {row.role: row.decision for row in decide_training(m, n, k, recipe, large)}
        assert decisions["grad_weight"] == "bf16"


@pytest.mark.parametrize(
    ("tiles", "share"), [(1, 1 / 132), (66, 0.5), (132, 1.0), (133, 133 / 264), (264, 1.0), (13200, 1.0), (0, 1.0)]
)
def test_rounds_of_tiles(tiles, share):
    assert dataclasses.replace(DEVICE, processors=132).filled(tiles) == pytest.approx(share)


def test_groups_of_both_operands_have_a_rate_of_their_own():
    m, n, k = 8192, 8192, 8192
    rows = {row.role: row.milliseconds_fp8 for row in decide_training(m, n, k, "blockwise", select="all")}
    slower = dataclasses.replace(DEVICE, fp8_group=GROUP_RATE / 2)
    again = {row.role: row.milliseconds_fp8 for row in decide_training(m, n, k, "blockwise", slower, select="all")}
    work = 2 * m * n * k / GROUP_RATE * 1e-9
    assert again["grad_weight"] - rows["grad_weight"] == pytest.approx(work)
    assert (again["output"], again["grad_input"]) == (rows["output"], rows["grad_input"])


def test_the_same_matmul_pays_on_one_device_and_not_on_another():
    slow = dataclasses.replace(DEVICE, casts=CASTS / 10)
    assert decide(8192, 8192, 8192)[0].decision == "fp8"
    assert decide(8192, 8192, 8192, slow)[0].decision == "bf16"


def test_every_device_of_the_table_has_what_the_cost_model_needs():
    for device in devices.TABLE.values():
        assert device.has_fp8
        assert 0 < device.bf16 < device.fp8_group <= device.fp8_block <= device.fp8_row <= device.fp8_tensor
        assert device.processors > 1
        assert device.casts > 0
        assert device.launch > 0
        assert decide(16384, 16384, 16384, device)[0].decision == "fp8"


# --- convolutions


@pytest.mark.parametrize(
    ("convolution", "reason"),
    [
        (nn.Conv2d(16, 32, 3, padding=1), "a convolution with padding or dilation is not a matmul"),
        (nn.Conv2d(16, 32, 3), "a convolution whose 3×3 patches overlap or leave gaps is not a matmul"),
        (nn.Conv2d(16, 32, 2, stride=3), "a convolution whose 2×2 patches overlap or leave gaps is not a matmul"),
        (nn.Conv2d(16, 32, 2, stride=2, dilation=2), "a convolution with padding or dilation is not a matmul"),
        (nn.Conv2d(16, 32, 2, stride=2, groups=4), "a convolution in 4 groups is not one matmul"),
        (nn.Conv2d(16, 16, 1, groups=16), "a convolution in 16 groups is not one matmul"),
        (nn.ConvTranspose2d(16, 32, 2, stride=2), "a transposed convolution is not a matmul"),
        (nn.Conv2d(16, 32, 5, stride=5), "the input 8×8 does not divide into 5×5 patches"),
        (nn.Conv1d(16, 32, 4, stride=2), "a convolution whose 4 patches overlap or leave gaps is not a matmul"),
    ],
    ids=str,
)
def test_a_convolution_that_is_no_matmul_says_why(convolution, reason):
    model = nn.Sequential(nn.Conv2d(3, 16, 1) if convolution.weight.dim() == 4 else nn.Conv1d(3, 16, 1), convolution)
    shape = (2, 3, 8, 8) if convolution.weight.dim() == 4 else (2, 3, 8)
    plan = step(model, torch.randn(shape))
    assert reasons(plan, "1") == {reason}
    assert {m.kind for m in plan.matmuls if m.path == "1"} == {"convolution"}
    assert {m.decision for m in plan.matmuls if m.path == "0"} == {"fp8"}


# --- sizes that need padding


def fake(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """x rounded to E4M3 with a scale for each slice along `dim` (None: for all), in float64."""
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = amax.float() / 448.0
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()


@pytest.mark.parametrize(
    ("m", "n", "k", "recipe", "with_bias"),
    [
        (7, 10, 20, "mixed", False), (16, 32, 20, "rowwise", True), (5, 10, 32, "mixed", True),
        (33, 17, 47, "rowwise", False), (33, 17, 47, "mixed", True),
    ],
)  # fmt: skip
def test_unaligned_sizes_are_padded_without_a_trace_in_the_values(m, n, k, recipe, with_bias):
    linear = nn.Linear(k, n, bias=with_bias)
    x, gradient = torch.randn(m, k, requires_grad=True), torch.randn(m, n)
    out = torch.compile(linear, backend="fp8", options={**EAGER, "recipe": recipe})(x)
    out.backward(gradient)
    plan = fp8compile.last_compile()
    assert [r.decision for r in plan.matmuls] == ["fp8"] * 3

    row = (lambda dim: dim) if recipe == "rowwise" else (lambda dim: None)
    w = linear.weight.detach()
    bias = linear.bias.detach().double() if with_bias else 0.0
    wanted = {
        "output": fake(x.detach(), 1) @ fake(w, row(1)).T + bias,
        "grad_input": fake(gradient, row(1)) @ fake(w, row(0)),
        "grad_weight": fake(gradient, row(0)).T @ fake(x.detach(), row(0)),
    }
    got = {"output": out, "grad_input": x.grad, "grad_weight": linear.weight.grad}
    for name, value in wanted.items():
        # FP32 sums of at most 47 products, each of them below 20: 47·2^-24·20 < 6e-5, and less where it matters
        torch.testing.assert_close(got[name].detach().double(), value, rtol=1e-5, atol=6e-5)
        assert got[name].shape == value.shape
    if with_bias:
        torch.testing.assert_close(linear.bias.grad, gradient.sum(0))


def test_the_plan_names_what_was_padded():
    linear = nn.Linear(20, 10, bias=False)
    plan = step(linear, torch.randn(7, 20, requires_grad=True))
    rows = {m.role: m.padded for m in plan.matmuls}
    assert rows == {
        "output": ("K 20 to a multiple of 16", "N 10 to a multiple of 16"),
        "grad_input": ("K 10 to a multiple of 16", "N 20 to a multiple of 16"),
        "grad_weight": ("K 7 to a multiple of 16", "N 20 to a multiple of 16"),
    }


def test_aligned_sizes_are_not_padded():
    plan = step(nn.Linear(32, 48), torch.randn(16, 32, requires_grad=True))
    assert {m.padded for m in plan.matmuls} == {()}


def test_symbolic_sizes_are_padded_as_the_batch_needs():
    linear = nn.Linear(32, 32)
    compiled = torch.compile(linear, backend="fp8", options=EAGER, dynamic=True)
    for m in (16, 23, 40):
        x, gradient = torch.randn(m, 32), torch.randn(m, 32)
        linear.weight.grad = None
        out = compiled(x)
        out.backward(gradient)
        wanted = fake(gradient, None).T @ fake(x, None)
        torch.testing.assert_close(linear.weight.grad.double(), wanted, rtol=1e-5, atol=6e-5)
    assert len(fp8compile.compiles()) == 1
    (row,) = [r for r in fp8compile.last_compile().matmuls if r.role == "grad_weight"]
    assert isinstance(row.k, str)
    assert row.padded == (f"K {row.k} to a multiple of 128",)


@pytest.mark.parametrize(
    ("tokens", "recipe", "multiple"),
    [(2064, "mixed", 128), (2064, "rowwise", 128), (2055, "rowwise", 128), (2064, "blockwise", 0), (2112, "mixed", 0),
     (2032, "mixed", 0), (2031, "mixed", 16)],
)  # fmt: skip
def test_many_tokens_are_padded_to_whole_cache_lines(tokens: int, recipe: str, multiple: int) -> None:
    linear = nn.Linear(32, 48, bias=False)
    x, gradient = torch.randn(tokens, 32, requires_grad=True), torch.randn(tokens, 48)
    torch.compile(linear, backend="fp8", options=EAGER | {"recipe": recipe})(x).backward(gradient)
    rows = {m.role: m.padded for m in fp8compile.last_compile().matmuls}
    assert rows.pop("grad_weight") == ((f"K {tokens} to a multiple of {multiple}",) if multiple else ())
    assert set(rows.values()) == {()}
    wanted = gradient.double().T @ x.detach().double()
    assert (linear.weight.grad.double() - wanted).norm() < 0.04 * wanted.norm()


@pytest.mark.parametrize("recipe", ["mixed", "rowwise", "blockwise"])
def test_costs_of_convolutions(monkeypatch, recipe):
    """A convolution's gradients come three at a time, and none is ever added to another."""
    monkeypatch.setattr(devices, "describe", lambda _: devices.TABLE["H100"])
    case = ZOO["cnn"]()
    options = {"executor": "eager", "strict": True, "recipe": recipe, "kernels": "inductor"}
    with pytest.warns(Fp8Warning, match="NOTHING was converted"):
        case.loss(torch.compile(case.model, backend="fp8", options=options)(**case.inputs)).backward()
    times = [row.milliseconds_fp8 for row in fp8compile.last_compile().matmuls if row.kind == "convolution"]
    assert times
