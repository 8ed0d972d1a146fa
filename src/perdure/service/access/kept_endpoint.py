"""The endpoint of a job's bus that stays the same over its runs: port, certificate, who asks in.

A machine that joined has an invitation, and the job's own machine may start anew (a reboot). Were
everything about the server new then, somebody would have to carry new invitations around. Where the
placement names a file for it, the server's port, its certificate and the password of `joiner` are
kept there, for its owner alone, and synced; all other credentials die with each run. Whoever holds
those of an earlier run is refused, which tells it that the job was started anew.
"""

import errno
import logging
import os
import secrets
import socket
import time

import msgspec

from perdure.adapters.nats import NatsServer, make_certificate
from perdure.files import replace_file, sync_path
from perdure.model.codec import encode
from perdure.model.errors import PlatformError
from perdure.service.jobfiles import read_document, write_atomic

log = logging.getLogger("perdure.run")

JOINER = "joiner"
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives to connections, so that none of them has it after a reboot."""
_TRIES = 100
_ADDRESS_S = 300.0
"""A machine that has just started may not have its address yet."""


class KeptEndpoint(msgspec.Struct, frozen=True):
    """The document that is kept. It holds secrets."""

    host: str
    port: int
    password: str
    certificate: str = ""
    """PEM; empty where the user gives one, or the address is loopback."""
    key: str = ""


def keep_endpoint(server: NatsServer, path: str, *, certificate: bool) -> None:
    """Give `server`, not started yet, the endpoint kept at `path`; make one where there is none.

    `certificate`: one is to be made and kept as well.

    Raises:
        PlatformError: the server's address is not on this machine, or the file cannot be written.
    """
    endpoint = read_document(path, KeptEndpoint)
    if (
        endpoint is None
        or endpoint.host != server.host
        or bool(endpoint.certificate) != certificate
    ):
        endpoint = _make_endpoint(server, certificate)
    elif not _is_free(server.host, endpoint.port):
        log.warning("port %d is taken: who joined before needs another invitation", endpoint.port)
        endpoint = msgspec.structs.replace(endpoint, port=_choose_port(server.host))
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    replace_file(path, encode(endpoint) + b"\n", mode=0o600, synced=True)
    sync_path(folder)  # It is there after a loss of power.
    server.port = endpoint.port
    server.set_password(JOINER, endpoint.password)
    if certificate:
        paths = [os.path.join(server.folder, name) for name in ("tls.crt", "tls.key")]
        for file, text in zip(paths, (endpoint.certificate, endpoint.key), strict=True):
            write_atomic(file, text.encode(), mode=0o600)
        server.certificate = (paths[0], paths[1])


def _make_endpoint(server: NatsServer, certificate: bool) -> KeptEndpoint:
    made = ["", ""]
    if certificate:
        for number, file in enumerate(make_certificate(server.folder, server.host)):
            with open(file, encoding="utf-8") as opened:
                made[number] = opened.read()
    return KeptEndpoint(server.host, _choose_port(server.host), secrets.token_urlsafe(24), *made)


def _choose_port(host: str) -> int:
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        if _is_free(host, port):
            return port
    raise PlatformError(f"no free port at {host} from {_PORTS[0]} to {_PORTS[-1]}")


def _is_free(host: str, port: int) -> bool:
    """Return whether nobody listens there, once this machine has the address.

    Raises:
        PlatformError: it does not get it.
    """
    deadline = time.monotonic() + _ADDRESS_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return False
            else:
                return True
        if time.monotonic() > deadline:
            raise PlatformError(f"{host} is not an address of this machine")
        time.sleep(1.0)
