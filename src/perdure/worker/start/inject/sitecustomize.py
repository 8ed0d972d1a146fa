"""Found by a cold-started Python before its script: arms the recorder and leaves no trace.

The keeper puts this file's directory first on PYTHONPATH of a rank that it executes. It takes
itself off again, attaches the recorder as soon as torch has been imported, in this process only
(the marker is gone before any child could inherit it), and runs the user's own `sitecustomize`.
Python ignores PYTHONPATH under `-I` and `-E`, so such a script runs without a recorder.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _leave_path() -> None:
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    parts = [part for part in parts if os.path.abspath(part or ".") != _HERE]
    if any(parts):
        os.environ["PYTHONPATH"] = os.pathsep.join(parts)
    else:
        os.environ.pop("PYTHONPATH", None)


def _run_next() -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_leave_path()
if os.environ.pop("PERDURE_ATTACH", ""):
    try:
        from perdure.worker.start.cold import arm

        arm(
            traceback_file=os.environ.pop("PERDURE_TRACEBACK", ""),
            title=os.environ.pop("PERDURE_TITLE", ""),
            imports=os.environ.pop("PERDURE_IMPORTS", ""),
        )
    except ImportError as error:
        print(f"perdure: no recorder: {error}", file=sys.stderr)
_run_next()
