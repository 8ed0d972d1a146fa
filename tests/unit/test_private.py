"""Another user can take names in /tmp first: jobs run all the same, and their files are safe."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.files.private import find_private, make_private
from perdure.model.errors import PlatformError

STRANGER = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root acts as another user")


def find_again(root: Path) -> str:
    """Find the folder as a new process does."""
    find_private.cache_clear()
    return find_private(str(root))


def squat(path: Path, kind: str, victim: Path) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(victim)
    else:
        path.touch()
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def test_all_processes_find_the_same_folder(tmp_path: Path) -> None:
    path = find_again(tmp_path)
    assert path == f"{tmp_path}/perdure-{os.getuid()}"
    make_private(path)
    make_private(path)
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o700
    assert find_again(tmp_path) == path
    os.chmod(path, 0o777)
    make_private(path)
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o700


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
@root_only
def test_a_name_that_a_stranger_has_taken_is_left_to_him(tmp_path: Path, kind: str) -> None:
    """It was refused, and could not be removed; a link of his was followed and its end chmod'ed."""
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    victim.chmod(0o755)
    first = Path(find_again(tmp_path))
    squat(first, kind, victim)
    squat(Path(f"{first}-2"), kind, victim)
    with pytest.raises(PlatformError, match="belongs to another user"):
        make_private(str(first))
    path = find_again(tmp_path)
    assert path == f"{first}-3"
    make_private(path)
    assert find_again(tmp_path) == path
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755
    assert not list(victim.iterdir())
    first.rename(tmp_path / "gone")  # The name is free again, and the folder in use stays.
    assert find_again(tmp_path) == path


def test_a_link_of_ones_own_is_not_followed_either(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    first = Path(find_again(tmp_path))
    first.symlink_to(victim)
    with pytest.raises(PlatformError):
        make_private(str(first))
    assert find_again(tmp_path) == f"{first}-2"


PLACES = ("/tmp/perdure-0", "/dev/shm/perdure-0")
INSIDE = (
    *(f"mkdir -p {place}" for place in PLACES),
    *(f"mount -t tmpfs -o uid={STRANGER},mode=755 tmpfs {place}" for place in PLACES),
    '"$1" -m perdure run -n 1 --cold --name squatted "$2" || exit',
    f"ls -A {' '.join(PLACES)}",
)
"""Commands in a mount namespace in which another user has both names."""


@root_only
def test_a_job_runs_though_a_stranger_has_its_folders(tmp_path: Path) -> None:
    """It ended with: belongs to another user; hint: remove it."""
    if subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("no mount namespaces here")
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    there = set(Path("/tmp").glob("perdure-0-*"))
    try:
        done = subprocess.run(
            [
                "unshare",
                "--mount",
                "sh",
                "-c",
                "\n".join(INSIDE),
                "sh",
                sys.executable,
                str(script),
            ],
            env={**os.environ, "PERDURE_HOME": str(tmp_path / "home")},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        for path in set(Path("/tmp").glob("perdure-0-*")) - there:
            path.rmdir()  # The job has left nothing in it.
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert done.stdout.endswith("/dev/shm/perdure-0:\n\n/tmp/perdure-0:\n")


_READ_ONLY = """
import ctypes, subprocess
from perdure.files.private import find_private, make_private
from perdure.model.errors import PlatformError
assert ctypes.CDLL(None).unshare(0x00020000) == 0  # CLONE_NEWNS
mount = ["mount", "-t", "tmpfs"]
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run([*mount, "tmpfs", "/dev/shm"], check=True)
subprocess.run([*mount, "-o", "ro", "tmpfs", "/tmp"], check=True)
folder = find_private("/tmp")
make_private(folder)
print(folder, find_private("/dev/shm") == folder)
subprocess.run(["mount", "-o", "remount,ro", "/dev/shm"], check=True)
try:
    make_private("/dev/shm/other")
except PlatformError as error:
    print(error.message, error.hint)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_where_tmp_is_read_only_shared_memory_holds_the_folder() -> None:
    """As in a pod with a read-only root file system."""
    words = [sys.executable, "-c", _READ_ONLY]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    folder, error = done.stdout.splitlines()
    assert folder == f"/dev/shm/perdure-{os.getuid()} True"
    assert "cannot make /dev/shm/other: Read-only file system mount a tmpfs" in error
