"""Counters of the interfaces that carry the ranks' traffic, and of RDMA ports, from sysfs.

RDMA traffic passes no socket, so its ports' own counters are all there is to see from outside;
an interface's errors and drops tell a bad cable or port from a bad path behind it.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from perdure.adapters.host import read_text
from perdure.model.signals.links import NicSample

_ETHERNET_ERRORS = ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "tx_carrier_errors")
_RDMA_ERRORS = (
    "counters/symbol_error",
    "counters/link_error_recovery",
    "counters/link_downed",
    "counters/port_rcv_errors",
    "counters/port_xmit_discards",
    "counters/local_link_integrity_errors",
    "hw_counters/out_of_sequence",
    "hw_counters/packet_seq_err",
    "hw_counters/local_ack_timeout_err",
    "hw_counters/rnr_nak_retry_err",
    "hw_counters/req_transport_retries_exceeded",
    "hw_counters/roce_adp_retrans",
)
_RDMA_WORD = 4
"""`port_xmit_data` and `port_rcv_data` count 32-bit words."""

_Counters = tuple[int, int, int]
"""Sent and received bytes, errors."""


class NicReader:
    """Samples of a node's interfaces and RDMA ports."""

    def __init__(self, root: str = "/sys") -> None:
        """Read below `root`."""
        self._root = Path(root)
        self._before: dict[str, _Counters] = {}

    def sample(self, interfaces: Iterable[str]) -> tuple[NicSample, ...]:
        """Return what `interfaces` and all RDMA ports did since the last call.

        One that is new is left out once: its counters have grown since the machine was started.
        """
        looks = [
            *(self._look_ethernet(name) for name in sorted(set(interfaces))),
            *(self._look_rdma(port) for port in self._list_ports()),
        ]
        samples = []
        for name, kind, up, counters in looks:
            before, self._before[name] = self._before.get(name), counters
            if before is not None:
                grown = (max(0, now - old) for now, old in zip(counters, before, strict=True))
                samples.append(NicSample(name, kind, up, *grown))
        return tuple(samples)

    def _look_ethernet(self, name: str) -> tuple[str, Literal["ethernet", "rdma"], bool, _Counters]:
        base = self._root / "class/net" / name
        counters = base / "statistics"
        up = read_text(base / "operstate").strip() in ("up", "unknown")  # Loopback says `unknown`.
        sent, received = (_read_number(counters / f"{way}_bytes") for way in ("tx", "rx"))
        errors = sum(_read_number(counters / error) for error in _ETHERNET_ERRORS)
        return name, "ethernet", up, (sent, received, errors)

    def _look_rdma(self, port: Path) -> tuple[str, Literal["ethernet", "rdma"], bool, _Counters]:
        name = f"{port.parent.parent.name}/{port.name}"
        up = read_text(port / "state").strip().endswith("ACTIVE")
        words = [_read_number(port / f"counters/port_{way}_data") for way in ("xmit", "rcv")]
        errors = sum(_read_number(port / error) for error in _RDMA_ERRORS)
        return name, "rdma", up, (words[0] * _RDMA_WORD, words[1] * _RDMA_WORD, errors)

    def _list_ports(self) -> list[Path]:
        devices = self._root / "class/infiniband"
        return sorted(devices.glob("*/ports/*")) if os.path.isdir(devices) else []


def _read_number(path: Path) -> int:
    """Return a counter; 0 where this device does not have it."""
    try:
        return int(read_text(path))
    except ValueError:
        return 0
