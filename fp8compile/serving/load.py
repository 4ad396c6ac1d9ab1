"""Load an FP8 checkpoint into a model, to train on: master weights are payload times scale.

model = LlamaForCausalLM(config)
fp8compile.load(model, "my-model-fp8")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fp8compile.errors import CheckpointError
from fp8compile.formats import E4M3
from fp8compile.serving.layouts import COMPRESSED, FINE_GRAINED, LAYOUTS, Layout
from fp8compile.serving.tensors import NAMES, Revert, layer_of, refuse_meta, tied_names, unwrapped, within
from fp8compile.serving.write_folder import CONFIG, INDEX, reverting


class Folder:
    """An open checkpoint: the names of its tensors, their shapes without reading them, and the tensors."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.layout = _layout(folder)
        self.files: dict[str, Any] = {}  # by name of a tensor
        for file, names in _files(folder).items():
            opened = stack.enter_context(_opened(folder / file))
            held = set(opened.keys())
            if missing := sorted(names - held):
                raise CheckpointError(f"{folder / file} has no {missing[0]}, which {INDEX} says it has")
            self.files |= dict.fromkeys(held, opened)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor."""
        return list(self.files[name].get_slice(name).get_shape())

    def is_fp8(self, name: str) -> bool:
        """Return True for the payload of a layer."""
        return self.files[name].get_slice(name).get_dtype() == "F8_E4M3"

    def is_floating_point(self, name: str) -> bool:
        """Return True for a tensor of numbers with a fraction."""
        return self.files[name].get_slice(name).get_dtype().startswith(("F", "BF"))

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor; an FP8 layer's as the weight that it stands for, in `dtype`."""
        x: Tensor = self.files[name].get_tensor(name)
        if x.dtype != E4M3.dtype:
            return x
        return self.layout.dequantized(x, self.files[name].get_tensor(self.scale_of(name)), dtype)

    def is_finite(self, name: str) -> bool:
        """Return True if no code of an FP8 payload is NaN."""
        return not bool(self.files[name].get_tensor(name).isnan().any())

    def scale_of(self, name: str) -> str:
        """Return the name of the scale of an FP8 layer's weight."""
        return within(layer_of(name), self.layout.scale)


def load(model: nn.Module, folder: str | PathLike[str]) -> None:
    """Give `model` the weights of an FP8 checkpoint, in the precision of its own parameters.

    folder: one that `export` wrote, or another in the same formats, with the names that this model has, or that
    Transformers gives them in files (one tensor of each expert, say). A sharded model takes on each rank what belongs
    there.

    Raises `CheckpointError` before anything is changed: for a tensor that is missing, not expected, of another shape,
    or without its scale; for a payload that is not finite, or a scale that is not finite and above zero; for a model on
    the meta device; for a file that was not written to its end; for a format that is none of `export`'s.
    """
    model = unwrapped(model)
    refuse_meta(model, "nothing was loaded")
    with ExitStack() as stack:
        found, revert = Folder(Path(folder), stack), reverting(model)
        tied = tied_names(model)
        state = {name: x for name, x in model.state_dict().items() if isinstance(x, Tensor)}
        forms = {name: _in_files(found, name, x, revert) for name, x in state.items()}
        wanted = [name for name in state if name not in tied or name in found.files]
        known = {key for keys in forms.values() for key in keys}
        _check(found, {key: x for name in wanted for key, x in forms[name].items()}, known)
        for name, kept in tied.items():
            if name in found.files and not torch.equal(*(found.read(n, torch.float32) for n in (name, kept))):
                raise CheckpointError(
                    f"{found.folder}: {name} and {kept} differ, and are one parameter of this model; nothing was loaded"
                )
        with torch.no_grad():
            for name in wanted:
                _copy(state[name], _read(found, name, state[name], list(forms[name]), revert))


def _in_files(found: Folder, name: str, x: Tensor, revert: Revert) -> Mapping[str, Tensor]:
    """Return the tensors in files that `x` is made of, on the meta device, by their names there."""
    shape = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return {name: shape} if name in found.files else revert({name: shape})


def _read(found: Folder, name: str, x: Tensor, keys: Sequence[str], revert: Revert) -> Tensor:
    """Return what a tensor of the model becomes: one of the files, or made of several."""
    if keys == [name]:
        return found.read(name, x.dtype)
    whole = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    parts = revert({name: whole})
    if all(part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for part in parts.values()):
        for key, part in parts.items():
            part.copy_(found.read(key, x.dtype))
        return whole
    numbers = torch.arange(x.numel(), dtype=torch.int64, device="cpu")
    places = revert({name: numbers.view(x.shape)})  # where each element of a file goes
    for key, place in places.items():
        whole.view(-1)[place.reshape(-1)] = found.read(key, x.dtype).reshape(-1)
    return whole


def _check(found: Folder, wanted: dict[str, Tensor], known: set[str]) -> None:
    """Raise `CheckpointError` unless all tensors are there, in their shapes, with their scales, and no others."""
    scales = {found.scale_of(name) for name in found.files if found.is_fp8(name)}
    inputs = {name for name in found.files if f".{name}".endswith(f".{found.layout.input_scale}")}
    problems = {
        "it lacks": [name for name in wanted if name not in found.files],
        "of another shape are": list(_misshapen(found, wanted)),
        "it lacks the scale": sorted(scales - found.files.keys()),
        "of another kind of numbers are": [n for n, x in wanted.items() if _is_of_another_kind(found, n, x)],
        "no finite numbers above zero are": [n for n in sorted(scales & found.files.keys()) if not _is_scale(found, n)],
        "not finite are": [n for n in wanted if n in found.files and found.is_fp8(n) and not found.is_finite(n)],
        "it has, and the model has not": sorted(found.files.keys() - known - scales - inputs),
    }
    for what, names in problems.items():
        if names:
            more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
            raise CheckpointError(f"{found.folder}: {what} {', '.join(names[:NAMES])}{more}; nothing was loaded")


def _misshapen(found: Folder, wanted: dict[str, Tensor]) -> Iterator[str]:
    for name, x in wanted.items():
        if name not in found.files:
            continue
        if (shape := found.shape(name)) != list(x.shape):
            yield f"{name} ({shape}, the model's is {list(x.shape)})"
        elif found.is_fp8(name) and found.scale_of(name) in found.files:
            shape, expected = found.shape(found.scale_of(name)), found.layout.scale_shape(x.shape)
            if torch.Size(shape).numel() != torch.Size(expected).numel():
                yield f"{found.scale_of(name)} ({shape}, not {expected})"


def _is_of_another_kind(found: Folder, name: str, x: Tensor) -> bool:
    """Return True where only one of both, the model's or the file's, holds numbers with a fraction."""
    return name in found.files and found.is_floating_point(name) != x.is_floating_point()


def _is_scale(found: Folder, name: str) -> bool:
    """Return True if all numbers of a scale can be one."""
    scale = found.read(name, torch.float32)
    return bool((scale.isfinite() & (scale > 0)).all())


def _copy(target: Tensor, source: Tensor) -> None:
    if isinstance(target, DTensor):
        source = distribute_tensor(
            source.to(target.device, target.dtype), target.device_mesh, target.placements, src_data_rank=None
        )
    target.copy_(source)


def _layout(folder: Path) -> Layout:
    """Return the format of a checkpoint, by its config."""
    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}: it is no checkpoint, or was not written to its end")
    given = _json(path).get("quantization_config")
    if not isinstance(given, dict):
        raise CheckpointError(f"{path} has no quantization_config: this checkpoint is not in FP8")
    method = given.get("quant_method")
    block, is_float = given.get("weight_block_size"), given.get("scale_fmt", "float") == "float"
    if method == FINE_GRAINED and block == [128, 128] and is_float:
        return LAYOUTS["block"]
    groups = given.get("config_groups")
    only = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    strategy = _found_in(_found_in(only, "weights"), "strategy")
    layout = LAYOUTS.get(strategy) if isinstance(strategy, str) else None
    if method == COMPRESSED and given.get("format") == "float-quantized" and layout and layout.method == COMPRESSED:
        return layout
    raise CheckpointError(
        f"{path}: quant_method {method!r} with these settings is none of the formats that are read: "
        "fp8 with blocks of 128×128, compressed-tensors with FP8 weights a channel or a tensor"
    )


def _files(folder: Path) -> dict[str, set[str]]:
    """Return the names of tensors by the file that is to hold them; none where there is a single file."""
    if not (folder / INDEX).is_file():
        return {"model.safetensors": set()}
    files: dict[str, set[str]] = {}
    given = _json(folder / INDEX).get("weight_map")
    if not isinstance(given, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map, which says where each tensor is")
    for name, file in given.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{folder / INDEX} says that {name} is in {file!r}, which is no file of this folder")
        files.setdefault(file, set()).add(name)
    return files


def _found_in(given: Any, key: str) -> Any:
    """Return what a JSON value has under `key`, or None."""
    return given.get(key) if isinstance(given, dict) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # not a dependency: only exported folders need it

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; was it written to its end?") from error
