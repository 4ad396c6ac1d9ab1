"""The doctor: what of this machine matters to FP8 training, whether it is as it should be, and what to do if not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8compile import devices, environment, torch_versions
from fp8compile.cache_folder import cache_folder
from fp8compile.insight.tables.numbers import size
from fp8compile.plan import store

FINE, NOTE, WRONG = "ok", "note", "WRONG"
SAFE_PTXAS = (13, 0)  # the oldest assembler seen to compile two FP8 layouts of one tensor rightly


@dataclass(frozen=True)
class Finding:
    """status: ok, note (works, with a limit), WRONG. what: the thing looked at; seen: how it is; advice: what to do."""

    status: str
    what: str
    seen: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything; no check raises."""
    found = []
    for check in CHECKS:
        try:
            found += list(check())
        except Exception as error:  # a broken installation is what a doctor is for
            found.append(Finding(WRONG, check.__name__.strip("_"), f"{type(error).__name__}: {error}"))
    return found


def findings_text(findings: list[Finding]) -> str:
    """Return one line a finding, advice under it, and a last line that sums up."""
    lines = []
    for f in findings:
        lines.append(f"{f.status:<5}  {f.what:<12}  {f.seen}")
        lines += [f"{'':21}{line}" for line in textwrap.wrap(f.advice, 99)]
    wrong = sum(f.status == WRONG for f in findings)
    lines.append(f"\n{wrong} thing{'s are' if wrong > 1 else ' is'} wrong." if wrong else "\nNothing is wrong.")
    return "\n".join(lines) + "\n"


def _versions() -> Iterator[Finding]:
    known = torch_versions.is_tested(torch.__version__)
    advice = "" if known else f"Tested with {torch_versions.tested_range()}."
    yield Finding(FINE if known else NOTE, "torch", f"{torch.__version__}, Python {platform.python_version()}", advice)


def _entry_point() -> Iterator[Finding]:
    found = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "fp8"]
    if found:
        yield Finding(FINE, "backend", f"backend='fp8' is {found[0].value}")
    else:
        advice = "Install the package (pip install -e .), or pass the function: backend=fp8compile.backend.fp8."
        yield Finding(WRONG, "backend", "backend='fp8' is not registered with torch", advice)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        advice = "On a CPU FP8 is emulated: select='all' makes the same decisions and the same numbers, slowly."
        yield Finding(NOTE, "GPU", "torch finds none", advice)
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        name = torch.cuda.get_device_name(i)
        device = devices.describe(torch.device("cuda", i))
        if not device.has_fp8:
            yield Finding(NOTE, f"GPU {i}", device.why_not, "Matmuls stay in BF16 there.")
        elif not device.measured or device.name not in name:
            seen = f"{name}: FP8; the cost model uses figures of {device.name}, which are not measured on this GPU"
            yield Finding(NOTE, f"GPU {i}", seen, "`python -m benchmarks.micro.casts_and_matmuls` measures them.")
        else:
            yield Finding(FINE, f"GPU {i}", f"{name}: FP8, with a measured cost model")


def _triton() -> Iterator[Finding]:
    try:
        import triton
    except ImportError:
        yield Finding(NOTE, "triton", "is not installed", "Generated kernels need it: pip install 'fp8compile[gpu]'.")
        return
    yield Finding(FINE, "triton", triton.__version__)
    if os.environ.get("TRITON_INTERPRET") == "1":
        yield Finding(
            NOTE, "triton", "TRITON_INTERPRET=1", "Kernels are interpreted: for tests only; unset it to train."
        )
    path, version = ptxas()
    if path is None or version is None:
        yield Finding(
            NOTE, "assembler", "no ptxas found", "Triton brings one for NVIDIA GPUs; TRITON_PTXAS_PATH names another."
        )
    elif version < SAFE_PTXAS:
        advice = (
            "Its code is wrong where a kernel stores one FP8 tensor in two layouts with Triton's own cast "
            "(triton-lang/triton#11111). Kernels generated here convert by inline assembly and are right; for Triton "
            "kernels of your own set TRITON_PTXAS_PATH to ptxas 13.0 or newer (pip install nvidia-cuda-nvcc)."
        )
        yield Finding(NOTE, "assembler", f"ptxas {version[0]}.{version[1]} ({path})", advice)
    else:
        yield Finding(FINE, "assembler", f"ptxas {version[0]}.{version[1]} ({path})")


def ptxas() -> tuple[str | None, tuple[int, int] | None]:
    """Return (path, version) of the assembler that Triton runs."""
    path = os.environ.get("TRITON_PTXAS_PATH")
    if not path:
        import triton

        bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        path = str(bundled) if bundled.exists() else shutil.which("ptxas")
    if not path or not Path(path).exists():
        return None, None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+)\.(\d+)", said)
    return path, (int(found[1]), int(found[2])) if found else None


def _caches() -> Iterator[Finding]:
    ours = cache_folder()
    root = ours.parent
    files = [f for f in ours.rglob("*") if f.is_file()] if root.exists() else []
    seen = f"{root}: {len(files)} files of ours, {size(sum(f.stat().st_size for f in files))}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        advice = "Set TORCHINDUCTOR_CACHE_DIR to a folder that can be written."
        yield Finding(WRONG, "caches", f"{root} cannot be written: {error}", advice)
        return
    yield Finding(FINE, "caches", seen)
    if torch.compiler.config.force_disable_caches:
        yield Finding(NOTE, "caches", "disabled (force_disable_caches)", "Every process compiles everything anew.")
    if environment.dump_folder():
        yield Finding(NOTE, "FP8COMPILE_DUMP", str(environment.dump_folder()), "Caches are left aside while dumping.")


def _compiler() -> Iterator[Finding]:
    if not torch.cuda.is_available() and not any(map(shutil.which, ("g++", "clang++"))):
        advice = "Inductor needs one for CPUs; executor='eager' does without."
        yield Finding(NOTE, "C++", "no compiler found", advice)


def _training() -> Iterator[Finding]:
    """Train one layer, forward and backward, and compare with FP32: the whole way from options to gradients."""
    from fp8compile.backend import fp8

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng(), warnings.catch_warnings(), store.collected() as found:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(256, 256, device=device), torch.randn(128, 256, device=device, dtype=torch.float32)
        options = {"select": "all", "executor": "eager", "strict": True, "dump": None}
        torch.compile(lambda x: layer(x), backend=lambda *a, **k: fp8(*a, **k), options=options)(
            x
        ).square().sum().backward()
        got, layer.weight.grad = layer.weight.grad, None
        layer(x).square().sum().backward()
    assert got is not None
    exact = layer.weight.grad
    assert exact is not None
    decibels = 20 * torch.log10(exact.norm() / (got - exact).norm()).item()
    converted = sum(len(plan.converted) for plan in found)
    seen = f"a linear layer on {device}: {converted} matmuls in FP8, weight gradient at {decibels:.0f} dB of FP32's"
    # E4M3 rounds to 4 significant bits: about 31 dB for one operand, 28 for a product of two; garbage is at 0.
    yield Finding(FINE if converted == 2 and decibels > 20 else WRONG, "a trial", seen)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions,
    _entry_point,
    _gpus,
    _triton,
    _compiler,
    _caches,
    _training,
)
