"""Gather as FP8: activations and gradients that ranks gather for an FP8 matmul are cast before they are gathered.

Before      %y = all_gather(%x)   %q = fp8.quantize(%y, …)                     two bytes an element travel
After       %q = fp8.quantize(%x, …)   %y = all_gather(%q)                     one, and the amaxes of rows

`passes/collectives/quantize_before_collective.py` says why the values are the same, bit for bit, and how. That needs
every reader to be such a cast, and fewer bytes: an activation that is cast by rows for its output and once more for its
grad_weight would travel twice. With wire="fp8" that one is cast by rows alone, and what else reads it reads the rounded
values, as backward does with all that is saved in FP8. Small tensors stay as they are: amaxes are a collective of their
own.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8compile.passes.collectives.quantize_before_collective import Cast, Early, Readers, readers_of
from fp8compile.passes.core.collectives import ALL_GATHER, NAMES, Journey, erase, journeys
from fp8compile.passes.core.compilation import Compilation, dependents, is_tangent, sort_topologically, value
from fp8compile.passes.core.marker_views import Quantize
from fp8compile.passes.core.node_views import first_input
from fp8compile.passes.core.origin import module_path, source_line
from fp8compile.passes.matmul import share_casts
from fp8compile.passes.save.saved_forms import count, dtype_name
from fp8compile.plan.rows import Transfer

LEAST = 2**22  # bytes that must be saved: 12 µs of a link of 360 GB/s, for the two or three launches that are added
SAME = "cast before it travels: the same values"


def run(c: Compilation) -> None:
    """Move casts in front of all-gathers, and say of each all-gather what became of it."""
    moved = [journey for journey in journeys(c.graph, ALL_GATHER) if _gather(c, journey)]
    finish(c, moved)


def finish(c: Compilation, moved: list[Journey]) -> None:
    """Put the graph in order after these journeys have been replaced."""
    if moved:
        sort_topologically(c.graph)
        for journey in reversed(moved):
            erase(c, journey)
        share_casts.run(c)


def _gather(c: Compilation, journey: Journey) -> bool:
    x = value(journey.source)
    if not x.is_floating_point() or x.element_size() == 1:
        return False
    readers = readers_of(journey)
    casts, reason = [*readers.early], SAME
    why = why_none(c, journey) or readers.why_plain or ("" if casts else readers.why_late)
    exact = why_inexact(readers, x)
    if not why and exact:
        casts, reason = casts[:1], f"wire='fp8': cast before it travels; what else reads it reads {casts[0]}"
        if c.options.wire != "fp8":
            why = f"{exact}; wire='fp8' makes one cast of it"
        elif not _pays(casts, x):
            why = "its rows are too short for scales"
    why = why or why_small(c, journey, casts)
    record(c, journey, [] if why else casts, why or reason)
    if why:
        return False
    early = Early(c, journey)
    if exact:
        replace_rounded(early, readers, casts[0])
    else:
        replace_exactly(early, readers)
    return True


def why_none(c: Compilation, journey: Journey) -> str:
    """Return why nothing can be cast before this journey; "" if something can."""
    x = value(journey.source)
    if c.options.wire == "bf16":
        return "wire='bf16'"
    return "" if x.dim() > 1 and isinstance(x.shape[-1], int) else "it has no rows of a known size"


def why_inexact(readers: Readers, x: torch.Tensor) -> str:
    """Return why not every reader can have the same values of fewer bytes; "" if they can."""
    if readers.late:
        return readers.why_late
    casts = [*readers.early]
    return "" if _pays(casts, x) else f"{' and '.join(map(str, casts))} together are no fewer bytes"


def _pays(casts: list[Cast], x: torch.Tensor) -> bool:
    """Return True if all payloads together are fewer bytes than the tensor."""
    return sum(cast.bytes_a_row(x.shape[-1]) for cast in casts) < x.shape[-1] * x.element_size()


def replace_exactly(early: Early, readers: Readers) -> None:
    """Let every reader read what was cast before."""
    for amax in readers.amaxes:
        early.replace_amax(amax)
    for quantizes in readers.early.values():
        for quantize in quantizes:
            early.replace_cast(quantize)


def replace_rounded(early: Early, readers: Readers, cast: Cast) -> None:
    """Let the casts like `cast` read what was cast before, and all other readers the rounded values."""
    kept = readers.early.get(cast, [])
    needed = {node for quantize in kept for node in _amaxes_of(Quantize(quantize).scale)}
    for amax in [node for node in readers.amaxes if node in needed]:
        early.replace_amax(amax)
    for quantize in kept:
        early.replace_cast(quantize)
    rounded: dict[fx.Node, fx.Node] = {}
    for shown, reader in [*early.journey.readers()]:
        if shown not in rounded:
            rounded[shown] = early.values(shown, cast)
        reader.replace_input_with(shown, rounded[shown])


def _amaxes_of(scale: fx.Node) -> list[fx.Node]:
    """Return the amax that a scale is made of, and the one that this is made of."""
    amax = first_input(scale)
    return [amax, *(n for n in amax.all_input_nodes if n.target is amax.target)]


def why_small(c: Compilation, journey: Journey, casts: list[Cast]) -> str:
    """Return why it would save too little to be worth a collective of amaxes; "" if it saves enough."""
    before, after = _bytes(journey, casts)
    if c.options.select == "all" or before - after >= LEAST:
        return ""
    return f"{before - after} bytes less: one more collective costs more (select='all' moves it)"


def _bytes(journey: Journey, casts: list[Cast]) -> tuple[int, int]:
    """Return what a rank has afterwards, in bytes: as values, and as these payloads with their amaxes."""
    x, arrived = value(journey.source), value(journey.arrival)
    rows, cols = count(arrived.shape[:-1]), count(arrived.shape[-1:])
    return rows * cols * x.element_size(), rows * sum(cast.bytes_a_row(cols) for cast in casts)


def record(c: Compilation, journey: Journey, casts: list[Cast], reason: str) -> None:
    """Return the plan's row for a collective: `casts`: those made before it, none where it moves the values."""
    x, arrived = value(journey.source), value(journey.arrival)
    before, after = _bytes(journey, casts)
    backward = journey.collective in dependents(c.graph, (n for n in c.graph.nodes if is_tangent(n)))
    row = Transfer(
        journey.collective.name,
        module_path(journey.collective),
        source_line(journey.collective),
        NAMES[journey.collective.target],
        "backward" if backward else "forward",
        tuple(n if isinstance(n, int) else str(n) for n in arrived.shape),
        dtype_name(x),
        " and ".join(map(str, casts)) or dtype_name(x),
        before,
        after if casts else before,
        reason,
    )
    c.plan.transfers.append(row)
