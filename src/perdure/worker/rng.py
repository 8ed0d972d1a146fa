"""Random generators of one rank: Python's, NumPy's, torch's, CUDA's, as plain data.

Plain, so that the file that holds them loads with `weights_only`.
"""

import random
import sys
from typing import Any

import torch


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to `state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        array = numpy.array(keys, dtype=numpy.uint32)
        numpy.random.set_state((kind, array, position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
