"""Recommenders, written plainly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.field.models.task import Batch, FieldModel, Task, drawn


def layers(*widths: int, last: bool = False) -> nn.Sequential:
    """Linear layers with ReLU between them, and behind the last one unless it is the `last` of the model."""
    made: list[nn.Module] = []
    for into, out in pairwise(widths):
        made += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*(made[:-1] if last else made))


class DLRM(nn.Module):
    """Dense features and embeddings, all pairs of which interact; one click probability a row."""

    pairs: Tensor

    def __init__(self, sizes: list[int], width: int, dense: int, inner: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in sizes)
        self.bottom = layers(dense, inner, inner // 2, width)
        pairs = (len(sizes) + 1) * len(sizes) // 2
        self.top = layers(width + pairs, inner, inner // 2, 1, last=True)
        self.register_buffer("pairs", torch.tril_indices(len(sizes) + 1, len(sizes) + 1, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(every, every.transpose(1, 2))
        flat = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, flat], dim=1)).squeeze(-1)


class DeepFM(nn.Module):
    """A factorization machine beside a deep net over the same embeddings."""

    def __init__(self, sizes: list[int], width: int, inner: int):
        super().__init__()
        self.first = nn.ModuleList(nn.Embedding(n, 1) for n in sizes)
        self.second = nn.ModuleList(nn.Embedding(n, width) for n in sizes)
        self.deep = layers(len(sizes) * width, inner, inner, 1, last=True)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        linear = sum(table(ids[:, i]) for i, table in enumerate(self.first))
        every = torch.stack([table(ids[:, i]) for i, table in enumerate(self.second)], dim=1)
        pairs = (every.sum(1).square() - every.square().sum(1)).sum(1, keepdim=True) / 2
        return (linear + pairs + self.deep(every.flatten(1))).squeeze(-1) + 0 * dense.sum(1)


class TwoTowers(nn.Module):
    """A tower for users and one for items; all other items of a batch are negatives."""

    def __init__(self, users: int, items: int, width: int, inner: int):
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.of_users, self.of_items = layers(width, inner, 128, last=True), layers(width, inner, 128, last=True)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        u = F.normalize(self.of_users(self.users(users)), dim=-1)
        v = F.normalize(self.of_items(self.items(items)), dim=-1)
        return u @ v.T / 0.05


def clicked(run: Any, batch: Batch) -> Tensor:
    logits = run(batch["dense"], batch["ids"]).float()
    return F.binary_cross_entropy_with_logits(logits, batch["clicks"].float())


def found(run: Any, batch: Batch) -> Tensor:
    logits = run(batch["users"], batch["items"]).float()
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def clicks(rows: int, sizes: list[int], dense: int) -> list[Batch]:
    ids = torch.stack([drawn(rows, below=n, seed=i) for i, n in enumerate(sizes)], dim=1)
    return [{"dense": drawn(rows, dense), "ids": ids, "clicks": drawn(rows, below=2)}]


def dlrm(is_small: bool, dtype: torch.dtype) -> Task:
    sizes = [50] * 4 if is_small else [100_000] * 26
    model = DLRM(sizes, 16, 13, 32) if is_small else DLRM(sizes, 128, 13, 1024)
    return Task(model.to(dtype), clicks(200 if is_small else 16384, sizes, 13), clicked)


def deep_fm(is_small: bool, dtype: torch.dtype) -> Task:
    sizes = [50] * 4 if is_small else [100_000] * 39
    model = DeepFM(sizes, 16, 32) if is_small else DeepFM(sizes, 16, 1024)
    return Task(model.to(dtype), clicks(200 if is_small else 16384, sizes, 13), clicked)


def two_towers(is_small: bool, dtype: torch.dtype) -> Task:
    rows, known = (24, 100) if is_small else (8192, 1_000_000)
    model = TwoTowers(known, known, *((16, 32) if is_small else (128, 1024)))
    batch = {"users": drawn(rows, below=known), "items": drawn(rows, below=known, seed=2)}
    return Task(model.to(dtype), [batch], found)


MODELS = (
    FieldModel("DLRM", "recommenders", dlrm, autocast=True, gib=15),
    FieldModel("DLRM · BF16", "recommenders", dlrm, gib=15),
    FieldModel("DeepFM", "recommenders", deep_fm, autocast=True),
    FieldModel("Two towers", "recommenders", two_towers, autocast=True, gib=15),
)
