"""What is concatenated for regions alone is read where it lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formed import formed
from torch import Tensor, fx, nn

from fp8compile import ops
from fp8compile.kernels.codegen.schedule import choose_schedule, one_pass
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass
from fp8compile.passes.core.compilation import aten
from fp8compile.passes.regions import combine_regions as combine_regions_module
from fp8compile.passes.regions import one_pass_casts, side_by_side
from fp8compile.passes.regions.region_graph import GraphEditor, regions_of, spec_of

BATCH, LENGTH, HEADS, WIDTH = 4, 50, 2, 64
COLS = HEADS * WIDTH


def concatenations(graph: fx.Graph) -> int:
    return len(list(graph.find_nodes(op="call_function", target=aten.cat.default)))


def cast(x: Tensor) -> tuple[Tensor, ...]:
    """Both layouts, the scale, and the sums of the columns."""
    scale = ops.scale(ops.amax(x, "tensor"), "e4m3")
    data = ops.quantize(x, scale, "e4m3", "tensor"), ops.quantize(x, scale, "e4m3", "tensor", True)
    return *data, scale, x.float().sum(0)


def heads(count: int = 3, seed: int = 0) -> list[Tensor]:
    """Gradients of q, k, v, [B, H, T, D], laid out as attention leaves them: [B, T, H, D]."""
    torch.manual_seed(seed)
    return [torch.randn(BATCH, LENGTH, HEADS, WIDTH).bfloat16().transpose(1, 2) * 2**n for n in range(count)]


def split_along_columns(*grads: Tensor) -> Any:
    return cast(torch.cat([g.transpose(1, 2).reshape(BATCH, LENGTH, COLS) for g in grads], 2).view(-1, 3 * COLS))


def unbound(*grads: Tensor) -> Any:
    """As of `qkv.reshape(B, T, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)`."""
    return cast(torch.stack(grads).permute(1, 3, 0, 2, 4).reshape(-1, 3 * COLS))


def with_copies(*grads: Tensor) -> Any:
    return cast(torch.cat([g.transpose(1, 2).contiguous().view(-1, COLS) for g in grads], 1))


def assert_alike(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        if a.dtype.itemsize == 1:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("contiguous", [False, True], ids=["as attention leaves them", "contiguous"])
@pytest.mark.parametrize("function", [split_along_columns, unbound, with_copies])
def test_it_is_read_where_it_lies(function: Callable[..., Any], contiguous: bool) -> None:
    grads = [g.contiguous() if contiguous else g for g in heads()]
    module = formed(function, *grads)
    assert concatenations(module.graph) == 0
    reads = [i for node in regions_of(module.graph) for part in spec_of(node)[0].parts for i in part.inputs]
    assert [len(i.tensors) for i in reads if i.beside] == [3, 3]  # to find the amax, and to cast
    assert_alike(module(*grads), function(*grads))


def test_a_tile_lies_in_one_of_them() -> None:
    torch.manual_seed(0)
    grads = [torch.randn(64, 96).bfloat16() for _ in range(2)]
    module = formed(lambda *x: cast(torch.cat(x, 1)), *grads)
    for node in regions_of(module.graph):
        region, schedule = spec_of(node)
        for part, tiling in zip(region.parts, schedule.tilings, strict=True):
            assert all(width % tiling.block_cols == 0 for width in part.widths)
        assert schedule == choose_schedule.choose(region)
    assert_alike(module(*grads), cast(torch.cat(grads, 1)))


def test_it_is_cast_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample is drawn of each piece."""
    monkeypatch.setattr(one_pass_casts, "LEAST", 1)
    monkeypatch.setattr(one_pass, "REPAIRING", 8)
    torch.manual_seed(0)
    grads = [torch.randn(2048, 128).bfloat16() * 2**n for n in range(3)]
    module = formed(lambda *x: cast(torch.cat(x, 1)), *grads, in_one_pass=True)
    assert concatenations(module.graph) == 0
    assert any(is_one_pass(spec_of(node)[0]) for node in regions_of(module.graph))
    data, across, scale, sums = module(*grads)
    whole = torch.cat(grads, 1).float()
    assert (data.float() * scale - whole).norm() < 0.03 * whole.norm()
    assert torch.equal(data.float(), across.float().t())
    torch.testing.assert_close(sums, whole.sum(0), rtol=1e-4, atol=1e-2)


def read_by_others(a: Tensor, b: Tensor) -> Any:
    both = torch.cat([a, b], 1)
    return *cast(both), both.t() @ both


def of_other_widths(a: Tensor, b: Tensor) -> Any:
    return cast(torch.cat([a, b[:, :32]], 1))


def along_rows(a: Tensor, b: Tensor) -> Any:
    return cast(torch.cat([a, b], 0))


def computed(a: Tensor, b: Tensor) -> Any:
    return cast(torch.cat([a * 2, b], 1))


def of_another_layout(a: Tensor, b: Tensor) -> Any:
    return cast(torch.cat([a, b.t()], 1))


def by_rows(a: Tensor, b: Tensor) -> Any:
    """Rows are reduced, so that a program has them whole."""
    both = torch.cat([a, b], 1)
    scale = ops.scale(ops.amax(both, "row"), "e4m3")
    return ops.quantize(both, scale, "e4m3", "row"), scale


def narrow(a: Tensor, b: Tensor) -> Any:
    """Pieces with no tile of their own."""
    return cast(torch.cat([a[:, :8].clone(), b[:, :8].clone()], 1))


def groups_across(a: Tensor, b: Tensor) -> Any:
    """Groups of 128 columns, of which one has half in each piece."""
    both = torch.cat([a, b], 1)
    scale = ops.scale(ops.amax(both, "group(128)"), "e4m3")
    return ops.quantize(both, scale, "e4m3", "group(128)"), scale


def repeated_rows(a: Tensor, b: Tensor) -> Any:
    """Each row 32 times: a store of it would be made for what varies."""
    rows = [x[:2, None].expand(2, 32, 64).reshape(2, 32, 64) for x in (a, b)]
    return cast(torch.cat(rows, 2).view(64, 128))


REFUSED = (
    read_by_others, of_other_widths, along_rows, computed, of_another_layout, by_rows, narrow, groups_across,
    repeated_rows,
)  # fmt: skip


@pytest.mark.parametrize("function", REFUSED)
def test_these_are_concatenated(function: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64).bfloat16() for _ in range(2))
    module = formed(function, a, b)
    assert concatenations(module.graph) == 1
    found, expected = module(a, b), function(a, b)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.13, atol=0.1)  # a code apart, where sums are in doubt


def test_sums_of_bands_of_rows_are_those_of_the_concatenation() -> None:
    """Of rows of each image, whose programs are counted by views."""

    def with_shift(*grads: Tensor) -> Any:
        both = torch.cat(grads, 1)
        data, across, scale, _ = cast(both)
        return data, across, scale, both.view(4, 256, 256).float().sum(1)

    torch.manual_seed(0)
    grads = [torch.randn(1024, 128).bfloat16() for _ in range(2)]
    assert_alike(formed(with_shift, *grads)(*grads), with_shift(*grads))


@pytest.mark.parametrize("width", [768, 1152, 1600])
def test_tiles_of_narrow_pieces_have_as_many_elements(width: int) -> None:
    grads = [torch.empty(8192, width, dtype=torch.bfloat16) for _ in range(3)]
    module = formed(lambda *x: cast(torch.cat(x, 1)), *grads)
    for node in regions_of(module.graph):
        region, schedule = spec_of(node)
        if any(part.widths for part in region.parts):
            assert schedule.elements_a_thread >= 16


def test_sizes_that_come_later_are_concatenated() -> None:
    a, b = (torch.randn(64, 64).bfloat16() for _ in range(2))
    module = formed(lambda *x: cast(torch.cat(x, 1)), a, b, mode="symbolic")
    assert concatenations(module.graph) == 1


class Attention(nn.Module):
    """Self-attention with q, k and v out of one matmul, split in one of two ways."""

    def __init__(self, unbinds: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.unbinds = nn.Linear(COLS, 3 * COLS), nn.Linear(COLS, COLS), unbinds

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x)
        if self.unbinds:
            q, k, v = qkv.reshape(rows, length, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (t.view(rows, length, HEADS, WIDTH).transpose(1, 2) for t in qkv.split(width, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).reshape(rows, length, width))


@pytest.mark.parametrize("unbinds", [False, True])
def test_gradients_are_those_of_bf16(unbinds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[tuple[int, int]] = []

    def read_side_by_side(editor: GraphEditor) -> None:
        before = concatenations(editor.graph)
        side_by_side.read_side_by_side(editor)
        counts.append((before, concatenations(editor.graph)))

    monkeypatch.setattr(combine_regions_module, "read_side_by_side", read_side_by_side)
    torch.manual_seed(0)
    model = Attention(unbinds).bfloat16()
    x = torch.randn(BATCH, LENGTH, COLS).bfloat16()
    gradients = {}
    for backend in ("eager", "fp8"):
        torch.compiler.reset()
        model.zero_grad()
        options = {"executor": "eager", "select": "all", "strict": True} if backend == "fp8" else {}
        torch.compile(model, backend=backend, options=options)(x).float().square().sum().backward()
        gradients[backend] = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    for name, expected in gradients["eager"].items():
        assert (gradients["fp8"][name] - expected).norm() < 0.1 * expected.norm(), name
    assert counts == [(0, 0), (1, 0)]
