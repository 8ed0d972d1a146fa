"""Which sockets a fence breaks: those of its quorum, and nothing else."""

import contextlib
import socket
import struct
import threading
from datetime import timedelta

import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.worker import interrupt as replica_fence
from perdure.worker.interrupt import Fences


class Group:
    """Stands for a process group."""


def connect() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        ours.setblocking(False)
        theirs, _ = server.accept()
    return ours, theirs


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Listener -> pairs of what is taken for gloo's devices; `interrupt`'s tests say how."""
    found: dict[str, list[int]] = {}
    monkeypatch.setattr(replica_fence, "list_devices", found.copy)
    return found


def is_open(sock: socket.socket) -> bool:
    """Return whether nothing has come; what was broken before is seen at once."""
    sock.setblocking(False)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def wait_closed(sock: socket.socket) -> None:
    sock.settimeout(PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        assert sock.recv(1) == b""


def test_only_the_quorums_own_sockets_are_broken_and_only_once(
    devices: dict[str, list[int]],
) -> None:
    fences, group = Fences(), Group()
    (older, older_end), (mine, mine_end), (late, late_end) = connect(), connect(), connect()
    devices["older"] = [older.fileno()]
    fences.begin(group, 7, 1)
    devices["mine"] = [mine.fileno()]
    fences.end(group)
    devices["mine"].append(late.fileno())
    assert fences.break_up(6) == 0
    assert fences.break_up(7) == 2
    assert fences.break_up(7) == 0
    wait_closed(mine_end)
    wait_closed(late_end)
    assert is_open(older_end)
    for sock in (older, older_end, mine, mine_end, late, late_end):
        sock.close()


def test_a_device_that_is_gone_by_now_breaks_nothing(devices: dict[str, list[int]]) -> None:
    fences, group = Fences(), Group()
    fences.begin(group, 7, 1)
    devices["mine"] = []
    fences.end(group)
    del devices["mine"]
    other, other_end = connect()
    devices["other"] = [other.fileno()]
    assert fences.break_up(7) == 0
    assert is_open(other_end)
    for sock in (other, other_end):
        sock.close()


def test_a_group_that_is_being_formed_lets_go_of_its_store(devices: dict[str, list[int]]) -> None:
    fences, group = Fences(), Group()
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        kept = socket.create_connection((host, port))
        kept_end, _ = server.accept()
        fences.prepare(group)
        first = socket.create_connection((host, port))
        first_end, _ = server.accept()
        fences.begin(group, 8, port)
        rendezvous = socket.create_connection((host, port))
        rendezvous_end, _ = server.accept()
        pair, pair_end = connect()
        devices["mine"] = [pair.fileno()]
        assert fences.break_up(8) == 3
        wait_closed(pair_end)
        wait_closed(first_end)
        wait_closed(rendezvous_end)
        assert is_open(kept_end)
        for sock in (kept, kept_end, first, first_end, rendezvous, rendezvous_end, pair, pair_end):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
            sock.close()


@pytest.mark.torch
def test_who_waits_at_the_rendezvous_for_one_that_does_not_come_is_let_go() -> None:
    torchft = pytest.importorskip("torchft")
    from torch.distributed import TCPStore

    from perdure.worker.torchft import manager

    manager.install(torchft)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group = torchft.ProcessGroupGloo(timeout=timedelta(hours=1))
    said: list[str] = []

    def form() -> None:
        try:
            group.configure(f"127.0.0.1:{store.port}/q/7/0", "a", 0, 2, quorum_id=7)
        except RuntimeError as error:
            said.append(str(error))

    forming = threading.Thread(target=form, daemon=True)
    forming.start()
    fences = manager.replica.fences
    # Its own address, before it waits for the other's.
    wait_until(lambda: store.check(["q/7/0/0/0"]), "address")
    assert fences.break_up(6) == 0
    assert fences.break_up(7) == 1
    forming.join(PATIENCE_S)
    assert len(said) == 1
    assert store.check(["q/7/0/0/0"]), "others' connections go on"
