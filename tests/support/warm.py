"""What the process does that ranks on CPUs are copies of: it has compiled a model once, as each rank would have to.

It is alone: no thread, no other process and no group of ranks is started, as copies would lack them
(tests/distributed/test_copies.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.hub

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does, before it is told

from quick import quicken

from fp8compile import process_state


def warm() -> None:
    """Compile a linear layer, forward and backward, without generated code, and forget it."""
    torch.set_num_threads(1)
    quicken()
    torch.hub.tqdm.monitor_interval = 0  # a progress bar, even one that is not shown, starts a thread that watches it
    x = torch.ones(32, 64, dtype=torch.bfloat16)
    options = {"executor": "eager", "select": "all"}
    torch.compile(torch.nn.Linear(64, 64).bfloat16(), backend="fp8", options=options)(x).sum().backward()
    process_state.reset()


warm()
