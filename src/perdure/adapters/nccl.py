"""Whether there is a GPU on this machine."""

import os


def has_nvidia_gpu() -> bool:
    """Return whether the driver shows a GPU to this machine (or container)."""
    return os.path.exists("/dev/nvidiactl") or os.path.isdir("/proc/driver/nvidia/gpus")
