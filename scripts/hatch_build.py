"""Gives a wheel the documents, and tags one that carries compiled parts for this machine.

Without compiled parts it stays for any. An editable installation has the documents of its checkout.
"""

import platform
import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    """Looks for `docs`, and for what `scripts/build_wheel.sh` has left beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the pages; set the tag: one build serves each Python, and each newer glibc (PEP 600).

        What the parts need beside glibc is torch's, which is loaded before them.
        """
        if version != "editable":
            docs = Path(self.root, "docs")
            for page in sorted(docs.rglob("*.md")):
                inside = f"perdure/docs/{page.relative_to(docs).as_posix()}"
                build_data["force_include"][str(page)] = inside
        parts = list(Path(self.root, "src/perdure/worker/native/prebuilt").glob("*.so"))
        if parts:
            needed = re.findall(rb"GLIBC_2\.(\d+)", b"".join(part.read_bytes() for part in parts))
            minor = max(map(int, needed), default=17)
            build_data["tag"] = f"py3-none-manylinux_2_{minor}_{platform.machine()}"
            build_data["pure_python"] = False
