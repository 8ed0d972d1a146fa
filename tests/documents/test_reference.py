"""The pages of `docs/reference` are what the code says."""

import os

import pytest

from tests.documents.reference import FOLDER, render_pages

PAGES = render_pages()


@pytest.mark.parametrize("name", PAGES)
def test_the_reference_is_what_the_code_says(name: str) -> None:
    path = FOLDER / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(PAGES[name], encoding="utf-8")
    again = "UPDATE_GOLDEN=1 pytest tests/documents/test_reference.py writes it anew"
    assert path.read_text(encoding="utf-8") == PAGES[name], again


def test_there_is_no_other_page() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)
