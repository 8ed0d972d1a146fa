"""What a connection shows the server, and by what it knows the server.

That is perdure's own user and password, or the user's own files. A file is recognized by what is in
it: a NATS credentials file (JWT and seed), an NKey seed, or JSON with `user` and `password`, or
`token`. The secret itself never leaves this process.
"""

import contextlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from perdure.model.bus.endpoint import Endpoint
from perdure.model.codec import decode
from perdure.model.errors import ConfigError, PlatformError, ProtocolError

SUFFIXES = (".creds", ".nk", ".json")
_JSON = frozenset({"user", "password", "token"})


def make_login(endpoint: Endpoint) -> dict[str, Any]:
    """Return what nats-py's `connect` is given for `endpoint`.

    Raises:
        PlatformError: the file of credentials cannot be read, or needs a library.
        ConfigError: it is none.
    """
    if endpoint.creds:
        return read_credentials(endpoint.creds)
    if endpoint.user:
        return {"user": endpoint.user, "password": endpoint.token}
    return {"token": endpoint.token} if endpoint.token else {}


def choose_file(creds: str, user: str, role: str) -> str:
    """Return the file of `user`, or else of its `role`, where `creds` is a directory.

    Otherwise it is `creds` itself.

    Raises:
        ConfigError: the directory has none for it.
    """
    if not os.path.isdir(creds):
        return creds
    for name in (user, role):
        for suffix in SUFFIXES:
            path = os.path.join(creds, name + suffix)
            if os.path.exists(path):
                return path
    names = ", ".join(role + suffix for suffix in SUFFIXES)
    raise ConfigError(f"{creds} has no credentials for {role}", hint=f"one of {names}")


def read_credentials(path: str) -> dict[str, Any]:
    """Return what nats-py's `connect` is given for the file at `path`.

    Raises:
        PlatformError: it cannot be read, or needs a library that is not there.
        ConfigError: it is none.
    """
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PlatformError(f"cannot read --nats-creds {path}: {error}") from error
    if "BEGIN NATS USER JWT" in text:
        return _need_nkeys(path, {"user_credentials": path})
    if text.startswith("SU"):
        return _need_nkeys(path, {"nkeys_seed": path})
    try:
        found: dict[str, str] = decode(text.encode(), dict[str, str])
    except ProtocolError:
        found = {}
    if not found or not found.keys() <= _JSON:
        raise ConfigError(
            f"{path} holds no NATS credentials",
            hint="a .creds file, an NKey seed, or JSON with user and password, or token",
        )
    return dict(found)


def _need_nkeys(path: str, login: dict[str, Any]) -> dict[str, Any]:
    if importlib.util.find_spec("nkeys") is None:
        raise PlatformError(f"{path} needs the library nkeys", hint="pip install nkeys")
    return login


def read_pem(path: str) -> str:
    """Return the certificates in the file `path`.

    Raises:
        PlatformError: it cannot be read, or holds none.
    """
    text = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = Path(path).read_text()
    if "BEGIN CERTIFICATE" not in text:
        raise PlatformError(f"{path} holds no certificate in PEM")
    return text
