"""A second process compiles from the cache: same losses to the bit, and the plan is still known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quick
import torch
from torch._dynamo.utils import counters

import fp8compile

SECOND = """
import json, torch
from quick import quicken
import test_cache
quicken()
torch.set_num_threads(1)
print(json.dumps(test_cache.trained("mixed")))
"""


def trained(recipe: Any) -> dict[str, Any]:
    """What training with `recipe` finds in a process that has compiled nothing, or forgets it."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 64).bfloat16()  # each kernel of C++ takes a second to compile
    x = torch.randn(32, 32, dtype=torch.bfloat16)
    step = torch.compile(model, backend="fp8", options={"select": "all", "strict": True, "recipe": recipe})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (step(x).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    plan = fp8compile.last_compile()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return {"losses": losses, "hits": hits, "plan": plan.to_json(), "converted": len(plan.converted)}


def _in_another_process() -> dict[str, Any]:
    """What training finds in a process of its own, with the cache of this one."""
    folders = [Path(__file__).parent, Path(quick.__file__).parent]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", SECOND], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fp8:" not in done.stderr  # nothing is logged by default
    return json.loads(done.stdout)


@pytest.mark.slow
def test_second_process_hits_the_cache_and_agrees_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cold = trained("mixed")
    other = trained({"base": "mixed", "output": None})
    warm = _in_another_process()
    assert cold["hits"] == 0
    assert warm["hits"] == 1
    assert cold["losses"] == warm["losses"]
    assert cold["converted"] == 2  # three matmuls, less the gradient of the input
    assert cold["plan"] == warm["plan"]
    assert other["hits"] == 0  # another recipe must not find that entry
    assert other["losses"] != cold["losses"]
