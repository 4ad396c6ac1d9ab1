"""Copies of saved activations to the host's memory and back: operators whose copies run beside the GPU's kernels.

    fp8::to_host(x, order)     -> x in pinned memory of the host, its dimensions in this order, the outermost first;
                                  the copy may not have ended
    fp8::to_device(host, d)    -> the same on GPU d; likewise
    fp8::copied(copy, source)  -> the copy, for what is launched from here on; until then `source` must live

One stream a GPU carries all copies, in the order of the calls; it waits for what was launched before a call, and
`copied` has the current stream wait for that copy alone. So the memory of `source` may be given to the next kernel
after `copied`, and no event is recorded with the allocator. Inductor may have made a copy of `source` for `to_host`
alone: that is held here, and its buffer not used again (`torch_hooks/inductor/buffer_reuse.py`). A tensor on a CPU is
copied at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_streams: dict[int, torch.cuda.Stream] = {}  # of copies, by GPU
_running: dict[int, tuple[torch.cuda.Event, Tensor]] = {}  # copies not waited for, by address: the end, the source


def _copy(source: Tensor, copy: Tensor, gpu: torch.device) -> Tensor:
    index = gpu.index if gpu.index is not None else torch.cuda.current_device()
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(index)
    stream = _streams[index]
    stream.wait_stream(torch.cuda.current_stream(index))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
        end = torch.cuda.Event()
        end.record(stream)
    _running[copy.data_ptr()] = end, source
    return copy


def _to_host(x: Tensor, order: Sequence[int]) -> Tensor:
    host = torch.empty_permuted(x.shape, tuple(order), dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    return _copy(x, host, x.device) if x.is_cuda else host.copy_(x)


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    x = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    return _copy(host, x, x.device) if x.is_cuda else x.copy_(host)


def _copied(copy: Tensor, source: Tensor) -> Tensor:
    if running := _running.pop(copy.data_ptr(), None):
        running[0].wait(torch.cuda.current_stream(copy.device if copy.is_cuda else source.device))
    return copy


def _fake_to_host(x: Tensor, order: Sequence[int]) -> Tensor:
    return torch.empty_permuted(x.shape, tuple(order), dtype=x.dtype, device="cpu")


def _fake_to_device(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)  # any strides will do
_library = torch.library.Library("fp8", "FRAGMENT")  # lives as long as the process
_library.define("to_host(Tensor x, int[] order) -> Tensor", tags=_TAGS)
_library.define("to_device(Tensor host, Device device) -> Tensor", tags=_TAGS)
_library.define("copied(Tensor(a) copy, Tensor source) -> Tensor(a)", tags=_TAGS)
_library.impl("to_host", _to_host, "CompositeExplicitAutograd")
_library.impl("to_device", _to_device, "CompositeExplicitAutograd")
_library.impl("copied", _copied, "CompositeExplicitAutograd")
torch.library.register_fake("fp8::to_host", _fake_to_host, lib=_library)
torch.library.register_fake("fp8::to_device", _fake_to_device, lib=_library)
torch.library.register_fake("fp8::copied", lambda copy, source: copy, lib=_library)

to_host = torch.ops.fp8.to_host.default
to_device = torch.ops.fp8.to_device.default
copied = torch.ops.fp8.copied.default
