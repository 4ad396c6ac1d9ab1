"""Training with keys and values that are repeated for groups of queries: read as they were, gradients as of FP32."""

from __future__ import annotations

import pytest
import torch
from pipelines import look_after
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fp8compile.passes.core.compilation import Compilation, value
from fp8compile.passes.core.node_views import node_argument

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")]
QUERIES_PER_KEY = 4


def repeated(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, QUERIES_PER_KEY, s, d).reshape(b, h * QUERIES_PER_KEY, s, d)


def attend(q: Tensor, k: Tensor, v: Tensor, masked: bool) -> Tensor:
    """Causal attention, told so or by a mask of booleans as Transformers makes it."""
    if not masked:
        return scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True)
    places = torch.arange(q.shape[2], device=q.device)
    mask = (places[None, :] <= places[:, None])[None, None].expand(q.shape[0], 1, -1, -1)
    return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "length", "width"), [(2, 256, 64), (1, 1024, 128), (3, 200, 128)])
def test_gradients_of_groups(
    batch: int, length: int, width: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    read: list[int] = []

    def look(c: Compilation) -> None:
        calls = [n for n in c.graph.nodes if "_scaled_dot_product" in str(n.target)]
        read[:] = [value(node_argument(n, name)).shape[1] for n in calls for name in ("key", "value")]

    def made(heads: int) -> Tensor:
        """Heads of tokens that lie one after the other, as a projection gives them."""
        x = torch.randn(batch, length, heads, width, generator=g, device="cuda").bfloat16()
        return x.transpose(1, 2).requires_grad_()

    look_after(monkeypatch, "grouped_heads", look)
    q, k, v = made(4 * QUERIES_PER_KEY), made(4), made(4)
    gain = 0.5 * torch.ones(width, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(batch, 4 * QUERIES_PER_KEY, length, width, generator=g, device="cuda")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (attend(q, k * gain, v * gain, masked) * weights).sum()  # computed: no caller has what is repeated

    torch.compiler.reset()
    compiled = torch.compile(run, backend="fp8", options={"strict": True}, dynamic=False)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert read == [4] * 4  # keys and values, forward and backward
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    for actual, right in zip(found, torch.autograd.grad(run(*wide), wide), strict=True):
        assert float((actual.float() - right).norm() / right.norm()) < 2**-6
