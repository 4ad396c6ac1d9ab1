"""FSDP2 on two GPUs: the losses of one GPU, with weights gathered in BF16 and in FP8.

Each rank trains half of every batch; the reference trains both halves one after the other on one GPU, with plain
parameters and without FSDP2. Kernels and scales are the same, gradients are averaged in FP32 on both sides; what is
left is the order of additions inside of kernels, which grows over steps as roundings flip.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharding import (
    Model,
    Run,
    compile_blocks_for_gpu,
    in_fp8,
    make_model,
    shard,
    train_alone,
    train_sharded,
)

import fp8compile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs with FP8 matmul units"),
]
SIZES = {"dim": 256, "hidden": 512, "layers": 2}
STEPS, RATE = 20, 1e-3
RECIPE = {
    "base": "mixed",
    "output": {"right": {"power_of_two": True}},
    "grad_input": {"right": {"power_of_two": True}},
}


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    started = Ranks(2, "nccl")
    yield started
    started.close()


def assert_near(run: Run, reference: Run, bound: float) -> None:
    assert reference.losses[-1] < reference.losses[0], "nothing is learned"
    for i, (a, b) in enumerate(zip(run.losses, reference.losses, strict=True)):
        assert abs(a - b) < bound * b, (i, run.losses, reference.losses)


def bf16_gather(rank: int) -> None:
    run = train_sharded(shard(compile_blocks_for_gpu(make_model(**SIZES).cuda())), STEPS, lr=RATE)
    reference = train_alone(make_model(**SIZES).cuda(), compile_blocks_for_gpu, steps=STEPS, lr=RATE)
    assert_near(run, reference, 0.005)


def fp8_gather(rank: int) -> None:
    """Against one GPU whose weights are rounded by plain torch before every step."""
    model = fp8compile.prepare_fsdp(make_model(**SIZES).cuda(), power_of_two=True)
    assert isinstance(model, Model)
    run = train_sharded(shard(compile_blocks_for_gpu(model)), STEPS, lr=RATE)
    plan = fp8compile.last_compile()
    assert sum(m.right is not None and m.right.gathered for m in plan.matmuls) == 6, str(plan)
    reference = train_alone(
        make_model(**SIZES).cuda(),
        lambda m: compile_blocks_for_gpu(m, recipe=RECIPE),
        steps=STEPS,
        lr=RATE,
        rounded=in_fp8(),
    )
    assert_near(run, reference, 0.01)  # there, gate and up are one matmul with one scale for their gradients


def payloads_are_the_references(rank: int) -> None:
    """The kernel that casts a shard has the bits of plain torch."""
    from fp8compile.distributed import eager_casts
    from fp8compile.kernels.reference import markers

    for shape in ((104, 256), (1000, 4096)):
        x = torch.randn(shape, device="cuda") * torch.logspace(-3, 3, shape[1], device="cuda")
        scale = markers.scale(markers.amax(x, "tensor"), "e4m3")
        expected = markers.quantize(x, scale, "e4m3", "tensor")
        assert torch.equal(
            eager_casts.quantize(x, scale, "e4m3", "tensor").view(torch.uint8), expected.view(torch.uint8)
        )
        for name in ("e4m3", "e5m2"):
            data, scales = eager_casts.quantize_groups(x, name)
            assert torch.equal(scales, markers.scale(markers.amax(x, "group(128)"), name))
            other = markers.quantize(x, scales, name, "group(128)")
            assert torch.equal(data.view(torch.uint8), other.view(torch.uint8))


def compressed_gradients(rank: int) -> None:
    plain = train_sharded(shard(compile_blocks_for_gpu(make_model(**SIZES).cuda())), 1)
    model = fp8compile.compress_gradients(shard(compile_blocks_for_gpu(make_model(**SIZES).cuda())))
    run = train_sharded(model, 1)
    for name, gradient in plain.gradients.items():
        assert 0 < (run.gradients[name] - gradient).norm() < 0.08 * gradient.norm(), name


CASES: list[Any] = [payloads_are_the_references, bf16_gather, fp8_gather, compressed_gradients]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_gpus(gpus: Ranks, case: Any) -> None:
    gpus.run(case)
