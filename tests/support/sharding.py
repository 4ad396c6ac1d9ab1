"""What tests of FSDP2 share: a small model of blocks, its batches, and a training run, sharded or not.

    losses, gradients = train(model, …)       on every rank, of the global batch

The single-process reference sees the whole batch; each of two ranks sees its half, and FSDP2 averages gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from where import device_type, seeded

from fp8compile.backend import fp8

EAGER = {"executor": "eager", "strict": True, "select": "all", "save_min_bytes": 0}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DIM, HIDDEN, VOCABULARY, BATCH, LENGTH = 64, 128, 64, 6, 16


class Block(nn.Module):
    """A pre-norm residual block with SwiGLU: three matmuls, two of which read one activation."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Embedding, blocks, head; returns logits."""

    def __init__(self, dim: int = DIM, hidden: int = HIDDEN, layers: int = 2, tied: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def make_model(seed: int = 7, **sizes: Any) -> Model:
    """The same model in every process."""
    torch.manual_seed(seed)
    return Model(**sizes)


def batch(step: int, device: str | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets [BATCH, LENGTH] of the global batch; a target follows from its token, so there is something to
    learn."""
    generator = seeded(100 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator, device=device_type())
    where = device or device_type()
    return tokens.to(where), ((5 * tokens + 3) % VOCABULARY).to(where)


def local_batch(step: int, device: str | None = None) -> tuple[Tensor, Tensor]:
    """This rank's part of it."""
    tokens, targets = batch(step, device)
    return tokens.chunk(dist.get_world_size())[dist.get_rank()], targets.chunk(dist.get_world_size())[dist.get_rank()]


_backends: dict[str, Callable[..., Any]] = {}


def backend(**options: Any) -> Callable[..., Any]:
    """The FP8 backend as torch.compile takes it, with the quick executor: of equal options the same one, so that code
    which it has compiled is found again."""
    given = {**EAGER, **options}
    return _backends.setdefault(repr(given), lambda gm, inputs, **kw: fp8(gm, inputs, options=given))


def compile_blocks(model: Model, **options: Any) -> Model:
    """Compile every block by itself."""
    compiler = backend(**options)
    for block in model.blocks:
        block.compile(backend=compiler)
    return model


def compile_blocks_for_gpu(model: Model, **options: Any) -> Model:
    """Compile every block by itself, as a user would."""
    for block in model.blocks:
        block.compile(backend="fp8", options={"select": "all", "strict": True, **options})
    return model


def shard(model: Model, policy: MixedPrecisionPolicy = BF16, **how: Any) -> Model:
    """fully_shard every block, then the rest."""
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **how)
    return fully_shard(model, mp_policy=policy, **how)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass
class Run:
    """Losses of the global batch, one a step, and the gradients of the last step by name, in FP32."""

    losses: list[float]
    gradients: dict[str, Tensor]


def full(x: Tensor) -> Tensor:
    """A tensor as it is without sharding."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().float()


def train(model: nn.Module, step: Callable[[int], Tensor], opt: torch.optim.Optimizer, steps: int = 2) -> Run:
    """`step(i)` runs forward and backward and returns the loss of this rank's batch."""
    losses, gradients = [], {}
    for i in range(steps):
        opt.zero_grad()
        loss = step(i).detach().float()
        if isinstance(model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in model.parameters()):
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(float(loss))
        gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        opt.step()
    return Run(losses, gradients)


def train_sharded(model: nn.Module, steps: int = 2, call: Callable[..., Any] | None = None, lr: float = 1e-2) -> Run:
    """Train this rank's half of every batch."""

    def step(i: int) -> Tensor:
        tokens, targets = local_batch(i, device_type())
        loss = loss_of((model if call is None else call)(tokens), targets)
        loss.backward()
        return loss

    return train(model, step, torch.optim.AdamW(model.parameters(), lr=lr), steps)


def train_alone(
    master: nn.Module,
    prepare: Callable[[Any], Any] = lambda model: model,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 2,
    lr: float = 1e-2,
    parts: int = 2,
    rounded: Callable[[str, Tensor], Tensor] = lambda name, p: p,
) -> Run:
    """The reference, in one process without FSDP2: FP32 `master` parameters, and a copy of them in `dtype`, made ready
    by `prepare`, that runs each part of the batch as a rank would; gradients are averaged in FP32. `rounded` says what
    a parameter is after a gather."""
    working = copy.deepcopy(master).to(dtype)
    pairs = list(zip(master.parameters(), working.parameters(), strict=True))
    names = {id(p): name for name, p in master.named_parameters()}
    run = prepare(working)

    def step(i: int) -> Tensor:
        total = torch.zeros((), device=device_type())
        tokens, targets = batch(i, device_type())
        with torch.no_grad():
            for p, w in pairs:
                w.copy_(rounded(names[id(p)], p))
        for t, y in zip(tokens.chunk(parts), targets.chunk(parts), strict=True):
            loss = loss_of(run(t), y)
            loss.backward()
            total += loss.detach().float() / parts
            for p, w in pairs:
                if w.grad is not None:
                    p.grad = w.grad.float() / parts + (0 if p.grad is None else p.grad)
                    w.grad = None
        return total

    return train(master, step, torch.optim.AdamW([p for p in master.parameters() if p.requires_grad], lr=lr), steps)


def in_fp8(block: int | None = None, power_of_two: bool = True) -> Callable[[str, Tensor], Tensor]:
    """What a weight of a block's linear is after an FP8 gather, written down independently: E4M3 with one scale, or one
    for each block × block elements."""

    def rounded(name: str, p: Tensor) -> Tensor:
        if p.dim() != 2 or "blocks." not in name:
            return p
        out, step = torch.empty_like(p), block or max(p.shape)
        for i in range(0, p.shape[0], step):
            for j in range(0, p.shape[1], step):
                part = p[i : i + step, j : j + step]
                scale = part.abs().max() / 448
                if power_of_two:
                    scale = 2 ** torch.ceil(torch.log2(scale))
                out[i : i + step, j : j + step] = (part / scale).to(torch.float8_e4m3fn).float() * scale
        return out

    return rounded


def assert_as_alone(run: Run, alone: Callable[[], Run], loss: float, gradient: float) -> None:
    """Every rank has the first one's run, which is near that of one process: the first rank trains it."""
    first: list[Any] = [run]
    dist.broadcast_object_list(first, src=0)
    assert run.losses == first[0].losses
    assert run.gradients.keys() == first[0].gradients.keys()
    for name, x in run.gradients.items():
        assert torch.equal(x, first[0].gradients[name].to(x.device)), f"gradient of {name} differs between ranks"
    if dist.get_rank() == 0:
        assert_close(run, alone(), loss, gradient)


def assert_close(a: Run, b: Run, loss: float, gradient: float) -> None:
    """Losses within `loss`, and each gradient within `gradient` of the other's norm."""
    for i, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)):
        assert abs(x - y) < loss, f"losses of step {i}: {a.losses} and {b.losses}"
    assert a.gradients.keys() == b.gradients.keys()
    for name, x in a.gradients.items():
        y = b.gradients[name].to(x.device)  # with offload one run's are on the host
        error = float((x - y).norm() / y.norm().clamp_min(1e-12))
        assert error < gradient, f"gradient of {name}: relative error {error:.4f}"
