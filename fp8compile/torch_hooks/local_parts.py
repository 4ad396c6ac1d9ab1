"""What one rank has of a DTensor. Private API of torch, used here only: `DTensor._local_tensor`.

`to_local` makes a view for autograd: another tensor, whose version says nothing of what is written to the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(x: Any) -> Any:
    """Return what this rank has of a DTensor, as it is; any other tensor itself."""
    return x._local_tensor if isinstance(x, DTensor) else x


def set_local_part(x: DTensor, local: Tensor) -> None:
    """Make `local` what this rank has of `x`; the object stays the same."""
    x._local_tensor = local


def sharded_like(x: Tensor, local: Tensor) -> Tensor:
    """Return a tensor of which this rank has `local`, sharded as `x` is; `local` itself if `x` is not sharded."""
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )  # fmt: skip
