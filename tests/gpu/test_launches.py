"""Regions inside Inductor's code: how many kernels a block takes, random numbers, and kernels as files."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from joint import joint
from torch import Tensor, nn
from torch._higher_order_ops import triton_kernel_wrap
from torch.profiler import ProfilerActivity, profile

import fp8compile
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule import choose_schedule
from fp8compile.kernels.codegen.spec.region import Buffer, Input, Part, Region, Store, Value
from fp8compile.passes.lower import known_accesses
from fp8compile.passes.matmul import host_costs

pytestmark = pytest.mark.gpu

from llama import Block, LlamaConfig, Rotary  # noqa: E402

# Kernels of libraries: matmuls (nvjet, cutlass, split-K), attention (with its conversions), copies by the driver.
LIBRARY = ("nvjet", "cutlass", "gemm", "splitK", "fmha", "flash", "sdpa", "cudnn", "Memset", "Memcpy", "at::native")


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(LlamaConfig(dim=1024, n_layers=1, n_heads=8, n_kv_heads=2, hidden=4096))
        self.rotary = Rotary(128, 512, 10_000.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.rotary)


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(model, backend="fp8", options={"strict": True, "select": "all", **options})


def kernels(run: Callable[[], Any]) -> Counter[str]:
    """Names of the kernels that `run` launches, without those of libraries."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    found = Counter({e.key: e.count for e in profiled.key_averages() if e.self_device_time_total > 0})
    return Counter({name: n for name, n in found.items() if not any(word in name for word in LIBRARY)})


def test_launches_of_a_llama_block() -> None:
    """Beside matmuls, attention and casts of weights alone: no more than 8 forward and 14 backward.

    In forward the cast of each of the four (merged) weights ends with a kernel that repeats its scale for every row.
    """
    model = LlamaBlock().cuda().bfloat16()
    x = torch.randn(2, 512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    run = compiled(model)
    gradient = torch.randn_like(x)
    run(x).backward(gradient)
    results: list[Tensor] = []
    forward = kernels(lambda: results.append(run(x)))
    backward = kernels(lambda: results[0].backward(gradient))
    weights = Counter({n: c for n, c in forward.items() if n in ("tiles_amax", "tiles_e4m3") or _is_of_weights(n)})
    repeated = sum(1 for row in fp8compile.last_compile().matmuls if row.role == "output" and row.decision == "fp8")
    assert (forward - weights).total() <= 8 + repeated, forward
    assert backward.total() <= 14, backward


def _is_of_weights(name: str) -> bool:
    """In forward only weights are cast by tensor scales: their kernels reduce no rows."""
    return name.startswith(("tiles_amax_", "tiles_e4m3_"))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_the_same_by_generated_kernels_as_by_inductor(p: float) -> None:
    torch.manual_seed(0)
    model = (
        nn.Sequential(
            nn.LayerNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Dropout(p), nn.Linear(1024, 512), nn.Dropout(p)
        )
        .cuda()
        .bfloat16()
    )
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    steps = []
    for how in ("inductor", "generated"):
        torch.compiler.reset()
        model.zero_grad()
        torch.manual_seed(1)
        out = compiled(model, kernels=how)(x)
        out.float().square().mean().backward()
        steps.append((out.detach(), [q.grad.clone() for q in model.parameters() if q.grad is not None]))
    (a, gradients_a), (b, gradients_b) = steps
    assert ((a == 0) == (b == 0)).float().mean() > 0.999  # the same elements are dropped
    assert 0.8 * p < (a == 0).float().mean() < 1.2 * p
    for left, right in zip(gradients_a, gradients_b, strict=True):
        assert (left - right).float().norm() < 0.15 * left.float().norm()


def test_a_generated_file_checks_and_times_itself() -> None:
    values = (
        Value("load", (), (0,)), Value("row_amax", (0,)), Value("scale", (1,), ("e4m3",)),
        Value("quantize", (0, 2), ("e4m3",)),
    )  # fmt: skip
    inputs = (Input(0, "bfloat16", ((4096, 2048),), ((2048, 1),)),)
    part = Part(4096, 2048, inputs, values, (Store(0, 3, 2048), Store(1, 2)))
    region = Region((part,), (Buffer((4096, 2048), "float8_e4m3fn"), Buffer((4096, 1), "float32")))
    module = generated.module_of(region, choose_schedule.choose(region), "cuda")
    ran = subprocess.run([sys.executable, str(module.__file__)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ok" in ran.stdout
    assert "/s" in ran.stdout


def test_inductor_shows_the_source_of_the_kernels() -> None:
    from torch._inductor.utils import run_and_get_code

    model = nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 1024, bias=False)).cuda().bfloat16()
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    _, codes = run_and_get_code(compiled(model), x)
    assert any("def rows_e4m3" in code for code in codes)


def test_kernels_are_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on neither Inductor's autotuner nor Triton's launcher is asked; the numbers are the same."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.backends.nvidia.driver import CudaLauncher

    model = LlamaBlock().cuda().bfloat16()
    x = torch.randn(2, 512, 1024, device="cuda", dtype=torch.bfloat16)
    run = compiled(model)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        run(x).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    assert sum(n for name, n in kernels(gradients).items() if name.startswith(("rows", "tiles"))) > 10

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("launched by a detour")

    monkeypatch.setattr(CachingAutotuner, "run", refused)
    monkeypatch.setattr(CudaLauncher, "__call__", refused)
    for got, wanted in zip(gradients(), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("gpus", [1, 2])
def test_no_c_compiler_makes_a_launcher(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """Not even for the first launch of a kernel: torch's launcher takes all that are generated, for every GPU."""
    from triton.backends.nvidia.driver import CudaLauncher

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a launcher is made")

    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    monkeypatch.setattr(CudaLauncher, "__init__", refused)
    for gpu in range(gpus):
        with torch.cuda.device(gpu):
            model = LlamaBlock().cuda().bfloat16()
            x = torch.randn(2, 512, 1024, device="cuda", dtype=torch.bfloat16)
            compiled(model)(x).float().square().mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_torch_finds_the_accesses_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own analysis of each kernel of a block finds the same arguments written."""
    name = next(n for n in known_accesses.ANALYSES if hasattr(triton_kernel_wrap, n))
    told, found = getattr(triton_kernel_wrap, name), dict[str, tuple[Any, Any]]()

    def written(accesses: Any) -> list[str]:
        return accesses if isinstance(accesses, list) else [dep.name for dep in accesses.read_writes.writes]

    def both(kernel: Any, *args: Any) -> Any:
        answer = told(kernel, *args)
        found[kernel.fn.__name__] = sorted(written(answer)), sorted(written(told.__wrapped__(kernel, *args)))
        return answer

    monkeypatch.setattr(triton_kernel_wrap, name, both)
    model = LlamaBlock().cuda().bfloat16()
    compiled(model)(torch.randn(2, 512, 1024, device="cuda", dtype=torch.bfloat16)).float().square().mean().backward()
    assert len(found) > 10
    assert {name: answer for name, (answer, own) in found.items() if answer != own} == {}


def test_a_wrapper_in_cpp() -> None:
    """torch sets what belongs to its C++ wrapper while forward is compiled alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).cuda().bfloat16()
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    steps = []
    for settings in ({}, {"cpp_wrapper": True}):
        torch.compiler.reset()
        model.zero_grad()
        run = compiled(model, inductor=settings)
        for _ in range(2):
            run(x).float().square().mean().backward()
        steps.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for got, wanted in zip(*steps, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_kernels_are_counted_before_they_are_made() -> None:
    """For the host's time, of BF16: within a third of what Inductor launches."""
    model = nn.Sequential(*(nn.Sequential(nn.RMSNorm(512), nn.Linear(512, 512), nn.GELU()) for _ in range(4)))
    model = model.cuda().bfloat16()
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    counted = len(host_costs._fused_kernels(joint(model, x).compilation.graph))
    run = torch.compile(model)
    run(x).sum().backward()
    launched = sum(n for name, n in kernels(lambda: run(x).sum().backward()).items() if name.startswith("triton"))
    assert abs(counted - launched) <= launched / 3, (counted, launched)
