"""A second process compiles from the cache: same losses to the bit, and the plan is still known.

What is compiled is logged on request alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick
from ranks import printed_by

TRAINING = """
import json, sys, torch
import fp8compile
from quick import quicken
from torch._dynamo.utils import counters
quicken()
torch.set_num_threads(1)
for recipe in map(json.loads, sys.argv[1:]):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 64).bfloat16()  # each kernel of C++ takes a second to compile
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    step = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "recipe": recipe})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = (step(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plan = fp8compile.last_compile()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    print(json.dumps({"losses": losses, "hits": hits, "plan": plan.to_json(), "converted": len(plan.converted)}))
"""


def _run_copy(cache: str, *recipes: str) -> None:
    """Train in a copy of a process, which has other hashes of strings than a new one."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    sys.argv = ["", *recipes]
    exec(TRAINING, {})


def _run_anew(cache: Path, *recipes: str, logs: str) -> tuple[list[str], list[str]]:
    """What a new process prints that trains with each of `recipes`, one after the other; lines of this package.

    logs: as the environment variable TORCH_LOGS.
    """
    path = os.pathsep.join([str(Path(quick.__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    env |= {"TORCH_LOGS": logs}
    command = [sys.executable, "-c", TRAINING, *recipes]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines(), [line for line in done.stderr.splitlines() if "fp8:" in line]


@pytest.mark.slow
def test_second_process_hits_the_cache_and_agrees_bit_for_bit(tmp_path: Path) -> None:
    # the other's kernels are among those of the first: nothing new is compiled as C++
    recipes = [json.dumps(recipe) for recipe in ("mixed", {"base": "mixed", "grad_weight": None})]
    silence = printed_by(_run_copy, str(tmp_path), recipes[0]).splitlines()
    printed, lines = _run_anew(tmp_path, *recipes, logs="fp8compile")
    cold, warm, other = (json.loads(line) for line in (silence.pop(), *printed))
    assert cold["hits"] == 0
    assert warm["hits"] == 1
    assert cold["losses"] == warm["losses"]
    assert cold["converted"] == 2  # three matmuls, less the gradient of the input
    assert cold["plan"] == warm["plan"]
    assert other["hits"] == 0  # another recipe must not find that entry
    assert other["losses"] != cold["losses"]
    assert not [line for line in silence if "fp8:" in line]
    assert len(lines) == 2
    for line, said in zip(lines, ("mixed, cpu: 2 of 2 matmuls", "mixed*, cpu: 1 of 2 matmuls"), strict=True):
        assert f"fp8: training graph, recipe {said} in FP8 (" in line
