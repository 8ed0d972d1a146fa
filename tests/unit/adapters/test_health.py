"""Checks of the machine, on what they are pointed at."""

import errno
import os
import stat
import tomllib
from pathlib import Path

import pytest

from perdure.adapters import health, host
from perdure.adapters.host import read_kernel_kills
from perdure.model.platforms.box import TESTED_TORCHES, TORCH_END, TORCH_MIN


def test_everything_is_said_and_nothing_is_left_behind(tmp_path: Path) -> None:
    checks = health.check_machine(str(tmp_path / "not" / "yet"))
    assert len({check.name for check in checks}) == len(checks)
    assert all(check.evidence for check in checks)
    assert all(check.mend for check in checks if check.state in ("degraded", "missing"))
    assert list(tmp_path.iterdir()) == []


def test_file_system_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\ntmpfs {tmp_path}x tmpfs rw 0 0\n"
    )
    assert health.find_filesystem(str(tmp_path / "job"), str(mounts)) == "nfs4"
    assert health.find_filesystem("/elsewhere", str(mounts)) == "ext4"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    check = health.check_state_directory(str(tmp_path))
    assert (check.state, "PERDURE_HOME" in check.mend) == ("missing", True)


def test_missing_shared_memory_is_named(tmp_path: Path) -> None:
    check = health.check_shared_memory(str(tmp_path / "none"))
    assert check.state == "degraded"
    assert "No such file" in check.evidence


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_version(name: str) -> str:
        raise health.PackageNotFoundError(name)

    monkeypatch.setattr(health, "version", no_version)
    monkeypatch.setenv("PATH", "/nowhere")
    assert health.check_torch().state == "missing"
    assert health.check_server().state == "missing"
    monkeypatch.setattr(health, "version", lambda name: "1.13.1")
    assert health.check_torch().state == "degraded"


@pytest.mark.parametrize(
    ("version", "state", "mend"),
    [("2.9.1+cu128", "ok", ""), ("2.13.0", "ok", ""), ("2.8.0", "degraded", "a newer one"),
     ("2.14.0", "degraded", "the recorder falls back")],
)  # fmt: skip
def test_torches_that_are_tested_are_those_of_the_extra(
    version: str, state: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    lowest, end = (f"{a}.{b}" for a, b in (TORCH_MIN, TORCH_END))
    assert f"torch>={lowest},<{end}" in project["project"]["optional-dependencies"]["torch"]
    assert f"{lowest} to {TORCH_END[0]}.{TORCH_END[1] - 1}" == TESTED_TORCHES
    monkeypatch.setattr(health, "version", lambda name: version)
    check = health.check_torch()
    assert (check.state, check.mend.partition(":")[0].partition(" where")[0]) == (state, mend)


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero", "/", "empty", "text", "missing"])
def test_another_file_in_the_place_of_the_kernel_log_is_said_to_be_closed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers map /dev/kmsg to /dev/null: an IndexError."""
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("6,1,2;Killed process 1\n\n,,,;\n")
    monkeypatch.setattr(host, "_KERNEL_LOG", str(tmp_path / place))
    assert not read_kernel_kills()[1]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.EINVAL, errno.EPIPE])
def test_a_kernel_log_that_refuses_every_read_ends_the_reading(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seccomp filter answers EPERM: it was read again for ever."""

    def refuse(fd: int, count: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host, "_KERNEL_LOG", "/dev/null")
    monkeypatch.setattr(os, "read", refuse)
    assert read_kernel_kills() == ((), False)


def test_records_before_and_after_those_that_were_overwritten_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = iter([b"6,1,9,-;Killed process 1\n", BrokenPipeError(), b"6,9,9;NVRM: Xid 79\n"])

    def read(fd: int, count: int) -> bytes:
        one = next(given, BlockingIOError())
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(host, "_KERNEL_LOG", "/dev/null")
    monkeypatch.setattr(os, "read", read)
    assert read_kernel_kills(-1e12) == (("Killed process 1", "NVRM: Xid 79"), True)


def test_kernel_log_is_read_or_said_to_be_closed() -> None:
    lines, readable = read_kernel_kills()
    assert readable or not lines
    # The kernel's stamps do not follow the clock of a time namespace.
    late, _ = read_kernel_kills(1e12)
    assert not late, "of before the job"
