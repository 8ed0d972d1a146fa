"""A port of the box that others try to reach: sent along as one file, with nothing but Python.

    python3 door.py SECONDS    be reachable for so long, in the background; say where

It imports nothing of perdure's.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from typing import Any

ANSWER = "@@perdure-json "
"""Begins the one line of standard output that is the answer: shells may print banners."""
SIOCGIFADDR = 0x8915
"""Linux's request for the address of an interface."""


def listen(for_s: float) -> dict[str, Any]:
    """Accept connections on a port for so long, in a process of its own; return port and addresses.

    What answers here would answer a rank as well: any port of any interface.
    """
    door = socket.socket()
    door.bind(("", 0))
    door.listen(64)
    port = door.getsockname()[1]
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        signal.alarm(max(1, int(for_s)))
        while True:
            door.accept()[0].close()
    return {"port": port, "interfaces": list_interfaces()}


def list_interfaces() -> list[tuple[str, str]]:
    """Return name and IPv4 address of each interface that has one."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                told = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(told[20:24])))
    return found


if __name__ == "__main__":
    print(ANSWER + json.dumps(listen(float(sys.argv[1]))))
