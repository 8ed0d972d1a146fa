"""An image built on this machine, from nothing that a registry of images would have to give.

The base is a Debian of its own (debootstrap, kept beside the cluster's programs), the builder is
buildah without a daemon, and packages come from wheels in the context.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.platforms.k8s.cluster import PROGRAMS, REPOSITORY

NEEDED = ("buildah", "debootstrap", "tar")
BASE, NAME = "perdure.test/base", "perdure.test/train"
_PACKAGES = "python3,python3-venv,python3-pip,openssl,ca-certificates"
_PYTHON = "3.11"
"""That of Debian 12."""


def find_lack() -> str:
    """Return why no image can be built here; empty where one can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    return f"no {missing[0]}: `make platforms-k8s` gets it" if missing else ""


class Builder:
    """buildah with a store of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context, self.archive = folder / "context", folder / "train.tar"
        store = {"--root": folder / "store", "--runroot": folder / "run"}
        self._words = ["buildah", *(f"{key}={path}" for key, path in store.items())]

    def build(self) -> str:
        """Build the image of this perdure; return its name by digest. It lies in `archive`."""
        base = self.folder / "base"
        base.mkdir()
        os.link(make_rootfs(), base / "rootfs.tar")
        (base / "Dockerfile").write_text('FROM scratch\nADD rootfs.tar /\nCMD ["python3"]\n')
        self.run("build", "--isolation", "chroot", "--tag", BASE, str(base))
        words = [
            "launch",
            "--write-image",
            str(self.context),
            "--base",
            BASE,
            "--tag",
            NAME,
            "--json",
        ]
        image = json.loads(run(sys.executable, "-m", "perdure", *words, timeout_s=60))
        download(self.context, image["torch"])
        config = self.folder / "pip.conf"
        config.write_text("[global]\nno-index = true\n")
        assert image["build"][:2] == ["docker", "build"]  # buildah takes the rest as it is.
        self.run("build", "--isolation", "chroot", "--network", "host",
                 "--secret", f"id=pip.conf,src={config}", *image["build"][2:])  # fmt: skip
        digest = self.folder / "digest"
        self.run("push", "--digestfile", str(digest), NAME, f"oci-archive:{self.archive}")
        return f"{NAME}@{digest.read_text().strip()}"

    def inspect(self) -> dict[str, object]:
        """Return the configuration of the image."""
        shown = self.run("inspect", "--type", "image", NAME)
        config = json.loads(shown)["OCIv1"]["config"]
        assert isinstance(config, dict)
        return config

    def run(self, *words: str) -> str:
        return run(*self._words, *words, timeout_s=900)


def make_rootfs() -> Path:
    """Return an archive of a small Debian with Python; made once, in three minutes."""
    kept = PROGRAMS.parent / "rootfs-bookworm.tar"
    if kept.exists():
        return kept
    root, made = kept.with_suffix(".d"), kept.with_suffix(f".{os.getpid()}")
    shutil.rmtree(root, ignore_errors=True)
    run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root),
        timeout_s=600)  # fmt: skip
    left_out = [f"--exclude=./{path}" for path in ("var/cache/apt/*", "var/lib/apt/lists/*",
                                                   "etc/resolv.conf", "etc/hostname")]  # fmt: skip
    run("tar", "-C", str(root), "--numeric-owner", *left_out, "-cf", str(made), ".", timeout_s=120)
    shutil.rmtree(root)
    made.rename(kept)
    return kept


def download(context: Path, torch: str) -> None:
    """Put all that the image installs into the context, as this machine's pip finds it."""
    words = ["--no-deps", "--only-binary", ":all:", "--python-version", _PYTHON]
    run(sys.executable, "-m", "pip", "download", "--quiet", *words, "--dest",
        str(context / "wheels"), "--requirement", str(context / "constraints.txt"),
        f"torch=={torch}", timeout_s=600)  # fmt: skip


def run(*words: str, timeout_s: float) -> str:
    done = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
