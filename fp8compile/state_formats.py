"""The formats in which optimizer states are stored: a code of 8 bits an element, and two FP32 numbers a group of 128.

    name      = code[/linear][/stochastic]            "log", "e4m3", "e5m2/stochastic", "e4m3/linear", "float32"
    side      = (±least nonzero magnitude, greatest magnitude) of a group; the sign says whether it has negative values

log      a byte is the position between the group's least and greatest magnitude, in equal steps of the logarithm: 126
         with a sign, 254 where no value is negative
e4m3     a byte is an E4M3 number; expansion makes the group's range that of E4M3 (`linear`: only its greatest
         magnitude becomes 448)
e5m2     likewise
float32  4 bytes an element and no side data: small tensors

The logarithm is that of the bits: read as an integer, a positive float is its log2 (times 2²³) with straight lines
between powers of two, at most 0.086 off. An affine map of these integers is COAT's expansion |x|^k (arXiv 2410.19313,
§4.1) without a special function, exactly invertible, and the same on every device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fp8compile.errors import OptionError, inside, unknown_name

GROUP = 128
BYTES_OF_SIDE = 8
CODES = ("log", "e4m3", "e5m2", "float32")
FLAGS = ("linear", "stochastic")
ROUNDINGS = ("", "/stochastic")


def bits(x: float) -> int:
    """Return the bits of an FP32 number as an integer."""
    return int(torch.tensor(x, dtype=torch.float32, device="cpu").view(torch.int32))


@dataclass(frozen=True)
class Minifloat:
    """Where the codes of an 8-bit float lie: code c < first_normal is c · tiny, above they are FP32 bits >> shift."""

    top: int  # code of the greatest finite number
    first_normal: int
    shift: int  # 23 minus the bits of its mantissa
    tiny: float  # its least positive number
    max: float

    @property
    def normal_bits(self) -> int:
        """FP32 bits of its least normal number."""
        return bits(self.tiny * self.first_normal)

    @property
    def low_bits(self) -> int:
        """FP32 bits of its least positive number."""
        return bits(self.tiny)

    @property
    def span(self) -> int:
        """From its least to its greatest positive number, in FP32 bits."""
        return bits(self.max) - self.low_bits


MINIFLOATS = {
    "e4m3": Minifloat(0x7E, 8, 20, 2.0**-9, 448.0),
    "e5m2": Minifloat(0x7B, 4, 21, 2.0**-16, 57344.0),
}


@dataclass(frozen=True)
class StateFormat:
    """One way of storing a state; `str` of it is its name."""

    code: str = "log"
    linear: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise unknown_name("state format", str(self), names())
        if self.linear and self.code not in MINIFLOATS:
            raise OptionError(f"state format {self.code!r} has no linear form; e4m3 and e5m2 have")
        if self.stochastic and self.code == "float32":
            raise OptionError("state format 'float32' is exact: there is nothing to round stochastically")

    def __str__(self) -> str:
        return "/".join([self.code, *(flag for flag in FLAGS if getattr(self, flag))])

    @property
    def is_exact(self) -> bool:
        """True if it stores FP32 as it is."""
        return self.code == "float32"

    def side_shape(self, elements: int) -> list[int]:
        """Return the shape of the side data of a tensor of so many elements."""
        return [0 if self.is_exact else -(-elements // GROUP), 2]

    def bytes(self, elements: int) -> int:
        """Return the bytes of a state of so many elements, side data included."""
        return 4 * elements if self.is_exact else elements + -(-elements // GROUP) * BYTES_OF_SIDE

    @property
    def payload_dtype(self) -> torch.dtype:
        """The dtype in which codes are kept."""
        return torch.float32 if self.is_exact else torch.uint8

    def nearest(self) -> StateFormat:
        """Return the same format without stochastic rounding."""
        return replace(self, stochastic=False)


def parse_state_format(value: StateFormat | str) -> StateFormat:
    """Return the `StateFormat` called `value`; raises `OptionError` with the nearest valid name."""
    if isinstance(value, StateFormat):
        return value
    code, *flags = value.split("/") if isinstance(value, str) else (None,)
    if code not in CODES or not {*flags} <= {*FLAGS}:
        raise unknown_name("state format", value, names())
    with inside(f"state format {value!r}"):
        return StateFormat(code, **dict.fromkeys(flags, True))


def names() -> list[str]:
    """Return the names of all formats."""
    of_minifloats = [f"{code}{linear}{how}" for code in MINIFLOATS for linear in ("", "/linear") for how in ROUNDINGS]
    return ["log", "log/stochastic", *of_minifloats, "float32"]


FLOAT32 = StateFormat("float32")
