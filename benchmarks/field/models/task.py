"""What a row of the field suite is: a model as a library ships it, its batches, and what a loop does with both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.field.models.libraries import library

Batch = dict[str, Any]
Sizes = dict[str, Any]
Loss = Callable[[Any, Batch], Tensor]
Batches = Callable[[Any, bool], list[Batch]]  # of a config, and whether they are small


def shipped_loss(run: Any, batch: Batch) -> Tensor:
    """Return the loss that the model itself returns."""
    return run(**batch).loss


@dataclass
class Task:
    """A model, and a loop's part in its training.

    batches: a step has the next of them; each is compared with eager. loss: of what is called in place of the model.
    parts: submodules that are compiled by themselves, in place of the whole model.
    """

    model: nn.Module
    batches: Sequence[Batch]
    loss: Loss = shipped_loss
    parts: Sequence[str] = ()

    def backward(self, run: Any, batch: Batch, forward_in: AbstractContextManager[Any]) -> Tensor:
        """Return the loss of a batch, after its backward."""
        with forward_in:
            loss = self.loss(run, batch)
        loss.backward()
        return loss.detach()


@dataclass(frozen=True)
class FieldModel:
    """A row: a model at sizes that people train, and the same at sizes for a CPU.

    make: the task, given whether it is small and the dtype of its parameters; needs: packages; autocast: parameters
    are FP32, and forward runs under BF16 autocast; dropout: dropout is as the library ships it (all others have none);
    on_cpu: the library builds its models on a CPU alone; gib: GPU memory that a step takes at most, roughly.
    """

    name: str
    kind: str
    make: Callable[[bool, torch.dtype], Task]
    needs: Sequence[str] = ()
    autocast: bool = False
    dropout: bool = False
    on_cpu: bool = False
    gib: float = 10.0

    def built(self, device: str, small: bool = False, dropout: bool | None = None) -> Task:
        """Return the task on a device, in training; equal weights at every call. `dropout=False` leaves dropout out."""
        for name in self.needs:
            library(name)
        dtype = torch.float32 if self.autocast else torch.bfloat16
        torch.manual_seed(0)
        with torch.device("cpu" if self.on_cpu else device):
            task = self.make(small, dtype)
            unsettle(task.model)
        if not (self.dropout if dropout is None else dropout):
            silence(task.model)
        task.model.to(device).train()
        task.batches = [{k: placed(v, device, dtype) for k, v in batch.items()} for batch in task.batches]
        return task

    def forward_in(self, device: str, exact: bool = False) -> AbstractContextManager[Any]:
        """Return the context of a forward; `exact`: that of the FP32 reference."""
        return torch.autocast(device, torch.bfloat16, enabled=self.autocast and not exact)


def placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Return a part of a batch on a device; real numbers in the parameters' dtype."""
    if isinstance(value, list | tuple):
        return type(value)(placed(v, device, dtype) for v in value)
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def unsettle(model: nn.Module) -> None:
    """Draw what starts as all zeros or ones (biases, norms, gates): gradients behind it would be zero or equal."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)


def silence(model: nn.Module) -> None:
    """Set every probability of dropping anything to zero, in the modules and in their configs."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder).items()) if holder is not None else ():
                dropping = "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
                if dropping and isinstance(value, float):
                    setattr(holder, name, 0.0)


# ---- rows of Transformers -------------------------------------------------------------------------------------------


def transformer(
    name: str, kind: str, config: str, head: str, sizes: Sizes, small: Sizes, batches: Batches, **row: Any
) -> FieldModel:
    """Return a row of Transformers. head: which Auto class makes the model, without "AutoModel".

    Further: `adapt`, what is done with the model once it is there; `loss` and `parts` of its `Task`; fields of a row.
    """
    adapt: Callable[[nn.Module], Any] = row.pop("adapt", lambda model: model)
    task = {name: row.pop(name) for name in ("loss", "parts") if name in row}

    def make(is_small: bool, dtype: torch.dtype) -> Task:
        transformers = library("transformers")
        made = getattr(transformers, config)(**merged(sizes, small) if is_small else sizes)
        model = getattr(transformers, f"AutoModel{head}").from_config(made, dtype=dtype)
        return Task(adapt(model) or model, batches(made, is_small), **task)

    return FieldModel(name, kind, make, ("transformers", *row.pop("needs", ())), **row)


def merged(sizes: Mapping[str, Any], small: Mapping[str, Any]) -> Sizes:
    """Return the sizes with the small ones in their place, within configs of parts as well."""
    both = {k: merged(sizes[k], small[k]) for k in sizes.keys() & small.keys() if isinstance(small[k], dict)}
    return {**sizes, **small, **both}


def bert(width: int, layers: int, heads: int, vocabulary: int, **more: Any) -> Sizes:
    """Sizes of a BERT, and of what has the same names for them."""
    return {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocabulary, **more,
    }  # fmt: skip


def drawn(*shape: int, below: int = 0, seed: int = 1) -> Tensor:
    """Random numbers: normal, or whole ones from 0 up to `below`. On the CPU, so that they are the same anywhere."""
    generator = torch.Generator("cpu").manual_seed(seed)
    if below:
        return torch.randint(below, shape, generator=generator, device="cpu")
    return torch.randn(shape, generator=generator, device="cpu")


def tokens(batch: int, length: int, small: tuple[int, int] = (2, 32), lengths: Sequence[float] = (1.0,)) -> Batches:
    """Tokens with themselves as labels; `lengths`: a batch for each share of the length."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, full = small if is_small else (batch, length)
        vocabulary = config.get_text_config().vocab_size
        drawings = [drawn(rows, int(full * share), below=vocabulary) for share in lengths]
        return [{"input_ids": ids, "labels": ids.clone()} for ids in drawings]

    return made


def padded_tokens(batch: int, length: int, small: tuple[int, int] = (2, 32)) -> Batches:
    """Tokens of which the last quarter of every other row is padding, without labels there."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        (with_labels,) = tokens(batch, length, small)(config, is_small)
        mask = torch.ones_like(with_labels["input_ids"])
        mask[::2, -mask.shape[1] // 4 :] = 0
        labels = with_labels["labels"].masked_fill(mask == 0, -100)
        return [{"input_ids": with_labels["input_ids"], "attention_mask": mask, "labels": labels}]

    return made


def classified_tokens(batch: int, length: int, small: tuple[int, int] = (2, 32)) -> Batches:
    """Tokens with one class for each row."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        ids = tokens(batch, length, small)(config, is_small)[0]["input_ids"]
        return [{"input_ids": ids, "labels": torch.arange(len(ids), device="cpu") % config.num_labels}]

    return made


def pairs_of_tokens(batch: int, length: int, targets: int, small: tuple[int, int] = (2, 32)) -> Batches:
    """Tokens of a source and of a target, for an encoder and a decoder."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows, source = small if is_small else (batch, length)
        target = small[1] // 2 if is_small else targets
        vocabulary = config.vocab_size
        return [{"input_ids": drawn(rows, source, below=vocabulary), "labels": drawn(rows, target, below=vocabulary,
                                                                                     seed=2)}]  # fmt: skip

    return made


def images(batch: int, small: int = 2, labels: bool = True) -> Batches:
    """Images with classes."""

    def made(config: Any, is_small: bool) -> list[Batch]:
        rows = small if is_small else batch
        pixels = drawn(rows, config.num_channels, config.image_size, config.image_size)
        classes = {"labels": torch.arange(rows, device="cpu") % config.num_labels} if labels else {}
        return [{"pixel_values": pixels, **classes}]

    return made
