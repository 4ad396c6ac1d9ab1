"""Models whose symbolic sizes are quotients, or are read off what they compute."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Regrouped(nn.Module):
    """Linear layers around a regrouping of tokens, whose sizes are quotients that guards alone say are equal."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.a, self.b, self.merge = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        match self.form:
            case "patches":
                return self.merge(x.reshape(batch, length // 4, 4 * width))
            case "unflattened patches":
                return self.merge(x.unflatten(1, (-1, 4)).flatten(2))
            case "inferred features":
                y = self.a(x).view(batch, length, 4, -1).transpose(1, 2).reshape(batch, -1, 128)
                return self.b(y)
            case "even and odd":
                return self.a(x[:, ::2]) + self.a(x[:, 1::2])
            case _:
                return (self.a(x) @ self.a.weight).unflatten(1, (length // 2, 2)).flatten(0, 1)


FORMS = ("patches", "unflattened patches", "inferred features", "even and odd", "rows by twos")


class Expanded(nn.Module):
    """A sequence expanded by its own length between linear layers: backward needs sizes of what forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.gelu(self.a(x[:, :, None].expand(-1, -1, x.shape[1], -1)))).sum(2)
