"""Whether a CUDA graph is being captured: then nothing that is launched runs yet, and what it reads has to stay."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Return True while a CUDA graph is captured from the current stream; False without CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
