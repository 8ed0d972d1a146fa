"""Imported by the warm image: the compiled recorder is loaded and registered before the fork.

A rank forked from it then only maps its ring. Until it does, the kernel passes on.
"""

import os

from perdure.worker.native.recorder import load_library

if os.environ.get("PERDURE_RECORDER", "auto") in ("auto", "compiled"):
    load_library()
