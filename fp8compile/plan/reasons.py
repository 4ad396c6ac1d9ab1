"""Reasons of decisions: a code that programs read, and the sentence that people read.

Code branches on codes alone, so a sentence may be reworded at any time. Codes stand in the JSON of plans, beside the
sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ADAPTED = "adaptive: "  # begins the sentences about what the automatic mode changed
CHOSEN = "; auto: "  # begins what recipe "auto" adds of a matmul that keeps its casts: what it has measured


class Reason(StrEnum):
    """The codes of reasons."""

    # of matmuls and of saved tensors
    PLAN = "plan"  # a plan that was handed back says so
    ADAPTIVE = "adaptive"  # precision that follows the training moved it
    MEASURED = "measured"  # a plan made of measurements moved it
    FAILED = "failed"  # a pass failed, so that nothing was carried out
    DTYPE = "dtype"  # FP8 does not stand in for its dtype
    UNALIGNED = "unaligned"  # its sizes are no multiples of what FP8 takes
    TOO_SMALL = "too_small"

    # of matmuls in FP8
    FASTER = "faster"  # by the cost model
    ALL = "all"  # select="all"
    GATHERED = "gathered"  # its weight arrived in FP8

    # of matmuls that stay in their precision
    NO_WEIGHT = "no_weight"  # neither operand is a weight
    PRODUCT = "product"  # an operand that a matmul made of parameters is not a weight plus such a product
    ONLY_WEIGHTS = "only_weights"
    ONLY_GRADIENTS = "only_gradients"
    NO_FORWARD = "no_forward"  # no matmul of the forward half has its operands
    UNSUPPORTED = "unsupported"  # an operator that is no plain matmul
    RECIPE = "recipe"  # the recipe keeps its role
    OPERATIONS = "operations"  # option `operations` leaves its kind out
    HIGHER_PRECISION = "higher_precision"  # FP32 among matmuls of lower precision
    DIFFERENTIATED = "differentiated"  # in a derivative that the model takes of itself; of saved tensors as well
    SKIP = "skip"  # option `skip` names it
    HEAD = "head"  # the output head
    CHUNKED_LOSS = "chunked_loss"  # the output head runs in chunks with its loss
    DEVICE = "device"  # the device has no such FP8 matmul
    GROUPED = "grouped"  # grouped FP8 matmuls cannot do it
    EMPTY = "empty"  # it has no elements
    HOST = "host"  # a short step would be no shorter: its host is late, or its GPU gains too little

    # remarks that a matmul's reason adds
    SHARED_CASTS = "shared_casts"  # faster for all that share its casts together
    UNPACKED = "unpacked"  # faster with what BF16 would take to keep and unpack its operand
    ROWS_ALONE = "rows_alone"  # grouped FP8 takes scales of rows, whatever the recipe says
    READ_ROUNDED = "read_rounded"  # its weight was gathered in FP8, and is read rounded
    CAST_AGAIN = "cast_again"  # its weight was gathered in FP8, and is cast again

    # of saved tensors in FP8
    AT_HAND = "at_hand"  # a matmul of forward has made the payload
    ACTIVATION = "activation"
    PAYLOAD = "payload"  # it is a payload itself, which a matmul of backward reads

    # of saved tensors that keep their precision
    OPTION = "option"  # option `save` says so
    HELD = "held"  # an input that somebody else keeps anyway
    RETURNED = "returned"  # the model returns it
    BY_PRODUCT = "by_product"  # a statistic of attention
    RANDOM = "random"  # random numbers, or random numbers are drawn again from it
    FOR_LOSS = "for_loss"  # no matmul reads it
    VECTOR = "vector"  # fewer than two dimensions
    NOTHING_IN_FP8 = "nothing_in_fp8"  # no matmul of the graph is
    BUDGET = "budget"  # the activation budget has room for it
    AMAX = "amax"
    COMPLEX = "complex"
    INDICES = "indices"  # or a mask
    GRADIENT = "gradient"  # of a loss in chunks, which forward computes
    FOR_BACKWARD = "for_backward"  # made for backward alone
    INPUT = "input"
    TORCH = "torch"  # torch's own cut saved it

    # of saved tensors that must not be rounded, as of what an operator makes of them
    EXPONENT = "exponent"
    QUERY_OR_KEY = "query_or_key"  # in the exponent of attention
    ATTENTION_BIAS = "attention_bias"
    ATTENTION_OUTPUT = "attention_output"  # taken off in the backward of attention
    ANGLE = "angle"
    MAY_BE_ZERO = "may_be_zero"  # rounded to zero, it would be divided by, or its logarithm taken
    COMPARED = "compared"
    STEP = "step"  # its answer jumps: a floor, an argmax
    CANCELLATION = "cancellation"  # taken off a constant, or another tensor
    WIDE_RANGE = "wide_range"  # small numbers in it count as much as large ones
    UNKNOWN_OPERATOR = "unknown_operator"
    MORE_THAN_VALUE = "more_than_value"  # an operator reads it as more than a value


@dataclass(frozen=True)
class Why:
    """A reason: its code, the sentence, and the codes of remarks that the sentence adds."""

    code: Reason
    text: str
    remarks: tuple[Reason, ...] = ()

    def with_remark(self, remark: Reason, text: str) -> Why:
        """Return this reason with `text` behind its sentence."""
        return Why(self.code, f"{self.text}{text}", (*self.remarks, remark))


BY_PLAN = Why(Reason.PLAN, "the plan says so")
DIFFERENTIATED = Why(Reason.DIFFERENTIATED, "in a derivative that the model takes, which would carry its rounding")
