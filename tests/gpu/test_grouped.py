"""Grouped FP8 matmuls of a GPU against the emulation: any groups, empty ones, odd sizes; what alignment really takes.

torch's kernel is written for Hopper; elsewhere a plan leaves experts in BF16, which is tested too.
"""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from experts import GROUPS, Experts, ends
from fake_quantized import fake_quantized, sqnr
from models import LAYERS, unsettled
from torch.profiler import ProfilerActivity, profile

import fp8compile
from fp8compile import ops
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.matmul.check_grouped import why_contractions_fail, why_it_fails
from fp8compile.kernels.reference import grouped_reference, markers
from tests.train.test_experts import LEAST, NEAR, losses, mixtral, qwen3_moe, step

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.gpu
hopper = pytest.mark.skipif(not HOPPER, reason="torch's grouped FP8 matmul is written for Hopper")
OPTIONS = {"select": "all", "strict": True}


def operands(rows: int, experts: int, n: int, k: int) -> list[torch.Tensor]:
    """(a, scale_a, b, scale_b) with rows of sizes between 1 and 16."""
    made = []
    for shape in ((rows, k), (experts, n, k)):
        x = torch.randn(shape, device="cuda") * torch.rand(*shape[:-1], 1, device="cuda").mul(4).exp2()
        scale = markers.scale(markers.amax(x, "row"), "e4m3")
        made += [markers.quantize(x, scale, "e4m3", "row"), scale]
    return made


def both(
    sizes: list[int], rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, fast: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The GPU's and the emulation's result, without the rows behind the last group."""
    a, scale_a, b, scale_b = operands(rows, len(sizes), n, k)
    args = (a, scale_a, "row", b, scale_b, "row", None, dtype, fast, ends(sizes, "cuda"))
    inside = sum(sizes)
    return scaled_mm.scaled_mm(*args)[:inside], markers.scaled_mm(*args)[:inside]


def agree(out: torch.Tensor, expected: torch.Tensor, bits: int = 13) -> None:
    """One rounding to BF16, and the units' accumulation: an error of 2^-bits of the sum of magnitudes, ≤ 8x the RMS of
    its expert's rows (tests/gpu/test_matmul.py)."""
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    rms = expected.float().pow(2).mean().sqrt() if expected.numel() else torch.zeros(())
    atol = 8 * 2.0 ** (5 - bits) * rms.item()
    torch.testing.assert_close(out.float(), expected.float(), rtol=2.0**-7, atol=atol)


@hopper
@pytest.mark.parametrize("trial", [why_it_fails, why_contractions_fail])
def test_the_trials_let_it_pass(trial: Any) -> None:
    assert trial(torch.device("cuda", 0)) == ""


@hopper
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("n", "k"), [(128, 64), (16, 16), (80, 1024), (256, 48)])
def test_groups_of_any_size(name: str, n: int, k: int, fast: bool) -> None:
    agree(*both(GROUPS[name], 96, n, k, fast=fast), bits=11 if fast else 13)


@hopper
@pytest.mark.parametrize("seed", range(12))
def test_drawn_groups(seed: int) -> None:
    """Groups that begin anywhere, many of them empty, of few tokens and of many: all three tiles of the kernel."""
    draw = random.Random(seed)
    experts, rows = draw.choice([1, 4, 8, 64]), draw.choice([1, 7, 250, 4099])
    cuts = sorted(draw.randint(0, rows) for _ in range(experts))
    sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    n, k = draw.choice([16, 208, 4096]), draw.choice([32, 2048])
    for fast in (False, True):
        agree(*both(sizes, rows, n, k, fast=fast), bits=11 if fast else 13)


@hopper
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulation_and_dtypes(fast: bool, dtype: torch.dtype) -> None:
    # of a result in FP16 or FP32 the kernel makes BF16 first; fast accumulation keeps fewer bits between pieces
    agree(*both([100, 0, 33, 123], 256, 512, 1024, dtype, fast), bits=11 if fast else 13)


@hopper
@pytest.mark.parametrize("seed", range(8))
def test_rows_have_the_bits_of_torchs_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which sums in the same pieces, and in the same order."""
    draw = random.Random(seed)
    experts, rows = draw.choice([1, 8, 64]), draw.choice([130, 4099])
    cuts = sorted(draw.randint(0, rows) for _ in range(experts))
    sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    n, k = draw.choice([48, 784, 2048]), draw.choice([16, 272, 4096])
    torch.manual_seed(seed)
    ours, _ = both(sizes, rows, n, k, fast=True)
    monkeypatch.setattr(scaled_mm, "_is_hopper", lambda device: False)
    torch.manual_seed(seed)
    assert torch.equal(ours, both(sizes, rows, n, k, fast=True)[0])


@hopper
@pytest.mark.parametrize("experts", [1, 512, 1023])
def test_as_many_groups_as_the_plan_allows(experts: int) -> None:
    for fast in (False, True):
        agree(*both([3] * experts, 3 * experts, 32, 64, fast=fast), bits=11 if fast else 13)


@hopper
def test_no_tokens() -> None:
    for fast in (False, True):
        out, expected = both([0, 0], 0, 32, 64, fast=fast)
        assert out.shape == expected.shape == (0, 32)
        agree(*both([0, 0, 0], 5, 32, 64, fast=fast))  # tokens, but nobody's


@hopper
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad: float) -> None:
    a, scale_a, b, scale_b = operands(96, 4, 32, 64)
    args = (b, scale_b, "row", None, torch.bfloat16, True, ends(GROUPS["uneven"], "cuda"))
    before = scaled_mm.scaled_mm(a, scale_a, "row", *args)
    scale_a[7] = bad
    after = scaled_mm.scaled_mm(a, scale_a, "row", *args)
    others = torch.arange(96, device="cuda") != 7
    assert not after[7].isfinite().any()
    assert torch.equal(after[others], before[others])


@hopper
@pytest.mark.parametrize("which", ["K", "N"])
def test_sizes_that_torchs_kernel_refuses(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What padding is for: 16 divides K and N, and nothing smaller does."""
    monkeypatch.setattr(scaled_mm, "_is_hopper", lambda device: False)
    a, scale_a, b, scale_b = operands(96, 4, 40 if which == "N" else 32, 72 if which == "K" else 64)
    with pytest.raises((RuntimeError, ValueError), match=r"divisible by 16|multiple of 16"):
        scaled_mm.scaled_mm(
            a, scale_a, "row", b, scale_b, "row", None, torch.bfloat16, False, ends([96, 0, 0, 0], "cuda")
        )


RAGGED = """
import torch
m, n, sizes = 64, 32, {sizes}
offs = torch.tensor(sizes, device="cuda").cumsum(0).int()
a, b = (torch.randn(rows, sum(sizes), device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
one = lambda rows: torch.ones(rows * len(sizes), device="cuda")
out = torch._scaled_grouped_mm(a, b.t(), one(m), one(n), offs, out_dtype=torch.bfloat16)
torch.cuda.synchronize()
start = 0
for e, size in enumerate(sizes):
    part = slice(start, start + size)
    torch.testing.assert_close(out[e].float(), a[:, part].float() @ b[:, part].float().t(), rtol=2e-2, atol=0.3)
    start += size
print("right")
"""


@hopper
@pytest.mark.parametrize(("sizes", "runs"), [([32, 16, 64], True), ([30, 18, 64], False), ([1, 0, 31], False)], ids=str)
def test_contracting_groups_takes_multiples_of_16(sizes: list[int], runs: bool) -> None:
    """Why casts for grad_weight fill groups up. Each in a process: the kernel's assertion ends all CUDA of its own."""
    done = subprocess.run(
        [sys.executable, "-c", RAGGED.format(sizes=sizes)], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode == 0 and "right" in done.stdout) == runs, done.stderr[-2000:]


# --- groups that are contracted


def tokens(sizes: list[int], columns: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, offs) of very different columns, with zeros of both signs; NaN in 37 rows behind the last group."""
    x = torch.randn(sum(sizes) + 37, columns, device="cuda") * torch.rand(columns, device="cuda").mul(20).sub(10).exp2()
    x[:, 3], x[1::2, 5] = 0.0, -0.0
    x[sum(sizes) :] = torch.nan
    return x.to(dtype), ends(sizes, "cuda")


def cast_right(
    x: torch.Tensor,
    offs: torch.Tensor,
    power_of_two: bool = False,
    junk: int = 0xFF,
    one_scale: bool = False,
    index: torch.Tensor | None = None,
) -> None:
    """The kernel gives the reference's bits in all that is read, and leaves the junk behind it."""
    from fp8compile.kernels.casts import grouped_cast

    rows = x if index is None else torch.where(index[:, None] < 0, 0, x[index.clamp_min(0)])
    amax = rows.abs().amax(1, keepdim=True).float() if one_scale else None
    wanted = grouped_reference.grouped_cast(x, offs, "e4m3", power_of_two, 16, amax, index)
    given = [torch.full_like(t.view(torch.uint8), junk).view(t.dtype) for t in wanted]
    grouped_cast.launch(x, offs, *given, power_of_two, amax, index)
    last = int(wanted[2][-1])
    assert torch.equal(given[2], wanted[2])
    torch.testing.assert_close(given[1], wanted[1], rtol=0, atol=0, equal_nan=True)
    found, codes = (torch.where(t.view(torch.uint8) == 0xFF, 0x7F, t.view(torch.uint8)) for t in (given[0], wanted[0]))
    assert torch.equal(found[:, :last], codes[:, :last])
    assert (given[0][:, last:].view(torch.uint8) == junk).all()


@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", GROUPS)
def test_casts_of_groups_are_the_references(name: str, dtype: torch.dtype, one_scale: bool) -> None:
    cast_right(*tokens(GROUPS[name], 208, dtype), power_of_two=dtype == torch.float32, one_scale=one_scale)


@pytest.mark.parametrize("seed", range(12))
def test_casts_of_drawn_groups(seed: int) -> None:
    draw = random.Random(seed)
    experts, rows = draw.choice([1, 8, 64, 1023]), draw.choice([1, 250, 20000])
    cuts = sorted(draw.randint(0, rows) for _ in range(experts))
    sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    x, offs = tokens(sizes, draw.choice([8, 72, 1000, 2048]))
    if sum(sizes) > 2:
        x[0, 6], x[1, 7] = torch.nan, torch.inf
    cast_right(x, offs, draw.random() < 0.5, draw.choice([0xFF, 0x7E]), one_scale=draw.random() < 0.5)
    index = torch.randint(-(len(x) // 9) - 1, len(x), (len(x),), device="cuda")
    cast_right(x, offs, draw.random() < 0.5, draw.choice([0xFF, 0x7E]), draw.random() < 0.5, index)


def test_casts_beyond_what_32_bits_count() -> None:
    """More than 2^31 elements, of which the last group has the last."""
    x = torch.zeros(2**20 + 5, 2064, device="cuda", dtype=torch.bfloat16)
    x[-40:] = torch.randn(40, 2064, device="cuda")
    offs = ends([2**20 - 35, 40], "cuda")
    from fp8compile.kernels.casts import grouped_cast

    data = torch.empty(2064, grouped_reference.padded_tokens(len(x), 2), device="cuda", dtype=torch.float8_e4m3fn)
    found = data, torch.empty(2, 2064, 1, device="cuda"), torch.empty_like(offs)
    grouped_cast.launch(x, offs, *found, False)
    wanted = grouped_reference.grouped_cast(x[-40:], ends([40], "cuda"), "e4m3")
    first, last = found[2].tolist()
    assert torch.equal(found[0][:, first:last].view(torch.uint8), wanted[0][:, :48].view(torch.uint8))
    assert torch.equal(found[1][1], wanted[1][0])


def contracted(sizes: list[int], n: int, k: int, dtype: torch.dtype = torch.bfloat16, fast: bool = False) -> Any:
    """The GPU's and the emulation's product of the tokens of each group, of what the GPU has cast."""
    (left, offs), (right, _) = tokens(sizes, n), tokens(sizes, k)
    (a, scale_a, places), (b, scale_b, _) = (ops.grouped_cast(x, offs, "e4m3") for x in (left, right))
    args = (a, scale_a, "row", b, scale_b, "row", None, dtype, fast, places)
    return scaled_mm.scaled_mm(*args), markers.scaled_mm(*args)


def agree_by_columns(out: torch.Tensor, expected: torch.Tensor, bits: int = 13) -> None:
    """As `agree`, each element beside the norms of its row and column: the scales of those differ by 2^20."""
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    for found, wanted in zip(out.double(), expected.double(), strict=True):
        rows, columns = (wanted.square().mean(dim, keepdim=True).sqrt() for dim in (1, 0))
        mean = wanted.square().mean().sqrt()
        size = rows * columns / mean if mean > 0 else torch.zeros_like(wanted)
        assert ((found - wanted).abs() <= 2.0**-7 * wanted.abs() + 8 * 2.0 ** (5 - bits) * size).all()


@hopper
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(("n", "k"), [(128, 64), (16, 16), (72, 1024), (256, 48)])
def test_contractions_of_groups_of_any_size(name: str, n: int, k: int) -> None:
    agree_by_columns(*contracted(GROUPS[name], n, k))


@hopper
@pytest.mark.parametrize("seed", range(12))
def test_contractions_of_drawn_groups(seed: int) -> None:
    draw = random.Random(seed)
    experts, rows = draw.choice([1, 4, 8, 64]), draw.choice([1, 7, 250, 4099])
    cuts = sorted(draw.randint(0, rows) for _ in range(experts))
    sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    agree_by_columns(*contracted(sizes, draw.choice([24, 208, 4096]), draw.choice([32, 2048])))


@hopper
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_contractions_in_other_dtypes(fast: bool, dtype: torch.dtype) -> None:
    agree_by_columns(*contracted([100, 0, 33, 123], 512, 1024, dtype, fast), bits=11 if fast else 13)


@hopper
@pytest.mark.parametrize("sizes", [[0, 0, 0], [0, 1, 0], [1] + [0] * 1022], ids=lambda sizes: str(len(sizes)))
def test_contractions_of_no_tokens_are_zeros(sizes: list[int]) -> None:
    out, wanted = contracted(sizes, 32, 48)
    agree_by_columns(out, wanted)
    assert [bool((product == 0).all()) for product in out] == [size == 0 for size in sizes]


# --- compiled


def compiled(model: torch.nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fp8", options={**OPTIONS, **options})


@hopper
@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_a_step_is_near_the_fake_quantized_one(name: str, flipped: bool, executor: str) -> None:
    model, offs = Experts(len(GROUPS[name]), flipped=flipped).bfloat16(), ends(GROUPS[name])
    bf16 = step(model, model, offs)
    with fake_quantized("mixed"):
        fake = step(model, model, offs)
    model.cuda()
    run = compiled(model, executor=executor)
    got = step(lambda x, offs: run(x.cuda(), offs.cuda()).cpu(), model, offs)
    for key, want in fake.items():
        assert sqnr(bf16[key], got[key].cpu()) >= LEAST, key
        assert sqnr(want.cpu(), got[key].cpu()) >= LEAST, key
    assert {(m.role, m.decision) for m in fp8compile.last_compile().matmuls} == {
        ("output", "fp8"), ("grad_input", "fp8"), ("grad_weight", "fp8")
    }  # fmt: skip


@hopper
@pytest.mark.parametrize(("width", "inner"), [(64, 72), (128, 200)])
def test_padded_sizes(width: int, inner: int) -> None:
    model, offs = Experts(4, width, inner).bfloat16().cuda(), ends([30, 1, 0, 65], "cuda")
    x = torch.randn(96, width, device="cuda", dtype=torch.bfloat16)
    assert sqnr(model(x, offs), compiled(model)(x, offs)) >= LEAST


@hopper
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_the_kernel_that_runs_is_grouped_fp8(executor: str) -> None:
    model, offs = Experts(4).bfloat16().cuda(), ends(GROUPS["uneven"], "cuda")
    run = compiled(model, executor=executor)
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run(x, offs).float().square().mean().backward()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run(x, offs).float().square().mean().backward()
        torch.cuda.synchronize()
    names = [e.name for e in recorded.events() or []]
    assert names.count("aten::_scaled_grouped_mm") == 2  # grad_weight
    assert names.count("rows_kernel") == 4
    assert not any("Memcpy DtoH" in name for name in names)  # nobody waits for the sizes of groups


@hopper
def test_cuda_graphs() -> None:
    """Sizes of groups that change between replays, without a new graph."""
    model = Experts(4).bfloat16().cuda()
    run = compiled(model, mode="reduce-overhead")
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16)
    for name in ("even", "uneven", "empty", "last"):
        offs = ends(GROUPS[name], "cuda")
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            assert sqnr(model(x, offs), run(x, offs)) >= LEAST


@hopper
def test_cuda_graphs_of_a_training_step() -> None:
    """Gradients of steps whose groups differ, without a new graph; all that is written before is NaN."""
    model = Experts(4).bfloat16().cuda()
    run = compiled(model, mode="reduce-overhead")
    x = torch.randn(96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for name in ("even", "uneven", "empty", "last", "even", "uneven"):
        offs = ends(GROUPS[name], "cuda")
        found = []
        for call in (model, run):
            torch.compiler.cudagraph_mark_step_begin()
            out = call(x, offs)
            gradients = torch.autograd.grad(out, (x, *model.parameters()), torch.ones_like(out))
            found.append([g.clone() for g in gradients])
        assert all(sqnr(bf16, fp8) >= LEAST for bf16, fp8 in zip(*found, strict=True)), name
    assert len(fp8compile.compiles()) == 1


@hopper
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_what_is_saved_takes_half_the_bytes(executor: str) -> None:
    """x is given to backward as the payload that grad_weight contracts."""
    model = Experts(4, 512, 1024).bfloat16().cuda()
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled(model, executor=executor)(x, ends([1000, 0, 2096, 1000], "cuda")).float().square().mean().backward()
    saved = {row.shape: row.bytes for row in fp8compile.last_compile().saved}
    assert saved[512, 4096 + 4 * 16] == 512 * (4096 + 4 * 16)
    assert (4096, 512) not in saved


@hopper
@pytest.mark.parametrize("build", [mixtral, qwen3_moe])
def test_models_of_transformers_train_as_in_bf16(build: Any) -> None:
    torch.manual_seed(0)
    first, second = (unsettled(build()).cuda() for _ in range(2))
    second.load_state_dict(first.state_dict())
    bf16 = losses(first, first)
    fp8 = losses(second, compiled(second, skip=["*.gate"]))
    assert max(abs(a - b) for a, b in zip(bf16, fp8, strict=True)) < NEAR
    assert sum(m.kind == "grouped" for m in fp8compile.last_compile().converted) == 6 * LAYERS


def test_elsewhere_experts_stay_in_bf16() -> None:
    if HOPPER:
        pytest.skip("a GPU that has the kernel")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16().cuda()
    experts = Experts(4).bfloat16().cuda()
    run = torch.compile(lambda x, offs: experts(model(x), offs), backend="fp8", options=OPTIONS)
    run(torch.randn(96, 64, device="cuda", dtype=torch.bfloat16), ends(GROUPS["even"], "cuda"))
    assert any("has no grouped FP8 matmul" in m.reason for m in fp8compile.last_compile().kept)
