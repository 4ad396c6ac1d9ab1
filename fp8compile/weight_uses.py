"""Weights whose casts are kept: which of them graphs read as they are, which they cast alone, which were freed.

A weight that is freed keeps its shape, and shows one NaN in all of its elements; one of more than two dimensions, as
experts' are, a matrix of them, which lies as its own did: grouped matmuls look at that when they are traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.eval_frame import skip_code  # or Dynamo compiles the hook, and takes it for the step
from torch._guards import TracingContext  # whose fake mode a graph is traced in
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fp8compile.errors import FreedWeightError


@dataclass
class Use:
    """Hold what is known of a weight. cast: its writes and its address when it was last cast, None if it never was.

    steps: of optimizers that have updated it since. is_read: a graph reads it as it is. freed: what is known of one
    whose memory was freed.
    """

    cast: tuple[int, int] | None = None
    steps: int = 0
    is_read: bool = False
    freed: Freed | None = None


@dataclass(frozen=True)
class Freed:
    """Hold how a weight lay whose memory was freed. layout: shape, strides, dtype, device; writes: how many there were.

    name: the parameter's in its model; nothing: what it shows, NaN alone, which is kept so that nothing else comes to
    lie there.
    """

    name: str
    layout: tuple[Any, ...]
    writes: int
    nothing: Tensor


MATRIX = 2
_matrices: weakref.WeakValueDictionary[tuple[Any, ...], Tensor] = weakref.WeakValueDictionary()  # what freed ones show
_uses: dict[int, Use] = {}  # by the identity of each weight, as long as it lives


@dataclass
class Steps:
    """The steps of optimizers that update weights whose casts are kept: torch does not count all of these writes."""

    hook: RemovableHandle | None = None

    def count(self) -> None:
        """Count them after every step from now on."""
        if self.hook is None:
            skip_code(_count_step.__code__)
            self.hook = register_optimizer_step_post_hook(_count_step)

    def clear(self) -> None:
        """Count them no more."""
        if self.hook is not None:
            self.hook.remove()
            self.hook = None


def _count_step(opt: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note a step, which may have left no gradients: hooks of the optimizer's own, and its code, come before."""
    if not torch.compiler.is_compiling():
        parameters = (p for group in opt.param_groups for p in group["params"])
        note_step(p for p in parameters if p.requires_grad or p.grad is not None)


_steps = Steps()


def _use_of(weight: Tensor) -> Use:
    if id(weight) not in _uses:
        _uses[id(weight)] = Use()
        weakref.finalize(weight, _uses.pop, id(weight), None)
    return _uses[id(weight)]


def note_step(parameters: Iterable[Tensor]) -> None:
    """Note that an optimizer has updated these parameters, however it has written them."""
    for parameter in parameters:
        if (use := _uses.get(id(parameter))) is not None:
            use.steps += 1


def writes_of(weight: Tensor) -> int:
    """Return a number that grows with each write that torch counts, and with each step of an optimizer."""
    use = _uses.get(id(weight))
    return weight._version if use is None else weight._version + use.steps


def is_stepped(weight: Tensor) -> bool:
    """Return True for a weight that an optimizer has updated since it was first cast."""
    use = _uses.get(id(weight))
    return use is not None and use.steps > 0


def note_casts(weights: Iterable[Tensor]) -> None:
    """Note that weights were cast as they are now."""
    _steps.count()
    for weight in weights:
        _use_of(weight).cast = writes_of(weight), weight.data_ptr()


def note_reads(weights: Iterable[Tensor]) -> None:
    """Note that a graph reads weights as they are."""
    for weight in weights:
        _use_of(weight).is_read = True


def is_freed(x: Tensor) -> bool:
    """Return True for a weight whose memory was freed, and that was given no other since."""
    use = _uses.get(id(x))
    return use is not None and use.freed is not None and use.freed.nothing.data_ptr() == x.data_ptr()


def shown_of(weight: Tensor) -> Tensor | None:
    """Return what a freed weight shows, NaN alone, [n]; None of any other."""
    freed = _uses[id(weight)].freed if is_freed(weight) else None
    return None if freed is None else freed.nothing


def is_unwritten(weight: Tensor) -> bool:
    """Return True for a freed weight that nobody has written since: some operations take its one NaN for all of it."""
    freed = _use_of(weight).freed
    return freed is not None and weight._version == freed.writes


def is_read(weight: Tensor) -> bool:
    """Return True for a weight that a graph is known to read as it is."""
    use = _uses.get(id(weight))
    return use is not None and use.is_read


def is_cast_alone(weight: Tensor) -> bool:
    """Return True for a weight that needs no gradient, that graphs cast, and that none which has run reads as it is."""
    use = None if weight.requires_grad else _uses.get(id(weight))
    return use is not None and use.cast is not None and not use.is_read and not is_freed(weight)


def refuse_written(weight: Tensor) -> None:
    """Raise if a weight was written since it was last cast."""
    if _use_of(weight).cast != (writes_of(weight), weight.data_ptr()):
        raise FreedWeightError("a weight was written since it was last cast: run the model once more before this")


def name_of(weight: Tensor) -> str:
    """Return the name in its model of a weight that was freed."""
    freed = _use_of(weight).freed
    assert freed is not None
    return freed.name


def stand_ins(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the weights, and of each that was freed zeros which lie as it did: all of a dtype in the same memory."""
    given = list(weights)
    freed = {i: use.freed for i, w in enumerate(given) if is_freed(w) and (use := _uses[id(w)]).freed is not None}
    sizes: dict[tuple[Any, ...], int] = {}  # by dtype and device
    for shape, strides, *kind in (known.layout for known in freed.values()):
        sizes[tuple(kind)] = max(sizes.get(tuple(kind), 0), _extent(shape, strides))
    zeros = {(dtype, device): torch.zeros(n, dtype=dtype, device=device) for (dtype, device), n in sizes.items()}
    for i, known in freed.items():
        shape, strides, *kind = known.layout
        given[i] = zeros[tuple(kind)].as_strided(shape, strides)
    return given


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans."""
    return 1 + sum(max(0, size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def free(weight: Tensor, name: str) -> int:
    """Free the memory of a weight that is as it was cast, and return how many bytes. name: in its model."""
    use = _use_of(weight)
    layout = weight.shape, weight.stride(), weight.dtype, weight.device
    leading = weight.dim() - MATRIX if weight.dim() > MATRIX else weight.dim()  # dimensions that show one thing
    before = len(_matrices)
    with torch.inference_mode(False):
        nothing = _nothing(weight, leading)
        whole = weight.untyped_storage().nbytes() == weight.nbytes  # and not a part of what others hold
        count = (weight.nbytes if whole else 0) - (nothing.nbytes if len(_matrices) > before else 0)
        weight.data = nothing.as_strided(weight.shape, (*(0,) * leading, *weight.stride()[leading:]))
    use.freed = Freed(name, layout, weight._version, nothing)
    return count


def _nothing(weight: Tensor, leading: int) -> Tensor:
    """Return NaN for a weight to show: [1], or [n] for all that lies in a matrix of it, which weights share."""
    kind = _extent(weight.shape[leading:], weight.stride()[leading:]), weight.dtype, weight.device
    known = _matrices.get(kind) if leading < weight.dim() else None
    if known is None:
        known = torch.full(kind[:1], torch.nan, dtype=weight.dtype, device=weight.device)
        if leading < weight.dim():
            _matrices[kind] = known
    return known


def as_it_lay(x: Any) -> Any:
    """Return an input of a graph for tracing: of a weight that was freed, one without data that lies as it did."""
    if not isinstance(x, Tensor) or not is_freed(x):
        return x
    use, context = _use_of(x), TracingContext.try_get()
    assert use.freed is not None
    if context is None or context.fake_mode is None:
        raise FreedWeightError("a weight was freed, and its graph is traced without Dynamo")
    shape, strides, dtype, device = use.freed.layout
    with context.fake_mode:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
