"""Convert checkpoints without a training loop: a folder of Transformers to FP8, and an FP8 folder to plain tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8compile.distributed.ranks import Ranks
from fp8compile.errors import CheckpointError
from fp8compile.serving.export import Exported, export
from fp8compile.serving.load import Folder
from fp8compile.serving.write_folder import CONFIG, INDEX, whole_folder, write_tensors

ALONE = Ranks()


def export_folder(
    source: Path, target: Path, format: str, layers: Sequence[str] | None, skip: Sequence[str], overwrite: bool
) -> Exported:
    """Write the model in folder `source`, which Transformers can load, to `target` with FP8 weights.

    layers: patterns of those that become FP8; by default all linear layers but the output head. skip: of those that do
    not. What else is in the folder, as a tokenizer's files, is copied.
    """
    model = _loaded(source)
    head = next((n for n, m in model.named_modules() if m is model.get_output_embeddings()), None)
    left = [head] if head is not None and layers is None else []
    done = export(model, target, format, layers=layers or ["*"], skip=[*skip, *left], overwrite=overwrite)
    _copy_others(source, target)
    return done


def load_folder(source: Path, target: Path, dtype: torch.dtype, overwrite: bool) -> int:
    """Write the FP8 checkpoint `source` to `target` with plain weights in `dtype`; return how many were FP8."""
    with ExitStack() as stack:
        found = Folder(source, stack)
        layers = [name for name in found.files if found.is_fp8(name)]
        scales = {found.scale_of(name) for name in layers}
        if missing := sorted(scales - found.files.keys()):
            raise CheckpointError(f"{source}: it lacks the scale {missing[0]}; nothing was written")
        config = json.loads((source / CONFIG).read_text())
        del config["quantization_config"]
        with whole_folder(target, overwrite, ALONE) as partial:
            write_tensors(partial, _plain(found, scales, dtype), ALONE)
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            _copy_others(source, partial)
    return len(layers)


def _plain(found: Folder, scales: set[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name in found.files:
        if name not in scales and not (found.layout.input_scale and name.endswith(f".{found.layout.input_scale}")):
            yield name, found.read(name, dtype)


def _loaded(source: Path) -> Any:
    """Return the model of a folder, in the precision in which it is there."""
    import transformers

    if not (source / CONFIG).is_file():
        raise CheckpointError(f"{source} has no {CONFIG}: it is no checkpoint of Transformers")
    config = transformers.AutoConfig.from_pretrained(source)
    if getattr(config, "quantization_config", None):
        raise CheckpointError(f"{source} is quantized already: convert it back first (fp8compile load)")
    names = [name for name in config.architectures or [] if hasattr(transformers, name)]
    if not names:
        raise CheckpointError(f"{source}: Transformers has no class for its architectures {config.architectures}")
    return getattr(transformers, names[0]).from_pretrained(source, dtype="auto")


def _copy_others(source: Path, target: Path) -> None:
    """Copy what no checkpoint's writer has written: tokenizers, licences, templates."""
    for file in source.iterdir():
        is_weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and file.name not in (CONFIG, INDEX) and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)
