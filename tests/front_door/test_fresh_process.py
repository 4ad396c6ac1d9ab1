"""What only a process of its own shows: what an import does, what a newer torch is told, how a script ends, and how
states are read before anything is imported."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import fp8compile

SCRIPT = """
import importlib.metadata as metadata, json, pickle, sys, warnings
found = metadata.entry_points
def entry_points(**which):
    here = found(**which)
    return metadata.EntryPoints(e for e in here if e.name != "fp8") if "group" in which else here
metadata.entry_points = entry_points
import torch
try:
    torch.load(sys.argv[1], weights_only=True)
except pickle.UnpicklingError as error:
    refused = str(error)
was_imported = "fp8compile" in sys.modules
torch.__version__ = torch.torch_version.TorchVersion("9.9.0")
model = torch.nn.Linear(32, 32).bfloat16()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fp8compile
    is_registered = "fp8" in torch._dynamo.list_backends()
    is_ours = torch._dynamo.lookup_backend("fp8") is fp8compile.backend.fp8
    for _ in range(2):
        step = torch.compile(model, backend="fp8", options={"executor": "eager", "select": "all"})
        step(torch.randn(32, 32).bfloat16()).sum().backward()
ours = [[w.category.__name__, w.filename == __file__] for w in caught if "fp8" in str(w.message)]
trained = fp8compile.last_compile().converted != []
torch.load(sys.argv[1], weights_only=True)
found = {"registered": is_registered and is_ours, "warnings": ours, "trained": trained}
print(json.dumps(found | {"refused": refused, "imported": was_imported}), flush=True)
step = torch.compile(torch.nn.Linear(4, 4), backend="fp8", options={"recipe": "mixd"})
step(torch.randn(4, 4))
"""


@functools.cache
def ran() -> tuple[dict[str, Any], str]:
    """What the script found, in a process whose torch is newer and finds no entry point; and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        checkpoint = Path(folder) / "c.pt"
        torch.save(fp8compile.FP8State.of(torch.randn(64, 64), format="e4m3"), checkpoint)
        command = [sys.executable, script, checkpoint]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_package_that_was_not_installed_is_registered_when_imported() -> None:
    assert ran()[0]["registered"]


def test_a_process_without_fp8compile_is_told_what_to_add() -> None:
    line = "torch.serialization.add_safe_globals([fp8compile.optimizer.states.rebuild])"
    assert line in ran()[0]["refused"]
    assert not ran()[0]["imported"]
    exec(line, {"torch": torch, "fp8compile": fp8compile})


def test_a_newer_torch_trains_and_is_warned_of_once() -> None:
    assert ran()[0]["warnings"] == [["Fp8Warning", True]]
    assert ran()[0]["trained"]


def test_the_traceback_of_a_script_ends_in_the_error_and_names_no_other() -> None:
    told = ran()[1]
    last = told.strip().splitlines()[-1]
    assert last.startswith(
        "fp8compile.errors.OptionError: option 'recipe': unknown recipe 'mixd'. Did you mean 'mixed'?"
    )
    assert "BackendCompilerFailed" not in told
    assert f'train.py", line {len(SCRIPT.splitlines())}' in told
