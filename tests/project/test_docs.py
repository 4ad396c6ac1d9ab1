"""The outputs in docs/explain.md are what explain() prints. Renew them with FP8COMPILE_ACCEPT=1."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import ZOO, tokens
from torch import Tensor, nn

import fp8compile
from llama import Llama, LlamaConfig

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
MADE_WITH = (2, 13)  # decompositions drift between torch versions
OPTIONS = {"select": "all"}


def _llama() -> fp8compile.Explanation:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden=128), max_seq=32)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, y)

    return fp8compile.explain(loss, tokens(4, 32), tokens(4, 32, 2), loss=lambda out: out, options=OPTIONS)


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


def _nothing() -> fp8compile.Explanation:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8compile.Fp8Warning)
        return fp8compile.explain(Nothing().bfloat16(), torch.randn(4, 3, 8, 8).bfloat16(), options=OPTIONS)


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
    shown = f"<!-- {name} -->\n```text\n{EXAMPLES[name]()}```\n<!-- end -->"
    place = re.compile(rf"<!-- {name} -->\n.*?<!-- end -->", re.DOTALL)
    page = PAGE.read_text()
    if os.environ.get("FP8COMPILE_ACCEPT"):
        PAGE.write_text(place.sub(lambda _: shown, page))
        return
    found = place.search(page)
    assert found is not None
    assert _without_lines(found[0]) == _without_lines(shown)


def _without_lines(text: str) -> str:
    """Text without the lines of source it quotes: a library's move from release to release."""
    return re.sub(r"(\w+\.py):\d+ .*", r"\1", text)
