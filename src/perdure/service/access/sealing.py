"""An answer that only the machine with an invitation's secret can read.

All machines that join show the bus the same login, `joiner`. Each of them can hear the answers to
the others, and an answer holds the login of a node.
"""

import base64
import hashlib

from perdure.model.errors import ProtocolError


def seal(data: bytes, secret: str) -> str:
    """Return `data`, encrypted and signed with `secret`."""
    from cryptography.fernet import Fernet

    return Fernet(_make_key(secret)).encrypt(data).decode()


def open_sealed(text: str, secret: str) -> bytes:
    """Return what `seal` was given.

    Raises:
        ProtocolError: it was sealed with another secret, or is damaged.
    """
    from cryptography.fernet import Fernet, InvalidToken

    try:
        return Fernet(_make_key(secret)).decrypt(text)
    except InvalidToken:
        raise ProtocolError("the answer is sealed with another secret") from None


def _make_key(secret: str) -> bytes:
    digest = hashlib.sha256(b"perdure admission " + secret.encode()).digest()
    return base64.urlsafe_b64encode(digest)
