"""A page that no menu of the site leads to is found here, and not only by who builds the site."""

import ast
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


class Loader(yaml.SafeLoader):
    """Reads `mkdocs.yml`, whose names of functions are nobody's concern here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def list_pages(nav: Any) -> list[str]:
    """Return the pages of a part of the navigation, in their order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in list_pages(part)]


def find_unlike(folder: Path, outside: list[str], nav: Any) -> tuple[list[str], list[str]]:
    """Return the pages that the navigation lacks, and its entries for which there is no page."""
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*.md")} | set(outside)
    named = list_pages(nav)
    return sorted(there - set(named)), sorted({n for n in named if n not in there})


def read_outside() -> list[str]:
    """Return the site's pages that lie outside `docs/`."""
    tree = ast.parse((ROOT / "scripts" / "mkdocs_hooks.py").read_text())
    (table,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OUTSIDE"
    ]
    return list(eval(ast.unparse(table), {"Path": Path}))


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    assert find_unlike(ROOT / "docs", read_outside(), nav) == ([], [])


def test_a_page_that_is_left_out_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.md").touch()
    nav = [{"Start": ["a.md", {"More": ["gone.md"]}]}]
    assert find_unlike(tmp_path, [], nav) == (["b/c.md"], ["gone.md"])
