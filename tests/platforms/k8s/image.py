"""Two container images without a registry, as OCI archives that containerd imports.

`pause` is busybox. `host` is nearly empty: the folders of this machine that a test mounts into it
(/usr, the Python, the repository) make it a machine like this one.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path

_PAUSE = ["/busybox", "sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FOLDERS = ("tmp", "etc", "root", "usr", "var", "run", "home", "opt", "dev", "proc", "sys")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_FROM_HERE = (
    "ld.so.cache", "ld.so.conf", "passwd", "group", "nsswitch.conf", "ssl/openssl.cnf",
)  # fmt: skip


def write_images(folder: Path) -> dict[str, Path]:
    """Write the archives into `folder`; return reference by digest -> file."""
    made = {}
    for name, layer, command in (
        ("perdure.test/pause", _make_layer(pause=True), _PAUSE),
        ("perdure.test/host", _make_layer(pause=False), ["/bin/sh"]),
    ):
        path = folder / f"{name.replace('/', '-')}.tar"
        digest = _write_archive(path, layer, command)
        made[f"{name}@{digest}"] = path
    return made


def _make_layer(*, pause: bool) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        if pause:
            _add(archive, "busybox", Path("/bin/busybox").read_bytes(), 0o755)
            return _end(archive, buffer)
        for name, target in _LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            archive.addfile(entry)
        for name in _FROM_HERE:
            if (source := Path("/etc", name)).exists():
                _add(archive, f"etc/{name}", source.read_bytes(), 0o644)
        return _end(archive, buffer)


def _end(archive: tarfile.TarFile, buffer: io.BytesIO) -> bytes:
    archive.close()
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _write_archive(path: Path, layer: bytes, command: list[str]) -> str:
    """Write an OCI layout of one layer; return the digest of its manifest."""
    blobs: list[bytes] = []

    def blob(data: bytes, kind: str) -> dict[str, object]:
        blobs.append(data)
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": digest, "size": len(data)}

    diff = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {
        "architecture": "amd64", "os": "linux",
        "config": {"Cmd": command, "Env": [f"PATH={_PATH}"]},
        "rootfs": {"type": "layers", "diff_ids": [diff]},
    }  # fmt: skip
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(layer, "layer.v1.tar")],
    }
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}', 0o644)
        _add(archive, "index.json", json.dumps(index).encode(), 0o644)
        for data in blobs:
            _add(archive, f"blobs/sha256/{hashlib.sha256(data).hexdigest()}", data, 0o644)
    return str(entry["digest"])
