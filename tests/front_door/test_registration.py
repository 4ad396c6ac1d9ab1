"""Backends under names: they mean what was registered, and accelerate knows them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.errors import OptionError

OPTIONS = {"select": "all", "executor": "eager", "strict": True, "recipe": "rowwise"}


def test_a_name_has_its_options():
    assert fp8compile.register_backend("fp8_by_rows", **OPTIONS) == "fp8_by_rows"
    torch.compile(nn.Linear(32, 32), backend="fp8_by_rows")(torch.randn(16, 32)).sum().backward()
    plan = fp8compile.last_compile()
    assert plan.recipe == "rowwise"
    assert [m.decision for m in plan.matmuls] == ["fp8"] * len(plan.matmuls) != []
    assert fp8compile.register_backend("fp8_by_rows", **OPTIONS) == "fp8_by_rows", "the same again is the same"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fp8", {"recipe": "rowwise"}, "a backend called 'fp8' exists already"),
        ("inductor", {}, "a backend called 'inductor' exists already"),
        ("FP8", {}, "an identifier in lower case, and is not 'FP8'"),
        ("fp8-rows", {}, "an identifier in lower case"),
        ("fp8_rows", {"recipee": "rowwise"}, "unknown option 'recipee'. Did you mean 'recipe'"),
    ],
)
def test_what_means_nothing_is_refused(name, options, message):
    with pytest.raises(OptionError, match=message):
        fp8compile.register_backend(name, **options)
    assert fp8compile.register_backend() == "fp8"


def test_accelerate_takes_registered_names_alone():
    accelerate = pytest.importorskip("accelerate.utils", reason="needs accelerate: pip install 'fp8compile[trainers]'")
    fp8compile.register_backend("fp8_known", **OPTIONS)
    plugin = accelerate.TorchDynamoPlugin(backend="fp8_known", options={"select": "all"})
    assert plugin.to_kwargs() == {"backend": "fp8_known", "options": {"select": "all"}}
    assert accelerate.TorchDynamoPlugin(backend="fp8").to_kwargs() == {"backend": "fp8"}
    member = plugin.backend
    assert member != accelerate.DynamoBackend.NO
    assert member is pickle.loads(pickle.dumps(member)) is copy.deepcopy(member)
    assert member is accelerate.DynamoBackend.FP8_KNOWN, "where some Pythons look for it to copy it"
    assert accelerate.TorchDynamoPlugin(backend="inductor").backend is accelerate.DynamoBackend.INDUCTOR
    with pytest.raises(ValueError, match="'FP9' is not a valid DynamoBackend"):
        accelerate.TorchDynamoPlugin(backend="fp9")
