"""A model with 8-bit optimizer states, sharded over the ranks of a mesh, and its states put together again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharding import EAGER, backend
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fp8compile

PARTS = ("payload", "side", "counter", "low")


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    """33 rows of 128 do not divide by two or four; rows of 33 cut groups; of a single row most ranks have nothing."""
    torch.manual_seed(1)
    sizes = (33, 128), (128, 256), (256, 128), (4224, 1)
    layers = nn.Linear(128, 33), *(nn.Linear(*size, bias=False) for size in sizes)
    return nn.Sequential(*layers).to(device(), dtype)


def device() -> str:
    """The kind of device of this group's ranks."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def first_ranks(size: int) -> DeviceMesh | None:
    """A mesh of the first ranks, on those."""
    group = dist.new_group(list(range(size)))
    return DeviceMesh.from_group(group, device()) if dist.get_rank() < size else None


def trained(
    mesh: DeviceMesh, recipe: Any, steps: int = 3, dtype: torch.dtype = torch.float32, fused: bool | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After some steps with gradients that do not depend on the mesh."""
    model = fully_shard(make(dtype), mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    by_name: dict[str, Any] = {"backend": "fp8", "options": {**EAGER, "states": recipe}}
    step = torch.compile(opt.step, **(by_name if fused else {"backend": backend(states=recipe)}))
    for i in range(steps):
        for p in model.parameters():
            assert isinstance(p, DTensor)
            generator = torch.Generator().manual_seed(i + p.numel())
            gradient = torch.randn(p.shape, generator=generator, device="cpu").to(device(), dtype)
            p.grad = distribute_tensor(gradient, mesh, p.placements)
        step()
    return model, opt


def whole(x: DTensor) -> tuple[str, dict[str, torch.Tensor]]:
    """A state's format, and its parts with the rows of all ranks of its mesh (or the plain tensor)."""
    local = x._local_tensor
    parts = {n: getattr(local, n) for n in PARTS if getattr(local, n, None) is not None} or {"plain": local}
    gathered: list[Any] = [None] * x.device_mesh.size()
    dist.all_gather_object(gathered, {n: t.cpu().clone() for n, t in parts.items()}, group=x.device_mesh.get_group())
    parts = {n: torch.cat([g[n] for g in gathered]) if n != "counter" else gathered[0][n] for n in parts}
    return getattr(local, "format", ""), parts


def states(opt: torch.optim.Optimizer) -> dict[tuple[int, str], tuple[str, dict[str, torch.Tensor]]]:
    parameters = [p for group in opt.param_groups for p in group["params"]]
    named = {(i, name): x for i, p in enumerate(parameters) for name, x in opt.state[p].items()}
    return {key: whole(x) for key, x in named.items() if isinstance(x, DTensor)}


def assert_same(one: Any, other: Any) -> None:
    """Equal bit for bit; both moments of four weights are in 8 bits (BF16 parameters: others are FP32 in ours)."""
    assert one.keys() == other.keys()
    for key, (format, parts) in one.items():
        assert format == other[key][0]
        assert parts.keys() == other[key][1].keys()
        for part, x in parts.items():
            assert torch.equal(x, other[key][1][part]), (key, part)
    assert sum(format not in ("", "float32") for format, _ in one.values()) == 2 * 4


def fresh(mesh: DeviceMesh, recipe: Any, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Before its first step."""
    model = fully_shard(make(dtype), mesh=mesh)
    return model, fp8compile.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), recipe)
