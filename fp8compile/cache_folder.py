"""Where plans and kernels are kept between processes. Private API of torch, used here only: the folder of its cache."""

from __future__ import annotations

from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir


def cache_folder() -> Path:
    """Return our folder in that of Inductor's cache: plans and kernels live and die with the code that calls them."""
    return Path(cache_dir()) / "fp8compile"
