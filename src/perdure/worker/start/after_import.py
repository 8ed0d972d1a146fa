"""Calls a function once a module has been imported, in this process only."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from perdure.worker.stderr import say


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name`: now, or as soon as a script has imported it.

    An error of `act` is said on standard error and never reaches the script.
    """
    if name in sys.modules:
        _try(act, sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, act))


def _try(act: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:
        say(f"{module.__name__} is left as it is: {error!r}")


class _After(MetaPathFinder):
    """Finds the module as the others do, once."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Acting(spec.loader, self._act)
                return spec
        return None


class _Acting(Loader):
    """Loads by another loader, puts that one back, then acts."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader, self._act, self._pid = loader, act, os.getpid()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if os.getpid() == self._pid:
            _try(self._act, module)
