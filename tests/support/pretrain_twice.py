"""Run examples/pretrain.py as a whole, and again from the last whole checkpoint but one: on each rank of torchrun.

    PYTHONPATH=examples torchrun --nproc-per-node 2 tests/support/pretrain_twice.py FOLDER

In the same processes, whose start takes longer than the steps: nothing that was compiled or trained is left. Of one
layer, as tracing the optimizer takes most of the time.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

import pretrain
from fp8compile import process_state


def run(*arguments: str) -> None:
    process_state.reset()
    sys.argv[1:] = ["--steps", "6", *arguments]
    pretrain.main()


def main(folder: Path) -> None:
    pretrain.CONFIGS["tiny"] = replace(pretrain.CONFIGS["tiny"], layers=1)
    dist.init_process_group("gloo")
    finish = dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *_: None
    run("--checkpoints", str(folder), "--every", "4")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-00000006")
        (folder / "step-00000005").mkdir()  # one that was not finished: it has no metadata
        print("again", flush=True)
    dist.barrier()
    run("--checkpoints", str(folder))
    finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
