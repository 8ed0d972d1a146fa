"""Where a rank's rendezvous store listens, and how much a stranger can write into it."""

import os
import socket
import struct
import subprocess
import sys

import pytest
from tests.attacker import MAGIC, NUMBER_OF_KEYS, SET, VALIDATE
from tests.waiting import PATIENCE_S

from perdure.worker.store import bind_store


def test_a_store_at_an_address_listens_there_alone() -> None:
    option = bind_store("127.0.0.1", 0)
    with socket.socket(fileno=option["master_listen_fd"]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["node-0.example", "192.0.2.1"])
def test_a_name_and_a_foreign_address_are_left_to_torch(host: str) -> None:
    assert bind_store(host, 0) == {}


SERVE = """
import sys
from perdure.worker import store
store._ROOM_BYTES = 64 << 20
store.wait_for_ever(store.open_store("127.0.0.1", 1, int(sys.argv[1])))
"""


def fill(port: int) -> None:
    """Write 1 GB into the store at `port`."""
    with connect(port) as sock:
        for number in range(1000):
            texts = b"/%d" % number, bytes(1 << 20)
            packed = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
            sock.sendall(bytes([SET]) + packed)


def connect(port: int) -> socket.socket:
    """Return a connection to the store at `port`."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    sock.sendall(struct.pack("<BI", VALIDATE, MAGIC))
    return sock


@pytest.mark.torch
def test_a_stranger_cannot_fill_the_machine_by_way_of_a_store() -> None:
    read, write = os.pipe()
    command = [sys.executable, "-c", SERVE, str(write)]
    with subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL) as server:
        os.close(write)
        port = int(os.read(read, 100))
        os.close(read)
        try:
            with pytest.raises(OSError, match=r"reset|Broken"):
                fill(port)
            with connect(port) as sock:
                sock.sendall(bytes([NUMBER_OF_KEYS]))
                assert int.from_bytes(sock.recv(8), "little") < 100
        finally:
            server.kill()
