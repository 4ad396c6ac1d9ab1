"""The outputs in README.md and docs/explain.md are what explain() prints. Renew them with FP8COMPILE_ACCEPT=1.

And the pages say what there is: README.md is short, every option has its row, every link leads somewhere.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path

import api_page
import pytest
import torch
import torch.nn.functional as F
from models import ZOO, tokens
from torch import Tensor, nn

import fp8compile
from fp8compile.options import Options
from llama import Llama, LlamaConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explain.md"
FRONT = ROOT / "README.md"
FIRST_LINES = 9  # of what explain() prints that the front page shows
MADE_WITH = (2, 13)  # decompositions drift between torch versions
OPTIONS = {"select": "all"}


@cache
def _llama() -> fp8compile.Explanation:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=128), max_seq=32)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, y)

    return fp8compile.explain(loss, tokens(4, 32), tokens(4, 32, 2), loss=lambda out: out, options=OPTIONS)


@cache
def _gpt2() -> fp8compile.Explanation:
    case = ZOO["gpt2"]()
    return fp8compile.explain(case.model, loss=case.loss, options=OPTIONS, **case.inputs)


class Nothing(nn.Module):
    """Nothing in here is a matmul between an activation and a weight, but for its output head."""

    def __init__(self) -> None:
        super().__init__()
        self.padded = nn.Conv2d(3, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=8)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.grouped(F.gelu(self.padded(x)))).flatten(2)
        x = torch.softmax(x @ x.transpose(1, 2), -1) @ x
        return self.head(x.mean(-1))


@cache
def _nothing() -> fp8compile.Explanation:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8compile.Fp8Warning)
        return fp8compile.explain(Nothing().bfloat16(), torch.randn(4, 3, 8, 8).bfloat16(), options=OPTIONS)


@cache
def _optimizer() -> fp8compile.Explanation:
    model = Llama(LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=128), max_seq=32)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return fp8compile.explain(torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1).step)


EXAMPLES: dict[str, Callable[[], str]] = {
    "llama": lambda: str(_llama()),
    "llama matmuls": lambda: _llama().table("matmuls"),
    "llama saved": lambda: _llama().table("saved"),
    "gpt2": lambda: str(_gpt2()),
    "nothing": lambda: str(_nothing()),
    "nothing matmuls": lambda: _nothing().table("matmuls"),
    "optimizer": lambda: str(_optimizer()),
    "optimizer groups": lambda: _optimizer().table("groups"),
    "optimizer states": lambda: _optimizer().table("states"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_what_explain_prints(name: str):
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) != MADE_WITH:
        pytest.skip(f"the page was made with torch {MADE_WITH[0]}.{MADE_WITH[1]}")
    _compare(PAGE, name, str(EXAMPLES[name]()))


def test_the_front_page_shows_the_beginning_of_it():
    """Of the same text, which the test above compares with what is printed."""
    place = re.search(r"<!-- llama -->\n```text\n(.*?)```\n<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert place is not None
    _compare(FRONT, "explain", "".join(place[1].splitlines(keepends=True)[:FIRST_LINES]) + "    …\n")


def _compare(page: Path, name: str, printed: str) -> None:
    """Compare the place of `name` in a page with what was printed, or write it there."""
    shown = f"<!-- {name} -->\n```text\n{printed}```\n<!-- end -->"
    place = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
    text = page.read_text()
    if os.environ.get("FP8COMPILE_ACCEPT"):
        page.write_text(place.sub(lambda _: shown, text))
        return
    found = place.search(text)
    assert found is not None
    assert _without_lines(found[0]) == _without_lines(shown)


def test_the_api_page_is_current():
    page = ROOT / "docs" / "api.md"
    if os.environ.get("FP8COMPILE_ACCEPT"):
        page.write_text(api_page.page())
    assert page.read_text() == api_page.page(), "renew it: make accept"


def test_the_front_page_is_short():
    assert len(FRONT.read_text().splitlines()) <= 130


def test_every_option_has_its_row():
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "options.md").read_text(), re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(
        field.name for field in fields(Options)
    )


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))], ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)#]+)(#[^)]*)?\)", page.read_text())
    for link, anchor in links:
        if "://" in link:
            continue
        target = page.parent / link
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor[1:] in _anchors(target), f"{page.name}: {link}{anchor}"


PATH = re.compile(
    r"(?<![\w/.-])((?:fp8compile|passes|kernels|tests|benchmarks|examples|docs)/[\w/]+\.(?:py|md|json|svg|png))"
)
ELSEWHERE = {"passes/ROOM/NAME.py", "benchmarks/llama3_h100_202412_torchtitan.md"}  # a pattern; another project's
ROOMS = ("fp8compile", "passes", "kernels", "benchmarks", "examples")


def test_paths_that_pages_and_sources_name_exist():
    files = [ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    files += [file for room in ROOMS for kind in ("*.py", "*.md") for file in (ROOT / room).rglob(kind)]
    gone = [
        f"{file.relative_to(ROOT)} names {path}"
        for file in files
        for path in sorted(set(PATH.findall(file.read_text())) - ELSEWHERE)
        if not (ROOT / path).exists()
    ]
    assert not gone, "\n".join(gone)


def _anchors(page: Path) -> set[str]:
    """The names under which a page's headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_lines(text: str) -> str:
    """Text without the lines of source it quotes: a library's move from release to release."""
    return re.sub(r"(\w+\.py):\d+ .*", r"\1", text)
