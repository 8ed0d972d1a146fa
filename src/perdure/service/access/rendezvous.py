"""An invitation that nobody hands over: several nodes derive the same one from a secret they share.

torchrun's nodes know one address and trust whoever is there. A job's bus lets in who has an
invitation, so that the nodes of one job have to share a secret: a variable, a file that each node
has, or one that is made in a PERDURE_HOME on a disk that they share. Everything that an invitation
holds follows from the secret and the job's name (scrypt, then HMAC-SHA256 for each use): the key of
the authority that signs the server's certificate, the password of `joiner`, the invitation's id and
its own secret. So the first node starts its server with them, the others join it, both by the means
of `perdure node invite` and `perdure node join`, and nothing secret travels before TLS is up and
the server has shown that it knows the secret as well.

The same secret and name give the same invitation for ever: after a restart of the first node the
others come back by it. To let nobody come by it any more, change the secret.
"""

import fcntl
import hashlib
import hmac
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from secrets import token_hex

import msgspec

from perdure.adapters.health import find_filesystem
from perdure.adapters.nats import make_authority, make_certificate
from perdure.files import create_file
from perdure.files.private import find_private, make_private
from perdure.files.regular import open_file
from perdure.launch.environment import RDZV_SECRET as SECRET
from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.wire import Invitation
from perdure.model.errors import ConfigError
from perdure.model.events import digest_secret
from perdure.model.platforms.box import NETWORK_KINDS
from perdure.service.access.credentials import JOINER, KeptEndpoint, is_loopback
from perdure.service.jobfiles import MINE, RENDEZVOUS, on_disk, write_document
from perdure.service.jobfolders import is_alive, paths_of
from perdure.service.placement import Invited, Placement

SECRET_MIN = 16
"""Characters: what is shorter could be guessed by who has recorded a connection, or a journal."""
_SECRET_MAX = 4096
_HOW = (
    f"the same secret on every node: {SECRET}, or --rdzv-conf secret_file=PATH; or PERDURE_HOME in "
    "a folder that all nodes share"
)
_COST = {"n": 1 << 14, "r": 8, "p": 1}
"""Of scrypt: 16 MiB and a twentieth of a second for each guess."""


class Derived(msgspec.Struct, frozen=True):
    """What follows from a secret and the name of a job; all of it is secret but `id`."""

    id: str
    secret: str
    password: str
    seed: bytes
    """Key of the authority that signs the server's certificate."""


def derive(secret: str, job: str) -> Derived:
    """Return what the nodes of `job` that know `secret` have in common."""
    salt = b"perdure rendezvous\0" + job.encode()
    root = hashlib.scrypt(secret.encode(), salt=salt, dklen=32, **_COST)

    def make(use: str) -> bytes:
        return hmac.digest(root, use.encode(), "sha256")

    return Derived(
        id=make("id").hex()[:8],
        secret=make("invitation").hex(),
        password=make("password").hex(),
        seed=make("authority"),
    )


def find_secret(environ: MutableMapping[str, str], file: str, home: str, address: str) -> str:
    """Return the secret that this node shares with the others; it leaves `environ`.

    It is the variable's, else that of `file`, else one in the folder `home`, made by the first who
    comes: where that lies on a disk of the network, or all nodes are this machine (`address`).

    Raises:
        ConfigError: there is none, or it is too short, or others can read it.
        PlatformError: its file cannot be read or made.
    """
    if (given := environ.pop(SECRET, None)) is not None:
        return _check(given.strip(), SECRET)
    if file:
        return _check(_read(file), f"--rdzv-conf secret_file={file}")
    if not is_shared(home, address):
        raise ConfigError(
            f"the nodes share no secret, so that anybody who reaches {address} could join, and "
            f"{home} is on a disk of this machine alone",
            hint=_HOW,
        )
    path = os.path.join(home, "rendezvous", "secret")
    with on_disk(f"write {path}"):
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        # Whole or not there: of several nodes that come at once, one has made it.
        create_file(Path(path), token_hex(32).encode() + b"\n", mode=0o600)
    return _check(_read(path), path)


def is_shared(folder: str, address: str) -> bool:
    """Return whether all nodes see `folder`; `address` is where they meet."""
    return is_loopback(address) or find_filesystem(folder) in NETWORK_KINDS


def _check(secret: str, source: str) -> str:
    if SECRET_MIN <= len(secret) <= _SECRET_MAX:
        return secret
    raise ConfigError(
        f"{source}: a secret of {len(secret)} characters, and it has to have {SECRET_MIN} to "
        f"{_SECRET_MAX}",
        hint="openssl rand -hex 32",
    )


def _read(path: str) -> str:
    try:
        with open_file(path, follow=True) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_SECRET_MAX + 2)
    except OSError as error:
        raise ConfigError(
            f"cannot read the secret in {path}: {error.strerror}", hint=_HOW
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path}: others can read the secret", hint=f"chmod 600 {path}")
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: no secret in UTF-8", hint="openssl rand -hex 32") from None


def make_invitation(secret: str, job: str, address: str, port: int) -> Invitation:
    """Return the invitation to `job`, whose server is at `address`, by which the others join it."""
    derived, closed = derive(secret, job), is_loopback(address)
    endpoint = Endpoint(
        url=f"{'nats' if closed else 'tls'}://{address}:{port}",
        token=derived.password,
        clock_offset_s=0.0,
        user=JOINER,
        ca="" if closed else make_authority(derived.seed),
        speaks=MINE,
    )
    return Invitation(job=job, endpoint=endpoint, id=derived.id, secret=derived.secret)


def write_placement(secret: str, job: str, home: str, address: str, port: int) -> str:
    """Write what `perdure run --placement` of the first node reads; return the file's path.

    Raises:
        PlatformError: it cannot be written.
    """
    derived = derive(secret, job)
    folder = os.path.join(paths_of(home, job).root, RENDEZVOUS)
    with on_disk(f"write {folder}"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    certificate = key = ""
    if not is_loopback(address):
        with on_disk(f"write {folder}"):
            files = make_certificate(folder, address, seed=derived.seed)
            certificate, key = (Path(file).read_text() for file in files)
            for file in files:
                os.unlink(file)
    door = KeptEndpoint(address, port, derived.password, certificate, key, fixed=True)
    write_document(os.path.join(folder, "door.json"), door, mode=0o600)
    placement = Placement(
        bind=address,
        addresses=(address,),
        door="door.json",
        invited=(Invited(id=derived.id, digest=digest_secret(derived.secret), uses=0),),
    )
    path = os.path.join(folder, "placement.json")
    write_document(path, placement)
    return path


class FirstNode:
    """The right to be the first node at an address of this machine; freed by any death.

    On loopback several nodes of a job are on one machine, and whoever comes first is the first.
    """

    def __init__(self, address: str, port: int) -> None:
        """Take it, if nobody has it: then it is `taken`."""
        private = find_private("/tmp")
        make_private(private)
        path = f"{private}/rendezvous-{address}-{port}.lock"
        with on_disk(f"use {path}"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.taken = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.taken = False
            self.release()

    def release(self) -> None:
        """Give it back."""
        os.close(self._fd)


def choose_home(home: str, job: str) -> str:
    """Return the state directory of a node that joins: below `home`, and no other's that runs.

    `home` may be shared by all nodes, and is the first one's own.
    """
    stem = os.path.join(home, "nodes", os.uname().nodename)
    number, found = 1, stem
    while is_alive(paths_of(found, job)):
        number += 1
        found = f"{stem}-{number}"
    return found
