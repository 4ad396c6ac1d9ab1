"""Inputs of the scale model: a machine's figures with their sources, shapes of models, how they are trained, systems.

Units: bytes, seconds, tokens and GPUs as they are; `Machine` alone has TFLOP/s, TB/s, GB/s and µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.scaling.scale_vision import Vision

GIB = 1 << 30
BF16, FP32 = 2, 4  # bytes an element
GROUP = 1 + 4 / 128  # bytes of an element kept as E4M3 in groups of 128, each with an FP32 scale
HOST = 8  # GPUs of a host, all joined by NVLink


def positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}: it must be one of {', '.join(map(repr, allowed))}")


def given(value: float, unit: str, source: str) -> Any:
    """Return a figure of a machine, with its unit and where it comes from."""
    return field(default=value, metadata={"unit": unit, "source": source})


RATES = ("bf16", "fp8", "attention", "memory", "adamw_fp32", "adamw_bf16", "adamw_8bit", "nvlink", "infiniband")


@dataclass(frozen=True)
class Machine:
    """What the model is told: rates, links, and what was fitted. Defaults: H200s, eight a host."""

    bf16: float = given(680, "TFLOP/s", "measured: `fp8compile/devices.py`, H200")
    fp8: float = given(1210, "TFLOP/s", "measured: `fp8compile/devices.py`, H200, tensor scales")
    attention: float = given(464, "TFLOP/s", "measured: two Llama-8B blocks, 4 × 4096 tokens: 8.3 ms, an earlier run")
    memory: float = given(2.6, "TB/s", "measured: casts as Inductor compiles them into a step")
    adamw_fp32: float = given(3.47, "TB/s", "measured: docs/optimizer.md, fused, FP32 states: 28 bytes, 7.04 ms")
    adamw_bf16: float = given(2.75, "TB/s", "measured: docs/optimizer.md, fused, BF16 states: 14 bytes, 4.44 ms")
    adamw_8bit: float = given(3.46, "TB/s", "measured: docs/optimizer.md, 8-bit states: 10.25 bytes, 2.58 ms")
    nvlink: float = given(360, "GB/s", "assumed: 80 % of the vendor's 450 a direction and GPU")
    infiniband: float = given(50, "GB/s", "assumed: 400 Gb/s a GPU")
    hop_nvlink: float = given(3.4, "µs", "NCCL, src/graph/tuning.cc: a step of a ring, protocol Simple")
    hop_network: float = given(9.6, "µs", "NCCL, src/graph/tuning.cc: likewise, between hosts")
    overlap: float = given(0.83, "", "fitted: the three rows that gather BF16, of `benchmarks/results/fsdp.json`")
    reserve: float = given(5, "GiB", "assumed: CUDA context, NCCL, fragmentation; for `--memory` alone")

    def __post_init__(self) -> None:
        for name in RATES:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name):g}: a rate must be above 0")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap is {self.overlap:g}: it must be between 0 and 1")
        if min(self.hop_nvlink, self.hop_network, self.reserve) < 0:
            raise ValueError("hop_nvlink, hop_network and reserve must not be negative")


H200 = Machine()
# Rates that nobody measured: those of fp8compile/devices.py, scaled from the vendor's peaks; attention like matmuls.
H100 = Machine(bf16=700, fp8=1190, attention=464 * 700 / 680, memory=1.8)
MACHINES = {"h200": H200, "h100": H100}


# ---- what is trained ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A Llama: `layers` blocks of attention and SwiGLU, an embedding and a head. vocabulary 0: blocks alone."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "kv_heads", "inner"):
            positive(name, getattr(self, name))
        if self.vocabulary < 0:
            raise ValueError(f"vocabulary is {self.vocabulary}: it must be 0 (no embedding, no head) or more")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}")

    @property
    def kv(self) -> int:
        """Features of all keys of a token; of all values as many."""
        return self.width // self.heads * self.kv_heads

    @property
    def layer(self) -> int:
        """Parameters of a block's linear layers."""
        return self.width * (2 * self.width + 2 * self.kv + 3 * self.inner)

    @property
    def last(self) -> int:
        """Parameters of a block's last matmul."""
        return self.width * self.inner

    @property
    def pairs(self) -> float:
        """Share of all pairs of tokens that attention sees."""
        return 0.5

    @property
    def table(self) -> int:
        """Parameters of the head; of the embedding as many."""
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.table * (1 if self.tied else 2)


MODELS = {
    "llama-1b": Model(2048, 16, 32, 8, 8192, 128256, tied=True),
    "llama-8b": Model(4096, 32, 32, 8, 14336, 128256),
    "llama-13b": Model(5120, 40, 40, 40, 13824, 32000),
    "llama-70b": Model(8192, 80, 64, 8, 28672, 128256),
}


@dataclass(frozen=True)
class Job:
    """How a model is trained: batch sequences of `sequence` tokens on each of `gpus` GPUs.

    vision: a tower in front of the model; tokens of images count in `sequence`.
    sharding: `full` over all GPUs, or `hybrid`: within a host, replicated over hosts.
    checkpoint: `none`, or `full`: of a layer its input is kept, and its forward runs again.
    parameter: bytes of a parameter, 4 or 2; plain states and gradients at rest have the same dtype.
    """

    model: Model
    gpus: int
    batch: int = 1
    sequence: int = 8192
    sharding: str = "full"
    checkpoint: str = "none"
    parameter: int = FP32
    vision: Vision | None = None

    def __post_init__(self) -> None:
        for name in ("gpus", "batch", "sequence"):
            positive(name, getattr(self, name))
        one_of("sharding", self.sharding, ("full", "hybrid"))
        one_of("checkpoint", self.checkpoint, ("none", "full"))
        one_of("parameter", self.parameter, (FP32, BF16))
        if self.gpus > HOST and self.gpus % HOST:
            raise ValueError(f"{self.gpus} GPUs do not fill hosts of {HOST}: give {HOST} or fewer, or a multiple")

    @property
    def tokens(self) -> int:
        """Of one GPU."""
        return self.batch * self.sequence

    @property
    def shards(self) -> int:
        """GPUs that share one copy of the parameters."""
        return self.gpus if self.sharding == "full" else min(self.gpus, HOST)


# ---- systems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerToken:
    """Bytes a token and layer: width · width of the model + kv · features of keys + inner · that of SwiGLU + …"""

    width: float = 0
    kv: float = 0
    inner: float = 0
    heads: float = 0
    constant: float = 0

    def of(self, model: Model | Vision) -> float:
        sizes = self.width * model.width + self.kv * model.kv + self.inner * model.inner
        return sizes + self.heads * model.heads + self.constant


@dataclass(frozen=True)
class System:
    """A way to train.

    forward, backward: bytes that kernels other than matmuls and attention move (docs/scale.md counts them).
    saved: bytes kept from forward to backward. working: the most that backward of a layer holds beside them.
    gather: bytes an element of a layer on the wire.
    gather_overhead: seconds a layer and step that FP8 gather adds beyond what is counted, fitted to its one row.
    """

    name: str
    fp8: bool
    forward: PerToken
    backward: PerToken
    saved: PerToken
    working: PerToken
    gather: int = BF16
    gather_overhead: float = 0.0
    eight_bit: bool = False
    chunked_loss: bool = False

    def state(self, job: Job) -> float:
        """Bytes of optimizer state a parameter, both moments."""
        return 2.125 if self.eight_bit else 2 * job.parameter

    def gathers_fp8(self, job: Job) -> bool:
        return self.gather == 1 and job.gpus > 1

    def cast_bytes(self, job: Job) -> tuple[int, int]:
        """Bytes a parameter of a layer that casts of its weight move, forward and backward.

        Forward reads a BF16 weight for its amax, and reads it again to write FP8; backward, which gathers it anew,
        reads and writes once. A payload that was gathered is transposed in backward.
        """
        if not self.fp8:
            return 0, 0
        return (0, 2) if self.gathers_fp8(job) else (5, 3)

    def copy_bytes(self, job: Job) -> int:
        """Bytes a parameter of FP8 weights that a layer makes: of both layouts, or of what was gathered the other."""
        return (1 if self.gathers_fp8(job) else 2) if self.fp8 else 0


LSE = {"heads": 4, "constant": 8}  # FP32: attention's log-sum-exp, and the two norms' statistics
BF16_COMPILE = System(
    "BF16",
    False,
    forward=PerToken(22, 4, 6),
    backward=PerToken(26, 4, 10),
    saved=PerToken(14, 4, 6, **LSE),
    working=PerToken(inner=3.4),
)
TORCHAO = System(
    "torchao tensorwise",
    True,
    forward=PerToken(37, 4, 11),
    backward=PerToken(50, 16, 24),
    saved=PerToken(8, 4, 4, **LSE),
    working=PerToken(inner=9.2),
)
OURS = System(
    "ours",
    True,
    forward=PerToken(25, 7, 7),
    backward=PerToken(44, 19, 13),
    saved=PerToken(2 + 2 + 2 * GROUP, 2 + GROUP, 2 * GROUP, heads=4, constant=8),
    working=PerToken(inner=6.0),
    chunked_loss=True,
)
TORCHAO_GATHER = replace(TORCHAO, name="torchao tensorwise + FP8 gather", gather=1, gather_overhead=0.9e-3)
OURS_GATHER = replace(OURS, name="ours + FP8 gather", gather=1, gather_overhead=1.2e-3)
OURS_ALL = replace(OURS_GATHER, name="ours + FP8 gather, 8-bit states", eight_bit=True)
OURS_EIGHT_BIT = replace(OURS, name="ours, 8-bit states", eight_bit=True)
SYSTEMS = (BF16_COMPILE, OURS, OURS_ALL)  # what the command line shows; with --more the others too
PEERS = (TORCHAO, TORCHAO_GATHER, OURS_GATHER, OURS_EIGHT_BIT)
