"""Every kernel's bytes and bandwidth, as a share of a device copy; beside it what Inductor makes of the same graph.

    python -m benchmarks.micro.kernels [--only cast_*,swiglu_*] [--regions] [--hot] [--json FILE]
        # one GPU with FP8, some minutes
    python -m benchmarks.micro.kernels --fake    # anywhere: no times

Each row is a function of casts and what surrounds them. It is traced, and the compiler's passes make regions of it;
their generated kernels are timed, each alone, and with them the operators that are left, if any. Inductor compiles the
same function with the casts' reference in plain torch, torchao where it has the same thing.

    MiB      what the kernels must move at least: of each, every input once and every output once
    of copy  MiB / time, as a share of the rate at which copy_ moves 128 MiB of BF16 in the same run
    times    medians of device times, caches flushed; the launch is queued before, so the host's time is not counted
    --hot    each between FP8 matmuls, on a GPU that has multiplied for a second: at the clocks of a training step
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.compile_utils import fx_graph_cse  # AOTAutograd's, before passes see a graph
from torch._inductor import metrics  # how many kernels Inductor generated
from torch._inductor.decomposition import select_decomp_table  # what passes see is decomposed like this
from torch._subclasses.fake_tensor import FakeTensorMode  # graphs are made without data
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import gelu, silu

from fp8compile import ops
from fp8compile.formats import FP8_DTYPES
from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule.one_pass import is_one_pass
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Region
from fp8compile.kernels.reference import markers
from fp8compile.passes.core.compilation import VIEWS
from fp8compile.passes.regions.combine_regions import combine_regions
from fp8compile.passes.regions.form_regions import form_regions

Casts = Any  # `ops`, whose markers passes look for, or `reference`: amax, scale and quantize, with equal signatures
E4M3 = "e4m3"
EPS = 1e-5
MIB = 1 << 20


# ---- inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """Sizes of the rows below: R tokens, C features, I features inside of an MLP, K those of keys and of values."""

    rows: int
    cols: int
    wide: int
    keys: int


FULL = Shapes(16384, 4096, 14336, 1024)
TINY = Shapes(256, 256, 384, 128)


@dataclass(frozen=True)
class Arg:
    """An input: its shape, dtype, and what it holds. FP32 scalars are amaxes, other FP32 statistics of rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    def empty(self, device: str) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def random(self, device: str) -> Tensor:
        if not self.shape:
            return torch.full((), 4.0, device=device)
        if self.dtype == torch.float8_e4m3fn:
            return torch.randn(self.shape, device=device).mul_(100).clamp_(-448, 448).to(self.dtype)
        if self.dtype == torch.bool:
            return torch.rand(self.shape, device=device) < 0.25
        if self.dtype == torch.float32:
            return torch.rand(self.shape, device=device) + 0.5
        return torch.randn(self.shape, dtype=self.dtype, device=device)


AMAX = Arg((), torch.float32)


def x(s: Shapes) -> Arg:
    return Arg((s.rows, s.cols))


def wide(s: Shapes) -> Arg:
    return Arg((s.rows, s.wide))


def gate_up(s: Shapes) -> Arg:
    return Arg((s.rows, 2 * s.wide))


def weight(s: Shapes) -> Arg:
    return Arg((s.cols,))


def statistic(s: Shapes) -> Arg:
    return Arg((s.rows, 1), torch.float32)


def qkv(s: Shapes) -> list[Arg]:
    return [Arg((rows, s.cols)) for rows in (s.cols, s.keys, s.keys)]


# ---- what is computed -----------------------------------------------------------------------------------------------


def cast(fp8: Casts, how: str, *layouts: bool, of: Tensor) -> list[Tensor]:
    """`of` cast with one scale an orientation (one in all for a tensor), a payload for each of `layouts`."""
    results = []
    for transpose in layouts:
        scale = fp8.scale(fp8.amax(of, how, transpose), E4M3)
        results += [fp8.quantize(of, scale, E4M3, how, transpose), scale]
    return results


def amax_of_rows(fp8: Casts, x: Tensor) -> Tensor:
    """Return the amax of a tensor whose rows' are needed anyway, as `passes/matmul/share_casts.py` writes it."""
    return fp8.amax(fp8.amax(x, "row"), "tensor")


def to(how: str, *layouts: bool) -> Callable[..., list[Tensor]]:
    return lambda fp8, x: cast(fp8, how, *layouts, of=x)


def cast_tensor(fp8: Casts, x: Tensor, *layouts: bool) -> list[Tensor]:
    """Cast with one scale for the tensor, its amax in between."""
    return cast_given(fp8, x, fp8.amax(x, "tensor"), *layouts)


def cast_given(fp8: Casts, x: Tensor, amax: Tensor, *layouts: bool) -> list[Tensor]:
    """Cast with one scale for the tensor, whose amax is known."""
    scale = fp8.scale(amax, E4M3)
    return [scale, *(fp8.quantize(x, scale, E4M3, "tensor", transpose) for transpose in layouts)]


def to_tensor(*layouts: bool) -> Callable[..., list[Tensor]]:
    return lambda fp8, x: cast_tensor(fp8, x, *layouts)


def to_tensor_given(*layouts: bool) -> Callable[..., list[Tensor]]:
    return lambda fp8, x, amax: cast_given(fp8, x, amax, *layouts)


def amax_only(fp8: Casts, x: Tensor) -> list[Tensor]:
    return [fp8.amax(x, "tensor")]


def rms_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(output, 1 / root mean square)."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * rstd).to(x.dtype) * w, rstd


def rms_norm_to(how: str) -> Callable[..., list[Tensor]]:
    def call(fp8: Casts, x: Tensor, w: Tensor) -> list[Tensor]:
        y, rstd = rms_norm(x, w)
        return [rstd, *cast(fp8, how, False, of=y)]

    return call


def rms_norm_to_row_with_amax(fp8: Casts, x: Tensor, w: Tensor) -> list[Tensor]:
    y, rstd = rms_norm(x, w)
    return [rstd, *cast(fp8, "row", False, of=y), amax_of_rows(fp8, y)]


def rms_norm_to_tensor(fp8: Casts, x: Tensor, w: Tensor) -> list[Tensor]:
    y, rstd = rms_norm(x, w)
    return [rstd, *cast_tensor(fp8, y, False)]


def layer_norm_to_row(fp8: Casts, x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    wide = x.float()
    var, mean = torch.var_mean(wide, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + EPS)
    y = ((wide - mean) * rstd * w + b).to(x.dtype)
    return [mean, rstd, *cast(fp8, "row", False, of=y)]


def rms_norm_again(fp8: Casts, x: Tensor, rstd: Tensor, w: Tensor, amax: Tensor) -> list[Tensor]:
    """Return the operand of a weight gradient: a norm's output, computed again from what is saved."""
    return cast_given(fp8, (x.float() * rstd).to(x.dtype) * w, amax, True)


def add_rms_norm_to_row(fp8: Casts, x: Tensor, residual: Tensor, w: Tensor) -> list[Tensor]:
    total = x + residual
    y, rstd = rms_norm(total, w)
    return [total, rstd, *cast(fp8, "row", False, of=y)]


def gelu_to_row(approximate: str) -> Callable[..., list[Tensor]]:
    return lambda fp8, x: cast(fp8, "row", False, of=gelu(x, approximate=approximate))


GateUp = Tensor | tuple[Tensor, Tensor]


def halves(gu: GateUp) -> tuple[Tensor, Tensor]:
    """(gate, up): as they are, or the two halves of the result of one merged matmul."""
    if isinstance(gu, tuple):
        return gu
    n = gu.shape[-1] // 2
    return gu[:, :n], gu[:, n:]


def swiglu(gu: GateUp) -> Tensor:
    gate, up = halves(gu)
    return silu(gate) * up


def swiglu_to_row(fp8: Casts, gu: Tensor) -> list[Tensor]:
    return cast(fp8, "row", False, of=swiglu(gu))


def swiglu_to_tensor(fp8: Casts, gu: Tensor) -> list[Tensor]:
    return cast_tensor(fp8, swiglu(gu), False, True)


def swiglu_to_tensor_given(fp8: Casts, gu: Tensor, amax: Tensor) -> list[Tensor]:
    return cast_given(fp8, swiglu(gu), amax, False, True)


def swiglu_to_group(fp8: Casts, gu: Tensor) -> list[Tensor]:
    return cast(fp8, "group(128)", False, True, of=swiglu(gu))


def swiglu_to_row_saved(fp8: Casts, gu: Tensor) -> list[Tensor]:
    """Return the operand of a matmul, and gate and up as they are kept for backward."""
    h = swiglu(gu)
    saved = [result for half in halves(gu) for result in cast(fp8, "group(128)", False, of=half)]
    return [*cast(fp8, "row", False, of=h), amax_of_rows(fp8, h), *saved]


def swiglu_gradients(gu: GateUp, dh: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = halves(gu)
    wide = gate.float()
    sigmoid = torch.sigmoid(wide)
    dgate = (dh.float() * up.float()) * (sigmoid * (1 + wide * (1 - sigmoid)))
    return dgate.to(dh.dtype), dh * silu(gate)


def swiglu_backward_amax(fp8: Casts, gu: GateUp, dh: Tensor) -> list[Tensor]:
    return [fp8.amax(d, "tensor") for d in swiglu_gradients(gu, dh)]


def from_saved(call: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """`call` with gate and up as payloads and scales of groups, instead of one BF16 tensor."""

    def from_payloads(fp8: Casts, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor, *more: Tensor) -> Any:
        pairs = ((gate, gate_scale), (up, up_scale))
        return call(fp8, tuple(fp8.dequantize(*pair, "group(128)", torch.bfloat16) for pair in pairs), *more)

    return from_payloads


def saved_gate_up(s: Shapes) -> list[Arg]:
    return [Arg((s.rows, s.wide), torch.float8_e4m3fn), Arg((s.rows, s.wide // 128), torch.float32)] * 2


def swiglu_backward_cast(fp8: Casts, gu: GateUp, dh: Tensor, amax_d: Tensor, amax_h: Tensor) -> list[Tensor]:
    """Five payloads: both gradients side by side in both layouts, and the product, transposed."""
    scale, scale_h = fp8.scale(amax_d, E4M3), fp8.scale(amax_h, E4M3)
    gradients = swiglu_gradients(gu, dh)
    rows, columns = ([fp8.quantize(d, scale, E4M3, "tensor", t) for d in gradients] for t in (False, True))
    h = fp8.quantize(swiglu(gu), scale_h, E4M3, "tensor", True)
    return [scale, scale_h, torch.cat(rows, 1), torch.cat(columns, 0), h]


def swiglu_backward(fp8: Casts, gu: GateUp, dh: Tensor, amax_h: Tensor) -> list[Tensor]:
    """Return the same with the scale of both gradients, which is theirs alone."""
    amaxes = [fp8.amax(d, "tensor") for d in swiglu_gradients(gu, dh)]
    return swiglu_backward_cast(fp8, gu, dh, torch.maximum(*amaxes), amax_h)


def behind(s: Shapes) -> Arg:
    """Return which rows are of no expert: their values count as zeros, whatever they are."""
    return Arg((s.rows, 1), torch.bool)


def experts_forward(fp8: Casts, gu: Tensor, behind: Tensor) -> list[Tensor]:
    """Return the operand of experts' second matmul, and gate and up as they are kept for backward."""
    gate, up = (torch.where(behind, 0.0, half) for half in halves(gu))
    saved = [result for half in (gate, up) for result in cast(fp8, "group(128)", False, of=half)]
    return [*cast(fp8, "row", False, of=swiglu((gate, up))), *saved]


def experts_backward(fp8: Casts, gu: GateUp, dh: Tensor, behind: Tensor) -> list[Tensor]:
    """Return the gradients of gate and up side by side, as they are and with a scale a row, and the product again.

    What is not cast is for grad_weight, whose scales are those of experts.
    """
    gradients = [torch.where(behind, 0.0, d) for d in swiglu_gradients(gu, dh)]
    scale = fp8.scale(torch.maximum(*[fp8.amax(d, "row") for d in gradients]), E4M3)
    payloads = [fp8.quantize(d, scale, E4M3, "row", False) for d in gradients]
    return [torch.cat(gradients, 1), torch.cat(payloads, 1), scale, swiglu(gu)]


def gelu_backward(fp8: Casts, dy: Tensor, x: Tensor) -> list[Tensor]:
    """In both layouts, with the gradient of a bias."""
    dx = torch.ops.aten.gelu_backward(dy, x)
    return [*cast_tensor(fp8, dx, False, True), dx.float().sum(0).to(dx.dtype)]


def rms_norm_backward(fp8: Casts, dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, residual: Tensor) -> list[Tensor]:
    dx_hat, x_hat = dy.float() * w.float(), x.float() * rstd
    along = (dx_hat * x_hat).mean(-1, keepdim=True)
    dx = (rstd * (dx_hat - x_hat * along)).to(x.dtype) + residual
    dw = (dy.float() * x_hat).sum(0).to(w.dtype)
    return [dx, dw, fp8.amax(dx, "tensor")]


def layer_norm_backward(fp8: Casts, dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor) -> list[Tensor]:
    dx_hat, x_hat = dy.float() * w.float(), (x.float() - mean) * rstd
    along = (dx_hat * x_hat).mean(-1, keepdim=True)
    dx = (rstd * (dx_hat - dx_hat.mean(-1, keepdim=True) - x_hat * along)).to(x.dtype)
    dw, db = ((dy.float() * x_hat).sum(0).to(w.dtype), dy.float().sum(0).to(w.dtype))
    return [dx, dw, db, fp8.amax(dx, "tensor")]


def bias_gradient(fp8: Casts, dy: Tensor) -> list[Tensor]:
    return [dy.float().sum(0).to(dy.dtype), fp8.amax(dy, "tensor")]


def weights_amax(fp8: Casts, *weights: Tensor) -> list[Tensor]:
    return [fp8.amax(w, "tensor") for w in weights]


def weights_tensor(fp8: Casts, *weights: Tensor) -> list[Tensor]:
    return weights_cast(False)(fp8, *weights, *weights_amax(fp8, *weights))


def weights_cast(transpose: bool) -> Callable[..., list[Tensor]]:
    """Weights of merged matmuls in one buffer, with one scale: the largest of their amaxes makes it."""

    def call(fp8: Casts, *inputs: Tensor) -> list[Tensor]:
        half = len(inputs) // 2
        total = inputs[half]
        for amax in inputs[half + 1 :]:
            total = torch.maximum(total, amax)
        scale = fp8.scale(total, E4M3)
        casts = [fp8.quantize(w, scale, E4M3, "tensor", transpose) for w in inputs[:half]]
        return [scale, torch.cat(casts, 1 if transpose else 0)]

    return call


# ---- torchao --------------------------------------------------------------------------------------------------------


def torchao_cast(dim: int | None, *layouts: bool) -> Callable[..., Any]:
    """torchao's cast with a scale for each row (`dim` -1) or for the tensor (None), compiled as its users do."""
    utils = import_module("torchao.float8.float8_utils")
    granularity = import_module("torchao.float8.config").ScalingGranularity
    how = granularity.TENSORWISE if dim is None else granularity.AXISWISE

    def call(x: Tensor) -> list[Tensor]:
        scale = utils.tensor_to_scale(x, torch.float8_e4m3fn, scaling_granularity=how, axiswise_dim=dim)
        data = utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
        return [scale, *(data.t().contiguous() if transpose else data for transpose in layouts)]

    return torch.compile(call, dynamic=False)


def torchao_given(*layouts: bool) -> Callable[..., Any]:
    """torchao's cast with one scale, whose amax is known, compiled as its users do."""
    utils = import_module("torchao.float8.float8_utils")

    def call(x: Tensor, amax: Tensor) -> list[Tensor]:
        scale = utils.amax_to_scale(amax, torch.float8_e4m3fn)
        data = utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
        return [scale, *(data.t().contiguous() if transpose else data for transpose in layouts)]

    return torch.compile(call, dynamic=False)


def torchao_kernels(*names: str) -> Callable[..., Any]:
    """Triton kernels of torchao, one after the other on the same tensor; each tunes itself at its first call."""
    kernels = import_module("torchao.prototype.blockwise_fp8_training.kernels")
    found = [getattr(kernels, f"triton_fp8_blockwise_{name}") for name in names]
    return lambda x: [kernel(x) for kernel in found]


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A function, its inputs, and what the passes make of it: kernels, and operators that are left to Inductor.

    An amax that leaves the graph, or in more pieces than each program of a reader may read, takes a kernel more, which
    puts the pieces together.
    """

    name: str
    call: Callable[..., list[Tensor]]  # (casts, *inputs)
    inputs: Callable[[Shapes], list[Arg]]
    launches: int
    torchao: Callable[[], Callable[..., Any]] | None = None
    in_one_pass: bool = False  # large casts (`kernels/codegen/schedule/one_pass.py`), whose two kernels count as one


BLOCK_KERNELS = ("weight_quant_transposed_rhs", "weight_quant_rhs")  # rows as they are, and transposed
ROWS = (
    Row("cast_row", to("row", False), lambda s: [x(s)], 1, partial(torchao_cast, -1, False)),
    Row("cast_given", to_tensor_given(False), lambda s: [x(s), AMAX], 1, partial(torchao_given, False)),
    Row("cast_given_transposed", to_tensor_given(True), lambda s: [x(s), AMAX], 1, partial(torchao_given, True)),
    Row(
        "cast_given_both",
        to_tensor_given(False, True),
        lambda s: [x(s), AMAX],
        1,
        partial(torchao_given, False, True),
    ),
    Row("amax", amax_only, lambda s: [x(s)], 2),
    Row("cast_tensor", to_tensor(False), lambda s: [x(s)], 2, partial(torchao_cast, None, False)),
    Row("cast_tensor_both", to_tensor(False, True), lambda s: [x(s)], 2, partial(torchao_cast, None, False, True)),
    Row("cast_group128", to("group(128)", False), lambda s: [x(s)], 1, partial(torchao_kernels, "act_quant_lhs")),
    Row("cast_group16", to("group(16)", False), lambda s: [x(s)], 1),
    Row(
        "cast_block128_both",
        to("block(128)", False, True),
        lambda s: [x(s)],
        1,
        partial(torchao_kernels, *BLOCK_KERNELS),
    ),
    Row("rms_norm_row", rms_norm_to("row"), lambda s: [x(s), weight(s)], 1),
    Row("rms_norm_row_amax", rms_norm_to_row_with_amax, lambda s: [x(s), weight(s)], 2),
    Row("rms_norm_tensor", rms_norm_to_tensor, lambda s: [x(s), weight(s)], 3),
    Row("rms_norm_group128", rms_norm_to("group(128)"), lambda s: [x(s), weight(s)], 1),
    Row("rms_norm_again", rms_norm_again, lambda s: [x(s), statistic(s), weight(s), AMAX], 1),
    Row("add_rms_norm_row", add_rms_norm_to_row, lambda s: [x(s), x(s), weight(s)], 1),
    Row("layer_norm_row", layer_norm_to_row, lambda s: [x(s), weight(s), weight(s)], 1),
    Row("gelu_tanh_row", gelu_to_row("tanh"), lambda s: [wide(s)], 1),
    Row("gelu_erf_row", gelu_to_row("none"), lambda s: [wide(s)], 1),
    Row("swiglu_row", swiglu_to_row, lambda s: [gate_up(s)], 1),
    Row("swiglu_tensor_both", swiglu_to_tensor, lambda s: [gate_up(s)], 2),
    Row("swiglu_given_both", swiglu_to_tensor_given, lambda s: [gate_up(s), AMAX], 1),
    Row("swiglu_group128_both", swiglu_to_group, lambda s: [gate_up(s)], 1),
    Row("swiglu_backward_amax", swiglu_backward_amax, lambda s: [gate_up(s), wide(s)], 2),
    Row("swiglu_backward_cast", swiglu_backward_cast, lambda s: [gate_up(s), wide(s), AMAX, AMAX], 1),
    Row("swiglu_row_saved", swiglu_to_row_saved, lambda s: [gate_up(s)], 2),
    Row(
        "swiglu_saved_backward_amax",
        from_saved(swiglu_backward_amax),
        lambda s: [*saved_gate_up(s), wide(s)],
        2,
    ),
    Row(
        "swiglu_saved_backward_cast",
        from_saved(swiglu_backward_cast),
        lambda s: [*saved_gate_up(s), wide(s), AMAX, AMAX],
        1,
    ),
    Row(
        "swiglu_saved_backward",
        from_saved(swiglu_backward),
        lambda s: [*saved_gate_up(s), wide(s), AMAX],
        2,
        in_one_pass=True,
    ),
    Row(
        "swiglu_saved_backward_two_passes",
        from_saved(swiglu_backward),
        lambda s: [*saved_gate_up(s), wide(s), AMAX],
        2,
    ),
    Row("experts_forward", experts_forward, lambda s: [gate_up(s), behind(s)], 1),
    Row(
        "experts_backward",
        from_saved(experts_backward),
        lambda s: [*saved_gate_up(s), wide(s), behind(s)],
        1,
    ),
    Row("gelu_backward", gelu_backward, lambda s: [wide(s), wide(s)], 3, in_one_pass=True),
    Row("gelu_backward_two_passes", gelu_backward, lambda s: [wide(s), wide(s)], 3),
    Row("rms_norm_backward", rms_norm_backward, lambda s: [x(s), x(s), weight(s), statistic(s), x(s)], 3),
    Row("layer_norm_backward", layer_norm_backward, lambda s: [x(s), x(s), weight(s), statistic(s), statistic(s)], 3),
    Row("bias_gradient", bias_gradient, lambda s: [x(s)], 3),
    Row("weights_amax", weights_amax, qkv, 4),
    Row("weights_tensor", weights_tensor, qkv, 2),
    Row("weights_cast", weights_cast(False), lambda s: [*qkv(s), AMAX, AMAX, AMAX], 1),
    Row("weights_cast_transposed", weights_cast(True), lambda s: [*qkv(s), AMAX, AMAX, AMAX], 1),
)


# ---- what the passes make of it -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formed:
    """A row's graph after the passes: its regions, casts that no region took and why, and operators that are left."""

    graph: fx.GraphModule
    regions: list[fx.Node]
    casts: list[fx.Node]
    left: list[fx.Node]
    reasons: list[str]


def form(row: Row, shapes: Shapes, device: str) -> Formed:
    """Trace the row's function and run the passes that make regions."""
    with FakeTensorMode():
        fakes = [arg.empty(device) for arg in row.inputs(shapes)]
        graph = make_fx(partial(row.call, ops), decomposition_table=select_decomp_table())(*fakes)
    graph.graph = fx_graph_cse(graph.graph)
    reasons = form_regions(graph.graph)
    combine_regions(graph.graph, row.in_one_pass)
    graph.recompile()
    calls = list(graph.graph.find_nodes(op="call_function", target=ops.region))
    casts = [n for n in graph.graph.nodes if n.target in ops.CASTS]
    skipped = {*calls, *casts}
    left = [
        n
        for n in graph.graph.nodes
        if n.op == "call_function" and n not in skipped and n.target not in VIEWS | {operator.getitem}
    ]
    return Formed(graph, calls, casts, left, reasons)


class Recorder(fx.Interpreter):
    """Runs a graph and keeps what each of `nodes` was called with, and what it returned."""

    def __init__(self, graph: fx.GraphModule, nodes: Sequence[fx.Node]):
        super().__init__(graph)
        self.nodes = set(nodes)
        self.calls: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.results: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """As ever; with a note."""
        result = super().run_node(n)
        if n in self.nodes:
            self.calls[n] = self.fetch_args_kwargs_from_env(n)
            self.results[n] = result
        return result


@dataclass(frozen=True)
class Launch:
    """A region with real arguments."""

    region: Region
    schedule: Schedule
    inputs: list[Tensor]
    sizes: list[int]

    @staticmethod
    def of(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Launch:
        """From the arguments of a region operator."""
        inputs, sizes, spec, schedule = call[0]
        region, how = generated.parse(spec, schedule)
        return Launch(region, how, generated.restrided(region, inputs, sizes), sizes)

    def kernel(self) -> Callable[[], object]:
        """Return a call of the kernel, or of both where it casts in one pass, into buffers that are there already."""
        _, run = generated.prepared_launch(self.region, self.schedule, self.inputs, self.sizes)
        return run


def moved(region: Region, sizes: Sequence[int]) -> int:
    """Bytes that a region must move at least: what several parts read counts once."""
    names = dict(zip(region.sizes, sizes, strict=True))
    found: dict[str, int] = {}
    for part in region.parts:
        for what, count in generated.moved(part, region, names).items():
            found[what] = max(found.get(what, 0), count)
    return sum(found.values())


# ---- checking -------------------------------------------------------------------------------------------------------


def check(row: Row, shapes: Shapes, device: str) -> list[str]:
    """Return what is wrong with the row's results: kernel by kernel (on a GPU, by `trial.compare`), and as a whole."""
    formed = form(row, shapes, device)
    inputs = [arg.random(device) for arg in row.inputs(shapes)]
    run = Recorder(formed.graph, formed.regions)
    actual = run.run(*inputs)
    lines = []
    if device == "cuda":
        for node in formed.regions:
            launch = Launch.of(run.calls[node])
            lines += check_kernel.compare(
                launch.region, launch.schedule, launch.inputs, launch.sizes, run.results[node]
            )
    del run
    expected = row.call(markers, *inputs)
    predicted = any(is_one_pass(generated.parse(node.args[2], node.args[3])[0]) for node in formed.regions)  # type: ignore[arg-type]
    for n, (a, b) in enumerate(zip(actual, expected, strict=True)):
        error = relative_error(a, b, predicted)
        if not error < TOLERANCE:  # nan is wrong as well
            lines.append(f"result {n}: relative error {error:.3g}")
    return lines


# The plain functions round to BF16 on their way, kernels do not: 2^-9 of a value, which moves one FP8 code in 20 to
# its neighbour, 2^-4 to 2^-3 away: about 0.02 in all. A result in the wrong place has an error of 1.
TOLERANCE = 0.05


def relative_error(actual: Tensor, expected: Tensor, predicted: bool = False) -> float:
    """|actual − expected| / |expected|, in norms; where scales are predicted, one up to 16 times as large is right."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    a, b = actual.float(), expected.float()
    if predicted and a.dim() == 0:
        return 0.0 if 1 <= a / b <= 16 else float("inf")
    if predicted and actual.dtype in FP8_DTYPES:
        b = b * ((a * b).sum() / b.square().sum())  # codes are as much smaller
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def check_what_fits(row: Row, shapes: Shapes) -> list[str]:
    """`check` on the GPU, with fewer rows where the reference, which keeps every value, takes too much memory."""
    for fewer in (1, 4, 16):
        try:
            return check(row, Shapes(shapes.rows // fewer, shapes.cols, shapes.wide, shapes.keys), "cuda")
        except torch.OutOfMemoryError:
            pass  # its traceback keeps the memory until here
        torch.cuda.empty_cache()
    return ["unchecked: the reference does not fit into memory"]


# ---- timing ---------------------------------------------------------------------------------------------------------


Call = Callable[[], object]
Timer = Callable[[Call], float]  # median device time of a call, in microseconds


def cold(call: Call) -> float:
    """Return the median device time of `call`, in microseconds, on a GPU that rests in between."""
    cache = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")

    def flush() -> None:
        cache.zero_()
        torch.cuda._sleep(1_000_000)  # cycles: half a millisecond, in which the host gets ahead

    return _median(call, flush)


def hot() -> Timer:
    """Return what times calls between FP8 matmuls, after a second of these: about what runs between calls in a step."""
    wide, narrow = (torch.randn(rows, 14336, device="cuda").to(torch.float8_e4m3fn) for rows in (16384, 4096))
    one = torch.ones((), device="cuda")

    def multiply(times: int = 3) -> None:
        for _ in range(times):
            torch._scaled_mm(wide, narrow.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    def timed(call: Call) -> float:
        multiply(800)
        return _median(call, multiply)

    return timed


def _median(call: Call, before: Call, times: int = 20) -> float:
    """Return the median device time of `call`, in microseconds, each after `before`, and all after three to warm up."""
    for _ in range(3):
        call()
    events = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def copy_rate(timer: Timer) -> float:
    """Return how many bytes copy_ reads and writes in a microsecond."""
    source = torch.randn(128 * MIB // 2, device="cuda").bfloat16()
    return 2 * source.nbytes / timer(partial(torch.empty_like(source).copy_, source))


@dataclass
class Kernel:
    """One kernel of a row: its bytes, its time, its name and tiles."""

    mib: float
    text: str
    us: float | None = None
    share: float | None = None


@dataclass
class Result:
    """A line of the table."""

    name: str
    launches: int
    left: int
    mib: float
    us: float | None = None
    share: float | None = None
    inductor_us: float | None = None
    inductor_kernels: int | None = None
    speedup: float | None = None
    torchao_us: float | None = None
    notes: list[str] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


def describe(row: Row, formed: Formed) -> Result:
    """Return what there is to say about a row without running it."""
    specs = [generated.parse(node.args[2], node.args[3]) for node in formed.regions]  # type: ignore[arg-type]
    kernels = [Kernel(moved(region, []) / MIB, tiles(region, schedule)) for region, schedule in specs]
    result = Result(row.name, len(specs), len(formed.left), sum(k.mib for k in kernels), kernels=kernels)
    if (len(specs), len(formed.left)) != (row.launches, 0):
        result.notes.append(f"expected {row.launches} launches, and nothing left")
    result.notes += [f"left as it is: %{n.name}" for n in formed.casts] + formed.reasons
    return result


def tiles(region: Region, schedule: Schedule) -> str:
    """Return a kernel's name and its tiles."""
    found = [f"{t.block_rows}x{t.block_cols}{t.manner}" for t in schedule.tilings]
    name = generated.kernel_name(region, schedule)
    return f"{name}, tiles {' '.join(found)}, {schedule.programs} programs of {schedule.warps} warps"


def measure(row: Row, shapes: Shapes, rate: float, timer: Timer) -> Result:
    """Return a row on the GPU. `rate`: bytes a microsecond of a device copy."""
    formed = form(row, shapes, "cuda")
    result = describe(row, formed)
    inputs = [arg.random("cuda") for arg in row.inputs(shapes)]
    times, left = time_kernels(formed, inputs, timer)
    for kernel, us in zip(result.kernels, times, strict=True):
        kernel.us, kernel.share = us, kernel.mib * MIB / us / rate
    result.us = sum(times) + left
    result.share = result.mib * MIB / result.us / rate
    result.inductor_us, result.inductor_kernels = time_inductor(row, inputs, timer)
    result.speedup = result.inductor_us / result.us
    result.torchao_us = time_torchao(row, inputs, result.notes, timer)
    del inputs
    torch.cuda.empty_cache()
    result.notes += [f"wrong: {line}" for line in check_what_fits(row, shapes)]
    return result


def time_kernels(formed: Formed, inputs: list[Tensor], timer: Timer) -> tuple[list[float], float]:
    """Return the time of each region's kernel, and that of all operators that are left."""
    run = Recorder(formed.graph, [*formed.regions, *formed.casts, *formed.left])
    run.run(*inputs)
    run.results.clear()
    times = [timer(Launch.of(run.calls[node]).kernel()) for node in formed.regions]
    left = 0.0
    for node in [*formed.casts, *formed.left]:
        args, kwargs = run.calls[node]
        left += timer(partial(node.target, *args, **kwargs))  # type: ignore[arg-type]
    return times, left


def time_inductor(row: Row, inputs: list[Tensor], timer: Timer) -> tuple[float, int]:
    """Time of the row's function as Inductor compiles it, and how many kernels that are."""
    torch.compiler.reset()
    metrics.reset()

    @partial(torch.compile, dynamic=False)
    def call(*inputs: Tensor) -> list[Tensor]:
        return row.call(markers, *inputs)

    call(*inputs)
    return timer(partial(call, *inputs)), metrics.generated_kernel_count


def time_torchao(row: Row, inputs: list[Tensor], notes: list[str], timer: Timer) -> float | None:
    """Time of torchao's way to the same results; None where it has none, or is not installed."""
    if row.torchao is None:
        return None
    torch.compiler.reset()
    try:
        call = row.torchao()
        return timer(partial(call, *inputs))
    except ModuleNotFoundError:
        return None
    except Exception as error:  # its prototypes come and go
        notes.append(f"torchao: {type(error).__name__}: {str(error)[:100]}")
        return None


# ---- output ---------------------------------------------------------------------------------------------------------

COLUMNS = ("launches", "MiB", "µs", "of copy", "Inductor µs", "kernels", "speed-up", "torchao µs")
WIDTHS = [max(8, len(c)) for c in COLUMNS]


def count(launches: int, left: int) -> str:
    return f"{launches} + {left}" if left else str(launches)


def line(name: str, cells: Sequence[str], notes: Sequence[str] = ()) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)]
    return "  ".join([f"{name:24}", *padded, *(["; ".join(notes)] if notes else [])])


def cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def table_line(r: Result) -> str:
    """Return a line of the table; what was not measured is a dash."""
    cells = [
        count(r.launches, r.left),
        f"{r.mib:.1f}",
        cell(r.us, ".1f"),
        cell(r.share, ".0%"),
        cell(r.inductor_us, ".1f"),
        cell(r.inductor_kernels, "d"),
        cell(r.speedup, ".2f"),
        cell(r.torchao_us, ".1f"),
    ]
    return line(r.name, cells, r.notes)


def region_lines(r: Result) -> list[str]:
    """Return a line for each kernel of a row."""
    width = max(len(COLUMNS[0]), 8)
    return [
        line("", [" " * width, f"{k.mib:.1f}", cell(k.us, ".1f"), cell(k.share, ".0%"), *[""] * 4], [k.text])
        for k in r.kernels
    ]


def selected(patterns: str) -> list[Row]:
    """Rows whose names match one of the patterns, which commas separate; raises `SystemExit` where one matches none."""
    wanted = [p.strip() for p in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in ROWS):
            raise SystemExit(f"no row is called {pattern!r}; there are: {', '.join(row.name for row in ROWS)}")
    return [row for row in ROWS if any(fnmatch.fnmatchcase(row.name, p) for p in wanted)]


def fake(row: Row, shapes: Shapes = FULL) -> Result:
    """Return a row without a GPU: regions of the real shapes, results of tiny ones, computed by the reference."""
    result = describe(row, form(row, shapes, "cpu"))
    result.notes += [f"wrong: {text}" for text in check(row, TINY, "cpu")]
    return result


def real(row: Row, rate: float, timer: Timer) -> Result:
    """Return a row on the GPU; a failure is a note."""
    try:
        return measure(row, FULL, rate, timer)
    except Exception as error:
        formed = describe(row, form(row, FULL, "cuda"))
        formed.notes.append(f"failed: {type(error).__name__}: {str(error)[:200]}")
        return formed
    finally:
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Print the table; returns its lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="names of rows, or patterns, with commas between them")
    parser.add_argument("--regions", action="store_true", help="also show each kernel")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--hot", action="store_true", help="time each between matmuls, at the clocks of a step")
    parser.add_argument("--fake", action="store_true", help="form regions and check them on the CPU, without times")
    arguments = parser.parse_args(argv)
    rows = selected(arguments.only)
    rate, timer = None, cold
    if not arguments.fake and torch.cuda.is_available():
        timer = hot() if arguments.hot else cold
        rate = copy_rate(timer)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {rate * 1e-6:.3f} TB/s")
    else:
        print("no times: this counts launches and bytes, and checks results of small shapes on the CPU")
    print(line("", COLUMNS))
    results = []
    for row in rows:
        result = fake(row) if rate is None else real(row, rate, timer)
        results.append(result)
        print("\n".join([table_line(result), *(region_lines(result) if arguments.regions else [])]), flush=True)
        if arguments.json:
            figures = {"hot": arguments.hot, "copy_tb_s": rate and rate * 1e-6, "rows": [asdict(r) for r in results]}
            arguments.json.write_text(json.dumps(figures, indent=1))
    return results


if __name__ == "__main__":
    main()
