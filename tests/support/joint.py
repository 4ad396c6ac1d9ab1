"""The graph of forward and backward that passes are given, without a compilation around it.

    traced = joint(model, x, labels, chunk_loss=40)     much as Dynamo and AOT Autograd would hand it over
    traced.run()                                        all passes of that stage, verified; returns the plan
    traced.results()                                    what the graph computes now: the output, then all gradients

It takes less than a compilation. Names of modules and the origin of nodes are missing, and tensors that the model reads
from elsewhere cannot be traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, func, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fp8compile import devices
from fp8compile.options import Options
from fp8compile.passes import pipeline
from fp8compile.passes.core.compilation import Compilation, Input
from fp8compile.plan.plan import Plan


class Joint:
    """A graph of `parameters` and further `inputs`, the last of which is the gradient of its output, and what passes
    are told of it."""

    def __init__(self, gm: fx.GraphModule, parameters: dict[str, Tensor], inputs: list[Tensor], options: Any) -> None:
        *primals, tangent = gm.graph.find_nodes(op="placeholder")
        tangent.target = "tangents_1"
        self.gm, self.given = gm, [*parameters.values(), *inputs]
        device = devices.describe(inputs[0].device)
        self.compilation = Compilation(gm.graph, Options.parse(options), device, Plan())
        names = [*parameters, *[""] * (len(inputs) - 1)]
        self.compilation.inputs = {
            node.name: Input(bool(name), name=name) for node, name in zip(primals, names, strict=True)
        }

    def run(self) -> Plan:
        c = self.compilation
        pipeline.run_stage(c)
        c.plan.matmuls = c.matmuls.rows()
        return c.plan

    def results(self, gradient: Tensor | None = None) -> list[Tensor]:
        """Of a gradient of ones, if none is given."""
        *given, ones = self.given
        with torch.no_grad():
            graph = fx.GraphModule(self.gm, self.compilation.graph)
            return list(fx.Interpreter(graph).run(*given, ones if gradient is None else gradient))


def joint(model: nn.Module, *inputs: Tensor, **options: Any) -> Joint:
    """Trace `model`, which returns one tensor, and the gradients of its parameters, then of its inputs."""
    named: dict[str, Tensor] = dict(model.named_parameters())

    def both(parameters: list[Tensor], inputs: list[Tensor], tangent: Tensor) -> list[Tensor]:
        y = func.functional_call(model, dict(zip(named, parameters, strict=True)), tuple(inputs))
        wanted = [t for t in (*parameters, *inputs) if t.requires_grad]
        return [y, *torch.autograd.grad(y, wanted, tangent)]

    with torch.no_grad():
        tangent = torch.ones_like(model(*inputs))
    given = list(named.values()), list(inputs), tangent
    gm = make_fx(both, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    gm.graph.eliminate_dead_code()
    return Joint(gm, named, [*inputs, tangent], options)
