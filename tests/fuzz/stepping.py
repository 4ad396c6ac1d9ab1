"""One training step of a random model: eager in any precision, or compiled in one of several ways."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager  # by name it takes no compiler
from torch.overrides import TorchFunctionMode

from fp8compile.plan import store

Around = Callable[[nn.Module], contextlib.AbstractContextManager[None]]
Step = dict[str, Tensor]  # outputs as "output N", the loss, gradients and buffers by name

# name -> options. Node by node, "inductor" runs references of casts, and "generated" regions: as they are, or kernels.
WAYS: dict[str, dict[str, str]] = {
    "inductor": {"executor": "eager", "kernels": "inductor"},
    "generated": {"executor": "eager", "kernels": "generated"},
    "inductor, compiled": {"executor": "inductor", "kernels": "inductor"},
    "generated, compiled": {"executor": "inductor", "kernels": "generated"},
}


def _run_nodes(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """Return what runs `gm` node by node: torch's `aot_eager`, but for tensors that lie otherwise than their fakes.

    Operators choose strides that their fakes do not know, attention's result for one; a view may be no view then.
    """
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()
    return make_boxed_func(gm.forward)


NODE_BY_NODE = partial(aot_eager, fw_compiler=_run_nodes, bw_compiler=_run_nodes)


class Widest(TorchFunctionMode):
    """Keeps FP64 where a model asks for FP32: `x.float()`, `softmax(x, dtype=torch.float32)`.

    A gradient that is zero but for rounding (a shift of all logits) has its exact value only if nothing is rounded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def imported(text: str) -> Iterator[ModuleType]:
    """The module whose source is `text`, from a file: tracebacks and the compiler's reports show its lines."""
    with tempfile.TemporaryDirectory(prefix="fp8compile-fuzz-") as folder:
        path = Path(folder) / "fuzzed_model.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("fuzzed_model", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["fuzzed_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        try:
            yield module
        finally:
            del sys.modules["fuzzed_model"]


class Subject:
    """A random model on a device, with a step of it in any precision."""

    def __init__(self, module: ModuleType, device: str, seed: int) -> None:
        self.module, self.device = module, device
        self.precision: str = module.PRECISION
        torch.manual_seed(seed)
        model: nn.Module = module.Model()
        for p in model.parameters():
            if p.dim() == 1:  # biases and norms start as all zeros, or all ones
                p.data.add_(0.1 * torch.randn(p.shape))
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        self.model = model.to(device, dtype)
        self.names = list(inspect.signature(module.Model.forward).parameters)[1:]

    def eager(self, data: int, exact: bool = False, around: Around = contextlib.nullcontext) -> Step:
        """A step of PyTorch's own, in the model's precision or, `exact`, in FP64; it runs within around(model)."""
        model = copy.deepcopy(self.model)
        with Widest() if exact else around(model):
            return self.step(model.double() if exact else model, model, data)

    def compiled(self, way: str, options: dict[str, Any]) -> Callable[[int], Step]:
        """A function of a data seed that makes steps by the backend."""
        torch.compiler.reset()
        store.reset()
        model = copy.deepcopy(self.model)
        run = torch.compile(model, backend="fp8", options={"strict": True, **options, **WAYS[way]})
        return lambda data: self.step(model, run, data)

    def traced(self, data: int, backend: str | Callable[..., Any] = NODE_BY_NODE) -> Step:
        """A step by torch.compile without us."""
        torch.compiler.reset()
        model = copy.deepcopy(self.model)
        return self.step(model, torch.compile(model, backend=backend), data)

    def step(self, model: nn.Module, run: Callable[..., Any], data: int) -> Step:
        """Forward and backward of `run`, which is `model` in some form; the weights are those of `data` as well."""
        model.zero_grad(set_to_none=True)
        self._draw_weights(model, data)
        dtype = next(model.parameters()).dtype
        given = {name: self._placed(x, dtype) for name, x in self.module.inputs(data).items()}
        x = given["x"].requires_grad_(self.module.INPUT_GRAD and given["x"].is_floating_point())
        outer = {name: x for name, x in given.items() if name not in self.names}
        narrow = self.precision == "autocast" and dtype != torch.float64
        with torch.autocast(self.device, torch.bfloat16, enabled=narrow):
            outputs = run(**{name: given[name] for name in self.names})
            loss = outputs[0] if self.module.LOSS_INSIDE else self.module.loss(outputs, **outer)
        if loss.requires_grad:
            loss.backward()
        found = {f"output {n}": o.detach().clone() for n, o in enumerate(outputs)} | {"loss": loss.detach().clone()}
        found |= {"input": x.grad.clone()} if x.grad is not None else {}
        found |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return found | {name: b.clone() for name, b in model.named_buffers() if b.is_floating_point()}

    @torch.no_grad()
    def _draw_weights(self, model: nn.Module, data: int) -> None:
        """Give `model` the weights that belong to `data`: the model's own for 0, else up to 10 % off.

        A weight halfway between two codes falls to either side in two ways of dividing by its scale, whatever the data.
        """
        g = torch.Generator().manual_seed(data)
        for p, own in zip(model.parameters(), self.model.parameters(), strict=True):
            factor = 1 + 0.1 * torch.rand(own.shape, generator=g) if data else torch.ones(())
            p.copy_(own * factor.to(own.device, own.dtype))

    def _placed(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        # what BF16 rounds, FP64 gets rounded as well
        if x.is_floating_point() and self.precision == "bf16":
            x = x.bfloat16()
        return x.to(self.device, dtype if x.is_floating_point() else x.dtype)
