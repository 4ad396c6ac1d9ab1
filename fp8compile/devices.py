"""The FP8 abilities and rates of each device: the constants of the cost model, in one table.

Rates in TFLOP/s on random data at Llama-8B shapes (`benchmarks/micro/casts_and_matmuls.py`; groups:
`benchmarks/micro/matmul.py`). `casts` in TB/s (bytes read + written, as `passes/matmul/matmul_costs.py` counts them) by
which casts in generated kernels lengthen a training step: 2.6 for the SwiGLU of Qwen2-1.5B (16384 × 8960), 3.7 for that
of a 100 M model (16384 × 2048), which partly stays in the cache; matmuls that are in doubt are of the second kind.
`launch` in microseconds for one more kernel in a compiled graph. `start` in microseconds that a matmul takes beyond its
FLOPs, in BF16 as in FP8: the device fills and drains (a fit over `benchmarks/micro/matmul.py`: 10.2 in BF16, 10.5 with
tensor scales; it is then within 4 and 8 % of the times, and without it within 8 and 13 %). `processors`: streaming
multiprocessors, over which tiles of an output are spread (`Device.filled`). `grouped`: whether torch's grouped FP8
matmul runs there; it is written for Hopper. `host_link`: TB/s of copies to the host's pinned memory, and of those from
it (of an H200's link of PCIe 5.0, 0.055 measured). H200: measured with torch 2.11. Where `measured` is False the
figures are scaled from the vendor's peaks, to be replaced by a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8compile.formats import round_up


@dataclass(frozen=True)
class Device:
    """A kind of device: whether it multiplies FP8, and its rates."""

    name: str
    has_fp8: bool
    emulated: bool = False
    bf16: float = 0.0
    fp8_tensor: float = 0.0
    fp8_row: float = 0.0
    fp8_block: float = 0.0
    fp8_group: float = 0.0
    processors: int = 1
    casts: float = 0.0
    launch: float = 0.0
    start: float = 0.0
    host_link: float = 0.05
    blockwise: bool = False
    grouped: bool = False
    measured: bool = False
    why_not: str = ""

    def rate(self, granularity: str) -> float:
        """Return the FP8 TFLOP/s of a matmul that fills the device: "tensor" (both operands), "row" (either), "block"
        (of one, groups of the other) or "group" (of both)."""
        rates = {"tensor": self.fp8_tensor, "row": self.fp8_row, "block": self.fp8_block, "group": self.fp8_group}
        return rates[granularity]

    def filled(self, tiles: int) -> float:
        """Return the share of the device that works on so many tiles of an output, on average over its rounds.

        Matmuls with scales of rows, groups or blocks give each tile of 128 × 128 to one multiprocessor, where those of
        BF16 and of tensor scales share one among several if there are few: [768, 768] of 16384 tokens has 36 tiles, and
        takes an H200 over 3 times what its FLOPs would (`benchmarks/micro/matmul.py`).
        """
        return tiles / round_up(tiles, self.processors) if tiles else 1.0


def _gpu(name: str, *rates: float, **more: bool) -> Device:
    return Device(name, True, False, *rates, **more)  # type: ignore[arg-type]


# name; TFLOP/s: BF16, then FP8 by tensor, row, block, group; processors; casts, launch, start
TABLE = {
    "H200": _gpu("H200", 680, 1210, 1180, 1050, 835, 132, 3.6, 3.0, 10.0, blockwise=True, grouped=True, measured=True),
    "H100": _gpu("H100", 700, 1190, 1140, 1000, 795, 132, 2.5, 3.0, 10.0, blockwise=True, grouped=True),
    "H20": _gpu("H20", 135, 270, 260, 230, 180, 78, 2.9, 3.0, 10.0, blockwise=True, grouped=True),
    "B200": _gpu("B200", 1600, 3000, 2800, 2600, 2070, 148, 5.5, 3.0, 10.0),
    "L40S": _gpu("L40S", 300, 580, 560, 500, 400, 142, 0.7, 3.0, 10.0),
    "L4": _gpu("L4", 90, 180, 170, 160, 127, 58, 0.28, 3.0, 10.0),
    "RTX 4090": _gpu("RTX 4090", 160, 310, 300, 280, 220, 128, 0.83, 3.0, 10.0),
}
GENERIC = {8: TABLE["L40S"], 9: TABLE["H100"], 10: TABLE["B200"], 12: TABLE["RTX 4090"]}


def describe(device: torch.device) -> Device:
    """Return the table's row for `device`; for a CPU a row that emulates FP8, for an older GPU one that has none."""
    if device.type == "cpu":
        return Device("cpu", False, emulated=True, why_not="a CPU has no FP8 matmul units")
    if device.type != "cuda":
        return Device(device.type, False, why_not=f"no FP8 matmul on device type {device.type!r}")
    if torch.version.hip is not None:
        return Device("rocm", False, why_not="FP8 on ROCm is not supported")
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < (8, 9):
        why = f"{properties.name} has no FP8 matmul units (compute capability {properties.major}.{properties.minor})"
        return Device(properties.name, False, why_not=why)
    for name in sorted(TABLE, key=len, reverse=True):
        if name in properties.name:
            return TABLE[name]
    return GENERIC.get(properties.major, TABLE["H100"])
