"""Certificates that the job's own parts alone trust, made at a server's start.

The key never leaves its file, which only its owner can read; clients get the certificate itself as
their only authority, or that of an authority whose key all nodes derive from their secret.
"""

import os
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TYPE_CHECKING

from perdure.files import replace_file
from perdure.model.errors import ConfigError

if TYPE_CHECKING:  # It is imported where a certificate is made: a job on loopback needs none.
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.x509 import CertificateBuilder

    Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

_AUTHORITY = "perdure rendezvous"
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""The whole range of a clock: a machine may start in 1970, and get the time later. A certificate
lives no longer than its job. RFC 5280, 4.1.2.5, gives this end to certificates without one."""


def make_certificate(folder: str, host: str, *, seed: bytes = b"") -> tuple[str, str]:
    """Return the paths below `folder` of a new certificate for `host`, and of its key, in PEM.

    It has signed itself; or an authority has, whose key is the 32 bytes of `seed`, and whose own
    certificate then follows it in the same file.

    Raises:
        OSError: the disk is full, read-only or not ours.
        ConfigError: `host` is no address, and no name that a host could have.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    own = ec.generate_private_key(ec.SECP256R1())
    name: x509.GeneralName
    try:
        name = x509.IPAddress(ip_address(host))
    except ValueError:
        try:
            name = x509.DNSName(host.encode("idna").decode())
        except UnicodeError as error:
            raise ConfigError(f"{host!r} is no address and no host's name: {error}") from None
    names = x509.SubjectAlternativeName([name])
    if seed:
        by = _derive(seed)
        made = _begin("perdure", own, _AUTHORITY, by).add_extension(names, critical=False)
        pem = made.sign(by, None).public_bytes(serialization.Encoding.PEM)
        pem += make_authority(seed).encode()
    else:
        made = _begin("perdure", own, "perdure", own).add_extension(names, critical=False)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        pem = made.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    cert, key = os.path.join(folder, "tls.crt"), os.path.join(folder, "tls.key")
    os.makedirs(folder, exist_ok=True)
    replace_file(cert, pem)
    replace_file(key, _encode(own), mode=0o600)
    return cert, key


def make_shared_certificate() -> str:
    """Return a new certificate that has signed itself, followed by its private key (PEM).

    Peers that share it show it to one another, and trust no other.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    own = ec.generate_private_key(ec.SECP256R1())
    constraints = x509.BasicConstraints(ca=True, path_length=None)
    made = _begin("perdure", own, "perdure", own).add_extension(constraints, critical=True)
    return (made.sign(own, hashes.SHA256()).public_bytes(Encoding.PEM) + _encode(own)).decode()


def _encode(key: "ec.EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def make_authority(seed: bytes) -> str:
    """Return a certificate (PEM) of the authority whose Ed25519 key is the 32 bytes of `seed`.

    Whoever has the seed makes one, and trusts by it what another has signed with the same seed.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    key = _derive(seed)
    usage = x509.KeyUsage(
        key_cert_sign=True, crl_sign=False, digital_signature=False, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip
    made = (
        _begin(_AUTHORITY, key, _AUTHORITY, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, None)
    )
    return made.public_bytes(Encoding.PEM).decode()


def _derive(seed: bytes) -> "ed25519.Ed25519PrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519.Ed25519PrivateKey.from_private_bytes(seed)


def _begin(subject: str, key: "Key", issuer: str, signer: "Key") -> "CertificateBuilder":
    """Return a certificate of `subject` with `key`, which `issuer` is to sign with `signer`."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(by, critical=False)
    )
