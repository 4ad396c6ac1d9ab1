"""Libraries of models, imported when a row needs them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks.harness.peers import LeftOutError

# What torchvision's Python side asks for while it is imported
OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def library(name: str) -> Any:
    """Return the imported package. Raises `LeftOutError` where it is not installed or cannot be imported."""
    if find_spec(name) is None:
        raise LeftOutError(f"{name} is not installed")
    declare_torchvision_operators()
    try:
        return _imported(name)
    except Exception as error:
        raise LeftOutError(f"{name} cannot be imported: {(str(error).splitlines() or [''])[0]}") from error


@cache
def _imported(name: str) -> ModuleType:
    return import_module(name)


@cache
def declare_torchvision_operators() -> Any:
    """Let torchvision be imported beside a torch for CPUs, with which its compiled operators cannot be loaded.

    Its models that use none of these operators need no more. Transformers and timm import it as well.
    """
    spec = find_spec("torchvision")
    if torch.version.cuda is not None or spec is None or not spec.submodule_search_locations:
        return None
    for file in Path(spec.submodule_search_locations[0]).glob("_C*.so"):
        try:
            torch.ops.load_library(str(file))
        except OSError:
            continue
        return None
    declared = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        declared.define(name + SCHEMA)
    return declared  # alive as long as the process
