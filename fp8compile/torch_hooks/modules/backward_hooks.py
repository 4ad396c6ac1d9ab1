"""Modules with full backward hooks (and pre-hooks) as part of a compiled graph.

    Dynamo:    hooks = BackwardHook(module, …);  x = hooks.setup_input_hook(x);  …;  y = hooks.setup_output_hook(y)
    joint:     grad_y = fp8::backward_hooks(state, "before", [grad_y], []);  …
               grad_x = fp8::backward_hooks(state, "after", [grad_x], [grad_y])

torch traces such hooks for compiled autograd alone, and else leaves the module to Python: its own modules (nn.Linear)
are then not compiled at all. What it traces for compiled autograd names the hooks in an object that is made anew for
each call. Here that object rides on an empty tensor through AOTAutograd, which saves it for backward like any input;
one operator takes the hooks from it and calls them with the gradients, as often and in the order in which torch does.
The operator gives new tensors, as operators of a graph must: a copy of each gradient that a hook sees.

Private API of torch, imported here only: how Dynamo traces the hooks, and the object that names them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import compiled_autograd  # says whether hooks may be traced: while they are, for this backend
from torch._dynamo.variables import BackwardHookVariable, TensorVariable, TupleVariable  # where Dynamo asks that
from torch._dynamo.variables.builder import wrap_fx_proxy  # a node of the graph, as Dynamo has it
from torch._guards import detect_fake_mode  # of the graph's inputs
from torch.fx.experimental._backward_state import BackwardState  # names hooks and modules
from torch.utils.hooks import BackwardHook

Values = tuple[Tensor | None, ...]
SCHEMA = "backward_hooks(Tensor state, str call, Tensor[] gradients, Tensor[] of_outputs) -> Tensor[]"
BEFORE, AFTER, ALONE = "before", "after", "alone"


def trace_hooks(is_ours: Callable[[Any], bool]) -> None:
    """Let Dynamo trace backward hooks where the backend `is_ours`."""
    create, setup = BackwardHookVariable.create, BackwardHookVariable._setup_hook

    def create_traced(tx: Any, *args: Any, **kwargs: Any) -> Any:
        if compiled_autograd.compiled_autograd_enabled or not is_ours(tx.output.compiler_fn):
            return create(tx, *args, **kwargs)
        compiled_autograd.compiled_autograd_enabled = True
        try:
            hooks = create(tx, *args, **kwargs)
        finally:
            compiled_autograd.compiled_autograd_enabled = False
        hooks.proxy.node.meta["example_value"] = PlacedHooks(None, (), ())
        return hooks

    def setup_traced(self: Any, tx: Any, name: str, args: Any) -> Any:
        if isinstance(self.proxy.node.meta["example_value"], PlacedHooks) and not isinstance(args, TensorVariable):
            return _setup_placed(self, tx, name, args)
        return setup(self, tx, name, args)

    BackwardHookVariable.create = staticmethod(create_traced)
    BackwardHookVariable._setup_hook = setup_traced  # type: ignore[method-assign]


def _setup_placed(hooks: Any, tx: Any, name: str, args: Any) -> Any:
    """Trace hooks on the tensors among several values. Of values that are no tuple torch takes no notice either."""
    if type(args) is not TupleVariable:
        return args
    places = [i for i, x in enumerate(args.items) if isinstance(x, TensorVariable)]
    tensors = tuple(args.items[i].as_proxy() for i in places)
    call = (hooks.as_proxy(), name, tensors, tuple(places), len(args.items))
    found = wrap_fx_proxy(tx, tx.output.create_proxy("call_method", "setup_placed", call, {}))
    new = dict(zip(places, found.unpack_var_sequence(tx), strict=True))
    return TupleVariable([new.get(i, x) for i, x in enumerate(args.items)])


def insert(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Sequence[Any], Callable[..., Any]]:
    """Make hooks that Dynamo traced into `gm` hooks of ours, in place.

    Returns the inputs to compile for, and what makes of a compiled graph one that takes what Dynamo hands over.
    """
    index = next((i for i, x in enumerate(inputs) if isinstance(x, BackwardState)), None)
    if index is None:
        return inputs, _as_it_is
    mode = detect_fake_mode([x for x in inputs if isinstance(x, Tensor)])
    carrier = torch.empty(0, dtype=torch.float32, device="cpu")
    fake = mode.from_tensor(carrier) if mode is not None else carrier
    for part in gm.modules():  # a checkpointed region is a graph of its own
        if isinstance(part, fx.GraphModule):
            _insert(part, fake)
    return [fake if i == index else x for i, x in enumerate(inputs)], lambda compiled: _carrying(compiled, index)


def _insert(gm: fx.GraphModule, carrier: Tensor) -> None:
    for node in gm.graph.nodes:
        if isinstance(node.meta.get("example_value"), BackwardState):
            node.meta["example_value"] = carrier
        elif node.op == "call_function" and getattr(node.target, "__name__", "") == "_in_graph_bw_hooks":
            names = inspect.getclosurevars(node.target).nonlocals
            node.target = GraphHooks
            node.args = (*node.args, names["module_name"], names["user_hooks_name"], names["user_pre_hooks_name"])
    gm.recompile()


def _as_it_is(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return compiled


def _carrying(compiled: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return `compiled` with its argument `index`, the state, replaced by a tensor that carries it."""

    def run(*args: Any) -> Any:
        carrier = torch.empty(0, dtype=torch.float32, device="cpu")
        carrier.backward_state = args[index]  # type: ignore[attr-defined]
        return compiled(*args[:index], carrier, *args[index + 1 :])

    return run


class PlacedHooks(BackwardHook):
    """torch's `BackwardHook`, for the tensors among values of other types."""

    def setup_placed(
        self, name: str, tensors: Sequence[Tensor], places: Sequence[int], length: int
    ) -> tuple[Tensor | None, ...]:
        """Call `setup_input_hook` or `setup_output_hook`, by name, for `length` values with tensors in these places."""
        found = getattr(self, name)(_spread(tensors, places, length))
        return tuple(found[i] for i in places)


class GraphHooks(PlacedHooks):
    """Hooks in a graph: the operator calls the user's, and knows which gradients belong to which inputs and outputs."""

    def __init__(self, state: Tensor, module: str, hooks: str, pre_hooks: str):
        super().__init__(None, (self._after,), (self._before,))
        self.state = state
        self.names = {"module": module, "hooks": hooks, "pre_hooks": pre_hooks}

    def _before(self, _: Any, of_outputs: Values) -> Values:
        """Call pre-hooks; and, if no input takes a gradient, the hooks as well: nothing else would call them."""
        alone = self.input_tensors_index is None
        return self._call(ALONE if alone else BEFORE, of_outputs, ())

    def _after(self, _: Any, of_inputs: Values, of_outputs: Values) -> Values | None:
        return None if self.input_tensors_index is None else self._call(AFTER, of_inputs, of_outputs)

    def _call(self, when: str, gradients: Values, of_outputs: Values) -> Values:
        given, outputs = ([i for i, x in enumerate(values) if x is not None] for values in (gradients, of_outputs))
        told = {**self.names, "when": when, "given": given, "of": len(gradients), "n_inputs": self.n_inputs}
        call = json.dumps({**told, "outputs": outputs, "of_outputs": len(of_outputs)})
        tensors = [[x for x in values if x is not None] for values in (gradients, of_outputs)]
        results = torch.ops.fp8.backward_hooks(self.state, call, *tensors)
        return _spread(results, given, len(gradients))


def _spread(values: Sequence[Tensor], places: Sequence[int], length: int) -> Values:
    found = dict(zip(places, values, strict=True))
    return tuple(found.get(i) for i in range(length))


def _backward_hooks(state: Tensor, call: str, gradients: list[Tensor], of_outputs: list[Tensor]) -> list[Tensor]:
    """Call the hooks of one module, as `BackwardHook` does; return the gradients that they leave, as new tensors.

    call: names in the state that `state` carries, and which gradients are not None. Raises what a hook raises, and
    `RuntimeError` for a hook that returns another number of gradients.
    """
    told, names = json.loads(call), state.backward_state  # type: ignore[attr-defined]
    module, hooks, pre_hooks = (getattr(names, told[name]) for name in ("module", "hooks", "pre_hooks"))
    values = _spread(gradients, told["given"], told["of"])
    if told["when"] == AFTER:
        outputs = _spread(of_outputs, told["outputs"], told["of_outputs"])
        for hook in hooks:
            values = _checked(hook(module, values, outputs), values, "hook", "grad_input")
    else:
        for hook in pre_hooks:
            values = _checked(hook(module, values), values, "pre hook", "grad_output")
    if told["when"] == ALONE:
        _call_alone(module, hooks, (None,) * told["n_inputs"], values)
    return [_like(values[place], x) for place, x in zip(told["given"], gradients, strict=True)]


def _checked(found: Any, before: Values, what: str, name: str) -> Values:
    if found is None:
        return before
    if len(found) != len(before):
        raise RuntimeError(
            f"Backward {what} returned an invalid number of {name}, got {len(found)}, but expected {len(before)}"
        )
    return tuple(found)


def _call_alone(module: torch.nn.Module, hooks: Sequence[Callable[..., Any]], nothing: Values, values: Values) -> None:
    for hook in hooks:
        found = hook(module, nothing, values)
        if found is not None and any(x is not None for x in found):
            raise RuntimeError(
                "Backward hook for Modules where no input requires gradient should always return None or None for all "
                "gradients."
            )


def _like(value: Tensor | None, given: Tensor) -> Tensor:
    """Return a new tensor of what a hook left, laid out as its gradient was; None stands for zeros."""
    if value is None:
        return torch.zeros_like(given)
    if value.shape != given.shape:
        raise RuntimeError(
            f"Backward hook returned a gradient of shape {list(value.shape)} for one of shape {list(given.shape)}"
        )
    return torch.empty_like(given).copy_(value)


def _fake(state: Tensor, call: str, gradients: list[Tensor], of_outputs: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x) for x in gradients]


_library = torch.library.Library("fp8", "FRAGMENT")  # lives as long as the process
_TAGS = [torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else []  # it calls the user's Python
_library.define(SCHEMA, tags=_TAGS)
_library.impl("backward_hooks", _backward_hooks, "CompositeExplicitAutograd")
torch.library.register_fake("fp8::backward_hooks", _fake, lib=_library)
