"""A rank that somebody else has started, and its line to the lighthouse of `perdure serve`.

A script that imports `perdure.torchft` looks, once it has made its Manager, for a socket of the
lighthouse that TORCHFT_LIGHTHOUSE names. It lies in a directory of this user's, so who can open it
is who may, and nothing has to be configured. On the lighthouse's own machine the lighthouse listens
there, on others the relay that was invited (`service/lighthouse`). From then on the rank has
what perdure's own ranks have: it promises settings, hears fences, and tells of long waits. On a
machine that has not joined, at a lighthouse of torchft's, or without any, the script runs on
without.
"""

import atexit
import os
import socket
import sys
import urllib.parse
from collections.abc import Mapping, MutableMapping
from typing import Any

from perdure.files.private import find_private
from perdure.model.bus.lighthouse import PATIENCE
from perdure.model.bus.wire import ReplicaHello, ReplicaWelcome, WorkerHello
from perdure.model.codec import decode, encode
from perdure.model.errors import ProtocolError
from perdure.model.events import RankAttached, RankLeft
from perdure.model.paths import lighthouse_door
from perdure.worker.attach import Attachment
from perdure.worker.control import Control
from perdure.worker.ring import RingWriter
from perdure.worker.system.stderr import say

_TIMEOUT_S = 10.0
_LINE_MAX = 1 << 20
REPLICA_ID_KEY = "replica_id"
"""Where torchft keeps the replica id in a group's store."""


def find_door(environ: Mapping[str, str]) -> str:
    """Return the socket of the lighthouse that the environment names; empty where there is none.

    A rank that perdure has started itself has a line already.
    """
    url = environ.get("TORCHFT_LIGHTHOUSE", "")
    if not url or environ.get("PERDURE_RING"):
        return ""
    try:
        parts = urllib.parse.urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        return ""
    return next(filter(_is_ours, _list_doors(host, port or 0)), "") if host else ""


def _list_doors(host: str, port: int) -> list[str]:
    """Return where the line to a lighthouse may be: it is on this machine, or on another one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    private = find_private("/tmp")
    here = [lighthouse_door(private, port)] if any(map(_is_here, addresses)) else []
    return here + [lighthouse_door(private, port, address) for address in addresses]


def prepare_elsewhere(environ: MutableMapping[str, str]) -> None:
    """Have the Manager that is yet to be made wait as long as the lighthouse may, if it is here."""
    door = find_door(environ)
    if door and _listens(door):
        for name, value in PATIENCE.items():
            environ.setdefault(name, value)


def open_line(manager: Any, door: str) -> Attachment | None:
    """Attach this rank by the socket `door`; None where the lighthouse does not take it."""
    hello = ReplicaHello(
        replica=_read_replica_id(manager),
        local_rank=int(manager._group_rank),
        ranks=int(manager._group_world_size),
        pid=os.getpid(),
    )
    try:
        welcome = _ask(os.path.realpath(door), hello)
    except (OSError, ProtocolError) as error:
        say(f"the lighthouse does not answer; this rank is seen from outside only: {error}")
        return None
    if welcome.refusal:
        say(f"this rank is seen from outside only: {welcome.refusal}")
        return None
    ring = RingWriter.in_memory(rank=welcome.rank, generation=welcome.generation)
    attachment = Attachment(ring)
    attachment.job, attachment.clock_offset_s = welcome.job, welcome.clock_offset_s
    name = WorkerHello(welcome.line, welcome.rank, welcome.generation, os.getpid())
    attachment.open_control(Control(os.path.realpath(door), name))
    attachment.place = welcome.place
    attachment.emit(_describe(attachment, list_devices() or (welcome.device,)))
    atexit.register(_leave, attachment)
    return attachment


def _leave(attachment: Attachment) -> None:
    """Tell that the script has ended, unless by an exception; the interpreter ends."""
    ring = attachment.ring
    if os.getpid() == attachment.pid and getattr(sys, "last_value", None) is None:
        left = RankLeft(generation=ring.generation, rank=ring.rank, at_s=attachment.now())
        attachment.emit(left)
    attachment.stop()


def tell_devices(attachment: Attachment) -> None:
    """Tell which GPU this rank uses, where it has begun to use one."""
    if devices := list_devices():
        attachment.emit(_describe(attachment, devices))


def _describe(attachment: Attachment, devices: tuple[str, ...]) -> RankAttached:
    return RankAttached(
        generation=attachment.ring.generation,
        rank=attachment.ring.rank,
        pid=os.getpid(),
        host=socket.gethostname(),
        devices=devices,
        at_s=attachment.now(),
        place=attachment.place,
    )


def list_devices() -> tuple[str, ...]:
    """Return the GPU that this process uses; nothing where it has not begun to use one.

    Asked earlier, the question itself would make a context on it.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return (f"GPU-{properties.uuid}",)


def _read_replica_id(manager: Any) -> str:
    return str(manager._store.get(REPLICA_ID_KEY).decode())


def _is_ours(path: str) -> bool:
    """Return whether there is a socket at `path`, and nobody else can have put it there."""
    try:
        owners = {os.lstat(os.path.dirname(path)).st_uid, os.stat(path).st_uid}
    except OSError:
        return False
    return owners == {os.getuid()}


def _listens(path: str) -> bool:
    """Return whether somebody serves there: one that was killed has left its socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_TIMEOUT_S)
        return line.connect_ex(os.path.realpath(path)) == 0


def _is_here(host: str) -> bool:
    """Return whether `host` is an address of this machine: one that can be bound."""
    try:
        [(family, kind, proto, _, address), *_] = socket.getaddrinfo(
            host, 0, type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _ask(path: str, hello: ReplicaHello) -> ReplicaWelcome:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_TIMEOUT_S)
        line.connect(path)
        line.sendall(encode(hello) + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            data = line.recv(65536)
            if not data or len(answer) > _LINE_MAX:
                raise ProtocolError("it has hung up")
            answer += data
    return decode(answer, ReplicaWelcome)
