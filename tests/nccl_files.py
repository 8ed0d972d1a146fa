"""The file of the NCCL plugin, read whole; perdure follows it from look to look instead."""

from perdure.files.regular import open_regular
from perdure.model.errors import ProtocolError
from perdure.model.signals.nccl import NcclReading, parse_nccl

_BYTES_MAX = 16 << 20


def read_nccl(ring: str, clock_offset_s: float) -> NcclReading | None:
    """Return the plugin's records of the rank with this `ring`; None if there are none."""
    try:
        with open(f"{ring}.nccl", "rb", opener=open_regular) as file:
            data = file.read(_BYTES_MAX)
            file.seek(0)
            again = file.read(_BYTES_MAX)
        return parse_nccl(data, again, clock_offset_s)
    except (OSError, ProtocolError):
        return None
