"""Three ranks, which share the rows of no weight alike: shards of 70, 70 and 68 rows, of 22, 22 and 20."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from ranks import Ranks
from sharding import Run, assert_as_alone, compile_blocks, in_fp8, make_model, shard, train_alone, train_sharded

import fp8compile
from fp8compile.passes.matmul import merge_matmuls

RANKS = 3
WEIGHT = {"right": {"power_of_two": True}}


def uneven(rank: int, granularity: str, recipe: str) -> None:
    """As in test_all_gather.py: exact, as scales are powers of two and the reference merges no matmuls."""
    sizes = {"dim": 64, "hidden": 208, "layers": 1}
    model = fp8compile.prepare_fsdp(make_model(**sizes), granularity, power_of_two=True)
    assert [p._local_tensor.shape[0] for p in shard(make_model(**sizes)).blocks[0].gate.parameters()] == [
        70 if rank < 2 else 68
    ]
    run = train_sharded(shard(compile_blocks(model, recipe=recipe)))
    exact = {"base": recipe, "output": WEIGHT, "grad_input": WEIGHT}

    def alone() -> Run:
        with mock.patch.object(merge_matmuls, "_groups", return_value=[]):
            return train_alone(
                make_model(**sizes),
                lambda m: compile_blocks(m, recipe=exact),
                parts=RANKS,
                rounded=in_fp8(128 if granularity != "tensor" else None),
            )

    assert_as_alone(run, alone, 1e-4, 2**-7)


CASES: list[Any] = [("tensor", "tensorwise"), ("block(128)", "blockwise")]


@pytest.mark.parametrize("granularity, recipe", CASES)
def test_uneven_shards(three: Ranks, granularity: str, recipe: str) -> None:
    three.run(uneven, granularity, recipe)
