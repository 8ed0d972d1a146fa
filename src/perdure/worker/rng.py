"""Random generators of one rank: Python's, NumPy's, torch's, CUDA's, as plain data.

Plain, so that the file that holds them loads with `weights_only`.

What the bits of a training depend on besides its state is its *fingerprint*. Where it differs
between saving and resuming, perdure still resumes but no longer claims that the losses are bitwise
equal.
"""

import contextlib
import functools
import os
import platform
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def keep_rng() -> tuple[Any, Tensor, Any]:
    """Return the states of Python's, torch's and NumPy's generators as they are, to put back."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), torch.get_rng_state(), drawn


def put_back_rng(kept: tuple[Any, Tensor, Any]) -> None:
    """Put the generators back to what `keep_rng` returned."""
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    if kept[2] is not None:
        sys.modules["numpy"].random.set_state(kept[2])


def capture_rng() -> dict[str, Any]:
    """Return the state of every generator."""
    (version, words, gauss), generator, drawn = keep_rng()
    state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": generator}
    if drawn is not None:
        kind, keys, position, has_gauss, cached = drawn
        state["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    """Put every generator back to `state`."""
    version, words, gauss = state["python"]
    drawn = None
    if "numpy" in state:
        import numpy

        kind, keys, *more = state["numpy"]
        drawn = (kind, numpy.array(keys, dtype=numpy.uint32), *more)
    put_back_rng(((version, tuple(words), gauss), state["torch"], drawn))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def take_fingerprint(world_size: int) -> dict[str, str]:
    """Return the environment's fingerprint."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else "none"
    return {
        "torch": str(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "machine": platform.machine(),
        "cpu": f"{_read_cpu_model()} {torch.backends.cpu.get_cpu_capability()}".strip(),
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32) if cuda else "none",
        "backend": str(backend),
        "nccl_algo": os.environ.get("NCCL_ALGO", "auto") if backend == "nccl" else "none",
        "world_size": str(world_size),
    }


@functools.cache
def _read_cpu_model() -> str:
    """Return the processor's name: vendors' libraries choose their kernels by it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def compare_fingerprints(saved: dict[str, str], now: dict[str, str]) -> str:
    """Return what differs, in words; empty where nothing does."""
    return ", ".join(
        f"{key} was {saved.get(key, '?')}, is {now.get(key, '?')}"
        for key in sorted(set(saved) | set(now))
        if saved.get(key) != now.get(key)
    )
