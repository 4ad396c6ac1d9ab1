"""Write a checkpoint's folder: safetensors of bounded size, their index, and a config; the whole folder or none.

All is written beside the folder, and moved to its place at the end. Several ranks write files of their own to a disk
that all of them see.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile.distributed.ranks import Ranks
from fp8compile.errors import CheckpointError
from fp8compile.serving.tensors import Revert, is_of_transformers

LARGEST = 4 << 30  # bytes of a file, or one tensor
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
OURS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|config\.json"
)  # what is replaced


@contextlib.contextmanager
def whole_folder(folder: Path, overwrite: bool, ranks: Ranks) -> Iterator[Path]:
    """Yield a folder to write to, which then takes the place of `folder`; after an error nothing is left of it.

    What else lies in `folder`, a tokenizer's files say, stays in it: all but files that have the names of ours.
    """
    folder = folder.resolve()  # a link stays one, to the new folder
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, not a folder")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise CheckpointError(f"{folder} is not empty: choose another folder, or overwrite=True")
    ranks.meet()  # before the first one changes what the others look at
    partial, old = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.old")
    if ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.meet()
    try:
        yield partial
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    failure = _put_in_place(folder, partial, old) if ranks.rank == 0 else ""
    if failures := [text for text in ranks.gathered(failure) if text]:  # nobody waits for a rank that has failed
        raise CheckpointError(f"{failures[0]}; {folder} is as it was")


def _put_in_place(folder: Path, partial: Path, old: Path) -> str:
    """Give `folder` what was written to `partial`; return what has failed, with nothing of that left."""
    try:
        if folder.exists():
            _take_over(folder, partial)
            shutil.rmtree(old, ignore_errors=True)  # of a run that was killed here
            folder.rename(old)
        partial.rename(folder)
    except OSError as error:  # shutil's own are some, too
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        return str(error)
    shutil.rmtree(old, ignore_errors=True)
    return ""


def _take_over(old: Path, new: Path) -> None:
    """Copy to the folder `new` what `old` has beside a checkpoint, and `new` has not; and its mode."""
    shutil.copymode(old, new)
    for path in old.iterdir():
        if OURS.fullmatch(path.name) or (new / path.name).exists():
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / path.name, symlinks=True)
        else:
            shutil.copy2(path, new / path.name, follow_symlinks=False)


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> int:
    """Write (name, tensor) as they come, and the index; return their bytes, of all ranks."""
    mine, failure = _Files(folder, ranks.rank), ""
    coming = iter(tensors)
    try:
        for name, x in coming:
            mine.add(name, x)
        mine.flush()
    except (OSError, CheckpointError) as error:
        failure = str(error)
        for _ in coming:  # the other ranks wait for each
            pass
    outcomes = ranks.gathered((failure, mine.written))
    if failures := [text for text, _ in outcomes if text]:
        raise CheckpointError(f"{failures[0]}; nothing was written")
    files = [file for _, written in outcomes for file in written]
    if ranks.rank == 0:
        _index(folder, files)
    return sum(total for _, _, total in files)


class _Files:
    """The files of one rank. written: (name, names of tensors, bytes) of each."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.waiting: dict[str, Tensor] = {}
        self.names: set[str] = set()
        self.bytes = 0
        self.written: list[tuple[str, list[str], int]] = []

    def add(self, name: str, x: Tensor) -> None:
        """Take a tensor; write what waits before it would be too much."""
        if name in self.names:
            raise CheckpointError(f"two tensors would be called {name}")
        self.names.add(name)
        size = x.numel() * x.itemsize
        if self.waiting and self.bytes + size > LARGEST:
            self.flush()
        self.waiting[name] = x
        self.bytes += size

    def flush(self) -> None:
        """Write what waits."""
        from safetensors.torch import save_file  # not a dependency: only exporting needs it

        if self.waiting:
            file = f"part-{self.rank}-{len(self.written)}.safetensors"
            save_file(self.waiting, self.folder / file, metadata={"format": "pt"})
            self.written.append((file, list(self.waiting), self.bytes))
        self.waiting, self.bytes = {}, 0


def _index(folder: Path, files: list[tuple[str, list[str], int]]) -> None:
    """Give files their names, and write which tensor is in which."""
    weights: dict[str, str] = {}
    for i, (file, names, _) in enumerate(files):
        name = "model.safetensors" if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / file).rename(folder / name)
        weights |= dict.fromkeys(names, name)
    if len(files) > 1:
        total = sum(size for _, _, size in files)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}, indent=2)
        (folder / INDEX).write_text(text + "\n")


def write_config(folder: Path, model: nn.Module, quantization: dict[str, Any]) -> None:
    """Write config.json: the model's own, if Transformers has one for it, with `quantization_config`."""
    architecture = type(model).__name__.removeprefix("FSDP")
    if not is_of_transformers(model):
        text = json.dumps({"architectures": [architecture], "quantization_config": quantization}, indent=2)
        (folder / CONFIG).write_text(text + "\n")
        return
    config: Any = copy.deepcopy(model.config)
    config.quantization_config, config.architectures = quantization, [architecture]
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)


def names_in_files(model: nn.Module, modules: Iterable[str], revert: Revert) -> list[str]:
    """Return the names of modules, and those that they have in files where these are others."""
    found: list[str] = []
    for name in modules:
        module, last = model.get_submodule(name), name.rpartition(".")[2]
        keys = {f"{name}.{n}": torch.empty_like(p, device="meta") for n, p in module.named_parameters(recurse=False)}
        keyed = [key.split(".") for key in revert(keys)]
        found += [".".join(parts[: len(parts) - parts[::-1].index(last)]) for parts in keyed if last in parts]
        found.append(name)
    return list(dict.fromkeys(found))


def reverting(model: nn.Module) -> Revert:
    """Return what gives a tensor its name and form in files of Transformers, whose loader renames and stacks some."""
    if not is_of_transformers(model):
        return lambda tensors: tensors
    from transformers.core_model_loading import revert_weight_conversion

    return lambda tensors: revert_weight_conversion(model, dict(tensors))  # type: ignore[arg-type]
