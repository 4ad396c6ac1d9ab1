"""examples/pretrain.py on two processes: it learns, and goes on where it was stopped."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shutil
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import Ranks

from fp8compile import process_state
from fp8compile.errors import Fp8Warning

pytest.importorskip("transformers")


def printed(*arguments: str) -> str:
    """What a run prints, in which nothing is left of earlier ones; of one layer, as tracing takes most of the time."""
    import corpus
    import pretrain

    process_state.reset()
    text = corpus.gather(Path(asyncio.__file__).parent, lambda name: name.endswith(".py"))  # of 40 MiB, what is enough
    small = replace(pretrain.CONFIGS["tiny"], layers=1)
    with (
        mock.patch.dict(pretrain.CONFIGS, tiny=small),
        mock.patch.object(sys, "argv", ["pretrain.py", "--steps", "6", *arguments]),
        mock.patch.object(corpus, "_installed_python", return_value=("asyncio", text)),
        mock.patch.object(dist, "init_process_group"),  # there is one
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as said,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", Fp8Warning)
        pretrain.main()
    return said.getvalue()


def twice(rank: int, folder: str) -> tuple[str, str]:
    """The run as a whole, and again from the last whole checkpoint but one."""
    whole = printed("--checkpoints", folder, "--every", "4")
    dist.barrier()
    if rank == 0:
        shutil.rmtree(Path(folder, "step-00000006"))
        Path(folder, "step-00000005").mkdir()  # one that was not finished: it has no metadata
    dist.barrier()
    return whole, printed("--checkpoints", folder)


@pytest.mark.slow
def test_it_learns_and_resumes(ranks: Ranks, tmp_path: Path) -> None:
    texts, silence = ranks.run(twice, str(tmp_path))
    assert silence == ("", ""), "the first rank speaks for all"
    whole, resumed = (
        {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss (\S+)", text)} for text in texts
    )
    assert whole.keys() == {1, 6}
    assert resumed == {6: whole[6]}
    assert whole[6] < whole[1] - 1
