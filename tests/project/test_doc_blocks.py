"""Every block of Python in the pages at the top and in docs/ runs as it is written, those of a page in order and in
one namespace, as a reader would paste them; commands name files, targets and flags that exist.

What is changed is around them: matmuls are converted that would not pay at these sizes, graphs run node by node, and
one process stands for the ranks that torchrun would start.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8compile
from fp8compile.options import Options

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = {"select": "all", "executor": "eager", "strict": True}


def blocks(page: Path) -> list[tuple[int, str, str, str]]:
    """Line, language, the rest of the opening line, and text of each block of code."""
    text = page.read_text()
    return [(text.count("\n", 0, m.start()) + 1, m[1], m[2], m[3]) for m in BLOCK.finditer(text)]


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Options.parse

    def parse_quickly(options: Any, mode: str | None = None) -> Options:
        return parse({**QUICK, **(options or {})}, mode)

    monkeypatch.setattr(Options, "parse", staticmethod(parse_quickly))


@pytest.fixture
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_quick", "_one_rank")
@pytest.mark.filterwarnings("ignore:fp8. NOTHING was converted")
@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda p: p.stem)
def test_every_block_of_a_page_runs_as_it_is_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line, language, rest, text in blocks(page):
        if language == "python":
            assert rest == "", f"{page}:{line}: a block that is not run as it is"
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("\n" * line + text, str(page), "exec"), namespace)
    assert fp8compile.compiles() or "torch.compile(" not in page.read_text(), "nothing was compiled"


def test_blocks_are_python_or_outputs():
    found = {(language, rest) for page in PAGES for _, language, rest, _ in blocks(page)}
    assert found == {("python", ""), ("text", ""), ("mermaid", "")}
    assert all(page.read_text().count("```") % 2 == 0 for page in PAGES)


PROGRAMS = "python|make|fp8compile|torchrun"
COMMAND = re.compile(rf"^    ((?:{PROGRAMS}) .+)$|`((?:{PROGRAMS}) [^`]+)`", re.MULTILINE)
OF_THE_READER = ("folder/", "script", "train.py", "runs/")  # files that commands take, not ours


def commands(page: Path) -> Iterator[str]:
    """Commands of indented blocks, and those in backticks, without their comments."""
    for found in COMMAND.findall(BLOCK.sub("", page.read_text())):
        yield re.sub(r"\s+", " ", next(filter(None, found))).split(" # ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_name_what_exists(page: Path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        paths = [p for p in re.findall(r"[\w/]+\.py\b", command) if not p.startswith(OF_THE_READER)]
        paths += [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (benchmarks[\w.]*)", command)]
        assert all((ROOT / path).is_file() for path in paths), f"{page.name}: {command}"
        if command.startswith("make "):
            assert command.split()[1] in targets, f"{page.name}: {command}"
        if command.startswith("python "):
            assert not unknown_flags(command, paths), f"{page.name}: {command}"


def unknown_flags(command: str, paths: list[str]) -> list[str]:
    """Flags that neither a file beside a command's scripts defines nor what runs benchmarks (those made of names in a
    loop may be any)."""
    folders = {(ROOT / path).parent for path in paths}
    if any("from benchmarks.harness" in (ROOT / path).read_text() for path in paths):
        folders.add(ROOT / "benchmarks" / "harness")
    sources = "".join(file.read_text() for folder in folders for file in folder.glob("*.py"))
    if 'f"--{' in sources:
        return []
    return [flag for flag in re.findall(r"(?<= )--[a-z][\w-]*", command) if paths and f'"{flag}"' not in sources]


def test_commands_are_found():
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 20
    assert any(command.startswith("make train") for command in found)
    assert unknown_flags("python examples/train_lm.py --siez 1b", ["examples/train_lm.py"]) == ["--siez"]
