"""Real connections between real processes, on loopback."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.network.links import LinkReader

_PEER = """
import socket, sys
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(sock.getsockname()[1], flush=True)
for line in sys.stdin:
    word, count = line.split()
    if word == "send":
        sock.sendall(b"x" * int(count))
    else:
        left = int(count)
        while left:
            left -= len(sock.recv(min(left, 1 << 20)))
    print("done", flush=True)
"""


class Peer:
    """Another process with one end of a connection; ours is `end`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as server:
            self.port = server.getsockname()[1]
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PEER, host, str(self.port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            server.settimeout(PATIENCE_S)
            self.end, _ = server.accept()
        assert self.process.stdout is not None
        self.far_port = int(self.process.stdout.readline())

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.end.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=["127.0.0.1", "::1"])
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    try:
        made = Peer(request.param)
    except OSError as error:
        pytest.skip(f"no {request.param}: {error}")
    yield made
    made.close()


def _drain(end: socket.socket, count: int) -> None:
    while count:
        count -= len(end.recv(min(count, 1 << 20)))


def test_both_directions_of_a_pair_of_ranks_on_one_node(peer: Peer) -> None:
    # Rank 0 is this process, which listened for group "dp"; rank 1 is the other.
    reader = LinkReader(lambda rank: {peer.port: "dp"} if rank == 0 else {}, alone=True)
    pids = {0: os.getpid(), 1: peer.process.pid}
    try:
        first = reader.sweep(100.0, pids)
        assert (first.links, first.sockets, first.note) == ((), 2, "")
        peer.tell("send 3000000")
        _drain(peer.end, 3_000_000)
        peer.wait()
        sweep = reader.sweep(101.0, pids)
        (link,) = sweep.links
        assert (link.src, link.dst, link.comm) == (1, 0, "dp")
        # An acknowledgement may be on its way, no more.
        assert 2_000_000 < link.bytes_acked <= 3_000_001
        assert link.rtt_s > 0
        assert (sweep.window_s, sweep.omitted, sweep.endpoints) == (1.0, 1, ())
        assert reader.choose_address(loopback=True) in ("127.0.0.1", "::1")
        assert reader.choose_address() == "", "another machine would reach itself by it"
        reader.hosts["10.0.0.1"] = 1
        assert reader.choose_address() == "10.0.0.1"
    finally:
        reader.close()


def test_what_is_not_read_is_told_even_when_little_moves(peer: Peer) -> None:
    reader = LinkReader(lambda _: {}, alone=True)
    pids = {0: os.getpid(), 1: peer.process.pid}
    try:
        reader.sweep(100.0, pids)
        peer.end.sendall(b"x" * 700)  # The other process does not read.
        links = {(s.src, s.dst): s for s in reader.sweep(101.0, pids).links}
        assert links[1, 0].unread_bytes == 700
        assert links[1, 0].comm == ""
    finally:
        reader.close()


def test_quiet_connections_are_left_out(peer: Peer) -> None:
    reader = LinkReader(lambda _: {}, alone=True)
    pids = {0: os.getpid(), 1: peer.process.pid}
    try:
        reader.sweep(100.0, pids)
        sweep = reader.sweep(101.0, pids)
        assert (sweep.links, sweep.omitted, sweep.sockets) == ((), 2, 2)
    finally:
        reader.close()


def test_an_end_on_another_node_is_announced_with_its_group(peer: Peer) -> None:
    # This process is no rank of that node: it may have more connections, of an earlier test.
    reader = LinkReader(lambda _: {peer.far_port: "tp"})
    pids = {4: peer.process.pid}
    try:
        sweep = reader.sweep(100.0, pids)
        (end,) = sweep.endpoints
        assert (end.rank, end.comm) == (4, "tp")
        assert end.local.endswith(f":{peer.far_port}")
        assert end.remote.endswith(f":{peer.port}")
        turns = [reader.sweep(101.0 + n, pids) for n in range(20)]
        assert sum(len(s.endpoints) for s in turns) == 1  # Repeated once in twenty sweeps.
    finally:
        reader.close()


def test_the_store_is_no_link(peer: Peer) -> None:
    reader = LinkReader(lambda _: {}, alone=True)
    pids = {0: os.getpid(), 1: peer.process.pid}
    try:
        assert reader.sweep(100.0, pids, frozenset({peer.port})).sockets == 0
    finally:
        reader.close()


def test_closed_connections_and_ended_ranks_are_forgotten(peer: Peer) -> None:
    reader = LinkReader(lambda _: {}, alone=True)
    pids = {0: os.getpid(), 1: peer.process.pid}
    try:
        assert reader.sweep(100.0, pids).sockets == 2
        peer.end.close()
        peer.process.kill()
        peer.process.wait()
        assert reader.sweep(101.0, pids).sockets == 0
        assert reader.sweep(102.0, {}).sockets == 0
    finally:
        reader.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another user")
def test_another_users_rank_is_said_to_be_missing() -> None:
    code = """
import os, socket, sys
from perdure.adapters.network.links import LinkReader
server = socket.create_server(("127.0.0.1", 0))
end = socket.create_connection(server.getsockname())
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(LinkReader(lambda _: {}, alone=True).sweep(1.0, {0: int(sys.argv[1])}).note)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid())],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "descriptors of rank 0" in done.stdout, done.stderr
    assert "Permission denied" in done.stdout


_IN_NAMESPACE = """
import fcntl, os, socket, struct, sys
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
fcntl.ioctl(probe, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS: IFF_UP
server = socket.create_server(("127.0.0.1", 0))
child = os.fork()
if child == 0:
    end = socket.create_connection(server.getsockname())
else:
    end, _ = server.accept()
server.close()
if child:
    end.sendall(b"x" * 900)
    print(os.getpid(), child, flush=True)
sys.stdin.read()
"""


def test_ranks_in_a_network_namespace_of_their_own() -> None:
    process = subprocess.Popen(
        ["unshare", "-n", sys.executable, "-I", "-c", _IN_NAMESPACE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    reader = LinkReader(lambda _: {}, alone=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if len(words) != 2:
            pytest.skip(f"no namespaces here: {process.communicate(timeout=PATIENCE_S)[1][-200:]}")
        pids = dict(enumerate(map(int, words)))
        assert reader.sweep(100.0, pids).sockets == 2
        (link,) = [s for s in reader.sweep(101.0, pids).links if s.unread_bytes]
        assert (link.src, link.dst, link.unread_bytes) == (1, 0, 900)
    finally:
        reader.close()
        process.communicate(timeout=PATIENCE_S)
