"""Sparse tensors among the values of a graph: gradients of `nn.Embedding(sparse=True)`, say.

Where a pass has changed what a node reads, Inductor computes the node's value again without data, and asks for the
storage of both values to see whether it is the same. A sparse tensor has none, and the compilation ends in a
NotImplementedError. Torch's own passes change nothing that such a gradient is computed from; ours do, a matmul of FP8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch._inductor import fx_utils

from fp8compile.torch_hooks.inductor.our_graph import is_ours


def give_storages() -> None:
    """Patch by what Inductor tells storages apart: in graphs of ours a tensor without one stands for itself."""
    storage_of: Callable[[Tensor], int] = fx_utils.get_storage

    @functools.wraps(storage_of)
    def known(x: Tensor) -> int:
        if is_ours() and not torch._C._has_storage(x):
            return -id(x)  # no address of a storage
        return storage_of(x)

    fx_utils.get_storage = known
