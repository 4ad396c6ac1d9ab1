"""Decoding on a GPU: matmuls of few rows launched from Inductor's code, and heads that are not repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import ZOO, tokens
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import scaled_dot_product_attention

from fp8compile.kernels.matmul import scaled_mm
from tests.kernels.matmul.test_few_rows import SIZES, assert_near, operand, product

pytestmark = pytest.mark.gpu

OPTIONS = {"select": "all", "strict": True}
LARGE = [(1, 2048, 8192), (8, 3072, 2048), (64, 16384, 2048), (33, 4096, 14336), (16, 128256, 4096)]


@pytest.mark.parametrize("sizes", [*SIZES, *LARGE], ids=str)
@pytest.mark.parametrize("granularities", [("row", "row"), ("row", "tensor"), ("tensor", "row")], ids=str)
def test_the_kernel(sizes: tuple[int, int, int], granularities: tuple[str, str]) -> None:
    assert_near(*product(*sizes, granularities, biased=True, times=3), sizes[2])


def test_it_is_as_near_as_cublas() -> None:
    """To FP64, of a long K whose sums nearly cancel: the matmul unit's own precision would show."""
    from fp8compile.kernels.matmul.few_rows import STAGES, WARPS, few_rows, launch_of

    m, n, k = 16, 256, 16384
    (a, scale_a), (b, scale_b) = operand(m, k, "row", 1), operand(n, k, "row", 2)
    a = torch.cat([a[:, : k // 2], (-a[:, : k // 2].float()).to(a.dtype)], 1)
    b = torch.cat([b[:, : k // 2], b[:, : k // 2]], 1)
    b[:, -16:] = 1
    right = (a.double() @ b.double().T) * scale_a.double() * scale_b.double().T
    launch = launch_of(m, n, k, "row", "row", False, False)
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    partial, arrived = torch.empty(launch.partial, device="cuda"), torch.zeros(launch.tiles, device="cuda").int()
    few_rows[launch.grid](
        a, b, scale_a, scale_b, scale_b, out, partial, arrived, **launch.constants, num_warps=WARPS, num_stages=STAGES
    )
    theirs = scaled_mm.scaled_mm(a, scale_a, "row", b, scale_b, "row", None, torch.bfloat16)
    mine, cublas = (float((x.double() - right).norm() / right.norm()) for x in (out, theirs))
    assert mine < max(1.5 * cublas, 2**-8), (mine, cublas)  # 2^-9 is BF16's own rounding, at most


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("rows", [1, 5, 64, 65])
@torch.no_grad()
def test_layers(rows: int, mode: str | None, frozen: bool) -> None:
    """Near to the node by node executor, which calls cuBLAS; launches up to 64 rows, in place."""
    torch.manual_seed(0)
    model = Layers().cuda().bfloat16().requires_grad_(False)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
    given = {**OPTIONS, "frozen": frozen, **({"mode": mode} if mode else {})}
    mine = torch.compile(model, backend="fp8", options=given, dynamic=False)
    with inductor_config.patch(force_disable_caches=True):  # which have no code to show
        _, code = run_and_get_code(mine, x)
    assert ("few_rows" in "".join(code)) == (rows <= 64)
    right = torch.compile(model, backend="fp8", options={**OPTIONS, "executor": "eager"}, dynamic=False)(x)
    for _ in range(4):
        found = mine(x).clone()
        assert float((found - right).float().norm() / right.float().norm()) < 2**-7


def repeated(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, 4, s, d).reshape(b, h * 4, s, d)


@pytest.mark.parametrize("shape", [(1, 1, 1024), (8, 1, 1024), (4, 7, 256), (2, 100, 128)], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@torch.no_grad()
def test_grouped_heads(shape: tuple[int, int, int], width: int) -> None:
    """Attention with a mask reads keys and values as they were: no copy of them, and the values of FP32."""
    batch, queries, length = shape
    g = torch.Generator("cuda").manual_seed(0)

    def made(*sizes: int) -> Tensor:
        return torch.randn(*sizes, width, generator=g, device="cuda").bfloat16()

    q, k, v = made(batch, 8, queries), made(batch, 2, length), made(batch, 2, length)
    mask = torch.rand(batch, 1, queries, length, generator=g, device="cuda") < 0.8

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)

    compiled = torch.compile(run, backend="fp8", options={"strict": True}, dynamic=False)
    with inductor_config.patch(force_disable_caches=True):
        found, code = run_and_get_code(compiled, q, k, v)
    right = run(q.float(), k.float(), v.float())
    assert float((found.float() - right).norm() / right.norm()) < 2**-7
    assert f"({batch}, 8, {length}, {width})" not in "".join(code)  # a buffer of repeated keys


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@torch.no_grad()
def test_tokens_with_a_static_cache(mode: str | None) -> None:
    """Greedy tokens one by one: logits near to those of eager BF16, step for step."""
    transformers = pytest.importorskip("transformers")
    model: Any = ZOO["llama"]().model.cuda().bfloat16().eval().requires_grad_(False)
    prompt = tokens().cuda()[:2, :8]
    given = {**OPTIONS, "frozen": True, **({"mode": mode} if mode else {})}
    compiled = torch.compile(model, backend="fp8", options=given, dynamic=False)
    fed = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1)).cuda()

    def logits(run: Callable[..., Any]) -> Tensor:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        model(input_ids=prompt, past_key_values=cache, use_cache=True)
        call = {"past_key_values": cache, "use_cache": True}
        return torch.cat([run(input_ids=fed[:, i : i + 1], **call).logits.clone() for i in range(12)], 1).float()

    found, right = logits(compiled), logits(model)
    assert found.isfinite().all()
    error = (found - right).norm(dim=-1) / right.norm(dim=-1)
    assert float(error.max()) < 0.25, error  # E4M3 has 2^-4 a cast; two layers
