"""What training keeps for backward: bytes, peak memory and time, beside BF16, checkpointing and torchao.

    python -m benchmarks.training.saved_activations --count    any machine: bytes by counting the graph, no times
    python -m benchmarks.training.saved_activations --json FILE --picture FILE
        one GPU: forward and backward of two blocks of Llama-8B on 4 × 4096 tokens, measured by the allocator

Random data and weights, medians. "saved" is what the allocator holds after forward beyond what it held before; "peak"
is beyond weights and gradients. Gradients are compared with BF16 eager: least cosine and largest relative error of all
parameters; `only saving` has FP8 in what is kept and in nothing else.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # counts a graph of any size on any machine

import fp8compile
from benchmarks.harness.measuring import GIB, milliseconds
from benchmarks.harness.peers import convert
from benchmarks.harness.picture import Point, scatter
from benchmarks.training.blocks import LLAMA_2_7B, LLAMA_8B, Blocks, compare, gradients, memory, step
from fp8compile import process_state
from fp8compile.errors import Fp8Warning

BUDGETS = (0.3, 0.4, 0.6, 1.0, 1.5)  # GiB a block
ON_HOST = (0.4, 0.6, 0.7)  # likewise
ELSEWHERE = {  # model → what other systems keep of it
    "Llama-8B block": {"torchao 0.17 tensorwise": 1.63, "COAT": 1.60},  # GiB, measured by the allocator
    "Llama-2-7B block": {"TransformerEngine, by COAT's paper": 18.33, "COAT, by its paper": 13.33},  # in units
}


# ---- counting -------------------------------------------------------------------------------------------------------


def gpt2() -> tuple[nn.Module, tuple[int, ...]]:
    """Return a block of GPT-2 XL, 8 × 1024 tokens."""
    import transformers

    config = transformers.GPT2Config(n_embd=1600, n_head=25, n_layer=1)
    config._attn_implementation = "sdpa"
    return transformers.models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0), (8, 1024, 1600)


def vit() -> tuple[nn.Module, tuple[int, ...]]:
    """Return a layer of ViT-H/14 on 64 images of 224 × 224."""
    import transformers

    config = transformers.ViTConfig(hidden_size=1280, num_attention_heads=16, intermediate_size=5120)
    config._attn_implementation = "sdpa"
    return transformers.models.vit.modeling_vit.ViTLayer(config), (64, 257, 1280)


class UNet(nn.Module):
    """Two levels of a U-Net with group norms, 128 and 256 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(128, 128, 3, padding=1), nn.Conv2d(128, 256, 3, stride=2, padding=1)
        self.inner, self.up = nn.Conv2d(256, 256, 3, padding=1), nn.Conv2d(256, 128, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(32, c) for c in (128, 256, 256))

    def forward(self, x: Tensor) -> Tensor:
        high = nn.functional.silu(self.norms[0](self.into(x)))
        low = nn.functional.silu(self.norms[1](self.down(high)))
        low = low + nn.functional.silu(self.norms[2](self.inner(low)))
        return self.up(nn.functional.interpolate(low, scale_factor=2.0)) + high


def llama() -> tuple[nn.Module, tuple[int, ...]]:
    """One block of Llama-8B, 4 × 4096 tokens."""
    return Blocks(replace(LLAMA_8B, n_layers=1)), (4, 4096, 4096)


def llama_2() -> tuple[nn.Module, tuple[int, ...]]:
    """Return one block of Llama-2-7B, the model of COAT's tables, 2 × 4096 tokens."""
    return Blocks(replace(LLAMA_2_7B, n_layers=1)), (2, 4096, 4096)


def unet() -> tuple[nn.Module, tuple[int, ...]]:
    """16 images of 64 × 64."""
    return UNet(), (16, 128, 64, 64)


COUNTED = {
    "Llama-8B block": llama,
    "Llama-2-7B block": llama_2,
    "GPT-2 XL block": gpt2,
    "ViT-H layer": vit,
    "U-Net levels": unet,
}
WAYS: dict[str, dict[str, Any]] = {
    "BF16, Inductor's cut": {"save": "bf16", "skip": "*"},
    "FP8 matmuls, own cut": {"save": "bf16", "select": "all"},
    "FP8 matmuls, saved in FP8": {"select": "all", "save": "fp8"},
    "likewise, q, k and output too": {"select": "all", "save": "fp8_with_qk"},
}


@dataclass
class Counted:
    """GiB that a model keeps, by form. units: of its input in BF16, which is how COAT's paper counts."""

    model: str
    way: str
    gib: float
    units: float
    forms: dict[str, float]


def count(name: str, way: str) -> Counted:
    """Return the plan's bytes for a model, compiled on tensors without data."""
    process_state.reset()
    before = torch.get_default_dtype()
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore", Fp8Warning)
        torch.set_default_dtype(torch.bfloat16)
        try:
            model, shape = COUNTED[name]()
        finally:
            torch.set_default_dtype(before)
        x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(model, backend="fp8", options={"executor": "eager", **WAYS[way]})(x)
    forms: Counter[str] = Counter()
    for plan in fp8compile.compiles():
        for row in plan.saved:
            forms[row.form] += row.bytes
    saved = sum(forms.values())
    return Counted(name, way, saved / GIB, saved / x.nbytes, {form: n / GIB for form, n in forms.items()})


def print_counts() -> list[Counted]:
    found = []
    print(f"{'model':16} {'way':34} {'GiB':>7} {'units':>7}  of which")
    for name in COUNTED:
        for way in WAYS:
            c = count(name, way)
            found.append(c)
            forms = ", ".join(f"{form} {n:.3f}" for form, n in sorted(c.forms.items(), key=lambda f: -f[1])[:4])
            print(f"{name:16} {way:34} {c.gib:7.3f} {c.units:7.2f}  {forms}", flush=True)
        unit = c.gib / c.units
        for other, n in ELSEWHERE.get(name, {}).items():
            gib, units = (n, n / unit) if name == "Llama-8B block" else (n * unit, n)
            print(f"{name:16} {other:34} {gib:7.3f} {units:7.2f}")
    return found


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Forward and backward of one system. `predicted_gib`: what the plan says is saved a block."""

    name: str
    series: str
    ms: float = 0.0
    saved_gib: float = 0.0
    peak_gib: float = 0.0
    predicted_gib: float | None = None
    cosine: float | None = None
    error: float | None = None
    parameters: dict[str, tuple[float, float]] = field(default_factory=dict)  # cosine and relative error of gradients
    note: str = ""


def measure(name: str, series: str, build: Callable[[Blocks], Any], checkpointed: bool = False) -> Measured:
    """One system on two blocks with the same weights and data as every other."""
    process_state.reset()
    torch.manual_seed(0)
    model = Blocks(checkpointed=checkpointed).bfloat16().cuda()
    x = torch.randn(4, 4096, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradient = torch.randn_like(x)
    result = Measured(name, series)
    try:
        expected = gradients(model, model, x, gradient)
        run = build(model)
        for _ in range(3):
            step(run, model, x, gradient)
        result.saved_gib, result.peak_gib = memory(run, model, x, gradient)
        result.ms = milliseconds(partial(step, run, model, x, gradient))
        result.parameters = compare(expected, gradients(run, model, x, gradient))
        result.cosine = min(cosine for cosine, _ in result.parameters.values())
        result.error = max(error for _, error in result.parameters.values())
        if fp8compile.compiles():
            result.predicted_gib = fp8compile.last_compile().saved_bytes / GIB / 2
    except Exception as error:
        result.note = f"{type(error).__name__}: {str(error)[:120]}"
    del model, x, gradient
    torch.cuda.empty_cache()
    return result


def ours(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fp8", options={"select": "all", **options})


def torchao(model: nn.Module) -> Any:
    convert(model, "tensorwise", "cuda")
    return torch.compile(model)


def measure_all() -> list[Measured]:
    systems: list[tuple[str, str, Callable[..., Any], bool]] = [
        ("eager", "BF16", lambda m: m, False),
        ("compile", "BF16", torch.compile, False),
        ("compile, checkpointed", "BF16", torch.compile, True),
        ("tensorwise", "torchao", torchao, False),
        ("tensorwise, checkpointed", "torchao", torchao, True),
        ("saved in BF16", "fp8compile", partial(ours, save="bf16"), False),
        ("saved in FP8", "fp8compile", ours, False),
        ("saved in FP8, q, k and output too", "fp8compile", partial(ours, save="fp8_with_qk"), False),
        ("only saving", "fp8compile, BF16 matmuls", partial(ours, skip="*", save="fp8"), False),
    ]
    systems += [
        (f"budget {b} GiB a block", "fp8compile", partial(ours, activation_budget=int(2 * b * GIB)), False)
        for b in BUDGETS
    ]
    systems += [
        (
            f"budget {b} GiB a block, the rest on the host",
            "fp8compile",
            partial(ours, activation_budget=int(2 * b * GIB), offload=True),
            False,
        )
        for b in ON_HOST
    ]
    found = []
    print(f"{'series':26} {'system':26} {'ms':>8} {'saved':>7} {'plan':>7} {'peak':>7} {'cosine':>8} {'error':>7}")
    for name, series, build, checkpointed in systems:
        m = measure(name, series, build, checkpointed)
        found.append(m)
        plan = "–" if m.predicted_gib is None else f"{m.predicted_gib:.3f}"
        quality = "–" if m.cosine is None else f"{m.cosine:8.4f} {m.error:7.3f}"
        memory_ = f"{m.saved_gib:7.3f} {plan:>7} {m.peak_gib:7.2f}"
        print(f"{series:26} {name:26} {m.ms:8.2f} {memory_} {quality} {m.note}", flush=True)
    for m in found:
        if m.name == "only saving":
            print("\ngradients where only what is saved is in FP8: cosine, relative error")
            for parameter, (cosine, error) in m.parameters.items():
                print(f"  {parameter:40} {cosine:8.4f} {error:7.3f}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count bytes, without a GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="time against peak memory, as SVG")
    arguments = parser.parse_args(argv)
    counting = arguments.count or not torch.cuda.is_available()
    measured = [] if counting else measure_all()
    rows = print_counts() if counting else measured
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    if arguments.picture and measured:
        points = [Point(m.peak_gib, m.ms, m.name, m.series) for m in measured if not m.note]
        arguments.picture.write_text(
            scatter(points, "Two Llama-8B blocks, 4 × 4096 tokens", "peak above weights, GiB", "forward + backward, ms")
        )


if __name__ == "__main__":
    main()
