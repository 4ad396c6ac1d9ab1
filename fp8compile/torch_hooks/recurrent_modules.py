"""nn.LSTM, nn.GRU and nn.RNN within compiled models: called as they are, between the graphs of what is around them.

torch refuses them where an attribute gives one, in the middle of an expression, and then leaves the rest of the
function to Python: linears before and after it are not compiled, and nothing says so. A call can be left and resumed
from. So for this backend Dynamo gets the module, and breaks the graph where it is called: it runs in torch's own
kernels (cuDNN), and what is around it is compiled. With `torch._dynamo.config.allow_rnn` all is as torch has it: it
traces step by step, which takes long, and in torch 2.13 fails for nn.LSTM.

Private API of torch, imported here only: how Dynamo meets a module, and what it has for one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch._dynamo import config as dynamo_config  # whether a user lets torch trace them
from torch._dynamo.exc import unimplemented  # how Dynamo breaks a graph
from torch._dynamo.variables.builder import VariableBuilder  # what meets a module

KINDS = (nn.RNN, nn.GRU, nn.LSTM)
REASON = "Recurrent module is called between graphs"


def call_between_graphs(is_ours: Callable[[Any], bool]) -> None:
    """Let Dynamo break graphs at calls of recurrent modules, where the backend `is_ours`."""
    wrap = VariableBuilder.wrap_module

    def wrap_module(self: Any, value: nn.Module) -> Any:
        if not isinstance(value, KINDS) or dynamo_config.allow_rnn or not is_ours(self.tx.output.compiler_fn):
            return wrap(self, value)
        with dynamo_config.patch(allow_rnn=True):  # type: ignore[attr-defined]
            variable = wrap(self, value)
        variable.__class__ = _called_between_graphs(type(variable))
        return variable

    VariableBuilder.wrap_module = wrap_module


@functools.cache
def _called_between_graphs(kind: type) -> type:
    """Return a class of Dynamo's for a module whose calls break the graph."""

    def call_function(self: Any, *_: Any, **__: Any) -> NoReturn:
        unimplemented(
            gb_type=REASON,
            context=str(self.value),
            explanation="nn.LSTM, nn.GRU and nn.RNN run in torch's own kernels.",
            hints=[],
        )

    return type(kind.__name__, (kind,), {"call_function": call_function})
