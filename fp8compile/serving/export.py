"""Export a model with FP8 weights, as files that Transformers loads, in formats that servers share.

run = torch.compile(model, backend="fp8");  …train…
print(fp8compile.export(model, "my-model-fp8"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8compile.adaptive.adaptive_graph import adaptive_graphs
from fp8compile.errors import CheckpointError, OptionError
from fp8compile.formats import E4M3
from fp8compile.plan import store
from fp8compile.plan.cast_statistics import Statistics
from fp8compile.plan.plan import Plan
from fp8compile.serving.choose_layers import by_name, choose
from fp8compile.serving.freed_modules import refuse_freed
from fp8compile.serving.layouts import FINE_GRAINED, Layout, layout_called
from fp8compile.serving.stacked_experts import refusals
from fp8compile.serving.tensors import ranks_of, refuse_meta, unwrapped, written
from fp8compile.serving.write_folder import names_in_files, reverting, whole_folder, write_config, write_tensors

MIB = 2**20


@dataclass(frozen=True)
class Exported:
    """Say what was written. quantized: names of layers, and of modules with stacked experts; kept: those that are not
    FP8, with the reason.

    bytes: of all tensors in files; before: of the same as the model has them.
    """

    folder: Path
    format: str
    quantized: tuple[str, ...]
    kept: Mapping[str, str] = field(default_factory=dict)
    bytes: int = 0
    before: int = 0

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: {len(self.quantized)} layers in FP8 ({self.format}), {self.bytes / MIB:.1f} MiB; "
            f"the model has {self.before / MIB:.1f} MiB"
        ]
        lines += [f"  not in FP8: {name}: {reason}" for name, reason in self.kept.items()]
        return "\n".join(lines)


def export(
    model: nn.Module,
    folder: str | PathLike[str],
    format: str = "block",
    *,
    layers: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    statistics: Statistics | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write `model` to `folder` with FP8 weights, and return what was done; print it to see which layers stayed.

    format: "block" (128×128, Transformers' fine-grained FP8), "channel" or "tensor" (compressed-tensors).
    layers: patterns of layers that become FP8, as of option `skip`; by default those whose output matmul ran in FP8 in
    this process. skip: patterns of layers that do not.
    statistics: of a `Watched` model (`fp8compile.watch`): scales of activations are written, for servers that take no
    maximum at run time; by default they do ("dynamic").
    A sharded model is exported by all of its ranks together; each writes a part, and holds one tensor at a time. Any
    other is exported by the one process that calls this: under DistributedDataParallel let one rank do so.

    Raises `OptionError`, `CheckpointError` (also for a model on the meta device) and `FreedWeightError`; the folder is
    there as a whole or not at all.
    """
    layout = layout_called(format)
    model = unwrapped(model)
    refuse_freed(model, "exported: export before that")
    refuse_meta(model, "nothing was written")
    revert = reverting(model)
    choice = choose(model, _plans(), layers, skip, layout, refusals(model, layout, revert))
    scales = _input_scales(statistics, layout, choice.quantized, model) if statistics is not None else {}
    ranks, path = ranks_of(model), Path(folder)
    with whole_folder(path, overwrite, ranks) as partial:
        tensors = written(model, layout, choice.quantized, choice.experts, scales, revert, ranks)
        total = write_tensors(partial, tensors, ranks)
        if ranks.rank == 0:
            kept = names_in_files(model, choice.kept, revert)
            write_config(partial, model, layout.config(kept, bool(scales)))
    before = sum(p.numel() * p.itemsize for p in (*model.parameters(), *model.buffers()))
    return Exported(path, format, (*choice.quantized, *choice.experts), choice.kept, total, before)


def _plans() -> list[Plan]:
    """Return the plans of this process, without those that the automatic mode has replaced."""
    replaced = {id(plan) for graph in adaptive_graphs() for plan in graph.replaced}
    return [plan for plan in store.compiles() if id(plan) not in replaced]


def _input_scales(
    statistics: Statistics, layout: Layout, quantized: Sequence[str], model: nn.Module
) -> dict[str, Tensor]:
    """Return the scale of each layer's input, from the largest magnitude that was seen."""
    if layout.method == FINE_GRAINED:
        raise OptionError('format="block" has no scales of activations: leave out statistics, or take "channel"')
    largest: dict[str, float] = {}
    for row in statistics.rows():
        if (row.role, row.side) == ("output", "left"):
            largest[row.path] = max(largest.get(row.path, 0.0), row.amax)
    seen = by_name(model, largest)
    if missing := [name for name in quantized if name not in seen]:
        raise CheckpointError(f"the statistics have seen nothing of {missing[0]}: watch a step of the whole model")
    least = torch.finfo(torch.float32).tiny
    return {
        name: torch.tensor(max(seen[name], least) / E4M3.max, dtype=torch.float32, device="cpu") for name in quantized
    }
