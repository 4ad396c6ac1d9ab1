"""Vision towers of the scale model, and which one a configuration of examples/configs.py has."""

from __future__ import annotations

from dataclasses import dataclass

from configs import VisionLanguage


@dataclass(frozen=True)
class Vision:
    """A vision tower of blocks without a gate in their MLP, whose attention sees all pairs, and its projector.

    rest: parameters of the tower beside its blocks' (embeddings of patches and positions, norms of its own).
    patches: rows of an image in the tower; tokens: that the projector makes of it; images: a sequence.
    projector: widths of what it reads, has in the middle, and hands on. It is trained; the tower unless `frozen`.
    """

    width: int
    layers: int
    heads: int
    mlp: int
    rest: int
    patches: int
    tokens: int
    projector: tuple[int, int, int]
    images: int = 1
    frozen: bool = False

    @property
    def kv(self) -> int:
        return self.width

    @property
    def inner(self) -> int:
        """As much of SwiGLU as keeps and moves what the MLP does: it has a gate and a product fewer."""
        return self.mlp // 2

    @property
    def layer(self) -> int:
        """Parameters of a block's linear layers, biases left out."""
        return 4 * self.width**2 + 2 * self.last

    @property
    def last(self) -> int:
        return self.width * self.mlp

    @property
    def pairs(self) -> float:
        return 1.0

    @property
    def tower(self) -> int:
        """All of its parameters: biases, and two norms a block, with them."""
        return self.layers * (self.layer + 4 * self.width + self.mlp + self.width + 4 * self.width) + self.rest

    @property
    def projected(self) -> int:
        """Parameters of the projector's two linear layers, with their biases."""
        first, middle, last = self.projector
        return (first + 1) * middle + (middle + 1) * last

    @property
    def trained(self) -> int:
        return self.projected + (0 if self.frozen else self.tower)


def vision_of(c: VisionLanguage) -> Vision:
    """Return the tower of a configuration; its parameters are exactly those of transformers' models."""
    tower, width = c.tower, c.language.width
    pixels, whole = 3 * 14 * 14, tower.merged * tower.width
    if tower.family == "clip":  # with a class token; norms before and after the blocks
        rows, projector = tower.patches + 1, (tower.width, width, width)
        rest = tower.width * (pixels + 1 + rows + 4)
    else:  # patches of two frames; a norm in front of the projector
        rows, projector = tower.patches, (whole, whole, width)
        rest = tower.width * (2 * pixels + 2)
    tokens = tower.patches // tower.merged
    return Vision(
        tower.width, tower.layers, tower.heads, tower.inner, rest, rows, tokens, projector, c.images, tower.frozen
    )
