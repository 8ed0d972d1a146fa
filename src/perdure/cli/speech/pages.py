"""Where perdure's documents lie, so that a message that names one leads to it.

A wheel carries them in `perdure/docs` (`scripts/hatch_build.py`); a checkout has them in `docs`.
Messages name a page as `docs/NAME.md` wherever they are made, and `point_to_pages` makes that the
path of the file where they are shown.
"""

import re
from functools import cache
from pathlib import Path

import perdure

_PAGE = re.compile(r"(?<![\w/.-])docs/([a-z-]+(?:/[a-z-]+)?\.md)\b")


@cache
def find_pages() -> Path | None:
    """Return the folder of the documents that belong to this perdure; None where it has none."""
    package = Path(perdure.__file__).resolve().parent
    for folder in (package / "docs", package.parent.parent / "docs"):
        if (folder / "exit-codes.md").is_file():
            return folder
    return None


def point_to_pages(text: str) -> str:
    """Return the text with every `docs/NAME.md` as a path that leads there from here.

    From within the checkout it stays as it is; so does the name of a page that is not there.
    """
    folder = find_pages()
    if folder is None or "docs/" not in text or folder == Path.cwd() / "docs":
        return text

    def point(match: re.Match[str]) -> str:
        path = folder / match[1]
        return str(path) if path.is_file() else match[0]

    return _PAGE.sub(point, text)
