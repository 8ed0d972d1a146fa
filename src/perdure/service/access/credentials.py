"""Who of a job may say what on its bus: made at each start, kept in files of their owner alone.

Each part reads one file, `credentials/USER.json` (`endpoint.json` for the operator), which is all
that a machine that runs only this part needs. A secret is in no argument, environment or log, and
dies with its server: the next run makes new ones. Parts that run as the same user on the same
machine can read one another's files; there, roles guard against mistakes, not against malice.

With a user's own server the same files say where it is and which of the user's own credentials to
show; what each may do there is for its administrator to set (`docs/nats.md`).

A machine that joined has an invitation, and the job's own machine may start anew (a reboot). Were
everything about the server new then, somebody would have to carry new invitations around. Where the
placement names a file for it, the server's port, its certificate and the password of `joiner` are
kept there, for its owner alone, and synced; all other credentials die with each run. Whoever holds
those of an earlier run is refused, which tells it that the job was started anew.

Logins of machines from elsewhere are ended while the job runs. A node's login is as old as the
job's server, and whoever took it keeps it. Ending one is giving it another password: the server
cuts off who came by the old one, and the node's next machine is given the new one. Only the
supervisor has the server; it is asked by a file in the folder of credentials, which nobody but
their owner can write to.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_urlsafe
from urllib.parse import urlsplit

import msgspec

from perdure.adapters.nats import (
    NatsServer,
    User,
    choose_file,
    make_certificate,
    read_pem,
)
from perdure.files import replace_file, sync_path
from perdure.files.regular import read_file
from perdure.model.bus.access import ROLES, Role, build_access, user_name
from perdure.model.bus.endpoint import Endpoint
from perdure.model.codec import decode
from perdure.model.errors import ConfigError, PerdureError, PlatformError
from perdure.model.job import JobSpec, NatsConfig
from perdure.model.paths import JobPaths
from perdure.model.records import encode_record
from perdure.service.jobfiles import (
    MINE,
    load_endpoint,
    on_disk,
    read_document,
    write_atomic,
    write_document,
)
from perdure.service.placement import Placement

log = logging.getLogger("perdure.run")


def list_users(spec: JobSpec) -> list[tuple[Role, int | None]]:
    """Return everybody who may connect: each role once, agents one a node or place."""
    nodes = {"agent": range(spec.num_logins)}
    return [(role, node) for role in ROLES for node in nodes.get(role, (None,))]


def make_server(spec: JobSpec, paths: JobPaths, placement: Placement) -> NatsServer:
    """Return the job's own server, not yet started, with fresh passwords."""
    users = tuple(
        User(user_name(role, node), token_urlsafe(24), build_access(role, spec.name, node))
        for role, node in list_users(spec)
    )
    host = placement.bind
    server = NatsServer(folder=paths.nats, token="", name=spec.name, host=host, users=users)
    if placement.door:
        made = not (is_loopback(host) or spec.nats.tls_cert)
        keep_endpoint(server, placement.door, certificate=made)
    return server


def set_certificate(server: NatsServer, config: NatsConfig) -> None:
    """Give `server` the user's certificate; else one made now, unless it is only on loopback.

    Raises:
        ConfigError: only one of certificate and key was given.
        PlatformError: a file cannot be read, or written.
    """
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError("nats: tls_cert and tls_key belong together", hint="give both")
    if config.tls_cert:
        read_pem(config.tls_cert)
        server.certificate = (config.tls_cert, config.tls_key)
    elif server.certificate is None and not is_loopback(server.host):
        with on_disk(f"write to {server.folder}"):
            server.certificate = make_certificate(server.folder, server.host)


def check_outside(spec: JobSpec) -> None:
    """Refuse what would carry secrets in the open, or say them where they can be read.

    Raises:
        ConfigError: an address that others can reach without TLS, or a URL with a password in it.
    """
    nats, notify = spec.nats, spec.notify
    if nats.url:
        parts = urlsplit(nats.url)
        if parts.scheme not in ("nats", "tls") or not parts.hostname:
            raise ConfigError("nats: not a URL of a NATS server", hint="tls://HOST:4222")
        if parts.username or parts.password:
            raise ConfigError(
                "nats: a URL with a password is seen in process lists and job files",
                hint="--nats-creds FILE, such as JSON with user and password",
            )
        if parts.scheme == "nats" and not is_loopback(parts.hostname):
            raise ConfigError(
                f"nats: {parts.hostname} is not loopback, and nats:// is not encrypted",
                hint=f"tls://{parts.netloc}, with --nats-tls-ca where its authority is your own",
            )
    elif nats.creds:
        raise ConfigError("nats: credentials without a server", hint="--nats URL")
    if notify.webhook_port and not (is_loopback(notify.webhook_host) or nats.tls_cert):
        raise ConfigError(
            f"notify: webhook_host {notify.webhook_host} is not loopback, and there is no TLS",
            hint="--nats-tls-cert and --nats-tls-key, or webhook_host = 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Return whether nobody outside this machine can reach `host`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def write_credentials(
    spec: JobSpec,
    paths: JobPaths,
    server: NatsServer | None,
    *,
    url: str,
    clock_offset_s: float,
) -> Endpoint:
    """Write a file for everybody who may connect; return that of `perdure run` itself.

    Raises:
        ConfigError: there are no credentials of the user's for a role.
        PlatformError: a file cannot be read or written.
    """
    folder = os.path.dirname(paths.credential("run"))
    with on_disk(f"make {folder}", hint=""):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)
    config = spec.nats
    ca = read_pem(config.tls_ca) if config.tls_ca else ""
    if server and server.certificate and not ca:
        ca = read_pem(server.certificate[0])
    passwords = {user.name: user.password for user in server.users} if server else {}
    by_role = server is None and os.path.isdir(config.creds)
    mine = None
    for role, node in list_users(spec):
        name = user_name(role, node)
        file = choose_file(config.creds, name, role) if config.creds and not server else ""
        endpoint = Endpoint(
            url=url,
            token=passwords.get(name, ""),
            clock_offset_s=clock_offset_s,
            external=server is None,
            user=name if server else Path(file).stem if by_role else "",
            ca=ca,
            creds=file,
            tls_cert="" if server else config.tls_cert,
            tls_key="" if server else config.tls_key,
            owner=os.geteuid() if server and is_loopback(server.host) else -1,
            speaks=MINE,
        )
        path = paths.endpoint if role == "operator" else paths.credential(name)
        write_document(path, endpoint, mode=0o600)
        mine = endpoint if role == "run" else mine
    assert mine is not None
    return mine


def make_token(path: str) -> str:
    """Return the secret in the file at `path`, made now where there is none.

    Raises:
        PlatformError: it cannot be read or written.
    """
    try:
        token = read_file(path, follow=True).decode().strip()
        if token:
            return token
        raise PlatformError(f"{path} is empty", hint="it shall hold a token")
    except FileNotFoundError:
        token = token_urlsafe(24)
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(f"cannot read {path}: {error}") from error
    with on_disk(f"write {path}", hint=""):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(token + "\n")
    return token


_ANSWER_S = 10.0
_POLL_S = 0.05


def end_logins(paths: JobPaths, nodes: Sequence[int]) -> None:
    """Have the supervisor of a running job end the logins of `nodes`; return once it has.

    Raises:
        ConfigError: there is no such login.
        PlatformError: it does not, or not in time.
    """
    asked = _asked(paths)
    before = [load_endpoint(paths, user_name("agent", node)).token for node in nodes]
    deadline = time.monotonic() + _ANSWER_S
    try:
        write_document(asked, list(nodes), mode=0o600)
        while os.path.exists(asked):
            if time.monotonic() > deadline:
                raise PlatformError(
                    f"the logins of nodes {', '.join(map(str, nodes))} were not ended in time",
                    hint="`perdure run` does it: is it alive? perdure status",
                )
            time.sleep(_POLL_S)
    finally:  # Nobody waits for it any more.
        _remove(asked)
    after = [load_endpoint(paths, user_name("agent", node)).token for node in nodes]
    if any(old == new for old, new in zip(before, after, strict=True)):
        raise PlatformError(
            "not all logins were ended, or not wholly",
            hint=f"`perdure run` says why, also in {paths.logs}; the same command tries again",
        )


def end_asked(paths: JobPaths, server: NatsServer, reload: Callable[[], None]) -> str:
    """End the logins that somebody has asked to end, if any; return what came of it, or nothing.

    `reload` has the server read its configuration again. Whatever is in the place of the
    request, and whatever the disk does, is told and never raised.
    """
    asked = _asked(paths)
    try:
        nodes = _read(asked)
        if nodes is None:
            return ""
        try:
            renew_logins(paths, server, nodes)
        finally:
            reload()  # What was written holds, also where not all could be.
        told = f"logins are ended, as asked: of nodes {', '.join(map(str, nodes))}"
    except (PerdureError, OSError) as error:
        told = f"logins are not ended, or not wholly: {error}"
    _remove(asked)
    return told


def renew_logins(paths: JobPaths, server: NatsServer, nodes: Sequence[int]) -> None:
    """Give the logins of `nodes` other passwords, in force once the server reads them again.

    The server is first: where not everything can be written, a login is rather ended without a
    next one than the other way round, and to ask again mends it.

    Raises:
        ConfigError: there is no such login; nothing has changed.
        PlatformError: a file cannot be written.
    """
    renewed = {
        name: msgspec.structs.replace(load_endpoint(paths, name), token=token_urlsafe(24))
        for name in (user_name("agent", node) for node in nodes)
    }
    before = server.users
    for name, endpoint in renewed.items():
        server.set_password(name, endpoint.token)
    try:
        server.write_config()
    except PlatformError:
        server.users = before
        raise
    for name, endpoint in renewed.items():
        write_document(paths.credential(name), endpoint, mode=0o600)


def _read(asked: str) -> list[int] | None:
    """Return the nodes of a request; None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        nodes: list[int] = decode(read_file(asked), list[int])
        return nodes
    return None


def _remove(asked: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(asked)


def _asked(paths: JobPaths) -> str:
    return os.path.join(os.path.dirname(paths.credential("run")), "end-logins.json")


# --- an endpoint that stays the same over a job's runs -------------------------------------------

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
    fixed: bool = False
    """Others know the port and come there: another one would be worth nothing."""


def keep_endpoint(server: NatsServer, path: str, *, certificate: bool) -> None:
    """Give `server`, not started yet, the endpoint kept at `path`; make one where there is none.

    `certificate`: one is to be made and kept as well.

    Raises:
        PlatformError: the server's address is not on this machine, its port is fixed and taken, or
            the file cannot be written.
    """
    endpoint = read_document(path, KeptEndpoint)
    if (
        endpoint is None
        or endpoint.host != server.host
        or bool(endpoint.certificate) != certificate
    ):
        endpoint = _make_endpoint(server, certificate)
    elif not _is_free(server.host, endpoint.port):
        if endpoint.fixed:
            raise PlatformError(
                f"port {endpoint.port} of {server.host} is taken",
                hint="by another job? Another port in --rdzv-endpoint, the same on every node",
            )
        log.warning("port %d is taken: who joined before needs another invitation", endpoint.port)
        endpoint = msgspec.structs.replace(endpoint, port=_choose_port(server.host))
    folder = os.path.dirname(path)
    with on_disk(f"write {path}"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        replace_file(path, encode_record(endpoint) + b"\n", mode=0o600, synced=True)
        sync_path(folder)  # It is there after a loss of power.
    server.port = endpoint.port
    server.set_password(JOINER, endpoint.password)
    if certificate:
        paths = [os.path.join(server.folder, name) for name in ("tls.crt", "tls.key")]
        for file, text in zip(paths, (endpoint.certificate, endpoint.key), strict=True):
            write_atomic(file, text.encode(), mode=0o600)
        server.certificate = (paths[0], paths[1])


def _make_endpoint(server: NatsServer, certificate: bool) -> KeptEndpoint:
    port, password = _choose_port(server.host), secrets.token_urlsafe(24)
    if not certificate:
        return KeptEndpoint(server.host, port, password)
    with on_disk(f"write to {server.folder}"):
        pem, key = (Path(file).read_text() for file in make_certificate(server.folder, server.host))
    return KeptEndpoint(server.host, port, password, pem, key)


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
