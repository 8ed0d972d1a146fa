"""Loaders that stand in front of others. Imports nothing that a Python does not have at its start.

`Loading` runs a function around another loader's work and puts that loader back. A script sees
nothing of it in the module.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    Load = Callable[[Callable[[ModuleType], None], ModuleType], None]


def find_elsewhere(
    finder: object, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    """Return what the first finder but `finder` finds."""
    for other in list(sys.meta_path):
        if other is finder or not hasattr(other, "find_spec"):  # Python passes over those, too.
            continue
        spec = other.find_spec(fullname, path, target)
        if spec is not None:
            return spec
    return None


class Loading:
    """Puts another loader back, and has `load` call it."""

    def __init__(self, loader: "Any", load: "Load") -> None:
        """Stand in front of `loader`."""
        self._loader, self._load = loader, load

    def __getattr__(self, name: str) -> "Any":
        """Look like the other loader."""
        return getattr(self._loader, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        """Make the module as the other loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Put the other loader back, then run it within `load`."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__dict__["__loader__"] = self._loader  # A class of torch's forbids the other way.
        self._load(self._loader.exec_module, module)
