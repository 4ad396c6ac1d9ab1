"""Strides of what a compiled graph returns: of bases as of the model's own outputs.

Of outputs that are views of one intermediate result AOTAutograd has the graph return that result, and takes the views
of it when the graph has run, with the sizes that it has seen. Inductor keeps the strides of the model's own outputs
alone: of a base that it lays out otherwise (a matmul whose columns were filled up and cut off again) there may be no
such view.
"""

from __future__ import annotations

from torch import fx
from torch._functorch._aot_autograd.descriptors import IntermediateBaseAOTOutput  # what an output of a graph is

VISIBLE = "user_visible_output_idxs"  # Inductor's: outputs whose strides it keeps


def keep_strides_of_bases(gm: fx.GraphModule) -> None:
    """Have Inductor keep the strides of outputs that others are views of."""
    meta = gm.graph.output_node().meta
    outputs = gm.graph.output_node().args[0]
    if VISIBLE not in meta or not isinstance(outputs, (list, tuple)):
        return
    bases = [
        n
        for n, (node, desc) in enumerate(zip(outputs, meta.get("desc") or [], strict=False))
        if isinstance(desc, IntermediateBaseAOTOutput) and isinstance(node, fx.Node)
    ]
    meta[VISIBLE] = sorted({*meta[VISIBLE], *bases})
