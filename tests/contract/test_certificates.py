"""Certificates of a job's own: whoever is meant believes them, by TLS's strictest rules."""

import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509

from perdure.adapters.nats import make_authority, make_certificate
from perdure.adapters.nats.certificates import make_shared_certificate
from perdure.model.errors import ConfigError

SEED, OTHER = bytes(range(32)), bytes(range(1, 33))


def shake_hands(files: tuple[str, str], believed: str, host: str) -> None:
    """Have a client that believes in `believed` alone meet a server, in memory."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(*files)
    client.load_verify_locations(cadata=believed)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(back, there, server_hostname=host)
    answers = server.wrap_bio(there, back, server_side=True)
    waiting = [asks, answers]
    for _ in range(10):
        for end in [*waiting]:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    assert not waiting


@pytest.mark.parametrize("host", ["192.0.2.1", "fd00::1", "node-3.example"])
def test_a_certificate_that_signed_itself_is_believed_for_its_host(
    tmp_path: Path, host: str
) -> None:
    files = make_certificate(str(tmp_path / "new"), host)
    shake_hands(files, Path(files[0]).read_text(), host)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(files, Path(files[0]).read_text(), "192.0.2.2")
    assert stat.S_IMODE(Path(files[1]).stat().st_mode) == 0o600
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tls.crt", "tls.key"]


def test_what_one_node_signs_all_believe_who_have_its_seed(tmp_path: Path) -> None:
    files = make_certificate(str(tmp_path), "192.0.2.1", seed=SEED)
    shake_hands(files, make_authority(SEED), "192.0.2.1")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(files, make_authority(OTHER), "192.0.2.1")


def test_what_is_no_host_is_refused_in_a_line(tmp_path: Path) -> None:
    for host in ("a" * 64, "a..b", "\udc80"):
        with pytest.raises(ConfigError, match="no host's name"):
            make_certificate(str(tmp_path), host)
    files = make_certificate(str(tmp_path), "knoten-ü.example")
    shake_hands(files, Path(files[0]).read_text(), "knoten-ü.example")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        make_certificate(str(tmp_path / "file"), "192.0.2.1")


def test_certificates_are_valid_whatever_a_machine_takes_for_the_time(tmp_path: Path) -> None:
    """A node whose clock stands in 1970, or years ahead, joins all the same."""
    files = make_certificate(str(tmp_path), "192.0.2.1", seed=SEED)
    made = Path(files[0]).read_text() + make_shared_certificate()
    for certificate in x509.load_pem_x509_certificates(made.encode()):
        assert certificate.not_valid_before_utc.timestamp() <= 0.0
        assert certificate.not_valid_after_utc.year == 9999
