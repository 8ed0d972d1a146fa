"""A certificate of a day's need: made at a server's start, trusted by the job's own parts alone.

`openssl` makes it: a library that can is a compiled one of its own, for one call that a job on
loopback never needs. The key never leaves its file,
which only its owner can read; clients get the certificate itself as their only authority.
"""

import contextlib
import ipaddress
import os
import subprocess
import tempfile
from pathlib import Path

from perdure.model.errors import PlatformError

_DAYS = 3650
"""Longer than any run: a certificate that ends before the job would end it."""
_COMMAND_S = 20.0


def make_certificate(folder: str, host: str) -> tuple[str, str]:
    """Return the paths of a new self-signed certificate for `host`, and of its key.

    Raises:
        PlatformError: there is no `openssl`, or it fails.
    """
    cert, key = os.path.join(folder, "tls.crt"), os.path.join(folder, "tls.key")
    try:
        ipaddress.ip_address(host)
        name = f"IP:{host}"
    except ValueError:
        name = f"DNS:{host}"
    command = [
        *("openssl", "req", "-x509", "-nodes", "-newkey", "ec"),
        *("-pkeyopt", "ec_paramgen_curve:P-256", "-days", str(_DAYS)),
        *("-subj", "/CN=perdure", "-addext", f"subjectAltName={name}"),
    ]
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tls-", dir=folder) as work:  # 0700
        made = [os.path.join(work, "crt"), os.path.join(work, "key")]
        try:
            done = subprocess.run(
                [*command, "-out", made[0], "-keyout", made[1]],
                capture_output=True,
                text=True,
                timeout=_COMMAND_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PlatformError(
                f"no certificate for {host} can be made: openssl: {error}",
                hint="install openssl, or give --nats-tls-cert and --nats-tls-key",
            ) from error
        if done.returncode:
            raise PlatformError(
                f"no certificate for {host} can be made: {done.stderr.strip()[-200:]}",
                hint="give --nats-tls-cert and --nats-tls-key",
            )
        os.chmod(made[1], 0o600)
        os.replace(made[0], cert)
        os.replace(made[1], key)
    return cert, key


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
