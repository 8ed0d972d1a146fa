"""Tags a wheel that carries compiled parts for this machine; without them it stays for any."""

import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):
    """Looks for what `scripts/build_wheel.sh` has left beside the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Set the tag: one build serves every Python, but not every machine."""
        if any(Path(self.root, "src/perdure/worker/native/prebuilt").glob("*.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"
            build_data["pure_python"] = False
