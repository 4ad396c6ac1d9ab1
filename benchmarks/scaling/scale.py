"""Step time, tokens/s and peak memory of training a decoder model on 8 to 512 GPUs under FSDP2, by arithmetic.

    python -m benchmarks.scaling.scale --model llama-8b --gpus 8,64,512 [--batch 2 --system "ours*"] [--json]
    python -m benchmarks.scaling.scale --model llama-70b --gpus 64 --memory 80,141    # the largest batch that fits
    python -m benchmarks.scaling.scale --model llama-8b --width 6144 --heads 48 --set infiniband=12.5 --sharding hybrid

Nothing runs on a GPU, and torch is not needed. scale_inputs.py has the inputs with their sources; docs/scale.md the
formulae, what they give for every measured row, and what they leave out. Batch, tokens/s and peak are those of a GPU.

ms        a step, optimizer included          compute    of which kernels and copies, if links took no time
peak      GiB allocated at most               communication    all collectives, one after the other
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from benchmarks.scaling.scale_inputs import (
    BF16,
    FP32,
    GIB,
    MACHINES,
    MODELS,
    PEERS,
    SYSTEMS,
    Job,
    Machine,
    Model,
    System,
    one_of,
)
from benchmarks.scaling.scale_model import largest_batch, predict


def main(arguments: Sequence[str] | None = None) -> None:
    """Print predictions; see the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=MODELS)
    for name in ("width", "layers", "heads", "kv_heads", "inner", "vocabulary"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the model's")
    parser.add_argument("--gpus", default="8,64,512", help="numbers of GPUs, with commas between them")
    parser.add_argument("--batch", type=int, default=1, help="sequences on a GPU")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--sharding", default="full", help="full, or hybrid: within a host")
    parser.add_argument("--checkpoint", default="none", help="none, or full: every layer's forward runs again")
    parser.add_argument("--parameters", default="fp32", choices=["fp32", "bf16"], help="dtype of parameters")
    parser.add_argument("--system", default="*", help="pattern of systems")
    parser.add_argument("--more", action="store_true", help="four systems more: torchao's float8 among them")
    parser.add_argument("--machine", default="h200", choices=MACHINES, help="h100: rates that were not measured")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an input of the table")
    parser.add_argument("--memory", metavar="GIB,…", help="print the largest batch that fits GPUs of this size instead")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    try:
        sizes = {f.name: getattr(args, f.name, None) for f in fields(Model)}
        model = replace(MODELS[args.model], **{name: value for name, value in sizes.items() if value is not None})
        machine = changed(MACHINES[args.machine], args.set)
        width = FP32 if args.parameters == "fp32" else BF16
        shape = (args.batch, args.sequence, args.sharding, args.checkpoint, width)
        jobs = [Job(model, number, *shape) for number in numbers(args.gpus)]
        systems = [s for s in SYSTEMS + PEERS * args.more if fnmatch.fnmatch(s.name, args.system)]
        if not systems:
            names = ", ".join(s.name for s in SYSTEMS + PEERS)
            raise ValueError(f"no system matches {args.system!r}; there are {names} (some with --more)")
        capacities = numbers(args.memory) if args.memory else []
    except ValueError as error:
        parser.error(str(error))
    head, rows = batches(jobs, systems, capacities, machine) if capacities else predictions(jobs, systems, machine)
    print(json.dumps(rows, indent=1) if args.json else "\n".join(text(head, rows)))


def numbers(given: str) -> list[int]:
    if not all(part.strip().isdecimal() for part in given.split(",")):
        raise ValueError(f"{given!r} is no list of whole numbers with commas between them")
    return [int(part) for part in given.split(",")]


def changed(machine: Machine, settings: Sequence[str]) -> Machine:
    """Return a machine with inputs of its own, given as NAME=VALUE."""
    names = [f.name for f in fields(Machine)]
    for setting in settings:
        name, _, value = setting.partition("=")
        one_of("--set", name, names)
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"--set {setting}: {value!r} is no number") from None
        machine = replace(machine, **{name: number})
    return machine


Row = dict[str, Any]


def predictions(jobs: Sequence[Job], systems: Sequence[System], machine: Machine) -> tuple[Row, list[Row]]:
    """Return a row a job and system, and the form of each column."""
    rows = []
    for job in jobs:
        for system in systems:
            p = predict(job, system, machine)
            figures = {"ms": p.seconds * 1e3, "tokens_per_second": p.tokens_per_second, "peak_gib": p.peak / GIB}
            parts = {"compute_ms": p.compute * 1e3, "communication_ms": p.communication * 1e3}
            rows.append({"gpus": job.gpus, "system": system.name, **figures, **parts})
    whole = dict.fromkeys(("ms", "tokens_per_second", "compute_ms", "communication_ms"), ".0f")
    return {**whole, "peak_gib": ".1f"}, rows


def batches(
    jobs: Sequence[Job], systems: Sequence[System], capacities: Sequence[int], machine: Machine
) -> tuple[Row, list[Row]]:
    """Return a row a job, system and memory: the largest batch, and tokens/s of a GPU with it."""
    rows = []
    for job in jobs:
        for system in systems:
            for capacity in capacities:
                batch = largest_batch(job, system, capacity, machine)
                speed = predict(replace(job, batch=batch), system, machine).tokens_per_second if batch else 0.0
                row = {"gpus": job.gpus, "system": system.name, "memory_gib": capacity, "largest_batch": batch}
                rows.append({**row, "tokens_per_second": speed})
    return {"tokens_per_second": ".0f"}, rows


def text(forms: Row, rows: Sequence[Row]) -> list[str]:
    """Lines of a table: names to the left, numbers to the right."""
    cells = [list(rows[0]), *([format(v, forms.get(k, "")) for k, v in row.items()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if isinstance(value, str) else ">" for value in rows[0].values()]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*line).rstrip() for line in cells]


if __name__ == "__main__":
    main()
