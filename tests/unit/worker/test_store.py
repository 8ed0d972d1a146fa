"""Where a rank's rendezvous store listens."""

import socket

import pytest

from perdure.worker.store import bind_store


def test_a_store_at_an_address_listens_there_alone() -> None:
    option = bind_store("127.0.0.1", 0)
    with socket.socket(fileno=option["master_listen_fd"]) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["node-0.example", "192.0.2.1"])
def test_a_name_and_a_foreign_address_are_left_to_torch(host: str) -> None:
    assert bind_store(host, 0) == {}
