"""Inside a rank that was started by exec: what `inject/sitecustomize.py` arms.

Standard library only, until torch is there: a script that imports no torch pays nothing.
"""

import importlib
import os
import sys

from perdure.worker.start.after_import import after_import
from perdure.worker.start.failure import install_hook
from perdure.worker.start.streams import survive_full_disks
from perdure.worker.start.title import set_title
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
        set_title(title)
    after_import("torch", lambda torch: _attach(imports))


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
