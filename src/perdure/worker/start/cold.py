"""Inside a rank that was started by exec: what `inject/sitecustomize.py` arms.

Standard library only, until torch is there: a script that imports no torch pays nothing.
"""

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from perdure.worker.start.failure import install_hook
from perdure.worker.start.loading import Loading, find_elsewhere
from perdure.worker.start.streams import survive_full_disks
from perdure.worker.store import bind_store, reach_store
from perdure.worker.system.process import SITE_SIGNALS, ignore_site_signals, set_title
from perdure.worker.system.stderr import say

_TIMEOUT = timedelta(seconds=300)
"""torch's own, of a store."""

if TYPE_CHECKING:
    from perdure.worker.start.loading import Load


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name`: now, or as soon as a script has imported it.

    An error of `act` is said on standard error and never reaches the script.
    """
    if name in sys.modules:
        _try(act, sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, act))


def while_importing(names: tuple[str, ...], within: AbstractContextManager[object]) -> None:
    """Let the main thread import, from now on, what begins with one of `names` `within` that.

    Another thread's import does not hold up the training. `within` is entered again in itself,
    where one module imports another.
    """
    sys.meta_path.insert(0, _While(names, within))


def _try(act: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:
        say(f"{module.__name__} is left as it is: {error!r}")


def _load_within(spec: ModuleSpec | None, load: "Load") -> ModuleSpec | None:
    """Have `load` run what `spec` loads; None where it loads nothing."""
    if spec is None or spec.loader is None:
        return None
    spec.loader = cast("Any", Loading(spec.loader, load))
    return spec


class _After(MetaPathFinder):
    """Finds the module as the others do, once."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def concerns(self, fullname: str) -> bool:
        """Return whether it has something to do at the import of `fullname`."""
        return fullname == self._name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.concerns(fullname):
            return None
        sys.meta_path.remove(self)
        pid = os.getpid()

        def load(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
            exec_module(module)
            if os.getpid() == pid:
                _try(self._act, module)

        return _load_within(find_elsewhere(self, fullname, path, target), load)


class _While(MetaPathFinder):
    """Finds modules as the others do, and runs them within something."""

    def __init__(self, names: tuple[str, ...], within: AbstractContextManager[object]) -> None:
        self._names, self._within = names, within

    def concerns(self, fullname: str) -> bool:
        """Return whether it has something to do at the import of `fullname`."""
        return fullname.startswith(self._names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.concerns(fullname):
            return None

        def load(exec_module: Callable[[ModuleType], None], module: ModuleType) -> None:
            main = threading.current_thread() is threading.main_thread()
            with self._within if main else nullcontext():
                exec_module(module)

        return _load_within(find_elsewhere(self, fullname, path, target), load)


def arm(traceback_file: str, title: str, imports: str) -> None:
    """Make a rank of this process; its recorder is attached after `import torch`.

    Its streams survive a full disk, its last exception is kept in `traceback_file`, its title is
    `title`. `imports` is the file for the names of the modules that this rank imports; empty for
    none.
    """
    ignore_site_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SITE_SIGNALS)
    survive_full_disks()
    if traceback_file:
        install_hook(traceback_file, os.getpid())
    if title:
        set_title(title)
    after_import("torch", lambda torch: _attach(imports))


def _prepare_store(rendezvous: ModuleType) -> None:
    """Have rank 0's store listen on MASTER_ADDR alone, and have no rank wait for a store that died.

    torch's server takes every interface. Its client tries for half an hour to reach a store.
    """
    make: Callable[..., object] = rendezvous.__dict__["TCPStore"]

    def make_store(
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = _TIMEOUT,
        *args: object,
        **named: object,
    ) -> object:
        def make_within(timeout: timedelta) -> object:
            return make(host_name, port, world_size, is_master, timeout, *args, **named)

        meeting = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if (host_name, str(port)) == meeting:
            if is_master:
                named |= bind_store(host_name, port)
            elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                return reach_store(make_within, host_name, port, timeout)
        return make_within(timeout)

    rendezvous.__dict__["TCPStore"] = make_store


def _attach(imports: str) -> None:
    attach()
    if imports:
        from perdure.worker.start.imports import record_imports

        script = getattr(sys.modules["__main__"], "__file__", None) or ""
        record_imports(imports, os.path.dirname(os.path.abspath(script)))


def attach() -> None:
    """Start the recorder; a script must run without it as well, so a failure is only said."""
    after_import("torch.distributed.rendezvous", _prepare_store)
    try:
        importlib.import_module("perdure.worker.attach").attach_rank()
    except Exception as error:
        say(f"no recorder: {type(error).__name__}: {error}")
