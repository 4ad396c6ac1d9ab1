"""The zoo on a GPU: FP8 kernels really run, as many as the plan says, and gradients agree with BF16 eager.

Every recipe by the eager executor; `mixed` also through Inductor, with warm and cold caches and under CUDA graphs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_quantized import sqnr
from models import ZOO, Case
from torch.profiler import ProfilerActivity, profile

import fp8compile
from tests.train.test_models import LEAST, Reference, train_step

pytestmark = pytest.mark.gpu

RECIPES = ("mixed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise")
BOUNDS = LEAST | {"rowwise_with_gw_hp": LEAST["rowwise"]}
ASKED = ("aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm")
FP8_KERNEL = re.compile(r"sm90_q[qr]t|sm90_qr?q|e4m3|e5m2|f8f8|fp8", re.IGNORECASE)


def on_gpu(name: str) -> Case:
    """The case of the zoo, model and batch on the GPU."""
    case = ZOO[name]()
    case.model.cuda()
    case.inputs = {k: v.cuda() for k, v in case.inputs.items()}
    host_loss = case.loss
    case.loss = lambda out: host_loss(_on_host(out))
    return case


def _on_host(out: Any) -> Any:
    return (out if isinstance(out, torch.Tensor) else out.logits).cpu()


def profiled(case: Case, run: Any) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """A training step, the names of its FP8 kernels, and how many FP8 matmuls torch was asked for."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        got = train_step(case, run)
        torch.cuda.synchronize()
    events = recorded.events() or []
    kernels = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA and FP8_KERNEL.search(e.name)]
    asked = sum(e.name in ASKED for e in events)
    return got, kernels, asked


def most(name: str, matmuls: int) -> float:
    """How often FP8 matmuls may run at most: a checkpointed output runs again in backward; where the model breaks into
    several graphs, Dynamo runs one graph for all layers alike."""
    if len([plan for plan in fp8compile.compiles() if plan.matmuls]) > 1:
        return float("inf")
    outputs = sum(row.role == "output" for plan in fp8compile.compiles() for row in plan.converted)
    return matmuls + (outputs if name == "checkpoint" else 0)


def check(case: Case, got: dict[str, torch.Tensor], recipe: str, slack: float = 0.0) -> None:
    reference = Reference.of(case)
    found = {name: sqnr(reference.bf16[name], got[name]) for name in reference.noise}
    bad = [f"{name}: {db:.1f} dB" for name, db in found.items() if not db >= BOUNDS[recipe] - slack]
    assert not bad, f"{recipe} needs {BOUNDS[recipe]} dB: " + ", ".join(bad)


def compiled(case: Case, recipe: str, **options: Any) -> Any:
    given = {"recipe": recipe, "select": "all", "strict": True, "skip": case.skip, **options}
    return torch.compile(case.model, backend="fp8", options=given)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ZOO)
def test_eager_executor(name: str, recipe: str) -> None:
    case = on_gpu(name)
    step = compiled(case, recipe, executor="eager")
    train_step(case, step)
    got, kernels, asked = profiled(case, step)
    matmuls = sum(int(row.batch) for plan in fp8compile.compiles() for row in plan.converted)
    assert matmuls <= asked <= most(name, matmuls)
    assert len(kernels) >= matmuls
    check(case, got, recipe)


@pytest.mark.parametrize("name", ZOO)
def test_inductor(name: str) -> None:
    case = on_gpu(name)
    step = compiled(case, "mixed")
    train_step(case, step)
    got, kernels, asked = profiled(case, step)
    matmuls = sum(int(row.batch) for plan in fp8compile.compiles() for row in plan.converted)
    assert matmuls <= asked <= most(name, matmuls)
    assert len(kernels) >= asked
    check(case, got, "mixed")


@pytest.mark.parametrize("recipe", RECIPES)
def test_cuda_graphs(recipe: str) -> None:
    case = on_gpu("llama")
    step = compiled(case, recipe, mode="reduce-overhead")
    for _ in range(4):  # warm-up, recording, replays
        torch.compiler.cudagraph_mark_step_begin()
        got = train_step(case, step)
    check(case, got, recipe)


def test_default_selection_leaves_small_models_alone() -> None:
    case = on_gpu("mlp")
    with pytest.warns(fp8compile.Fp8Warning, match="NOTHING was converted.*too small"):
        train_step(case, torch.compile(case.model, backend="fp8"))


def test_default_selection_converts_large_matmuls() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4096, 14336, bias=False), torch.nn.Linear(14336, 4096, bias=False))
    model = model.cuda().bfloat16()
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.compile(model, backend="fp8", options={"strict": True})(x).square().mean().backward()
    plan = fp8compile.last_compile()
    assert [row.role for row in plan.converted].count("output") == 2
    assert len(plan.converted) == 6


LOSSES = """
import sys; sys.path[:0] = [{support!r}, {gpu!r}]
import torch, fp8compile
from test_zoo import compiled, on_gpu, train_step
from torch._dynamo.utils import counters
torch.manual_seed(0)
case = on_gpu("llama")
step = compiled(case, "mixed")
optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
for _ in range(4):
    out = case.model.zero_grad() or step(**case.inputs)
    loss = case.loss(out)
    loss.backward()
    optimizer.step()
    print(repr(loss.item()))
print(len(fp8compile.last_compile().converted), counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_warm_and_cold_cache_give_the_same_numbers(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = LOSSES.format(support=str(here.parent / "support"), gpu=str(here))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    outs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        outs.append(done.stdout.splitlines()[-5:])
    cold, warm = outs
    assert cold[:4] == warm[:4]
    assert cold[4].split()[0] == warm[4].split()[0] != "0"
    assert (cold[4].split()[1], warm[4].split()[1]) == ("0", "1")


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradscaler_sees_an_overflow(recipe: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.Linear(256, 128)).cuda()
    step = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "recipe": recipe})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for bad in (False, True):
        x = torch.randn(128, 128, device="cuda")
        if bad:
            x[5, 7] = float("inf")
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = step(x).float().square().mean()
        scaler.scale(loss).backward()
        size = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert unchanged == bad
        assert (scaler.get_scale() < size) == bad
        if bad:
            assert not loss.isfinite()
