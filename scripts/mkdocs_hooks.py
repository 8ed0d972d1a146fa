"""What the site of the documents needs beyond MkDocs (`mkdocs.yml`).

The pages are those of the repository, where they are: those outside `docs/` become pages under
`project/`, and links between any of them are turned into links between pages. A built page that
would fetch something from another host fails the build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    f"project/{Path(path).name}": path
    for path in (
        "README.md",
        "ARCHITECTURE.md",
        "GLOSSARY.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "bench/RESULTS.md",
    )
}
"""Page of the site -> file of the repository; all others are in `docs/` under the same name."""
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)]*)?(\))")
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)\b[^>]*\bsrc=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b(?![^>]*rel=["']?(?:canonical|prev|next))[^>]*href=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^\s"')]+"""
)
"""What a browser fetches from another host when it shows a page, not where a reader may go."""


def on_files(files, config):
    """Add the pages that are outside `docs/`."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn links between files of the repository into links between pages."""
    here = OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {path: name for name, path in OUTSIDE.items()}

    def turn(match):
        begin, target, anchor, end = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        there = pages.get(path, path.removeprefix("docs/"))
        link = posixpath.relpath(there, posixpath.dirname(page.file.src_uri) or ".")
        return f"{begin}{link}{anchor or ''}{end}"

    return LINK.sub(turn, markdown)


def on_post_build(config):
    """Fail where a page or a style sheet fetches from another host."""
    site = Path(config["site_dir"])
    found = [
        f"{path.relative_to(site)}: {match[0]}"
        for pattern in ("*.html", "*.css")
        for path in sorted(site.rglob(pattern))
        for match in FETCHED.finditer(path.read_text("utf-8"))
    ]
    if found:
        raise PluginError("pages fetch from other hosts:\n" + "\n".join(found))
