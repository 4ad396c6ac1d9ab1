"""The command line: `fp8compile explain|dump|diff|report|doctor|export|load` (also as `python -m fp8compile`).

Exit status: 0 if all is well, 1 if something was found wrong, 2 for a command that cannot be carried out.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fp8compile.errors import Fp8Error
from fp8compile.insight import doctor
from fp8compile.insight.dump import stages
from fp8compile.insight.dump.dumps import dump, graphs
from fp8compile.insight.dump.report import write_report
from fp8compile.insight.explanation import Explanation
from fp8compile.insight.step_times import StepTimes
from fp8compile.insight.tables.text import TABLES
from fp8compile.plan.from_json import read_plans
from fp8compile.plan.store import compiles
from fp8compile.serving.convert_folder import export_folder, load_folder
from fp8compile.serving.layouts import LAYOUTS


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (Fp8Error, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        print(f"fp8compile: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8compile", description="Look at what backend='fp8' makes of a model.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    explain = command("explain", _explain, "show the plan of a dump, of a JSON file, or of what a script compiles")
    explain.add_argument(
        "--table", choices=[*TABLES, "all"], metavar="NAME", help=f"a table instead: {', '.join(TABLES)}; or all"
    )
    explain.add_argument("target", help="a dump's folder, a plan as JSON, or a Python script")
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    explain.add_argument(
        "--json", action="store_true", help="as JSON: edit it, and hand it back as options={'plan': …}"
    )

    dumped = command("dump", _dump, "run a script and write all that it compiles into a folder")
    dumped.add_argument("-o", "--output", required=True, metavar="DUMP", help="the folder")
    dumped.add_argument("script")
    dumped.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")

    diff = command("diff", _diff, "show the difference of two stages of a dump; without stages, list them")
    diff.add_argument("dump")
    diff.add_argument("stages", nargs="*", metavar="STAGE", help='two stages, such as "joint/input" and "share_casts"')
    diff.add_argument("-U", "--context", type=int, default=3, help="lines around a change (default: 3)")

    report = command("report", _report, "make one self-contained page of a dump")
    report.add_argument("dump")
    report.add_argument("-o", "--output", default="report.html", help="the page (default: report.html)")

    examined = command("doctor", _doctor, "check versions, GPU, FP8 support, assembler and caches, and say what to do")
    examined.add_argument(
        "--model",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a script instead, with its arguments, and time the parts of its training steps on host and GPU",
    )

    export = command("export", _export, "write a model of Transformers with FP8 weights (docs/serving.md)")
    export.add_argument("--format", default="block", metavar="NAME", help=f"{', '.join(LAYOUTS)} (default: block)")
    export.add_argument(
        "--layers", nargs="+", metavar="PATTERN", help="layers that become FP8 (default: all but the head)"
    )
    export.add_argument("--skip", nargs="+", default=[], metavar="PATTERN", help="layers that do not")
    load = command("load", _load, "write the model of an FP8 checkpoint with plain weights, to train on")
    load.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the weights")
    for converting in (export, load):
        converting.add_argument("source", help="the folder to read")
        converting.add_argument("-o", "--output", required=True, metavar="FOLDER", help="the folder to write")
        converting.add_argument("--overwrite", action="store_true", help="replace what is there")
    return parser


def _export(arguments: argparse.Namespace) -> int:
    source, output = Path(arguments.source), Path(arguments.output)
    print(export_folder(source, output, arguments.format, arguments.layers, arguments.skip, arguments.overwrite))
    return 0


def _load(arguments: argparse.Namespace) -> int:
    source, output = Path(arguments.source), Path(arguments.output)
    count = load_folder(source, output, getattr(torch, arguments.dtype), arguments.overwrite)
    print(f"{output}: {count} layers were in FP8, and are {arguments.dtype}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    explanation = _explanation(Path(arguments.target), arguments.arguments)
    if arguments.json:
        print(explanation.to_json())
    elif arguments.table == "all":
        print(explanation.full_text(), end="")
    else:
        print(explanation.table(arguments.table) if arguments.table else explanation, end="")
    return 1 if explanation.totals.failures else 0


def _explanation(target: Path, arguments: Sequence[str]) -> Explanation:
    if target.is_dir():
        return stages.explanation(target)
    if target.suffix == ".json":
        return Explanation(read_plans(target))
    _run(target, arguments)
    return Explanation(compiles())


def _dump(arguments: argparse.Namespace) -> int:
    before = len(graphs(Path(arguments.output)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fp8: nothing was compiled while dumping")
        with dump(arguments.output) as folder:
            _run(Path(arguments.script), arguments.arguments)
    if len(graphs(folder)) == before:
        raise Fp8Error(f"{arguments.script} compiled nothing with backend='fp8', so nothing was written")
    print(f"{folder / 'index.txt'} lists what was written.")
    return 0


def _run(script: Path, arguments: Sequence[str]) -> None:
    """Run a script as `python script arguments…` would."""
    if not script.is_file():
        raise Fp8Error(f"there is no file {str(script)!r}")
    before, sys.argv = sys.argv, [str(script), *arguments]
    sys.path.insert(0, str(script.parent.absolute()))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise Fp8Error(f"{script} ended with {end.code!r}") from end
    finally:
        sys.argv = before
        sys.path.pop(0)


def _diff(arguments: argparse.Namespace) -> int:
    root = Path(arguments.dump)
    if len(arguments.stages) != 2:
        print("\n".join(stage.name for stage in stages.stages(root)))
        return 0 if not arguments.stages else 2
    print(stages.diff(root, *arguments.stages, context=arguments.context), end="")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    print(write_report(Path(arguments.dump), Path(arguments.output)))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.model is not None:
        return _time_steps(arguments.model)
    findings = doctor.examine()
    print(doctor.findings_text(findings), end="")
    return 1 if any(f.status == doctor.WRONG for f in findings) else 0


def _time_steps(command: Sequence[str]) -> int:
    """Run a script, and print the times of its training steps."""
    if not command:
        raise Fp8Error("doctor --model needs a script that trains")
    with StepTimes().measuring() as times:
        _run(Path(command[0]), command[1:])
    print(times.text(), end="")
    return 0
