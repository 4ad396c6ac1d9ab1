"""Known accesses: which arguments a generated kernel reads and writes, torch is told, and does not find out itself.

torch reads that off Triton's intermediate representation, which it makes anew for each launch, twice: 30 ms a kernel in
the process that compiles. Our kernels write their buffers and nothing else. Other kernels are analysed as ever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._higher_order_ops import triton_kernel_wrap  # where torch keeps the analysis, which has no cache

ANALYSES = ("identify_accessed_tensors", "identify_mutated_tensors")  # torch 2.13; before


@dataclass(frozen=True)
class Accesses:
    """The arguments of a kernel that are tensors, by name. It may read what it writes as well."""

    read: tuple[str, ...]
    written: tuple[str, ...]
    kernel: Any  # is kept alive, as it is known by its identity


_known: dict[int, Accesses] = {}


def declare(kernel: Any, read: Sequence[str], written: Sequence[str]) -> None:
    """Tell torch which tensors `kernel`, a Triton function, reads and writes, by the names of its arguments."""
    _known[id(kernel)] = Accesses(tuple(read), tuple(written), kernel)


def declare_accesses() -> None:
    """Replace torch's analysis by one that knows our kernels."""
    for name in ANALYSES:
        analysis = getattr(triton_kernel_wrap, name, None)
        if analysis is not None:
            setattr(triton_kernel_wrap, name, knowing(analysis, _mutated if name == ANALYSES[1] else _accessed))


def knowing(analysis: Callable[..., Any], answer: Callable[[Accesses], Any]) -> Callable[..., Any]:
    """Return `analysis`, a function of a kernel and its arguments, that answers at once for our kernels."""

    @functools.wraps(analysis)
    def known(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        accesses = _known.get(id(kernel.fn if hasattr(kernel, "configs") else kernel))  # seen through an autotuner
        if accesses is not None:
            with contextlib.suppress(AttributeError, TypeError):  # a newer torch may want to know something else
                return answer(accesses)
        return analysis(kernel, *args, **kwargs)

    return known


def _mutated(accesses: Accesses) -> list[str]:
    return list(accesses.written)


def _accessed(accesses: Accesses) -> Any:
    from torch._inductor.dependencies import Dep, ReadWrites, StarDep  # imports Inductor
    from torch.utils._ordered_set import OrderedSet

    def whole(names: Sequence[str]) -> OrderedSet[Dep]:
        return OrderedSet(StarDep(name) for name in names)

    both = whole((*accesses.read, *accesses.written))
    made: Any = triton_kernel_wrap.TensorAccesses  # of torch 2.13
    return made(ReadWrites(both, whole(accesses.written), OrderedSet()), can_fuse_epilogue=False)
