"""Graph networks of PyTorch Geometric: classes of the nodes of one graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.field.models.libraries import library
from benchmarks.field.models.task import Batch, FieldModel, Task, drawn


def nodes_classified(run: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(run(batch["x"], batch["edge_index"]).float(), batch["classes"])


def one_graph(nodes: int, edges: int, features: int) -> list[Batch]:
    """Random edges between nodes with features."""
    return [{
        "x": drawn(nodes, features), "edge_index": drawn(2, edges, below=nodes), "classes": drawn(nodes, below=16,
                                                                                                  seed=2)
    }]  # fmt: skip


def geometric(name: str, model: str, width: int = 256, **row: Any) -> FieldModel:
    """Return a row of a model that torch_geometric has."""
    arguments = row.pop("arguments", {})

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        models = library("torch_geometric").nn.models
        features, inner = (32, 64) if is_small else (128, width)
        made = getattr(models, model)(features, inner, num_layers=3, out_channels=16, **arguments)
        batches = one_graph(40, 160, features) if is_small else one_graph(100_000, 800_000, features)
        return Task(made.to(dtype), batches, nodes_classified)

    return FieldModel(name, "graphs", make, ("torch_geometric",), on_cpu=True, **row)


class GraphTransformer(nn.Module):
    """Layers of attention along edges."""

    def __init__(self, features: int, width: int, heads: int):
        super().__init__()
        layer = library("torch_geometric").nn.TransformerConv
        self.into = nn.Linear(features, width)
        self.layers = nn.ModuleList(layer(width, width // heads, heads, beta=True) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.into(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(layer(norm(x), edge_index))
        return self.head(x)


def graph_transformer(is_small: bool, dtype: torch.dtype) -> Task:
    features, width = (32, 64) if is_small else (128, 256)
    batches = one_graph(40, 160, features) if is_small else one_graph(20_000, 200_000, features)
    return Task(GraphTransformer(features, width, 4).to(dtype), batches, nodes_classified)


def schnet(is_small: bool, dtype: torch.dtype) -> Task:
    """Energies of molecules; edges are given, as a loader would."""
    layers = library("torch_geometric").nn.models.schnet
    width, atoms, edges = (32, 20, 80) if is_small else (256, 20_000, 400_000)
    made = nn.ModuleList(layers.InteractionBlock(width, 32, width, 10.0) for _ in range(3))

    def energy(run: Any, batch: Batch) -> Tensor:
        return run(batch["x"], batch["edge_index"], batch["distances"]).float().square().mean()

    model = Molecule(layers.GaussianSmearing(0.0, 10.0, 32), made)
    batch = {"x": drawn(atoms, width), "edge_index": drawn(2, edges, below=atoms), "distances": drawn(edges).abs() * 3}
    return Task(model.to(dtype), [batch], energy)


class Molecule(nn.Module):
    """SchNet's interactions between atoms."""

    def __init__(self, smear: nn.Module, interactions: nn.ModuleList):
        super().__init__()
        self.smear, self.interactions = smear, interactions

    def forward(self, x: Tensor, edge_index: Tensor, distances: Tensor) -> Tensor:
        smeared = self.smear(distances)
        for layer in self.interactions:
            x = x + layer(x, edge_index, distances, smeared)
        return x.sum(1)


GEOMETRIC = ("torch_geometric",)
MODELS = (
    geometric("GCN", "GCN", autocast=True),
    geometric("GraphSAGE · BF16", "GraphSAGE", width=512),
    geometric("GAT", "GAT", autocast=True, arguments={"heads": 4}),
    geometric("GIN · dropout", "GIN", autocast=True, dropout=True, arguments={"dropout": 0.1}),
    FieldModel("Graph transformer", "graphs", graph_transformer, GEOMETRIC, autocast=True, on_cpu=True),
    FieldModel("SchNet", "graphs", schnet, GEOMETRIC, autocast=True, on_cpu=True),
)
