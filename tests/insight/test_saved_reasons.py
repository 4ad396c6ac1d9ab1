"""Why a saved tensor is kept as it is, where that is told by what it is."""

from __future__ import annotations

import torch
from torch import nn

import fp8compile


class Filter(nn.Module):
    """A linear layer, and a filter in the frequencies of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.spectrum = nn.Parameter(torch.randn(9, 32, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(self.linear(x), dim=0)
        return torch.fft.irfft(frequencies * torch.view_as_complex(self.spectrum), dim=0)


def test_complex_numbers_are_no_indices():
    options = {"select": "all", "strict": True, "executor": "eager"}
    model = Filter()
    torch.compile(model, backend="fp8", options=options)(torch.randn(16, 32)).square().sum().backward()
    reasons = {row["dtype"]: row["reason"] for row in fp8compile.last_compile().rows("saved")}
    assert reasons["complex64"] == "complex numbers"
