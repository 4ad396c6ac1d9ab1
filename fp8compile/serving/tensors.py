"""What is written for a model: its tensors by name, FP8 layers as payload and scale; one tensor at a time.

Several ranks share the work: a tensor that is sharded is gathered by all of them, and kept by the one that writes it.
What several names share is written once, under the name that a loader looks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8compile.distributed.ranks import Ranks
from fp8compile.errors import CheckpointError
from fp8compile.serving.layouts import Layout

Revert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
NAMES = 5  # in an error
WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")  # in names of modules, not of the state_dict


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model within what torch.compile, DataParallel and DistributedDataParallel make of it."""
    while True:
        is_parallel = isinstance(model, (nn.DataParallel, DistributedDataParallel))
        inner = getattr(model, "module" if is_parallel else "_orig_mod", model)
        if inner is model:
            return model
        model = inner


def refuse_meta(model: nn.Module, outcome: str) -> None:
    """Raise `CheckpointError` for a model that has no memory for all of its tensors."""
    nowhere = [name for name, x in model.state_dict().items() if isinstance(x, Tensor) and x.is_meta]
    if nowhere:
        more = f" and {len(nowhere) - NAMES} more" if len(nowhere) > NAMES else ""
        raise CheckpointError(
            f"the model has no memory for {', '.join(nowhere[:NAMES])}{more}, on the meta device: call "
            f"model.to_empty(device=…), and give it values; {outcome}"
        )


def ranks_of(model: nn.Module) -> Ranks:
    """Return all ranks if parameters of `model` are sharded; else this process alone."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return Ranks(dist.group.WORLD)
    return Ranks()


def written(
    model: nn.Module,
    layout: Layout,
    quantized: Collection[str],
    experts: Collection[str],
    input_scales: Mapping[str, Tensor],
    revert: Revert,
    ranks: Ranks,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in files, tensor on the CPU) of all that this rank writes. Every rank must take all that comes.

    quantized: names of linear layers; experts: of modules whose tensors are layers in files; revert: to names of files.
    Raises `CheckpointError` after the last one, for a weight that is not finite: other ranks wait for each tensor.
    """
    tied = tied_names(model)
    state = {name: x for name, x in model.state_dict().items() if name not in tied}
    if other := [name for name, x in state.items() if not isinstance(x, Tensor)]:
        kind = type(state[other[0]]).__name__
        raise CheckpointError(f"{other[0]} of the state_dict is a {kind}, which safetensors cannot hold")
    if lost := [layer for layer in quantized if within(layer, "weight") not in state]:
        raise CheckpointError(f"the state_dict has no {within(lost[0], 'weight')}")
    bad = []
    for i, (name, x) in enumerate(state.items()):
        full = x.full_tensor() if isinstance(x, DTensor) else x
        if i % ranks.world != ranks.rank:
            continue
        module, _, last = name.rpartition(".")
        is_layer = last == "weight" and module in quantized
        if (is_layer or module in experts) and not bool(full.isfinite().all()):
            bad.append(name)
        elif is_layer:
            for key, part in _layer(module, full, layout, input_scales.get(module)):
                yield from revert({key: part}).items()
        elif module in experts:
            for key, weight in revert({name: full}).items():
                yield from _layer(layer_of(key), weight, layout, None)
        else:
            yield from revert({name: _own(full)}).items()
    if bad:
        raise CheckpointError(f"{bad[0]} has numbers that are not finite, as {len(bad)} of this rank's weights have")


def _layer(name: str, weight: Tensor, layout: Layout, input_scale: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    payload, scale = layout.quantized(weight.detach())
    yield within(name, "weight"), _own(payload)
    yield within(name, layout.scale), _own(scale)
    if input_scale is not None:
        yield within(name, layout.input_scale), _own(input_scale.reshape(1).float())


def within(layer: str, tensor: str) -> str:
    """Return the name of a tensor of `layer`, which is "" for the model itself."""
    return f"{layer}.{tensor}" if layer else tensor


def layer_of(name: str) -> str:
    """Return the layer whose weight is called `name`; another tensor counts as a layer."""
    layer, _, last = name.rpartition(".")
    return layer if last == "weight" else name


def _own(x: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU that shares no memory: safetensors refuses aliases."""
    return x.detach().to("cpu", copy=True).contiguous()


def names_by_tensor(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter and buffer, by its `id`."""
    names: dict[int, list[str]] = {}
    for name, x in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        names.setdefault(id(x), []).append(name)
    return names


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return names of the state_dict whose tensor has another name, under which it is written, and that name.

    Of a model of Transformers these are the names that its loader ties; of any other, all but the first.
    """
    declared = getattr(model, "all_tied_weights_keys", None)
    declared = set(declared) if isinstance(declared, Mapping) else set()
    names = names_by_tensor(model)
    tied: dict[str, str] = {}
    for shared in (found for found in names.values() if len(found) > 1):
        kept = next((name for name in shared if name not in declared), shared[0])
        others = (name for name in shared if name != kept and (name in declared or not is_of_transformers(model)))
        tied |= dict.fromkeys(others, kept)
    return tied


def is_of_transformers(model: nn.Module) -> bool:
    """Return True for a model that Transformers saves and loads."""
    return hasattr(model, "config") and hasattr(model, "save_pretrained") and hasattr(model.config, "save_pretrained")
