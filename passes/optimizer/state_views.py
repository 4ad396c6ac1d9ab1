"""Read the arguments of an optimizer's own operators by name (`passes/core/node_views.py` is that for all others)."""

from __future__ import annotations

from torch import fx

from fp8compile.optimizer import state_ops
from fp8compile.passes.core.node_views import NodeView, argument


class LoadState(NodeView):
    """`fp8::load_state`: a state as numbers."""

    TARGETS = frozenset({state_ops.load_state})

    @property
    def payload(self) -> fx.Node:
        """The codes."""
        return self._node("payload")

    @property
    def side(self) -> fx.Node:
        """The scales, or what the format has in their place."""
        return self._node("side")

    @property
    def format(self) -> str:
        """The format of the state."""
        return self._text("format")


class StoreState(NodeView):
    """`fp8::store_state`: numbers as a state."""

    TARGETS = frozenset({state_ops.store_state})

    @property
    def x(self) -> fx.Node:
        """The numbers."""
        return self._node("x")

    @property
    def counter(self) -> fx.Node | None:
        """The count of the random bits that its rounding has drawn."""
        return self._optional("counter")

    @property
    def low(self) -> fx.Node | None:
        """The missing bits of the parameter, where this state carries them."""
        return self._optional("low")

    @property
    def format(self) -> str:
        """The format of the state."""
        return self._text("format")

    @property
    def parameter(self) -> str:
        """The rounding of the parameter of this state: "nearest", "stochastic", "split"."""
        return self._text("parameter")


class Unscale(NodeView):
    """`fp8::unscale`: a gradient times 1/scale."""

    TARGETS = frozenset({state_ops.unscale})

    @property
    def gradient(self) -> fx.Node:
        """The gradient of the scaled loss."""
        return self._node("gradient")

    @property
    def inverse(self) -> fx.Node:
        """1/scale, FP32, 0-d."""
        return self._node("inverse")

    @property
    def overflow(self) -> fx.Node:
        """The number that is not 0 where the step is to be skipped."""
        return self._node("overflow")


class UpdateParameters(NodeView):
    """`fp8::update_parameters`: updates of many parameters by one expression."""

    TARGETS = frozenset({state_ops.update_parameters})

    @property
    def stored(self) -> list[fx.Node]:
        """The tensors that are written, parameter by parameter."""
        return list(argument(self.node, "stored"))

    @property
    def read(self) -> list[fx.Node]:
        """The tensors that are read beside those."""
        return list(argument(self.node, "read"))

    @property
    def scalars(self) -> list[fx.Node]:
        """The numbers of each parameter, one parameter after the other."""
        return list(argument(self.node, "scalars"))

    @property
    def spec(self) -> str:
        """The expression as JSON (`kernels/optimizer/update_spec.py`)."""
        return self._text("spec")
