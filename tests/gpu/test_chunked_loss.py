"""Losses in chunks on a GPU: the kernel against plain torch, models against eager, and what memory they take."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile import ops
from fp8compile.kernels.loss import chunked_loss, plain_head
from fp8compile.kernels.loss.softmax_step import DROPPED, Codes, Curve, plain_step

pytestmark = pytest.mark.gpu
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
CURVES = {"as it is": Curve(), "scaled": Curve(-0.5), "soft-capped": Curve(0.1, 30.0)}


@pytest.mark.parametrize("n", [11, 4096, 50257, 128256])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("every_term", [False, True])
def test_the_kernel_is_the_reference(every_term: bool, dtype: torch.dtype, curve: str, n: int):
    from fp8compile.kernels.loss.softmax_gradient import step

    torch.manual_seed(0)
    rows = torch.empty(64, -(-n // 64) * 64, device="cuda", dtype=dtype)[:, :n]
    rows.normal_(std=8)
    rows[3, : n // 2] = -torch.inf
    index = torch.randint(n // 2, n, (64,), device="cuda")
    weights = torch.rand(4, 64, device="cuda") if every_term else torch.rand(64, device="cuda")
    if every_term:
        rows[3, : n // 2] = -50.0  # a sum of log-probabilities that is finite
        weights[1] /= n
    before = rows.clone()
    theirs = before.clone()
    want = plain_step(theirs, index, weights, CURVES[curve], True, every_term)
    ulp = torch.finfo(dtype).eps
    for mine in (rows, before):  # with room between its rows, which holds anything, and without
        terms = step(mine, index, weights, CURVES[curve], True, every_term)
        torch.testing.assert_close(terms, want, rtol=2e-5, atol=2e-5, equal_nan=True)
        atol = 1e-4 if every_term else 1e-6  # where gradients of several terms cancel
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=max(ulp, 1e-4), atol=atol, equal_nan=True)


def test_infinities_and_nan_are_those_of_torch():
    from fp8compile.kernels.loss.softmax_gradient import step

    logits = torch.randn(5, 9000, device="cuda")
    logits[0, :5000] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    logits[3, 7] = torch.nan
    index = torch.full((5,), 8000, device="cuda")
    want = logits.log_softmax(-1).gather(1, index[:, None]).squeeze(1)
    torch.testing.assert_close(step(logits, index, None, Curve(), True), want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_offsets_beyond_32_bits():
    """17000 rows of 128256 BF16 logits: 4.4 GB, more than 2³¹ elements."""
    from fp8compile.kernels.loss.softmax_gradient import step

    logits = torch.zeros(17_000, 128_256, device="cuda", dtype=torch.bfloat16)
    logits[-1, 5] = 4.0
    chosen = step(logits, torch.full((17_000,), 5, device="cuda"), None, Curve(), True)
    want = torch.log_softmax(torch.zeros(128_256).index_fill_(0, torch.tensor(5), 4.0), 0)[5]
    torch.testing.assert_close(chosen[-1].cpu(), want, rtol=1e-5, atol=1e-5)
    assert logits[-1, 5] < -0.99


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("wider", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_operator_is_exact_to_the_rounding_of_logits(
    dtype: torch.dtype, wider: bool, monkeypatch: pytest.MonkeyPatch
):
    """Whether torch adds a product to a wider matrix, or not."""
    if not wider:
        monkeypatch.setattr(plain_head, "_adds_to_wider", lambda *_: False)
    torch.manual_seed(0)
    x = torch.randn(3000, 256, device="cuda").to(dtype)
    weight = (torch.randn(10_007, 256, device="cuda") / 8).to(dtype)
    bias = torch.randn(10_007, device="cuda").to(dtype)
    index, weights = torch.randint(0, 10_007, (3000,), device="cuda"), torch.rand(3000, device="cuda")
    got = ops.chunked_loss(x, weight, bias, index, weights, 1024, 1.0, None, [True, True, True])
    given = [t.double().requires_grad_() for t in (x, weight, bias)]
    losses = F.cross_entropy(F.linear(*given), index, reduction="none")
    want = [-losses, *torch.autograd.grad((losses * weights).sum(), given)]
    bound = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-3}[dtype]  # FP32: TF32 may be on
    assert all(relative(a, b) < bound for a, b in zip(got, want, strict=True))


class Head(nn.Module):
    def __init__(self, classes: int, features: int, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(features)
        self.lm_head = nn.Linear(features, classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(self.norm(x)).float(), labels, label_smoothing=self.smoothing)


def compiled(model: nn.Module, **options: Any) -> Any:
    warnings.filterwarnings("ignore", "fp8: NOTHING was converted")
    return torch.compile(model, backend="fp8", options={"strict": True, **options})


def step_of(model: nn.Module, run: Any, x: Tensor, labels: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    loss = run(x, labels)
    (loss * scale).backward()
    found = {"loss": loss.detach().clone(), "x": x.grad} | {n: p.grad for n, p in model.named_parameters()}
    return {n: t.float() if n == "loss" else t.float() / scale for n, t in found.items() if t is not None}


@pytest.mark.parametrize(("mode", "smoothing"), [(None, 0.0), ("reduce-overhead", 0.0), (None, 0.1)])
def test_compiled_gradients_are_no_further_from_fp32_than_eager_bf16(mode: str | None, smoothing: float):
    model = Head(32_003, 512, smoothing).cuda().bfloat16()
    x, labels = torch.randn(5000, 512, device="cuda"), torch.randint(0, 32_003, (5000,), device="cuda")
    labels[::5] = -100
    wide = Head(32_003, 512, smoothing).cuda()
    wide.load_state_dict({n: p.float() for n, p in model.state_dict().items()})
    exact = step_of(wide, wide, x.bfloat16().float(), labels)
    plain = step_of(model, model, x.bfloat16(), labels)
    run = compiled(model, chunk_loss=1024, mode=mode)
    for _ in range(4 if mode else 1):  # recorded by then
        got = step_of(model, run, x.bfloat16(), labels)
    plan = fp8compile.last_compile()
    assert plan is not None
    assert [loss.chunk for loss in plan.losses] == [1024]
    for name, want in exact.items():
        assert relative(got[name], want) <= 1.25 * relative(plain[name], want) + 1e-6, name


@pytest.mark.parametrize(("rows", "width"), [(64, 4096), (1000, 50272), (2049, 32016)])
def test_codes_are_turned_as_plain_torch_turns_them(rows: int, width: int):
    from fp8compile.kernels.loss import fp8_head, turned_codes

    codes = torch.randint(0, 256, (rows, width), device="cuda", dtype=torch.uint8).view(torch.float8_e5m2)
    found = []
    for turn in (turned_codes.turn, fp8_head.turn):
        block = torch.full([width, 64 + (rows // 16 + 1) * 16], 7, device="cuda", dtype=torch.uint8)
        turn(codes, block[:, 64:].view(torch.float8_e5m2))
        assert (block[:, :64] == 7).all()
        found.append(block)
    assert torch.equal(*found)


@pytest.mark.parametrize("n", [11, 4096, 50257])
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("every_term", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_codes_are_those_of_the_gradient(gradients: bool, every_term: bool, dtype: torch.dtype, curve: str, n: int):
    from fp8compile.kernels.loss.softmax_gradient import step

    torch.manual_seed(0)
    logits = torch.empty(64, -(-n // 16) * 16, device="cuda", dtype=dtype)[:, :n].normal_(std=3)
    index = torch.randint(0, n, (64,), device="cuda")
    index[3] = DROPPED
    logits[4, index[4]], logits[5, 3] = 60.0, torch.nan  # a label that is nearly certain; nothing known
    weights = torch.rand(4, 64, device="cuda") if every_term else torch.rand(64, device="cuda")
    exact = logits.float().clone()
    plain_step(exact, index, weights, CURVES[curve], True, every_term)
    width = -(-n // 16) * 16
    codes = Codes(
        torch.full((64, width), 77, device="cuda", dtype=torch.uint8).view(torch.float8_e5m2),
        torch.full((64, 1), torch.nan, device="cuda"),
    )
    before = logits.clone()
    step(logits, index, weights, CURVES[curve], gradients, every_term, codes)
    assert gradients or torch.equal(logits.nan_to_num(), before.nan_to_num())
    got = codes.data.float()
    assert not got[:, n:].nan_to_num().any()
    assert not got[3].any()
    assert codes.scales[3] == 0
    assert got[5, :n].isnan().all()
    finite = torch.tensor([i for i in range(64) if i not in (3, 5)], device="cuda")
    amax = exact[finite].abs().amax(1, keepdim=True)
    torch.testing.assert_close(codes.scales[finite] * 57344, amax, rtol=2e-3, atol=1e-6)  # where terms cancel
    error = (got[finite, :n] * codes.scales[finite] - exact[finite]).abs()
    assert (error <= exact[finite].abs() * 0.126 + amax * (1e-4 if every_term else 1e-6)).all()


@pytest.mark.parametrize("exact_grad_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_operator_in_fp8_is_the_reference(dtype: torch.dtype, exact_grad_weight: bool):
    """Chunks of other sizes, of which the last is no multiple of 16, and classes that are filled up."""
    m, k, n = 3001, 256, 10_007
    x, weight = torch.randn(m, k, device="cuda").to(dtype), (torch.randn(n, k, device="cuda") / 8).to(dtype)
    wide = F.pad(weight, (0, 0, 0, -n % 16))

    def cast(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = ops.scale(ops.amax(x, "row"), "e4m3")
        return ops.quantize(x, scale, "e4m3", "row"), scale

    index, weights = torch.randint(0, n, (m,), device="cuda"), torch.rand(m, device="cuda")
    index[::7] = DROPPED
    bias = torch.randn(n, device="cuda").to(dtype)
    operands = x, *cast(x), *cast(wide), *cast(wide.t().contiguous())
    given = *operands, bias, index, weights, n, 1024, 1.0, None, [True] * 3, False, exact_grad_weight
    got = ops.chunked_loss_in_fp8(*given)
    want = chunked_loss.run_in_fp8(*given)  # plain torch on the GPU; with sums in FP32
    counts = index != DROPPED
    torch.testing.assert_close(got[0][counts], want[0][counts], rtol=1e-2, atol=2e-2)  # logits to the next BF16
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative(a, b) < 2e-2  # FP8 units add in at least 14 bits, and some slopes fall to the next code
    assert not got[1][~counts].any()


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_head_in_fp8_in_chunks_is_as_near_as_in_one_piece(mode: str | None):
    model = Head(32_003, 512).cuda().bfloat16()
    x, labels = torch.randn(5000, 512, device="cuda"), torch.randint(0, 32_003, (5000,), device="cuda")
    labels[::5] = -100
    wide = Head(32_003, 512).cuda()
    wide.load_state_dict({n: p.float() for n, p in model.state_dict().items()})
    exact = step_of(wide, wide, x.bfloat16().float(), labels)
    found = {}
    for chunks in (False, 1024):
        torch.compiler.reset()
        run = compiled(model, chunk_loss=chunks, mode=mode, lm_head=True, select="all")
        for _ in range(4 if mode else 1):  # recorded by then
            found[chunks] = step_of(model, run, x.bfloat16(), labels)
        plan = fp8compile.last_compile()
        assert {m.decision for m in plan.matmuls} == {"fp8"}
    assert [loss.chunk for loss in plan.losses] == [1024]
    for name, want in exact.items():
        assert relative(found[1024][name], want) <= 1.25 * relative(found[False][name], want) + 1e-3, name


def test_a_loss_scale_in_fp16():
    model = Head(8_000, 256).cuda()
    x, labels = torch.randn(8192, 256, device="cuda"), torch.randint(0, 8_000, (8192,), device="cuda")

    def halved(x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return model(x, labels)

    exact = step_of(model, model, x, labels)
    plain = step_of(model, halved, x, labels, 2.0**16)
    got = step_of(model, compiled(halved, chunk_loss=True), x, labels, 2.0**16)
    for name, want in exact.items():
        assert relative(got[name], want) <= 1.25 * relative(plain[name], want) + 1e-6, name


def peak(run: Any, model: nn.Module, x: Tensor, labels: Tensor) -> int:
    """The most bytes above what is there before a step."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        x.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(x, labels).backward()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_memory_is_what_the_equations_say(parameters: torch.dtype):
    """M 16384, N 128256, K 1024: whole 4MN = 8.4 GB; in chunks of R = 2048 rows an FP32 sum 4NK, and 2NR of logits or
    2NK of the gradient's BF16 form: 1.1 GB (FP32 parameters: their BF16 copy 2NK, the FP32 gradient in place)."""
    m, n, k, r = 16384, 128256, 1024, 2048
    model = Head(n, k).cuda().to(parameters)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, n, (m,), device="cuda")

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x, labels)

    chunked = peak(compiled(step), model, x, labels)
    plan = fp8compile.last_compile()
    assert plan is not None
    assert [loss.chunk for loss in plan.losses] == [r]
    torch.compiler.reset()
    whole = peak(compiled(step, chunk_loss=False), model, x, labels)
    small = 12 * m * k * 2  # activations and gradients of M × K, a dozen in BF16 at most
    copies = 2 * n * k if parameters is torch.float32 else 0
    assert chunked < 4 * n * k + 2 * n * max(r, k) + copies + small, (chunked, whole)
    assert chunked < whole / 3, (chunked, whole)


OUT_OF_BOUNDS = """
import torch, fp8compile
from torch import nn
head = nn.Linear(64, 1000, bias=False).cuda().bfloat16()
x, labels = torch.randn(4096, 64, device="cuda").bfloat16(), torch.zeros(4096, dtype=torch.int64, device="cuda")
loss = lambda x, labels: nn.functional.cross_entropy(head(x).float(), labels)
run = torch.compile(loss, backend="fp8", options={"chunk_loss": 2048})
run(x, labels).backward()
torch.cuda.synchronize()
print("in bounds")
labels[7] = 1000
run(x, labels).backward()
torch.cuda.synchronize()
print("out of bounds")
"""


def test_a_label_that_is_no_class_is_an_assertion_of_the_device():
    """In a process of its own, which can use the GPU no more."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_BOUNDS], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["in", "bounds"], done.stderr
    assert done.returncode != 0
    assert "assert" in done.stderr
