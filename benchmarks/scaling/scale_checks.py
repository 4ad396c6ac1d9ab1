"""The scale model beside everything that was measured, and the tables of docs/scale.md.

    python -m benchmarks.scaling.scale_checks    print them, and what a fit gives: inputs of scale_inputs.py
    python -m benchmarks.scaling.scale_checks --write
        put them into docs/scale.md; a test says when that is not up to date

A page has `<!-- scale: name -->` and `<!-- end of scale -->` around each table.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness.columns import MISSING, markdown
from benchmarks.scaling.scale_inputs import (
    BF16,
    BF16_COMPILE,
    GIB,
    H100,
    H200,
    MODELS,
    OURS,
    OURS_ALL,
    OURS_EIGHT_BIT,
    OURS_GATHER,
    SYSTEMS,
    TORCHAO,
    TORCHAO_GATHER,
    Job,
    Machine,
    Model,
    System,
)
from benchmarks.scaling.scale_model import largest_batch, optimizer, predict
from benchmarks.scaling.scale_vision import Vision, vision_of
from configs import CONFIGS, VISION_LANGUAGE, Pretraining

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "scale.md"
PLACE = re.compile(r"(<!-- scale: (\w+) -->\n).*?(<!-- end of scale -->)", re.DOTALL)
BLOCKS = Model(4096, 8, 32, 8, 14336, 0)  # of Llama-8B
ON_TWO, ON_FOUR = Job(BLOCKS, 2, 2, 4096), Job(BLOCKS, 4, 2, 4096)


@dataclass(frozen=True)
class Step:
    """A measured training step. ms and peak_gib: what was measured of it, if it was."""

    what: str
    job: Job
    system: System
    ms: float | None
    peak_gib: float | None


# ---- measured -------------------------------------------------------------------------------------------------------


@cache
def results(name: str) -> dict[str, dict[str, Any]]:
    """Rows of a file of results, by name."""
    return {row["name"]: row for row in json.loads((RESULTS / name).read_text())["rows"]}


def two_gpus() -> list[Step]:
    """Return what numbers of the model were fitted to."""
    return sharded(ON_TWO, "fsdp.json")


def four_gpus() -> list[Step]:
    """Return what nothing was fitted to."""
    return sharded(ON_FOUR, "fsdp_4gpus.json")


def sharded(job: Job, file: str) -> list[Step]:
    """Return the rows of a file of `fsdp.py`."""
    found = []
    for system in (BF16_COMPILE, TORCHAO, TORCHAO_GATHER, OURS, OURS_GATHER):
        row = results(file)[system.name.replace("BF16", "bf16")]
        found.append(Step(f"8 Llama-8B blocks, {job.gpus} GPUs, 2 × 4096", job, system, row["ms"], row["peak_gib"]))
    return found


ONE_B = Job(Model(2048, 16, 32, 8, 8192, 32000), 1, 8, 2048, parameter=BF16)
EIGHT_LAYERS = Job(replace(BLOCKS, vocabulary=128256), 1, 4, 4096, parameter=BF16)
SMALL = Job(Model(768, 12, 12, 4, 3584, 256), 1, 32, 1024)
HUGGING_FACE = "Hugging Face Llama 1.1B, 8 × 2048", "8 layers of Hugging Face Llama-8B, 4 × 4096"
BYTES = "`train_lm.py --size 120m`, 32 × 1024", "the same, 64 × 1024"
ONE_GPU = (
    Step(HUGGING_FACE[0], ONE_B, BF16_COMPILE, 239.8, 29.4),
    Step(HUGGING_FACE[0], ONE_B, TORCHAO, 209.7, 23.4),
    Step(HUGGING_FACE[1], EIGHT_LAYERS, BF16_COMPILE, 473.3, 46.3),
    Step(HUGGING_FACE[1], EIGHT_LAYERS, TORCHAO, 386.3, 40.8),
    Step(BYTES[0], SMALL, BF16_COMPILE, 32 * 1024 / 553_861 * 1e3, 14.15),
    Step(BYTES[1], replace(SMALL, batch=64), BF16_COMPILE, None, 26.62),
    Step(BYTES[1], replace(SMALL, batch=64), OURS, None, 12.04),
)


@dataclass(frozen=True)
class Published:
    """Tokens/s of a GPU that others report for Llama 3 (3.1) 8B, with selective activation checkpointing."""

    source: str
    machine: str
    gpus: int
    batch: int
    system: System
    tokens_per_second: float


TITAN = "torchtitan, 2024-12"
TRAINY = "Trainy in torchtitan, 2025-06"
AO = "torchao's README"
PUBLISHED = (
    Published(TRAINY, "h200", 32, 2, TORCHAO_GATHER, 10938),
    Published(TRAINY, "h200", 64, 2, TORCHAO_GATHER, 10753),
    Published(TITAN, "h100", 8, 2, BF16_COMPILE, 6667),
    Published(TITAN, "h100", 8, 2, TORCHAO, 8532),
    Published(TITAN, "h100", 128, 2, BF16_COMPILE, 6514),
    Published(TITAN, "h100", 128, 2, TORCHAO, 8380),
    Published(AO, "h100", 8, 1, BF16_COMPILE, 6150),
    Published(AO, "h100", 8, 1, TORCHAO_GATHER, 7690),
)


# ---- what was fitted ------------------------------------------------------------------------------------------------


def fitted_overlap() -> float:
    """Return the overlap, in hundredths, with the least squared relative errors over rows that gather in BF16."""
    rows = [s for s in two_gpus() if s.system.gather == BF16]

    def loss(overlap: float) -> float:
        machine = replace(H200, overlap=overlap)
        return sum((predict(s.job, s.system, machine).seconds * 1e3 / (s.ms or 1) - 1) ** 2 for s in rows)

    return min((i / 100 for i in range(101)), key=loss)


def fitted_gather_overhead(system: System) -> float:
    """Seconds a layer and step, in tenths of a millisecond, by which the system's 2-GPU row exceeds what is counted."""
    row = next(s for s in two_gpus() if s.system.name == system.name)
    counted = predict(row.job, replace(system, gather_overhead=0.0)).seconds
    return round(((row.ms or 0) / 1e3 - counted) / row.job.model.layers, 4)


# ---- tables ---------------------------------------------------------------------------------------------------------


def inputs() -> str:
    told = [(f.name, f"{f.default:g} {f.metadata['unit']}", f.metadata["source"]) for f in fields(Machine)]
    lines = [[f"`{name}`", value.strip(), source] for name, value, source in told]
    counted = f"{OURS_GATHER.gather_overhead * 1e3:.1f} ms (torchao {TORCHAO_GATHER.gather_overhead * 1e3:.1f})"
    source = "fitted: a layer and step, beyond what is counted; one row each of `benchmarks/results/fsdp.json`"
    return markdown(["input", "H200", "source"], [*lines, ["`gather_overhead`", counted, source]])


def error(predicted: float, measured: float) -> str:
    return f"{predicted:.4g} · {measured:.4g} · {percent(predicted, measured)}"


def percent(predicted: float, measured: float) -> str:
    return f"{round((predicted / measured - 1) * 100):+d} %".replace("-", "−")


def blocks() -> str:
    """Forward and backward of two blocks; saved: GiB a block."""
    rows = results("saved_activations.json")
    lines = []
    cases = [(BF16_COMPILE, "compile"), (TORCHAO, "tensorwise"), (OURS, "saved in FP8")]
    cases += [(BF16_COMPILE, "compile, checkpointed"), (TORCHAO, "tensorwise, checkpointed")]
    for system, name in cases:
        full = "checkpointed" in name
        job = Job(replace(BLOCKS, layers=2), 1, 4, 4096, checkpoint="full" if full else "none", parameter=BF16)
        ms = (predict(job, system).seconds - optimizer(job, system, H200)) * 1e3
        own = BF16 * job.model.width  # of the two, the first block's input is not counted, unless FP8 is made of it
        each = own if full else system.saved.of(job.model)
        saved = job.tokens * (each if system is OURS else each - own / 2) / GIB
        kept = error(saved, rows[name]["saved_gib"])
        lines.append([f"{system.name}{', checkpointed' * full}", error(ms, rows[name]["ms"]), kept])
    return markdown(["two blocks, one GPU, 4 × 4096", "ms", "saved a block, GiB"], lines)


def steps() -> str:
    lines = []
    for s in (*two_gpus(), *four_gpus(), *ONE_GPU):
        p = predict(s.job, s.system)
        ms = MISSING if s.ms is None else error(p.seconds * 1e3, s.ms)
        lines.append([s.what, s.system.name, ms, MISSING if s.peak_gib is None else error(p.peak / GIB, s.peak_gib)])
    return markdown(["whole steps", "system", "ms", "peak, GiB"], lines)


def published() -> str:
    lines = []
    for row in PUBLISHED:
        machine = H200 if row.machine == "h200" else H100
        job = Job(MODELS["llama-8b"], row.gpus, row.batch)
        full, none = (predict(replace(job, checkpoint=c), row.system, machine) for c in ("full", "none"))
        between = f"{full.tokens_per_second:,.0f} – {none.tokens_per_second:,.0f}"
        where = f"{row.gpus} {row.machine.upper()}, {row.batch} × 8192"
        measured = f"{row.tokens_per_second:,.0f}"
        errors = " – ".join(percent(p.tokens_per_second, row.tokens_per_second) for p in (full, none))
        lines.append([row.source, where, row.system.name, between, measured, errors])
    head = ["source", "GPUs, batch", "system", "predicted: full – no checkpointing", "published", "errors"]
    return markdown(head, lines)


def predictions() -> str:
    cases = [("llama-8b", "full", "none"), ("llama-70b", "full", "none"), ("llama-70b", "full", "full")]
    cases.append(("llama-70b", "hybrid", "full"))
    lines = []
    for name, sharding, checkpoint in cases:
        for gpus in (8, 64, 512):
            if sharding == "hybrid" and gpus == 8:
                continue
            job = Job(MODELS[name], gpus, sharding=sharding, checkpoint=checkpoint)
            label = f"{name}{', checkpointed' * (checkpoint == 'full')}{', hybrid' * (sharding == 'hybrid')}"
            lines.append([label, str(gpus), *(cell(job, s) for s in SYSTEMS)])
    return markdown(["1 × 8192 tokens a GPU", "GPUs", *(s.name for s in SYSTEMS)], lines)


def cell(job: Job, system: System) -> str:
    p = predict(job, system)
    if largest_batch(job, system, 141) < job.batch:
        return f"does not fit ({p.peak / GIB:.0f} GiB)"
    return f"{p.tokens_per_second:,.0f} · {p.seconds * 1e3:.0f} ms · {p.peak / GIB:.0f} GiB"


def batch() -> str:
    """Return the largest batch in 80 and in 141 GiB, of 8192 tokens."""
    lines = []
    for name, gpus in (("llama-8b", 8), ("llama-8b", 64), ("llama-13b", 8), ("llama-70b", 64), ("llama-70b", 512)):
        for checkpoint in ("none", "full"):
            job = Job(MODELS[name], gpus, checkpoint=checkpoint)
            sizes = [[str(largest_batch(job, s, gib)) for gib in (80, 141)] for s in (*SYSTEMS, OURS_EIGHT_BIT)]
            lines.append([f"{name}, {gpus} GPUs{', checkpointed' * (checkpoint == 'full')}", *map(" · ".join, sizes)])
    return markdown(["in 80 · 141 GiB", *(s.name for s in (*SYSTEMS, OURS_EIGHT_BIT))], lines)


def links() -> str:
    """Return what a slower network costs Llama-8B on 64 GPUs: tokens/s of a GPU."""
    lines = []
    for rate in (50, 25, 12.5, 6.25, 3.125):
        machine = replace(H200, infiniband=rate)
        job = Job(MODELS["llama-8b"], 64)
        speeds = [predict(job, s, machine).tokens_per_second for s in (BF16_COMPILE, OURS, OURS_ALL)]
        speeds.append(predict(replace(job, sharding="hybrid"), OURS, machine).tokens_per_second)
        lines.append([f"{rate:g}", *(f"{speed:,.0f}" for speed in speeds)])
    return markdown(["GB/s a GPU between hosts", "BF16", "ours", OURS_ALL.name, "ours, hybrid sharding"], lines)


def job_of(c: Pretraining, vision: Vision | None = None) -> Job:
    model = Model(c.width, c.layers, c.heads, c.kv_heads, c.inner, c.vocabulary)
    return Job(model, c.gpus, c.batch, c.sequence, checkpoint="full" if c.checkpoint else "none", vision=vision)


def configurations() -> str:
    """Return what the configurations of examples/configs.py should take."""
    cases = [(name, c, job_of(c), "") for name, c in CONFIGS.items() if name != "tiny"]
    for name, c in VISION_LANGUAGE.items():
        images = f", {c.images} image{'s' * (c.images > 1)} each{', tower frozen' * c.tower.frozen}"
        cases.append((name, c.language, job_of(c.language, vision_of(c)), images))
    lines = []
    for name, c, job, images in cases:
        system = OURS_ALL if c.gather else OURS_EIGHT_BIT
        where = f"{c.batch} × {c.sequence}{images}{', checkpointed' * c.checkpoint}{', FP8 gather' * c.gather}"
        fits = [str(largest_batch(job, system, gib)) for gib in (80, 141)]
        lines.append(
            [f"`{name}`", str(c.gpus), where, f"{c.global_batch / 2**20:g} Mi", cell(job, system), " · ".join(fits)]
        )
    head = ["configuration", "GPUs", "a GPU's batch", "global batch, tokens", "tokens/s of a GPU · step · peak"]
    return markdown([*head, "largest batch in 80 · 141 GiB"], lines)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (inputs, blocks, steps, published, predictions, batch, links, configurations)
}


def filled(page: str) -> str:
    """Return a page with its tables."""
    return PLACE.sub(lambda place: f"{place[1]}{TABLES[place[2]]()}{place[3]}", page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    if parser.parse_args(arguments).write:
        PAGE.write_text(filled(PAGE.read_text()))
        return
    print(f"fitted: overlap {fitted_overlap()}, gather_overhead", end=" ")
    print(*(f"{s.name} {fitted_gather_overhead(s) * 1e3:.1f} ms" for s in (OURS_GATHER, TORCHAO_GATHER)), sep=", ")
    for name, table in TABLES.items():
        print(f"\n{name}\n{table()}", end="")


if __name__ == "__main__":
    main()
