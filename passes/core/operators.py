"""Properties of operators that passes may rely on, by their names. Of an operator that no table names, none.

    matmul, convolution, attention      a library's kernel computes it
    bears rounding                      a small error of an input is a small one of the output
    hazard                              why it does not (`Hazard`), for some overloads
    takes any strides                   what it computes does not depend on how its inputs lie in memory

What generated kernels compute (add, exp, …) has its row in `kernels/codegen/spec/operations.py`, from where it comes.
An operator of another library (FlashAttention, a `torch.library` operator, a kernel of the user's) may take exponents,
compare, or have strides compiled in; so may one of torch's that is not named here. Adding one is adding its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fp8compile.kernels.codegen.spec.operation import Hazard
from fp8compile.kernels.codegen.spec.operations import OPERATIONS


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


MATMULS = _aten("mm addmm bmm baddbmm addbmm addmv mv dot linear _addmm_activation _int_mm _grouped_mm") | {
    *_aten("_scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2"),
    "fp8::scaled_mm",
}
CONVOLUTIONS = _aten("convolution convolution_backward cudnn_convolution mkldnn_convolution _conv_depthwise2d")
SCALED_DOT_PRODUCT = frozenset(
    f"aten::_scaled_dot_product_{kind}{half}"
    for kind in (
        "flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention",
        "fused_attention_overrideable",
    )
    for half in ("", "_backward")
)  # fmt: skip
ATTENTIONS = SCALED_DOT_PRODUCT | {
    *(
        f"aten::_{kind}_attention_{half}"
        for kind in ("flash", "efficient", "cudnn")
        for half in ("forward", "backward")
    ),
    "aten::scaled_dot_product_attention",
    "torch_attn::_varlen_attn",  # torch.nn.attention.varlen
    "torch_attn::_varlen_attn_backward",
    "flex_attention",
    "flex_attention_backward",
}

# Values come out as they went in, in another order, more often, or not at all.
MOVES = _aten(
    "alias alias_copy as_strided as_strided_copy as_strided_scatter cat channel_shuffle chunk clone col2im "
    "constant_pad_nd copy copy_ detach diagonal diagonal_copy diagonal_scatter embedding expand expand_copy flip "
    "gather im2col index index_copy index_fill index_put index_select _unsafe_index _unsafe_index_put "
    "_unsafe_masked_index lift_fresh_copy masked_fill masked_scatter masked_select movedim native_channel_shuffle pad "
    "permute permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d repeat "
    "repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape _reshape_alias roll rot90 "
    "scatter select select_copy select_scatter slice slice_copy slice_scatter split split_copy split_with_sizes "
    "split_with_sizes_copy squeeze squeeze_copy stack t t_copy take _to_copy transpose transpose_copy tril triu "
    "unbind unfold unsqueeze unsqueeze_copy view view_as_complex view_as_real view_copy _unsafe_view where real imag "
    "_conj conj_physical resolve_conj _neg_view resolve_neg"
) | {"prims::convert_element_type", "prims::rev", "prims::device_put", "prims::inductor_force_stride_order"}
# Sums, means and products, with any weights.
SUMS = _aten(
    "rsub _unsafe_masked_index_put_accumulate sum mean cumsum prod var std var_mean std_mean "
    "linalg_vector_norm norm max min amax amin index_add scatter_add scatter_reduce index_reduce "
    "embedding_dense_backward _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward "
    "_embedding_bag_forward_only embedding_bag addcmul lerp dist trace kron outer unfold_backward select_backward "
    "slice_backward diagonal_backward value_selecting_reduction_backward avg_pool1d avg_pool2d avg_pool3d "
    "avg_pool2d_backward avg_pool3d_backward adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward max_pool2d_with_indices_backward "
    "max_pool3d_with_indices_backward adaptive_max_pool2d_backward reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_nearest1d_backward "
    "upsample_nearest2d_backward upsample_nearest3d_backward _upsample_nearest_exact1d_backward "
    "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward upsample_linear1d_backward "
    "upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward "
    "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward _fft_r2c _fft_c2c _fft_c2r native_group_norm "
    "native_group_norm_backward native_layer_norm native_layer_norm_backward native_batch_norm "
    "native_batch_norm_backward _native_batch_norm_legit cudnn_batch_norm cudnn_batch_norm_backward "
    "batch_norm_backward _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward native_dropout "
    "native_dropout_backward"
) | {"prims::fma"}
# Functions of single elements that are steep nowhere.
SMOOTH = _aten(
    "relu relu6 erfc square pow atan asinh hypot sign sgn signbit isnan isinf isfinite fmax fmin clamp nan_to_num "
    "copysign gelu gelu_backward silu silu_backward elu elu_backward leaky_relu leaky_relu_backward "
    "hardtanh hardtanh_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward softplus "
    "softplus_backward log_sigmoid_forward log_sigmoid_backward threshold threshold_backward tanh_backward "
    "sigmoid_backward mish _prelu_kernel _prelu_kernel_backward softshrink softshrink_backward hardshrink "
    "hardshrink_backward celu mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss "
    "huber_loss_backward glu glu_backward"
)
# Only the size of an input matters.
CREATIONS = _aten(
    "full full_like zeros_like ones_like empty_like rand_like randn_like new_zeros new_ones new_empty new_full "
    "new_empty_strided empty_strided"
) | {"prims::inductor_random", "prims::inductor_seeds", "prims::inductor_lookup_seed", "prims::inductor_randint"}
# Operations of generated kernels: overload -> its hazard, None if it bears rounding.
_OPERATIONS = {f"aten::{overload}": row.hazard for row in OPERATIONS.values() for overload in row.aten}
# Steep operators of which generated kernels have no operation.
_OTHER_HAZARDS = {
    Hazard.EXPONENT: "sinh.default cosh.default",
    Hazard.ANGLE: "tan.default",
    Hazard.ZERO: "log10.default",
    Hazard.STEP: "round.default trunc.default frac.default remainder.Scalar remainder.Tensor fmod.Scalar fmod.Tensor",
}
HAZARDS: dict[str, Hazard] = {overload: hazard for overload, hazard in _OPERATIONS.items() if hazard} | {
    overload: hazard for hazard, names in _OTHER_HAZARDS.items() for overload in _aten(names)
}


def _without_overloads(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.split(".")[0] for name in names)


# Steep, or choices: what is to be said of their inputs is said in `passes/save/rounding_hazards.py`.
STEEP = (
    _without_overloads(HAZARDS)
    | _aten(
        "argmax argmin sort topk median nanmedian mode kthvalue cummax cummin _softmax "
        "_log_softmax _softmax_backward_data _log_softmax_backward_data searchsorted bucketize nonzero "
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d nll_loss_forward nll_loss_backward "
        "nll_loss2d_forward nll_loss2d_backward"
    )
    | {"prims::_low_memory_max_pool_with_offsets", "prims::_low_memory_max_pool_offsets_to_indices"}
)

CARRIERS = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp")  # to and from other ranks
OURS = "fp8"  # namespace of operators whose inputs are rounded as it is
HARMLESS = MATMULS | CONVOLUTIONS | MOVES | SUMS | SMOOTH | CREATIONS | (_without_overloads(_OPERATIONS) - STEEP)
# Operators of which some inputs bear rounding, by their names in the schema; the others must be exact.
PARTLY = {
    **dict.fromkeys(ATTENTIONS, frozenset({"value", "grad_out", "grad_out_"})),
    **dict.fromkeys(_aten("grid_sampler_2d grid_sampler_3d cudnn_grid_sampler"), frozenset({"input"})),
    **dict.fromkeys(_aten("grid_sampler_2d_backward grid_sampler_3d_backward"), frozenset({"grad_output", "input"})),
    "torchvision::roi_align": frozenset({"input"}),
    "torchvision::_roi_align_backward": frozenset({"grad"}),
    "torchvision::deform_conv2d": frozenset({"input", "weight", "bias"}),
}
# Operators without a schema: their first arguments.
_UNNAMED = {
    "flex_attention": ("query", "key", "value"),
    "flex_attention_backward": ("query", "key", "value", "out", "logsumexp", "grad_out"),
}
_READS_MEMORY = _aten("as_strided as_strided_copy as_strided_scatter view_as_complex view_as_real _scaled_mm") | _aten(
    "_scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2 _grouped_mm"
)
ANY_STRIDES = (HARMLESS | STEEP) - _READS_MEMORY


def name_of(target: Any) -> str:
    """Return the name of an operator without its overload: "aten::mm", "flex_attention"."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else str(target)


def shown(target: Any) -> str:
    """Return an operator's name as plans have it: "mylib.flash"."""
    return name_of(target).replace("::", ".")


def is_operator(target: Any) -> bool:
    """Return True if `target` is an operator of torch's dispatcher, and no function of Python's."""
    return isinstance(target, torch._ops.OperatorBase)


def is_attention(target: Any) -> bool:
    """Return True if `target` is an attention that is known here, or its backward."""
    return is_operator(target) and name_of(target) in ATTENTIONS


def is_convolution(target: Any) -> bool:
    """Return True if `target` is a convolution, or its backward."""
    return is_operator(target) and name_of(target) in CONVOLUTIONS


def is_library_kernel(target: Any) -> bool:
    """Return True if `target` is a matmul, an attention or a convolution."""
    return is_operator(target) and name_of(target) in MATMULS | ATTENTIONS | CONVOLUTIONS


def is_known(target: Any) -> bool:
    """Return True if it is known of every input of `target` how it bears rounding."""
    if not is_operator(target):
        return True
    namespace = getattr(target, "namespace", "")
    return namespace == OURS or namespace in CARRIERS or name_of(target) in HARMLESS | STEEP | PARTLY.keys()


def takes_any_strides(target: Any) -> bool:
    """Return True if `target` computes the same however its inputs lie in memory."""
    if not is_operator(target):
        return True
    namespace = getattr(target, "namespace", "")
    return namespace == OURS or namespace in CARRIERS or name_of(target) in ANY_STRIDES


def hazard_of(target: Any) -> Hazard | None:
    """Return why an overload does not bear rounding; None if it does, or if that is said of no overload as such."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return HAZARDS.get(f"{target._schema.name}.{target._overloadname}")


def moves(target: Any) -> bool:
    """Return True if what `target` gives are values that it was given."""
    return is_operator(target) and name_of(target) in MOVES


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return what an operator is given, by the names of its schema."""
    if isinstance(node.target, torch._ops.OpOverload):
        names: Iterable[str] = [a.name for a in node.target._schema.arguments]
    else:
        names = _UNNAMED.get(name_of(node.target), ())
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def bearing(node: fx.Node) -> set[fx.Node]:
    """Return the inputs of an operator of `PARTLY` that bear rounding wherever it reads them."""
    names, given = PARTLY[name_of(node.target)], arguments(node)
    bear = {a for name, a in given.items() if name in names and isinstance(a, fx.Node)}
    others = [a for name, a in given.items() if name not in names and isinstance(a, fx.Node)]
    return bear - set(others)
