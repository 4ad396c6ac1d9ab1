"""The stages of a compilation at which passes run, and what a pass is given at each.

    DYNAMO       Dynamo's graph, before AOTAutograd traces it                                     DynamoGraph
    JOINT        the joint graph of forward and backward, or one for inference                    Compilation
    CUT          the joint graph, when it is decided what the forward half keeps for backward     Cut
    EARLY_HALF   a forward, backward or inference graph, before Inductor's own passes             HalfGraph
    HALF         the same after them, or at once where the graph is run node by node              HalfGraph
    LATE_HALF    the same, whatever became of it: nothing comes between it and Inductor's code    HalfGraph
    OPTIMIZER    an optimizer's graph, after Inductor's own passes                                OptimizerGraph

`Compilation` is defined in `passes/core/compilation.py`, `Cut` in `passes/save/save_as_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, fx

from fp8compile.options import Options
from fp8compile.plan.rows import Lowered


class Stage(Enum):
    """When a pass runs."""

    DYNAMO = "dynamo"
    JOINT = "joint"
    CUT = "cut"
    EARLY_HALF = "early half"
    HALF = "half"
    LATE_HALF = "late half"
    OPTIMIZER = "optimizer"


@dataclass
class StageGraph:
    """A graph at one stage, which passes rewrite in place. running: the name of the pass that ran last."""

    graph: fx.Graph
    options: Options
    stage: Stage = field(kw_only=True)
    running: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """The name of the graph in errors and dumps: "joint", "forward", …"""
        return self.stage.value


@dataclass(frozen=True)
class UnscaledGradients:
    """The gradients that a step unscales, by id, and the numbers that it reads: 1/scale and overflow, FP32, 0-d."""

    gradients: frozenset[int]
    numbers: tuple[Tensor, Tensor]


@dataclass
class DynamoGraph(StageGraph):
    """Dynamo's graph in its module, and the inputs that it was traced with.

    is_step: True for the graph of an optimizer with 8-bit states. unscaling: of a step whose loss is scaled.
    opened: the state, and the part of it, that each buffer is which passes have added. added: names of other buffers.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    is_step: bool = False
    unscaling: UnscaledGradients | None = None
    opened: dict[str, tuple[str, str]] = field(default_factory=dict)
    added: list[str] = field(default_factory=list)
    stage: Stage = field(default=Stage.DYNAMO, kw_only=True)


@dataclass
class HalfGraph(StageGraph):
    """A forward, backward or inference graph (`half`) after the cut.

    executor: "operators" where the graph is run node by node; "triton" or "inductor" where Inductor compiles it, with
    our kernels or without. lowered: what the passes made of it.
    """

    half: str
    executor: str
    lowered: Lowered = field(default_factory=Lowered)
    stage: Stage = field(default=Stage.HALF, kw_only=True)

    @property
    def name(self) -> str:
        """The name of the graph in errors and dumps: "forward", "backward", "inference"."""
        return self.half


@dataclass
class OptimizerGraph(StageGraph):
    """An optimizer's graph. overflow: the number that says whether the step is skipped, where gradients are unscaled.

    lowered: what the passes merged.
    """

    overflow: fx.Node | None
    lowered: Lowered = field(default_factory=Lowered)
    stage: Stage = field(default=Stage.OPTIMIZER, kw_only=True)
