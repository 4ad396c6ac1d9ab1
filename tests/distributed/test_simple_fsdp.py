"""SimpleFSDP: weights are DTensors that the model gathers in its own forward, in one compiled graph."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
import torch.nn.utils.parametrize as parametrize
from ranks import Ranks
from sharding import Model, assert_as_alone, backend, local_batch, loss_of, make_model, train, train_alone
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from where import device_type

import fp8compile


class Gathered(nn.Module):
    """What a sharded parameter is in the model: all of it, in BF16; its gradient is averaged over ranks in FP32."""

    def forward(self, p: Tensor) -> Tensor:
        whole = p.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
        return whole.to_local(grad_placements=[Partial("avg")])


def sharded(model: Model) -> Model:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    for module in list(model.modules()):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, Gathered(), unsafe=True)
    return model


def one_graph(rank: int) -> None:
    model = sharded(make_model(layers=1))
    run = torch.compile(model, backend=backend())

    def step(i: int) -> Tensor:
        tokens, targets = local_batch(i)
        loss = loss_of(run(tokens), targets)
        loss.backward()
        return loss

    found = train(model, step, torch.optim.AdamW(model.parameters(), lr=1e-2))
    plans = [m for plan in fp8compile.compiles() for m in plan.matmuls]
    assert {m.path for m in plans if m.decision != "fp8"} == {"lm_head"}
    plain = re.compile(r"parametrizations\.|\.original")
    found.gradients = {plain.sub("", name): x for name, x in found.gradients.items()}
    # kernels round to BF16 at other places around a gathered weight: some casts fall to the next code
    assert_as_alone(
        found, lambda: train_alone(make_model(layers=1), lambda m: torch.compile(m, backend=backend())), 5e-3, 0.1
    )


def test_one_graph(ranks: Ranks) -> None:
    ranks.run(one_graph)
