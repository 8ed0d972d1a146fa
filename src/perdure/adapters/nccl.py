"""Files of the NCCL plugin read from outside the rank, and whether there is a GPU at all."""

import os

from perdure.adapters.rings import open_regular
from perdure.model.errors import ProtocolError
from perdure.model.signals.nccl import NcclReading, parse_nccl

_BYTES_MAX = 16 << 20


def read_nccl(ring: str, clock_offset_s: float) -> NcclReading | None:
    """Return what the plugin of the rank with this `ring` wrote; None where there is nothing.

    Works while the rank is stopped and after its end. It copies 1.5 MB twice, and a full file
    takes a tenth of a second to read: for a diagnosis, not for every heartbeat.
    """
    try:
        with open(f"{ring}.nccl", "rb", opener=open_regular) as file:
            data = file.read(_BYTES_MAX)
            file.seek(0)
            again = file.read(_BYTES_MAX)
        return parse_nccl(data, again, clock_offset_s)
    except (OSError, ProtocolError):
        return None


def has_nvidia_gpu() -> bool:
    """Return whether the driver shows a GPU to this machine (or container)."""
    return os.path.exists("/dev/nvidiactl") or os.path.isdir("/proc/driver/nvidia/gpus")
