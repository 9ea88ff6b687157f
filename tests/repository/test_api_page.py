"""docs/api.md is what the docstrings say."""

from __future__ import annotations

import lossycoll
from tools import api_page


def test_the_page_is_up_to_date() -> None:
    written = api_page.PAGE.read_text(encoding="utf-8")
    assert written == api_page.page(), "docs/api.md is not of these docstrings: run `make docs`"


def test_every_public_name_is_on_the_page() -> None:
    text = api_page.page()
    missing = [name for name in lossycoll.__all__ if f"\n### {name}\n" not in text]
    assert not missing


def test_a_docstring_becomes_markdown() -> None:
    text = """Adds ``a`` to :class:`~lossycoll.Options`.

More.

Args:
    a: The first,
        in two lines.
    *more: The rest.

Returns:
    A sum.

Raises:
    ValueError: Not a number.
"""
    wanted = """Adds `a` to `Options`.

More.

**Args**

- `a`: The first,
  in two lines.
- `*more`: The rest.

**Returns**

A sum.

**Raises**

- `ValueError`: Not a number.
"""
    assert api_page.markdown(text) == wanted
