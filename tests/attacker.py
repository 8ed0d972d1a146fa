"""A stranger who attacks listening sockets: a process of its own, and another user if root runs it.

usage: python -m tests.attacker [--core N] [--stores]

Each line on standard input replaces the places that the attacker attacks. It is a JSON list. A
place is `[HOST, PORT]` for TCP and `["", PATH]` for a unix socket. A path that begins with `@` is a
name in the abstract namespace. The attacker uses each protocol at each place until standard input
ends. Each line on standard output is a `Told` as JSON.

With `--stores` the attacker also uses what has no login: TCPStore, gloo, and the quorum of a
lighthouse.
"""

import argparse
import contextlib
import itertools
import json
import os
import pwd
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perdure.model.bus.access import ROLES
from perdure.model.bus.wire import (
    subject_beats,
    subject_commands,
    subject_events,
    subject_joins,
    subject_journal,
    subject_lines,
    subject_notices,
    subject_orders,
    subject_queries,
)
from perdure.model.signals.links import subject_probe

Place = tuple[str, int | str]
"""Host and port; or an empty host, and the path of a unix socket."""
JOB = "prey"
"""Name of the job that is attacked."""
_CONNECT_S, _ANSWER_S, _CALL_S = 1.0, 0.1, 0.5
_BYTES_MAX = 1 << 20
_HELD_MAX = 200
"""Idle connections that it holds at one place."""
_THREADS = 8
_FIRST_USER = 61_184
"""The first number that no user of a usual system has."""


@dataclass(frozen=True)
class Told:
    """What one attack has found."""

    place: Place
    protocol: str
    bytes: int
    """What came back."""
    begins: str
    """The first of these bytes."""
    connected: bool


# --- the sockets of a job ------------------------------------------------------------------------


def find_places(pids: Iterable[int]) -> set[Place]:
    """Return all places at which one of these processes listens."""
    inodes: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(entry.path).removeprefix("socket:[").rstrip("]"))
    return {*_find_tcp(inodes), *_find_unix(inodes)}


def _find_tcp(inodes: Collection[str]) -> Iterator[Place]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):  # A machine without IPv6.
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    host, _, port = words[1].partition(":")
                    yield _read_address(host), int(port, 16)


def _read_address(text: str) -> str:
    """Return where to connect to for an address of the kernel's table."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return socket.inet_ntop(socket.AF_INET, packed).replace("0.0.0.0", "127.0.0.1")
    if packed.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return "::1" if packed == bytes(16) else socket.inet_ntop(socket.AF_INET6, packed)


def _find_unix(inodes: Collection[str]) -> Iterator[Place]:
    listens = 0x10000
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split(maxsplit=7)
        if len(words) == 8 and int(words[3], 16) & listens and words[6] in inodes:
            yield "", words[7]


# --- what it says --------------------------------------------------------------------------------


def connect(place: Place) -> socket.socket:
    """Return a connection.

    Raises:
        OSError: there is none.
    """
    host, name = place
    if host:
        return socket.create_connection((host, int(name)), _CONNECT_S)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect(str(name).replace("@", "\0", 1) if str(name).startswith("@") else str(name))
    except OSError:
        sock.close()
        raise
    return sock


def exchange(place: Place, *pieces: bytes, reset: bool = False) -> bytes:
    """Send each piece; return what came back. The connection ends by a reset if asked."""
    with connect(place) as sock:
        with contextlib.suppress(OSError):
            for piece in pieces:
                sock.sendall(piece)
        if reset:
            linger = struct.pack("ii", 1, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return b""
        return _read_all(sock)


def _read_all(sock: socket.socket) -> bytes:
    data = b""
    sock.settimeout(_ANSWER_S)
    with contextlib.suppress(OSError):
        while len(data) < _BYTES_MAX and (block := sock.recv(1 << 16)):
            data += block
    return data


ASK = b'{"type":"Ask","generation":0,"member":1}\n{"type":"Take","step":1,"share":0,"shares":1}\n'
GARBAGE = (
    os.urandom(4096),
    b"\xff" * 64,
    b"\x00" * 100_000,
    b"\x16\x03\x01\x02\x00" + bytes(512),
    b"\x16\x03\x01\x02",
    b"GET",
    ASK,
    ASK.replace(b'"shares":1', b'"shares":0'),
    b'{"type":"WorkerHello","job":"prey","rank":0,"generation":0,"pid":1}\n' * 3,
    b'{"type":"KeeperExit"}\n',
    b"[" * 100_000 + b"\n",
)


def send_garbage(place: Place) -> Iterator[bytes]:
    """Send what no port understands, and end some connections by a reset."""
    for data in GARBAGE:
        yield exchange(place, data)
        exchange(place, data, reset=True)


SUBJECTS = (
    *(name(JOB, node) for name in (subject_events, subject_beats, subject_orders) for node in "01"),
    *(subject_events(JOB, name) for name in ("lighthouse", "run")),
    *(subject_orders(JOB, name) for name in ("all", "lighthouse")),
    subject_commands(JOB),
    subject_queries(JOB),
    subject_notices(JOB),
    subject_joins(JOB),
    subject_journal(JOB),
    subject_lines(JOB, 0),
    subject_probe(JOB, 0),
    f"$JS.API.STREAM.DELETE.PERDURE_{JOB}_JOURNAL",
    "$SYS.REQ.SERVER.PING",
)
STOP = b'{"id":"evil","kind":"stop"}'


def speak_nats(place: Place) -> Iterator[bytes]:
    """Log in as each role with a guess, publish to each subject, and send too much."""
    heard = b"PING\r\nSUB > 1\r\nSUB _INBOX.> 2\r\n"
    said = b"".join(
        f"PUB {subject} _INBOX.x {len(STOP)}\r\n".encode() + STOP + b"\r\n" for subject in SUBJECTS
    )
    logins: list[dict[str, Any]] = [{"verbose": True}, {"auth_token": ""}]
    logins += [{"user": user, "pass": "guess"} for user in (*ROLES, "agent-0", "route", "system")]
    for login in logins:
        yield exchange(place, f"CONNECT {json.dumps(login)}\r\n".encode() + heard + said)
    yield exchange(place, b"PUB x 2000000000\r\n" + b"x" * 100_000)
    yield exchange(place, b"INFO {}\r\n+OK\r\n" * 1000)


REQUESTS = tuple(
    f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
    for path, host in (
        ("/", "127.0.0.1"),
        (f"/jobs/{JOB}", "127.0.0.1"),
        (f"/jobs/{JOB}/live", "localhost"),
        (f"/jobs/{JOB}/report.html", "127.0.0.1/static/?"),
        (f"//jobs/{JOB}", "127.0.0.1"),
        (f"/static/..%2f..%2fjobs%2f{JOB}", "127.0.0.1"),
        (f"/static/;/jobs/{JOB}", "127.0.0.1"),
        (f"http://x/jobs/{JOB}", "127.0.0.1"),
        ("/results", "evil.example"),
        ("/varz", "x"),
        ("/connz?auth=1&subs=1", "x"),
        ("/metrics", "x"),
        ("/debug/pprof/heap", "x"),
    )
) + (
    f"GET /jobs/{JOB}/live HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
    "AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode(),
    f"POST /jobs/{JOB}/ask HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n"
    'Content-Length: 15\r\n\r\n{"verb":"stop"}'.encode(),
    b"POST /notify HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /notify HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n"
    b"Content-Length: 1000000000\r\n\r\n" + b"x" * 100_000,
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n"
    b"\r\n0\r\n\r\nGET /jobs/prey HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
)


def speak_http(place: Place) -> Iterator[bytes]:
    """Ask for pages without a token, by each trick of paths, hosts, and bodies."""
    for request in REQUESTS:
        yield exchange(place, request)


def speak_tls(place: Place) -> Iterator[bytes]:
    """Make a TLS handshake without a certificate and with a wrong one, then ask for a state."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with connect(place) as sock, contextlib.suppress(OSError, ValueError):
        sock.settimeout(_CONNECT_S)
        with context.wrap_socket(sock, server_hostname="x") as secured:
            secured.sendall(ASK)
            yield _read_all(secured)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAMES = (
    bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)),  # SETTINGS
    bytes((0, 0, 8, 6, 0, 0, 0, 0, 0)) + b"pingping",
    bytes((255, 255, 255, 0, 0, 0, 0, 0, 1)) + b"x" * 4096,  # DATA, larger than is allowed
    bytes((0, 0, 4, 1, 4, 0, 0, 0, 1)) + b"\xff\xff\xff\xff",  # HEADERS that cannot be read
)
CALLS = (
    "/torchft.LighthouseService/Heartbeat",
    "/torchft.LighthouseService/Quorum",
    "/torchft.ManagerService/CheckpointMetadata",
    "/torchft.ManagerService/ShouldCommit",
    "/torchft.ManagerService/Quorum",
)
"""All calls but a manager's `Kill`, which ends its process: torchft has no login
(docs/security.md)."""
CALLED = (b"", b"\xff" * 64, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x04evil")


def speak_grpc(place: Place) -> Iterator[bytes]:
    """Send bad HTTP/2 frames, and call torchft's services with messages that mean nothing."""
    for frame in FRAMES:
        yield exchange(place, PREFACE, frame * 10)
    grpc = sys.modules.get("grpc")
    if grpc is None or not place[0]:
        return
    host, port = place
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for call, message in itertools.product(CALLS, CALLED):
            try:
                yield channel.unary_unary(call)(message, timeout=_CALL_S)
            except grpc.RpcError as error:
                if error.code() in (
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                ):  # It speaks no gRPC.
                    return


def flood(place: Place) -> Iterator[bytes]:
    """Open many connections that say nothing, or the beginning of something; then drop all."""
    held = []
    with contextlib.suppress(OSError):
        for number in range(_HELD_MAX):
            held.append(connect(place))
            held[-1].send((b"", b"\x16", b"P", b"\x00")[number % 4] or b"{")
    if held:
        yield b""
    for sock in held:
        sock.close()


PROTOCOLS: dict[str, Callable[[Place], Iterator[bytes]]] = {
    "garbage": send_garbage,
    "nats": speak_nats,
    "http": speak_http,
    "tls": speak_tls,
    "grpc": speak_grpc,
    "flood": flood,
}


# --- what has no login ---------------------------------------------------------------------------


VALIDATE, SET, COMPARE_SET, GET, CHECK, NUMBER_OF_KEYS, DELETE = 0, 1, 2, 3, 5, 7, 8
"""Queries of torch's TCPStore, in the order of its `QueryType`."""
MAGIC = 0x3C85F7CE
KEYS = tuple(
    f"/{name}"
    for number in range(20)
    for name in (
        f"perdure/agreed/b{number}", f"perdure/agreed/b{number}.1", f"{number}", f"{number}/plain",
        f"default_pg/0//{number}", f"block/{number}",
    )
)  # fmt: skip


def _pack(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def speak_store(place: Place) -> Iterator[bytes]:
    """Replace and delete keys of a TCPStore; write into the cells of agreements."""
    hello = bytes([VALIDATE]) + struct.pack("<I", MAGIC)
    yield exchange(place, hello, bytes([NUMBER_OF_KEYS]))
    for key in map(str.encode, KEYS):
        replaced = bytes([COMPARE_SET]) + _pack(key, b"", b"\xff")
        replaced += bytes([SET]) + _pack(key, b"\xff" * 100)
        exchange(place, hello, replaced, bytes([DELETE]) + _pack(key), bytes([NUMBER_OF_KEYS]))
    yield exchange(place, hello, bytes([GET]) + _pack(b"/none"))  # It ends before it is answered.


def speak_gloo(place: Place) -> Iterator[bytes]:
    """Say that this is the pair of each small number."""
    for number in range(32):
        yield exchange(place, struct.pack("<q", number))


def join_quorum(place: Place) -> Iterator[bytes]:
    """Ask a lighthouse for a quorum as a group that does not exist."""
    grpc = sys.modules.get("grpc")
    if grpc is None or not place[0] or ":" in place[0]:
        return
    member = b"\x0a\x06evil:1\x12\x12http://127.0.0.1:1\x1a\x0b127.0.0.1:1\x20\x05\x28\x01"
    with (
        grpc.insecure_channel(
            f"{place[0]}:{place[1]}", options=[("grpc.enable_http_proxy", 0)]
        ) as channel,
        contextlib.suppress(grpc.RpcError),
    ):
        call = channel.unary_unary("/torchft.LighthouseService/Quorum")
        yield call(b"\x0a" + bytes([len(member)]) + member, timeout=_CALL_S)


OPEN_PROTOCOLS = {"store": speak_store, "gloo": speak_gloo, "quorum": join_quorum}


# --- the process ---------------------------------------------------------------------------------


def find_user() -> int:
    """Return a number that no user has; this user's own if it is not root."""
    if os.geteuid() != 0:
        return os.geteuid()
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            taken.add(os.stat(f"/proc/{name}").st_uid)
    return next(number for number in itertools.count(_FIRST_USER) if number not in taken)


class Attacker:
    """The process, for a test; a context, at whose end it is gone."""

    def __init__(self, *words: str) -> None:
        """Start it with these options."""
        self.told: dict[tuple[Place, str], Told] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacker", *words],
            cwd=Path(__file__).resolve().parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._rest = b""

    def __enter__(self) -> "Attacker":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def user(self) -> int:
        """The user that it is."""
        return os.stat(f"/proc/{self._process.pid}").st_uid

    def aim(self, places: Iterable[Place]) -> None:
        """Attack these places from now on, and no others."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(sorted(places, key=str)).encode() + b"\n")
        self._process.stdin.flush()

    def look(self) -> dict[tuple[Place, str], Told]:
        """Return the largest answer of each attack so far."""
        assert self._process.stdout is not None
        assert self._process.poll() is None, "the attacker has ended"
        self._rest += self._process.stdout.read() or b""
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            row = json.loads(line)
            told = Told(**row | {"place": tuple(row["place"])})
            self.told[told.place, told.protocol] = told
        return self.told

    def has_attacked(self, places: Iterable[Place], protocols: Collection[str]) -> bool:
        """Return whether each place was attacked by each of these protocols."""
        told = self.look()
        return all((place, name) in told for place in places for name in protocols)


def _attack(place: Place, name: str, run: Callable[[Place], Iterator[bytes]]) -> Told:
    largest, connected = b"", False
    try:
        for data in run(place):
            connected = True
            largest = max(largest, data, key=len)
    except OSError:
        pass
    return Told(place, name, len(largest), largest[:200].decode("latin-1"), connected)


class _Aims:
    """The places of now, which the threads take their turns at."""

    def __init__(self, protocols: dict[str, Callable[[Place], Iterator[bytes]]]) -> None:
        self._lock = threading.Lock()
        self._protocols, self._places, self._turn = protocols, list[Place](), 0
        self._told: dict[tuple[Place, str], Told] = {}
        self.over = False

    def set(self, places: Sequence[Place]) -> None:
        """Have these attacked."""
        with self._lock:
            self._places = list(places)

    def run(self) -> None:
        """Attack until it is over; tell of the first answer of each attack, and of larger ones."""
        while not self.over:
            with self._lock:
                self._turn += 1
                turns = [(p, n) for p in self._places for n in self._protocols]
                turn = turns[self._turn % len(turns)] if turns else None
            if turn is None:
                time.sleep(0.02)
                continue
            told = _attack(*turn, self._protocols[turn[1]])
            with self._lock:
                before = self._told.get(turn)
                if before is None or told.bytes > before.bytes:
                    self._told[turn] = told
                    print(json.dumps(asdict(told)), flush=True)


def main() -> None:
    """Become another user, then attack until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", type=int, default=-1)
    parser.add_argument("--stores", action="store_true")
    args = parser.parse_args()
    with contextlib.suppress(ImportError):
        import grpc  # noqa: F401
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    user = find_user()
    "x".encode("idna")  # `socket` imports it late.
    if os.geteuid() == 0:  # All modules are imported: this user may not read the repository.
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if args.core >= 0:
        os.sched_setaffinity(0, {args.core})
    aims = _Aims(PROTOCOLS | (OPEN_PROTOCOLS if args.stores else {}))
    for _ in range(_THREADS):
        threading.Thread(target=aims.run, daemon=True).start()
    for line in sys.stdin:
        aims.set([(host, name) for host, name in json.loads(line)])
    aims.over = True
    os._exit(0)


if __name__ == "__main__":
    main()
