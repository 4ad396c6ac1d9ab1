"""nn.LSTM, nn.GRU and nn.RNN within compiled models: called as they are, between the graphs of what is around them.

torch before 2.15 refuses them where an attribute gives one, in the middle of an expression, and then leaves the rest of
the function to Python: linears before and after it are not compiled, and nothing says so. torch from 2.15 on refuses
where one is called, but leaves whatever module is called by the same code later as well. A call can be left and
resumed from. So for this backend Dynamo gets the module, and breaks the graph where it is called: it runs in torch's
own kernels (cuDNN), and what is around it is compiled. With `torch._dynamo.config.allow_rnn` all is as torch has it: it
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

    @functools.wraps(wrap)
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
        _break_graph(self.value)

    def tp_getattro_impl(self: Any, tx: Any, name: str) -> Any:
        if name == "forward":  # module.compile(), of which torch from 2.14 on takes up torch's own modules
            _break_graph(self.value)
        return kind.tp_getattro_impl(self, tx, name)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"call_function": call_function, "tp_getattro_impl": tp_getattro_impl})


def _break_graph(module: nn.Module) -> NoReturn:
    unimplemented(
        gb_type=REASON,
        context=str(module),
        explanation="nn.LSTM, nn.GRU and nn.RNN run in torch's own kernels.",
        hints=[],
    )
