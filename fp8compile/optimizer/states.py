"""`FP8State`: an optimizer state that looks like a plain tensor and is kept in 8 bits.

    FP8State = payload (a byte an element, in the state's shape) · side (two FP32 a group of 128)
               · counter (int32 [1], of random bits) · low (int16, the missing bits of a BF16 parameter)

Reading dequantizes, writing quantizes; torch sees through it (`__tensor_flatten__`), so a compiled optimizer step has
payload and side as its inputs. In a compiled step the passes take care that each state is read once and written once;
run without a compiler, every in-place operation of an optimizer stores, which is slower and less precise.

A step with graph breaks does so between two graphs, where Dynamo would compile what runs here as functions of the user,
one by one: hence `never_compiled`. In a graph nothing of this is traced by Dynamo, only by AOTAutograd.
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp8compile.errors import StateError
from fp8compile.kernels.optimizer import state_transfer
from fp8compile.optimizer import state_checks, state_ops
from fp8compile.optimizer.new_states import is_one_number, number_of
from fp8compile.optimizer.state_copies import copied, no_memory
from fp8compile.optimizer.state_parts import INNER
from fp8compile.state_formats import GROUP, parse_state_format
from fp8compile.torch_hooks.calls.untraced import never_compiled
from fp8compile.torch_hooks.tensor_subclasses import (
    has_values_to_come,
    no_torch_function,
    refuse_memory,
    tree_map,
    without_memory,
    written_arguments,
)

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default}


class FP8State(Tensor):
    """A state x ≈ decode(payload, side), as the module says. Made with `FP8State.of(x, format)`."""

    payload: Tensor
    side: Tensor
    counter: Tensor | None
    low: Tensor | None
    stored_checksum: int | None = None  # of the file that it is from, where its values have not been seen yet
    from_file: bool = False  # not in use yet: what a tool copies it into is a checkpoint, too
    moves: ClassVar[int] = 0  # how often a state has got other memory, of all states: so steps need not ask each part

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        payload: Tensor,
        side: Tensor,
        counter: Tensor | None,
        low: Tensor | None,
        format: str,
        parameter: str,
        dtype: torch.dtype,
    ) -> FP8State:
        return refuse_memory(without_memory(cls, payload, dtype=dtype))

    def __init__(
        self,
        payload: Tensor,
        side: Tensor,
        counter: Tensor | None,
        low: Tensor | None,
        format: str,
        parameter: str,
        dtype: torch.dtype,
    ) -> None:
        self.payload, self.side, self.counter, self.low = payload, side, counter, low
        self.format, self.parameter = format, parameter

    @staticmethod
    @never_compiled
    def of(
        x: Tensor, rounding: str = "nearest", *, format: str, salt: int = 0, dtype: torch.dtype | None = None
    ) -> FP8State:
        """Return `x` stored in `format`, a state in `dtype` (default: x's) to those who read it.

        `rounding` is that of its parameter, whose missing bits or random bits it carries; `salt` sets its random bits
        apart from those of other states.
        """
        how = parse_state_format(format)
        counter = low = None
        if how.stochastic or rounding == "stochastic":
            counter = torch.tensor([salt % (1 << 31)], dtype=torch.int32, device=x.device)
        if rounding == "split":
            low = torch.zeros(x.shape, dtype=torch.int16, device=x.device)
        if is_one_number(x):
            payload, side = state_transfer.constant(x.shape, number_of(x), format, counter)
        else:
            payload, side = state_ops.store_state(x.detach().contiguous(), counter, low, format, rounding)
        return FP8State(payload, side, counter, low, format, rounding, dtype or x.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, str, torch.dtype]]:
        self.settle()
        names = [name for name in INNER if getattr(self, name) is not None]
        return names, (self.format, self.parameter, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> FP8State:
        return FP8State(*(inner.get(name) for name in INNER), *context)  # type: ignore[arg-type]

    def _stable_hash_for_caching(self) -> str:
        """Return what compiled code depends on, for torch's caches."""
        what = [tuple(self.shape), self.stride(), self.dtype, self.device, [getattr(self, n) is None for n in INNER]]
        return f"FP8State {self.format} {self.parameter} {what}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FP8State({list(self.shape)}, {self.format}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle()
        return rebuild, (*self._arguments(), state_checks.checksum(self))

    def __copy__(self) -> FP8State:
        return self.like(Tensor.detach)  # the same memory, in parts of its own

    def _arguments(self) -> tuple[Any, ...]:
        return *(getattr(self, name) for name in INNER), self.format, self.parameter, self.dtype

    def parts(self) -> list[Tensor]:
        """Return the tensors that the state is made of."""
        return [x for name in INNER if (x := getattr(self, name)) is not None]

    @property
    def data(self) -> Tensor:
        """The state, without its history; assigned to, it takes over the memory of another one, as tensors do."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, FP8State) or value.__tensor_flatten__() != self.__tensor_flatten__():
            raise StateError(f"the data of {self} cannot be {type(value).__name__}s of another kind: copy_ into it")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # shape and device
        for mine, other in zip(self.parts(), value.parts(), strict=True):
            mine.data = other.data  # compiled steps hold the parts
        FP8State.moves += 1

    def share_memory_(self) -> FP8State:
        """Move all parts to shared memory, as `Tensor.share_memory_` does."""
        for x in self.parts():
            x.share_memory_()
        FP8State.moves += 1
        return self

    def is_shared(self) -> bool:
        """Return True if all parts are in shared memory."""
        return all(x.is_shared() for x in self.parts())

    def storage(self) -> Any:
        """Raise `StateError`: what wants the memory of a tensor, as safetensors does, cannot copy a state."""
        raise no_memory("its storage is asked for")

    def data_ptr(self) -> int:
        """Return 0, by which torch's own tools in Python know that there is no memory; those in C++ raise."""
        return 0

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise no_memory("it is exported by dlpack")

    @never_compiled
    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """Return the state as a plain tensor."""
        self.settle()
        return state_ops.load_state(self.payload, self.side, self.format, dtype or self.dtype)

    @never_compiled
    def store(self, x: Tensor) -> FP8State:
        """Write `x`, in place."""
        self.settle()
        self.from_file = False
        x = x.to(self.dtype) if x.dtype not in (self.dtype, torch.float32) else x
        x = x if x.shape == self.shape else x.expand(self.shape)
        payload, side = state_ops.store_state(x.contiguous(), self.counter, self.low, self.format, self.parameter)
        self.payload.copy_(payload)
        self.side.copy_(side)
        if self.counter is not None:
            self.counter.add_(1)
        return self

    def like(self, function: Any) -> FP8State:
        """Return the same state with `function` applied to each of its tensors."""
        self.settle()
        inner = [None if (x := getattr(self, name)) is None else function(x) for name in INNER]
        return FP8State(*inner, self.format, self.parameter, self.dtype)  # type: ignore[arg-type]

    def rows(self, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> FP8State | None:
        """Return some rows of the state, sharing its memory; None where they are not whole groups."""
        self.settle()
        count = self.shape[0]
        first, last, _ = slice(start, stop).indices(count)
        row, side = self.payload[0].numel() if count else 0, self.side
        if dim != 0 or step != 1:
            return None
        if side.shape[0]:
            if first * row % GROUP or (last * row % GROUP and last != count):
                return None
            side = side[first * row // GROUP : -(-last * row // GROUP)]
        low = None if self.low is None else self.low[first:last]
        payload = self.payload[first:last]
        counter = None if self.counter is None else self.counter.detach()
        return FP8State(payload, side, counter, low, self.format, self.parameter, self.dtype)

    def check(self) -> None:
        """Raise `StateError` if this cannot be what `store` left."""
        state_checks.check(self)
        self.stored_checksum = None

    def settle(self) -> None:
        """Raise `StateError` if this is from a damaged file; a state whose values came after it has not been asked."""
        if self.stored_checksum is not None:
            self.check()

    __torch_function__ = no_torch_function

    @classmethod
    @never_compiled
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (result := copied(func, args, kwargs)) is not NotImplemented:
            return result
        if func in VIEWS and list(args[1]) == list(args[0].shape):
            return args[0].like(lambda x: x.view(x.shape))
        if func is aten.copy_.default and isinstance(args[0], FP8State):
            return _copy(*args, **kwargs)
        if func is aten.slice.Tensor and isinstance(args[0], FP8State):
            rows = args[0].rows(*args[1:])
            if rows is not None:
                return rows
        if func.is_view and type(args[0]) is FP8State and type(args[0].payload) is Tensor:
            raise StateError(
                f"{func} of an 8-bit optimizer state outside of a compiled step: what is written to a view would be "
                "lost. Read state.dequantize(), compile the step, or take fp8compile.plain_state_dict(opt). Only rows "
                f"that are whole groups of {GROUP} elements can be taken as they are"
            )
        return _through_plain(func, args, kwargs)


def _copy(target: FP8State, source: Tensor, non_blocking: bool = False) -> FP8State:
    """Write `source` to `target`: bit for bit if it is such a state, and what belongs to the parameter in any case."""
    if not isinstance(source, FP8State):
        return target.store(source)
    source.settle()
    if source.format != target.format or source.shape != target.shape:
        target.store(source.dequantize(torch.float32))
    else:
        target.payload.copy_(source.payload, non_blocking)
        target.side.copy_(source.side, non_blocking)
    for name in ("counter", "low"):
        mine, other = getattr(target, name), getattr(source, name)
        if mine is not None and other is not None and source.shape == target.shape:
            mine.copy_(other, non_blocking)
    return target


def _through_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Run `func` on dequantized states, and store those that it changed."""
    plain: dict[int, tuple[FP8State, Tensor]] = {}

    def dequantized(x: Any) -> Any:
        if not isinstance(x, FP8State):
            return x
        if id(x) not in plain:
            plain[id(x)] = x, x.dequantize()
        return plain[id(x)][1]

    result = func(*tree_map(dequantized, args), **tree_map(dequantized, kwargs))
    changed = [x for x in written_arguments(func, args, kwargs) if isinstance(x, FP8State)]
    for state in changed:
        state.store(plain[id(state)][1])
    back = {id(x): state for state, x in plain.values() if any(state is c for c in changed)}
    return tree_map(lambda x: back.get(id(x), x), result)


def rebuild(*parts: Any) -> FP8State:
    """Return a state from a file; raises `StateError` for one that is not what was saved.

    Files in torch's old format hold the values behind all else: such a state is checked when it is first used.
    """
    if len(parts) not in (7, 8) or not all(x is None or isinstance(x, Tensor) for x in parts[:4]):
        raise StateError("a stored FP8 optimizer state has other parts than this version of fp8compile writes")
    state = FP8State(*parts[:7])
    state.from_file = True
    state.stored_checksum = parts[7] if len(parts) == 8 else None  # none was written up to 0.1.0
    if not has_values_to_come(state.payload):
        state.check()
    return state


def _share(state: FP8State) -> tuple[Any, ...]:
    """Return how another process makes the same state, of the same memory: it may change meanwhile."""
    state.settle()
    return FP8State, state._arguments()


# Under the names by which checkpoints refer to them; those of 0.1.0 name the module that this one was then.
torch.serialization.add_safe_globals([FP8State, rebuild, (rebuild, "fp8compile.states.rebuild")])
ForkingPickler.register(FP8State, _share)
