"""The rows of the field suite: models of many libraries as those ship them, and loops as people write them.

A row is a `FieldModel` (task.py): it builds a model with random weights at sizes that people train, depth left out
where it only repeats, and the same model small enough for a CPU.
"""

from __future__ import annotations

from benchmarks.field.models import (
    decoders,
    diffusion,
    encoders,
    experts,
    graphs,
    loops,
    recommenders,
    recurrent,
    series,
    sound,
    together,
    vision,
)

KINDS = (
    decoders,
    experts,
    encoders,
    vision,
    sound,
    diffusion,
    recurrent,
    graphs,
    recommenders,
    together,
    series,
    loops,
)
MODELS = tuple(model for kind in KINDS for model in kind.MODELS)
BY_NAME = {model.name: model for model in MODELS}
