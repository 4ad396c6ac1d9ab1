"""docs/api.md is made of the docstrings as they are. Renew it with FP8COMPILE_ACCEPT=1."""

from __future__ import annotations

import os
from dataclasses import fields

import fp8compile
from docs import api


def test_the_page_is_current():
    if os.environ.get("FP8COMPILE_ACCEPT"):
        api.PAGE.write_text(api.page())
    assert api.PAGE.read_text() == api.page(), "run `make accept`"


def test_everything_public_is_on_the_page():
    page = api.page()
    for name in fp8compile.__all__:
        assert f"### {name}\n" in page or f"- `{name}`: " in page or name == "RECIPES", name
    for option in fields(fp8compile.Options):
        assert f"| `{option.name}` |" in page
    for recipe in fp8compile.RECIPES:
        assert f"| `{recipe}` |" in page


def test_a_docstring_becomes_a_list_and_code():
    text = api._markdown("Return it.\n\na: one\n    more\nb, c: two\n\n>>> code\n")
    assert text == "Return it.\n\n- **a**: one\n  more\n- **b, c**: two\n\n    >>> code"
