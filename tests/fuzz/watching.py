"""Generated kernels inside of whole models: each runs in poisoned, guarded memory and is compared with its reference.

    with watched("interpreter", byte) as complaints: …      what the operator `fp8::region` runs, while this lasts

how           what runs
"reference"   the meaning of the region in plain torch: what a CPU runs
"interpreter" the kernel, in Triton's interpreter, where it has few enough programs
"cuda"        the kernel, on a GPU: all, or a share of them
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import poison
import torch
from torch import Tensor

from fp8compile.kernels.check import check_kernel
from fp8compile.kernels.codegen import generated
from fp8compile.kernels.codegen.schedule.tiling import Schedule
from fp8compile.kernels.codegen.spec.region import Region
from fp8compile.kernels.reference import region_reference

MOST_PROGRAMS = 24  # that are interpreted: 2.5 ms each and more
MOST_ELEMENTS = 1 << 20  # of buffers that are compared: bounds take some hundred operators
Run = Callable[[Region, Schedule, Sequence[Tensor], Sequence[int]], list[Tensor]]


@dataclasses.dataclass
class Watch:
    """What was run, and what was wrong with it."""

    target: str
    byte: int
    share: float = 1.0  # of the kernels that this process has not compiled: compiling takes longest by far
    seed: int = 0  # of the model
    complaints: list[str] = dataclasses.field(default_factory=list)
    launched: int = 0
    fresh: int = 0  # kernels that were compiled

    def run(self, region: Region, schedule: Schedule, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Launch a kernel in poisoned memory; its buffers. Complaints about them are noted."""
        plain = dataclasses.replace(region, origins=())  # models of other seeds have the same kernels elsewhere
        names = dict(zip(region.sizes, sizes, strict=True))
        memory = [check_kernel._guarded(b, names, schedule, inputs[0].device) for b in region.buffers]
        for outer, _ in memory:
            outer.fill_(self.byte)
        buffers = [inner for _, inner in memory]
        self.launched += 1
        if any(b.numel() for b in buffers):
            kernel = generated.kernel_of(plain, schedule, self.target)
            kernel[(schedule.programs,)](*inputs, *buffers, *sizes, num_warps=schedule.warps)
        self.complaints += [f"{_name(region)}: {line}" for line in self._wrong(region, schedule, inputs, sizes, memory)]
        return buffers

    def _wrong(self, region: Region, schedule: Schedule, inputs: Any, sizes: Any, memory: Any) -> list[str]:
        guard = check_kernel.GUARD
        lines = [
            f"y{i}: written outside of it"
            for i, (outer, _) in enumerate(memory)
            if not ((outer[:guard] == self.byte).all() and (outer[-guard:] == self.byte).all())
        ]
        buffers = [inner for _, inner in memory]
        if sum(b.numel() for b in buffers) > MOST_ELEMENTS:
            return lines
        return lines + check_kernel.compare(region, schedule, inputs, sizes, buffers)

    def may(self, region: Region, schedule: Schedule) -> bool:
        """Whether this kernel may run: the interpreter is slow, and so is compiling."""
        if self.target == "interpreter":
            return schedule.programs <= MOST_PROGRAMS
        name = generated.kernel_name(dataclasses.replace(region, origins=()), schedule)
        if name in _KNOWN:
            return True
        chosen = random.Random(f"{name} {self.seed}").random() < self.share
        if chosen:
            _KNOWN.add(name)
            self.fresh += 1
        return chosen


_KNOWN: set[str] = set()  # kernels that this process has compiled


def _name(region: Region) -> str:
    return f"kernel of {', '.join(region.origins) or 'no line'}"


@contextlib.contextmanager
def watched(how: str, byte: int, share: float = 1.0, seed: int = 0) -> Iterator[Watch]:
    """Run regions as `how` says, in memory full of `byte`; yields what there is to complain about."""
    watch = Watch(how, byte, share, seed)
    reference = region_reference.run

    def run(region: Region, schedule: Schedule, inputs: Sequence[Tensor], sizes: Sequence[int], *_: Any) -> Any:
        if how != "reference" and watch.may(region, schedule):
            return watch.run(region, schedule, inputs, sizes)
        return reference(region, schedule, inputs, sizes)

    with contextlib.ExitStack() as stack:
        for module, name in ((generated, "launch"), (region_reference, "run")):  # on a GPU, on a CPU
            stack.enter_context(mock.patch.object(module, name, run))
        stack.enter_context(poison.poisoned_allocations(byte))
        yield watch
        if torch.cuda.is_available():
            torch.cuda.synchronize()
