"""The tables of control messages in docs/ are those of the schemas."""

from __future__ import annotations

import pytest

from tools.message_tables import DOCS, TABLES, written


@pytest.mark.parametrize("page", TABLES)
def test_pages_have_the_messages_of_the_schemas(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert written(page, text) == text, "run python -m tools.message_tables"
