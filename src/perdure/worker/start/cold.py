"""Inside a rank that was started by exec: what `inject/sitecustomize.py` arms.

Standard library only, until torch is there: a script that imports no torch pays nothing.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from perdure.worker.start.failure import install_hook
from perdure.worker.start.streams import survive_full_disks
from perdure.worker.stderr import say


def arm(traceback_file: str, title: str, imports: str) -> None:
    """Make a rank of this process; its recorder is attached after `import torch`.

    Its streams survive a full disk, its last exception is kept in `traceback_file`, its title is
    `title`. `imports` is the file for the names of the modules that this rank imports; empty for
    none.
    """
    survive_full_disks()
    if traceback_file:
        install_hook(traceback_file, os.getpid())
    if title:
        _set_title(title)
    sys.meta_path.insert(0, _AfterTorch(imports))


class _AfterTorch(MetaPathFinder):
    """Finds `torch` as the others do, once, and has its loader attach afterwards."""

    def __init__(self, imports: str) -> None:
        self._imports = imports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Attaching(spec.loader, self._imports)
                return spec
        return None


class _Attaching(Loader):
    """Loads by another loader, then puts that one back and attaches."""

    def __init__(self, loader: Loader, imports: str) -> None:
        self._loader = loader
        self._imports = imports
        self._pid = os.getpid()

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if os.getpid() == self._pid:
            _attach(self._imports)


def _attach(imports: str) -> None:
    try:
        importlib.import_module("perdure.worker.attach").attach_rank()
        if imports:
            from perdure.worker.start.imports import record_imports

            main = sys.modules["__main__"]
            script = getattr(main, "__file__", None) or ""
            record_imports(imports, os.path.dirname(os.path.abspath(script)))
    except Exception as error:
        say(f"no recorder: {type(error).__name__}: {error}")


def _set_title(title: str) -> None:
    """Show `title` over the command line, as much of it as fits without the environment."""
    with contextlib.suppress(ImportError):
        os.environ["SPT_NOENV"] = "1"
        import setproctitle

        setproctitle.setproctitle(title)
    os.environ.pop("SPT_NOENV", None)
