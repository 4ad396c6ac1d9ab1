"""Text to train on: bytes of real files, cut into a training part and a held-out part.

By default the text is the installed Python's own standard library, which every machine has, filled up with the sources
of installed packages where a distribution keeps the library small. Files are put in the order of a hash of their
relative path, a shuffle that is the same everywhere, so that a size cap and the split both take an even sample of the
whole. The last `HELD_OUT` of the bytes is held out.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = 0.05
MAX_BYTES = 40 * 2**20
MIN_HELD_OUT_WINDOWS = 16
BLOCK = 2**17  # where two sources are mixed, they are mixed in blocks of this many bytes
LIBRARY_SUFFIXES = frozenset({".py", ".txt", ".rst", ".md"})
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})


class CorpusError(ValueError):
    """The text cannot be trained on; the message says why and what to do."""


@dataclass(frozen=True)
class Corpus:
    """Bytes of text: `train` u8[n], `held_out` u8[h], and where they came from."""

    train: Tensor
    held_out: Tensor
    source: str

    def to(self, device: torch.device) -> "Corpus":
        return Corpus(self.train.to(device), self.held_out.to(device), self.source)

    def unigram_entropy(self) -> float:
        """-sum p log p over the bytes of the whole text, nats per byte: what knowing their frequencies alone gives."""
        counts = torch.bincount(self.train, minlength=256) + torch.bincount(self.held_out, minlength=256)
        probability = counts[counts > 0].double() / counts.sum()
        return -(probability * probability.log()).sum().item()


def load_corpus(path: Path | None, seq: int) -> Corpus:
    """Reads a file, a folder, or (path None) the standard library; raises CorpusError if it is too short for `seq`."""
    if path is None:
        source, text = _installed_python()
    elif path.is_file():
        source, text = str(path), path.read_bytes()[:MAX_BYTES]
    elif path.is_dir():
        source, text = str(path), gather(path, _is_visible)
    else:
        raise CorpusError(f"--text {path}: no such file or folder")
    return split(text, source, seq)


@functools.cache  # of tens of thousands of files, which do not change
def _installed_python() -> tuple[str, bytes]:
    """Return the standard library's sources and docs; if these are too short, installed packages' sources as well."""
    text = gather(Path(sysconfig.get_path("stdlib")), _is_library_text)
    if len(text) >= MAX_BYTES:
        return "Python's standard library", text
    packages = gather(Path(torch.__file__).parents[1], _is_source)
    mixed = text + packages[: MAX_BYTES - len(text)]
    blocks = [mixed[i : i + BLOCK] for i in range(0, len(mixed), BLOCK)]
    order = sorted(range(len(blocks)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    return "Python's standard library and installed packages", b"".join(blocks[i] for i in order)


def gather(root: Path, accept: Callable[[str], bool]) -> bytes:
    """Return the accepted files under root that hold text, joined in hash order, up to MAX_BYTES."""
    names = sorted((name for name in _files(root) if accept(name)), key=_hash_order)
    parts: list[bytes] = []
    size = 0
    for content in _text_files(root, names):
        parts.append(content)
        size += len(content) + 1
        if size >= MAX_BYTES:
            break
    return b"\n".join(parts)[:MAX_BYTES]


def split(text: bytes, source: str, seq: int) -> Corpus:
    """Holds out the last bytes of the text; raises CorpusError when they are too few for a fair held-out loss."""
    needed = int(MIN_HELD_OUT_WINDOWS * (seq + 1) / HELD_OUT)
    if len(text) < needed:
        raise CorpusError(
            f"{source} holds {len(text):,} bytes of text, and sequences of {seq} need at least {needed:,}: "
            "give a longer --text or a smaller --seq"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = int(len(text) * (1 - HELD_OUT))
    return Corpus(data[:cut], data[cut:], source)


def random_starts(text: Tensor, steps: int, batch: int, seq: int, seed: int) -> Tensor:
    """Return where every training window begins, i64[steps, batch]: drawn once, so that all runs see the same data."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(text.numel() - seq, (steps, batch), generator=generator).to(text.device)


def even_starts(text: Tensor, batches: int, batch: int, seq: int) -> Tensor:
    """Windows spread evenly over the text, i64[batches, batch]."""
    last = text.numel() - seq - 1
    return torch.linspace(0, last, batches * batch, dtype=torch.float64).long().view(batches, batch).to(text.device)


def windows(text: Tensor, starts: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow them, both i64[batch, seq], for starts i64[batch]."""
    span = torch.arange(seq + 1, device=text.device)
    window = text[starts[:, None] + span].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _files(root: Path) -> Iterator[str]:
    """Yield names under root that are no folders, relative to it; tens of thousands, so nothing is asked of each."""
    for folder, _, names in os.walk(root):
        here = Path(folder).relative_to(root).as_posix()
        for name in names:
            yield name if here == "." else f"{here}/{name}"


def _text_files(root: Path, names: list[str]) -> Iterator[bytes]:
    for name in names:
        if not (root / name).is_file() or (root / name).is_symlink():
            continue
        try:
            content = (root / name).read_bytes()
        except PermissionError:
            continue
        if content and b"\0" not in content:  # a NUL byte marks a binary file
            yield content


def _hash_order(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _is_library_text(name: str) -> bool:
    return os.path.splitext(name)[1] in LIBRARY_SUFFIXES and not SKIPPED_FOLDERS.intersection(name.split("/"))


def _is_source(name: str) -> bool:
    return os.path.splitext(name)[1] == ".py" and "__pycache__" not in name.split("/")


def _is_visible(name: str) -> bool:
    return not any(part.startswith(".") for part in name.split("/"))
