"""A nats-server as an administrator would run one: TLS, and decentralised JWT credentials.

An operator signs an account, the account signs a user for each role with the permissions that
`perdure doctor --permissions` lists; the server knows the operator and the account only. The
tokens are those that `nsc` would make (JWT of version 2, signed with NKeys).
"""

import base64
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import nkeys

from perdure.adapters.nats import NatsServer, make_certificate
from perdure.adapters.nats.server import find_binary
from perdure.model.bus.access import ROLES, Access, build_access
from tests.waiting import wait_until

_CREDS = """\
-----BEGIN NATS USER JWT-----
{jwt}
------END NATS USER JWT------

-----BEGIN USER NKEY SEED-----
{seed}
------END USER NKEY SEED------
"""
_LIMITS = {
    "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "conn": -1, "leaf": -1,
    "wildcards": True,
}  # fmt: skip
_STREAMS = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}


class Signer:
    """Somebody with an NKey: an operator, an account or a user."""

    def __init__(self, kind: int) -> None:
        self.seed: bytes = nkeys.encode_seed(os.urandom(32), kind)
        self._key = nkeys.from_seed(bytearray(self.seed))
        self.public: str = self._key.public_key.decode()

    def sign(
        self, kind: str, whom: "Signer", claims: dict[str, Any], name: str, expires_s: float = 0.0
    ) -> str:
        """Return the token in which this signer says who `whom` is, and what he may do."""
        body: dict[str, Any] = {
            "iat": int(time.time()), "iss": self.public, "name": name, "sub": whom.public,
            "nats": claims | {"type": kind, "version": 2},
        }  # fmt: skip
        if expires_s:
            body["exp"] = int(expires_s)
        digest = hashlib.new("sha512_256", json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        parts = [_encode({"typ": "JWT", "alg": "ed25519-nkey"}), _encode(body)]
        signature = self._key.sign(".".join(parts).encode())
        return ".".join([*parts, _base64(signature)])


class JwtCluster:
    """One server, its authorities, and a `.creds` file for each role of `job`."""

    def __init__(self, folder: Path, job: str, *, jetstream: bool = True) -> None:
        folder.mkdir()
        self.folder, self.log = folder, folder / "server.log"
        self.ca, self._key = make_certificate(str(folder), "127.0.0.1")
        self.operator = Signer(nkeys.PREFIX_BYTE_OPERATOR)
        self.account = Signer(nkeys.PREFIX_BYTE_ACCOUNT)
        self.secrets: list[str] = []
        """No argument, environment or log may have one of these in it."""
        self.creds = folder / "creds"
        self.creds.mkdir()
        for role in ROLES:
            self.write_creds(self.creds / f"{role}.creds", role, build_access(role, job))
        self.port = -1
        self.process: Any = None
        self._start(jetstream)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"tls://127.0.0.1:{self.port}"

    def write_creds(
        self,
        path: Path,
        name: str,
        access: Access,
        *,
        by: Signer | None = None,
        expires_s: float = 0.0,
    ) -> None:
        """Write credentials that the account (or `by`) has signed; 0: they do not expire."""
        user = Signer(nkeys.PREFIX_BYTE_USER)
        claims: dict[str, Any] = {
            "pub": {"allow": list(access.publish)},
            "sub": {"allow": list(access.subscribe)},
            "subs": -1, "data": -1, "payload": -1,
        }  # fmt: skip
        if access.answers:
            claims["resp"] = {"max": 1, "ttl": 60_000_000_000}
        jwt = (by or self.account).sign("user", user, claims, name, expires_s)
        path.write_text(_CREDS.format(jwt=jwt, seed=user.seed.decode()))
        self.secrets += [user.seed.decode(), jwt]

    def _start(self, jetstream: bool) -> None:
        system = Signer(nkeys.PREFIX_BYTE_ACCOUNT)  # The server's own; JetStream asks for one.
        claims = {"system_account": system.public}
        operator = self.operator.sign("operator", self.operator, claims, "O")
        its_own = self.operator.sign("account", system, {"limits": _LIMITS}, "SYS")
        limits = _LIMITS | (_STREAMS if jetstream else {})
        account = self.operator.sign("account", self.account, {"limits": limits}, "A")
        config = self.folder / "server.conf"
        config.write_text(
            f'host: "127.0.0.1"\nport: -1\nports_file_dir: "{self.folder}"\n'
            f'tls: {{ cert_file: "{self.ca}", key_file: "{self._key}" }}\n'
            f'jetstream: {{ store_dir: "{self.folder}/store" }}\n'
            f"operator: {operator}\nresolver: MEMORY\n"
            f"resolver_preload: {{ {self.account.public}: {account}\n"
            f"  {system.public}: {its_own} }}\n"
        )
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [find_binary(), "-c", str(config)], stdout=log, stderr=log
            )
        files = NatsServer(folder=str(self.folder), token="")

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return bool(files.poll_ready())

        wait_until(is_ready, "server")
        self.port = files.port

    def kill(self) -> None:
        """End the server."""
        self.process.kill()
        self.process.wait()


def _encode(value: dict[str, Any]) -> str:
    return _base64(json.dumps(value, separators=(",", ":")).encode())


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
