"""The marker operators: fixed names that passes insert into graphs, registered once, at import.

With a warm cache no pass runs, so no operator may be born at compile time.

    fp8::amax(x, granularity, …)                    -> FP32, in the shape of the scale
    fp8::scale(amax, format, power_of_two)          -> FP32, same shape
    fp8::quantize(x, scale, format, granularity, …) -> data, contiguous along the contracted dimension
    fp8::dequantize(data, scale, granularity, dtype)
    fp8::scaled_mm(a, scale_a, …, b, scale_b, …)    -> (a · scale_a) @ (b · scale_b)ᵀ + bias; with `offs` grouped: rows
                                                       of a, in groups that end there, each times its own matrix of b;
                                                       of two matrices, groups of columns, with a product for each
    fp8::grouped_cast(x, offs, format, …)           -> data, scale and ends of groups of tokens, for those products
    fp8::delayed_scale(amax, key, …)                -> scale from the history kept under `key` (`fp8compile.delayed`)
    fp8::observe(scale, tensors, …)                 -> the scale; measures the cast (`fp8compile.plan.cast_statistics`)
    fp8::probe(x, …)                                -> x; measures what casts of it would lose, where there is none
    fp8::region(inputs, sizes, spec, schedule)      -> buffers of a generated kernel (`kernels/codegen/spec/region.py`)
    fp8::chunked_loss(x, weight, bias, index, …)    -> log-probabilities and gradients (`kernels/loss/chunked_loss.py`)
    fp8::chunked_loss_in_fp8(x, data, scale, …)     -> the same, of matmuls in FP8 (`kernels/loss/fp8_head.py`)

amax, scale and quantize are three operators, not one with two results: an amax can come from an earlier kernel, be
maximised over merged operands or reduced over ranks, a scale can be shared by two layouts, and no node has a tuple.
grouped_cast makes scales and data: scales of a group's columns serve nothing else. With `amax`, of each token, it has
one scale a group; with `index` it gathers its rows.
`transpose` means: of xᵀ. `row_multiple` and `col_multiple` append zeros: padding needs no symbolic sizes in graphs.

Their meaning is `kernels/reference/markers.py` and `grouped_reference.py`; on CUDA, `scaled_mm` is
`kernels/matmul/scaled_mm.py`, and `grouped_cast` is `kernels/casts/grouped_cast.py`. Inductor never sees the first four
on its way to code: `passes/regions/form_regions.py` makes generated kernels of them, and
`passes/lower/lower_markers.py` plain operators of what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8compile import delayed
from fp8compile.empty_tensors import new_empty
from fp8compile.formats import FORMATS, parse_granularity, round_up
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.loss import chunked_loss as chunked
from fp8compile.kernels.loss import fp8_head
from fp8compile.kernels.matmul import scaled_mm
from fp8compile.kernels.reference import grouped_reference, markers, region_reference
from fp8compile.plan import cast_statistics

NAMESPACE = "fp8"
_LAYOUT = "bool transpose=False, int row_multiple=1, int col_multiple=1"
SCHEMAS = {
    "amax": f"(Tensor x, str granularity, {_LAYOUT}) -> Tensor",
    "scale": "(Tensor amax, str format, bool power_of_two=False) -> Tensor",
    "quantize": f"(Tensor x, Tensor scale, str format, str granularity, {_LAYOUT}) -> Tensor",
    "dequantize": "(Tensor data, Tensor scale, str granularity, ScalarType dtype) -> Tensor",
    "scaled_mm": "(Tensor a, Tensor scale_a, str granularity_a, Tensor b, Tensor scale_b, str granularity_b, "
    "Tensor? bias, ScalarType out_dtype, bool fast_accumulation=False, Tensor? offs=None) -> Tensor",
    "grouped_cast": "(Tensor x, Tensor offs, str format, bool power_of_two=False, int row_multiple=1, "
    "Tensor? amax=None, Tensor? index=None) -> (Tensor, Tensor, Tensor)",
    "delayed_scale": "(Tensor amax, str key, str format, int history, int margin, bool power_of_two=False) -> Tensor",
    "observe": "(Tensor scale, Tensor[] tensors, str cast, bool transpose, str name, str key) -> Tensor",
    "probe": "(Tensor x, bool transpose, str name, str key) -> Tensor",
}


def _oriented_shape(x: Tensor, transpose: bool, row_multiple: int, col_multiple: int) -> list[Any]:
    *batch, rows, cols = x.shape
    if transpose:
        rows, cols = cols, rows
    return [*batch, round_up(rows, row_multiple), round_up(cols, col_multiple)]


def _fake_amax(
    x: Tensor, granularity: str, transpose: bool = False, row_multiple: int = 1, col_multiple: int = 1
) -> Tensor:
    if granularity == "tensor":
        return new_empty(x, [], torch.float32)
    shape = _oriented_shape(x, transpose, row_multiple, col_multiple)
    return new_empty(x, parse_granularity(granularity).scale_shape(shape), torch.float32)


def _fake_scale(amax: Tensor, format: str, power_of_two: bool = False) -> Tensor:
    return new_empty(amax, amax.shape)


def _fake_quantize(
    x: Tensor,
    scale: Tensor,
    format: str,
    granularity: str,
    transpose: bool = False,
    row_multiple: int = 1,
    col_multiple: int = 1,
) -> Tensor:
    return new_empty(x, _oriented_shape(x, transpose, row_multiple, col_multiple), FORMATS[format].dtype)


def _fake_dequantize(data: Tensor, scale: Tensor, granularity: str, dtype: torch.dtype) -> Tensor:
    return new_empty(data, data.shape, dtype)


def _fake_scaled_mm(
    a: Tensor,
    scale_a: Tensor,
    granularity_a: str,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
    offs: Tensor | None = None,
) -> Tensor:
    groups = [offs.shape[0]] if offs is not None and b.dim() == 2 else []
    return new_empty(a, [*groups, *a.shape[:-1], b.shape[-2]], out_dtype)


def _fake_grouped_cast(
    x: Tensor,
    offs: Tensor,
    format: str,
    power_of_two: bool = False,
    row_multiple: int = 1,
    amax: Tensor | None = None,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = (x if index is None else index).shape[0]
    width, length = round_up(x.shape[1], row_multiple), grouped_reference.padded_tokens(tokens, offs.shape[0])
    data = new_empty(x, [width, length], FORMATS[format].dtype)
    return data, new_empty(x, [offs.shape[0], width, 1], torch.float32), new_empty(offs, offs.shape)


def _fake_delayed_scale(
    amax: Tensor, key: str, format: str, history: int, margin: int, power_of_two: bool = False
) -> Tensor:
    return new_empty(amax, amax.shape)


def _fake_observe(scale: Tensor, tensors: list[Tensor], cast: str, transpose: bool, name: str, key: str) -> Tensor:
    return new_empty(scale, scale.shape)


def _fake_probe(x: Tensor, transpose: bool, name: str, key: str) -> Tensor:
    return new_empty(x, x.shape)


_FAKES: dict[str, Callable[..., Any]] = {
    "amax": _fake_amax,
    "scale": _fake_scale,
    "quantize": _fake_quantize,
    "dequantize": _fake_dequantize,
    "scaled_mm": _fake_scaled_mm,
    "grouped_cast": _fake_grouped_cast,
    "delayed_scale": _fake_delayed_scale,
    "observe": _fake_observe,
    "probe": _fake_probe,
}


def _scaled_mm_on_cpu(a: Tensor, scale_a: Tensor, granularity_a: str, b: Tensor, *rest: Any) -> Tensor:
    """Return the reference, with the GPU's demand on layout, so that a wrong one is seen without a GPU too."""
    if not (a.is_contiguous() and b.is_contiguous()):
        raise RuntimeError(f"fp8::scaled_mm needs contiguous data, got strides {a.stride()} and {b.stride()}")
    return markers.scaled_mm(a, scale_a, granularity_a, b, *rest)


def _grouped_cast_on_cuda(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    from fp8compile.kernels.casts.grouped_cast import grouped_cast  # Triton is imported where there is a GPU

    return grouped_cast(*given)


_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "amax": markers.amax,
    "scale": markers.scale,
    "quantize": markers.quantize,
    "dequantize": markers.dequantize,
    "scaled_mm": _scaled_mm_on_cpu,
    "grouped_cast": grouped_reference.grouped_cast,
    "delayed_scale": delayed.scale,
    "observe": cast_statistics.observe,
    "probe": cast_statistics.probe,
}


def _fake_region(inputs: list[Tensor], sizes: list[Any], spec: str, schedule: str) -> list[Tensor]:
    return generated.empty_buffers(*generated.parse(spec, schedule), sizes, inputs[0])


def _region_on_cpu(inputs: list[Tensor], sizes: list[int], spec: str, schedule: str) -> list[Tensor]:
    region, how = generated.parse(spec, schedule)
    return region_reference.run(region, how, generated.restrided(region, inputs, sizes), sizes)


def _region_on_cuda(inputs: list[Tensor], sizes: list[int], spec: str, schedule: str) -> list[Tensor]:
    region, how = generated.parse(spec, schedule)
    return generated.launch(region, how, generated.restrided(region, inputs, sizes), sizes)


_library = torch.library.Library(NAMESPACE, "DEF")  # lives as long as the process
for _name, _schema in SCHEMAS.items():
    # Data must be contiguous along the contracted dimension, whatever layout Inductor would prefer. needs_exact_strides
    # would not do: Inductor ignores it on nodes that a pass inserted, which carry no eager_input_vals.
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides))
    _library.impl(_name, _IMPLEMENTATIONS[_name], "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _FAKES[_name], lib=_library)
_library.impl("scaled_mm", scaled_mm.scaled_mm, "CUDA")
_library.impl("grouped_cast", _grouped_cast_on_cuda, "CUDA")
_library.define(
    "region(Tensor[] inputs, SymInt[] sizes, str spec, str schedule) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("region", _region_on_cpu, "CompositeExplicitAutograd")
_library.impl("region", _region_on_cuda, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::region", _fake_region, lib=_library)


def _fake_chunked_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    index: Tensor,
    weights: Tensor | None,
    rows: int,
    inner: float,
    outer: float | None,
    wanted: list[bool],
    every_term: bool = False,
) -> list[Tensor]:
    return chunked.empty_results(x, weight.shape[0], wanted, every_term)


_library.define(
    "chunked_loss(Tensor x, Tensor weight, Tensor? bias, Tensor index, Tensor? weights, int rows, float inner, "
    "float? outer, bool[] wanted, bool every_term=False) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("chunked_loss", chunked.run, "CompositeExplicitAutograd")
_library.impl("chunked_loss", chunked.run_on_cuda, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::chunked_loss", _fake_chunked_loss, lib=_library)


def _fake_chunked_loss_in_fp8(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    weight_data: Tensor,
    weight_scale: Tensor,
    turned_data: Tensor | None,
    turned_scale: Tensor | None,
    bias: Tensor | None,
    index: Tensor,
    weights: Tensor | None,
    classes: Any,
    rows: int,
    inner: float,
    outer: float | None,
    wanted: list[bool],
    every_term: bool = False,
    exact_grad_weight: bool = False,
    waits: bool = False,
    fast_accumulation: bool = False,
) -> list[Tensor]:
    now = chunked.empty_results(x, classes, chunked.computed_now(wanted, waits), every_term)
    return [*now, *(fp8_head.empty_waiting(x, weight_data.shape[0]) if waits else [])]


_library.define(
    "chunked_loss_in_fp8(Tensor x, Tensor data, Tensor scale, Tensor weight_data, Tensor weight_scale, "
    "Tensor? turned_data, Tensor? turned_scale, Tensor? bias, Tensor index, Tensor? weights, SymInt classes, int rows, "
    "float inner, float? outer, bool[] wanted, bool every_term=False, bool exact_grad_weight=False, "
    "bool waits=False, bool fast_accumulation=False) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_contiguous_strides),
)
_library.impl("chunked_loss_in_fp8", chunked.run_in_fp8, "CompositeExplicitAutograd")
_library.impl("chunked_loss_in_fp8", chunked.run_in_fp8_on_cuda, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::chunked_loss_in_fp8", _fake_chunked_loss_in_fp8, lib=_library)

amax = torch.ops.fp8.amax.default
scale = torch.ops.fp8.scale.default
quantize = torch.ops.fp8.quantize.default
dequantize = torch.ops.fp8.dequantize.default
scaled_mm = torch.ops.fp8.scaled_mm.default
grouped_cast = torch.ops.fp8.grouped_cast.default
delayed_scale = torch.ops.fp8.delayed_scale.default
observe = torch.ops.fp8.observe.default
probe = torch.ops.fp8.probe.default
region = torch.ops.fp8.region.default
chunked_loss = torch.ops.fp8.chunked_loss.default
chunked_loss_in_fp8 = torch.ops.fp8.chunked_loss_in_fp8.default
CHUNKED_LOSSES = (chunked_loss, chunked_loss_in_fp8)
MARKERS = (amax, scale, quantize, dequantize, scaled_mm, grouped_cast, delayed_scale, observe, probe)
FAKES = {getattr(torch.ops.fp8, name).default: fake for name, fake in _FAKES.items()} | {region: _fake_region}
CASTS = {
    amax: markers.amax,
    scale: markers.scale,
    quantize: markers.quantize,
    dequantize: markers.dequantize,
}
