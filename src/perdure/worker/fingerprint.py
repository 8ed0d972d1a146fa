"""What the bits of a training depend on besides its state.

Where it differs between saving and resuming, perdure still resumes but no longer claims that the
losses are bitwise equal.
"""

import contextlib
import functools
import os
import platform

import torch
import torch.distributed as dist


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
    keys = sorted(set(saved) | set(now))
    return ", ".join(
        f"{key} was {saved.get(key, '?')}, is {now.get(key, '?')}"
        for key in keys
        if saved.get(key) != now.get(key)
    )
