"""What runs on the box: the supervisor's records, locks on GPUs, rosters, mended scripts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.launch.ssh import box, results

BOX = str(Path(box.__file__))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the box a home that can be written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def supervise(folder: Path, code: str, **settings: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", code]
    document = {"command": command, "cwd": str(folder), **settings}
    (folder / "settings.json").write_text(json.dumps(document))
    return subprocess.Popen([sys.executable, BOX, "supervise", str(folder)])


def wait_state(folder: Path, state: str) -> None:
    wait_until(lambda: box.read_job_state(str(folder))["state"] == state)


def wait_child(folder: Path, attempt: int = 1) -> int:
    def find() -> Any:
        start = box.read(str(folder), "start.json") or {}
        return start.get("attempt") == attempt and start.get("child")

    wait_until(find)
    return int(find())


def test_how_a_job_has_ended_is_written_down_once_the_disk_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor died of a full disk, and the box said of a job that it was killed."""
    monkeypatch.setenv("PERDURE_FAILPOINTS", "supervise/write=error(ENOSPC),about=exit.json,nth=1")
    runner = supervise(tmp_path, "pass")
    wait_until(lambda: "how is not written down yet" in box.read_job_state(str(tmp_path))["reason"])
    assert runner.wait(PATIENCE_S) == 0
    found = box.read_job_state(str(tmp_path))
    assert (found["state"], found["code"]) == ("ended", 0)


def test_a_job_knows_the_file_that_it_writes_to(tmp_path: Path) -> None:
    code = "import os; print(os.environ['PERDURE_OUTPUT'])"
    assert supervise(tmp_path, code).wait(PATIENCE_S) == 0
    assert (tmp_path / "run.out").read_text() == f"{tmp_path / 'run.out'}\n"


def test_a_job_whose_number_cannot_be_written_down_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know of it once its supervisor is gone."""
    monkeypatch.setenv("PERDURE_FAILPOINTS", "supervise/write=error(ENOSPC),about=start.json,nth=2")
    monkeypatch.setenv("PERDURE_FAILPOINTS_FOLDER", str(tmp_path))
    assert (
        supervise(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')").wait(PATIENCE_S) == box.REFUSED
    )
    assert "cannot be started" in box.read_job_state(str(tmp_path))["reason"]
    assert not (tmp_path / "ran").exists()


def test_exit_code_and_signal_are_written_down_exactly(tmp_path: Path) -> None:
    assert box.read_job_state(str(tmp_path))["state"] == "not-started"
    assert supervise(tmp_path, "raise SystemExit(37)").wait(PATIENCE_S) == 37
    found = box.read_job_state(str(tmp_path))
    assert (found["state"], found["code"], found["signal"]) == ("ended", 37, 0)
    runner = supervise(tmp_path, "import time; time.sleep(3600)")
    os.kill(wait_child(tmp_path, attempt=2), signal.SIGKILL)
    assert runner.wait(PATIENCE_S) == 137
    found = box.read_job_state(str(tmp_path))
    assert (found["code"], found["signal"], found["attempt"]) == (0, 9, 2)


def test_a_job_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    assert supervise(tmp_path, "pass", cwd=str(tmp_path / "gone")).wait(PATIENCE_S) == box.REFUSED
    found = box.read_job_state(str(tmp_path))
    assert (found["state"], found["code"]) == ("ended", box.REFUSED)
    assert "cannot be started" in found["reason"]
    assert "gone" in found["reason"]


def test_who_is_gone_and_who_goes_on_is_told_apart(tmp_path: Path) -> None:
    runner = supervise(tmp_path, "import time; time.sleep(3600)")
    child = wait_child(tmp_path)
    wait_state(tmp_path, "running")
    second = subprocess.run([sys.executable, BOX, "supervise", str(tmp_path)], capture_output=True)
    assert second.returncode == box.REFUSED
    runner.kill()
    runner.wait()
    wait_state(tmp_path, "orphaned")
    os.kill(child, signal.SIGKILL)
    wait_state(tmp_path, "killed")
    start = box.read(str(tmp_path), "start.json")
    assert start is not None
    box.write(str(tmp_path), "start.json", start | {"boot_id": "another"})
    assert box.read_job_state(str(tmp_path))["state"] == "rebooted"


CGROUP = Path("/sys/fs/cgroup/memory")
IN_CGROUP = "echo $$ > {cgroup}/cgroup.procs; exec {python} {box} supervise {folder}"


@pytest.mark.skipif(
    not os.access(CGROUP, os.W_OK) or os.geteuid() != 0, reason="no memory cgroup can be made here"
)
def test_who_was_killed_for_memory_is_told_from_who_was_killed(tmp_path: Path) -> None:
    cgroup = CGROUP / f"perdure-test-{os.getpid()}"
    cgroup.mkdir()
    try:
        (cgroup / "memory.limit_in_bytes").write_text(str(64 << 20))
        script = IN_CGROUP.format(cgroup=cgroup, python=sys.executable, box=BOX, folder=tmp_path)
        for code, signs in (
            ("import os; os.kill(os.getpid(), 9)", False),
            ("x = bytearray(300 << 20)", True),
        ):
            document = {"command": [sys.executable, "-c", code], "cwd": str(tmp_path)}
            (tmp_path / "settings.json").write_text(json.dumps(document))
            assert subprocess.run(["sh", "-c", script], timeout=PATIENCE_S).returncode == 137
            found = box.read_job_state(str(tmp_path))
            assert (found["state"], found["signal"]) == ("ended", 9)
            assert ("out of memory" in found["reason"]) is signs
    finally:
        wait_until(lambda: not (cgroup / "cgroup.procs").read_text())
        cgroup.rmdir()


def test_a_signal_to_the_supervisor_reaches_the_job(tmp_path: Path) -> None:
    handler = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(5)); "
    runner = supervise(tmp_path, handler + "open('up', 'w'); time.sleep(3600)")
    wait_until((tmp_path / "up").exists)
    runner.send_signal(signal.SIGHUP)
    runner.terminate()
    assert runner.wait(PATIENCE_S) == 5


SMI = """#!/bin/sh
case "$1" in
--query-gpu*) printf '0, GPU-a, T4, 16 GB\\n1, GPU-b, T4, 16 GB\\n';;
--query-compute-apps*) printf '%s' "$BUSY";;
*) echo 'Driver Version: 550 CUDA Version: 12.4 ';;
esac
"""


def test_one_run_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BUSY", "")
    assert box.read_cuda_version() == "12.4"
    devices, locks = box.take_devices(1)
    assert devices == "GPU-a"
    other, more = box.take_devices(1)
    assert other == "GPU-b"
    with pytest.raises(LookupError, match="GPU 0: another run of perdure"):
        box.take_devices(1)
    for fd in [*locks, *more]:
        os.close(fd)
    monkeypatch.setenv("BUSY", "GPU-a, 4242\n")
    with pytest.raises(LookupError, match=r"2 GPUs are wanted and 1 of 2 .* process 4242"):
        box.take_devices(2)
    devices, locks = box.take_devices(1)
    assert devices == "GPU-b"
    os.close(locks[0])


def test_scripts_from_another_system_are_mended(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_bytes(b"echo a\r\necho b\r\n")
    (tmp_path / "tool").write_bytes(b"#!/usr/bin/env python3\n")
    (tmp_path / "data.bin").write_bytes(b"\r\n\r\n")
    told = results.repair(str(tmp_path))
    assert told == {
        "line_ends": [str(tmp_path / "run.sh")],
        "execute_bits": [str(tmp_path / "tool")],
    }
    assert (tmp_path / "run.sh").read_bytes() == b"echo a\necho b\n"
    assert os.access(tmp_path / "tool", os.X_OK)
    assert (tmp_path / "data.bin").read_bytes() == b"\r\n\r\n"
    assert results.repair(str(tmp_path)) == {"line_ends": [], "execute_bits": []}


def test_a_roster_is_exact_and_names_links(tmp_path: Path) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "sub" / "best.pt").write_bytes(b"x" * 10)
    (tmp_path / "a" / "x.latest.pth").write_bytes(b"scratch")
    (tmp_path / "a" / "link").symlink_to("/etc/hostname")
    told = results.make_manifest(
        {
            "roots": {"out": str(tmp_path / "a"), "no": "/nonexistent"},
            "skip": {"out": ["*.latest.pth"]},
            "exclude": [],
        }
    )
    assert [(row["path"], row["bytes"]) for row in told["files"]] == [("out/sub/best.pt", 10)]
    assert told["links"] == ["out/link"]


def test_the_end_of_an_earlier_attempt_is_not_that_of_the_one_that_runs(tmp_path: Path) -> None:
    start = {"attempt": 2, "boot_id": box.boot_id(), "pid": os.getpid(), "at": 1.0}
    start["pid_start"] = box.start_time(os.getpid())
    box.write(str(tmp_path), "start.json", start)
    box.write(str(tmp_path), "exit.json", {"attempt": 1, "code": 0, "at": 0.5})
    assert box.read_job_state(str(tmp_path))["state"] == "running"


def test_a_job_is_taken_from_a_box_whole_and_nobody_else_is_touched(tmp_path: Path) -> None:
    """Its supervisor writes nothing down, an orphan that left its session goes as well."""
    home = str(tmp_path / "state")
    orphan = (
        "import os, subprocess, sys; "
        f"env = dict(os.environ, PERDURE_HOME={home!r}, PERDURE_JOB='mine'); "
        "child = subprocess.Popen(['sleep', '3600'], env=env, start_new_session=True, "
        "stdout=subprocess.DEVNULL); "
        "print(child.pid, flush=True)"
    )
    made = subprocess.run(
        [sys.executable, "-c", orphan], stdout=subprocess.PIPE, timeout=PATIENCE_S
    )
    lost = int(made.stdout)
    env = dict(os.environ, PERDURE_HOME=home)
    theirs = subprocess.Popen(["sleep", "3600"], env=env)  # Such as `perdure logs -f` beside it.
    code = "import subprocess; subprocess.run(['sleep', '3600'])"
    runner = supervise(tmp_path, code)
    try:
        child = wait_child(tmp_path)
        wait_until(lambda: len(box.list_family([child], home)) == 3)
        asked = json.dumps({"folder": str(tmp_path), "home": home})
        done = subprocess.run([sys.executable, BOX, "take", asked], stdout=subprocess.PIPE,
                              check=True, timeout=PATIENCE_S)  # fmt: skip
        told = json.loads(done.stdout.decode().removeprefix(box.ANSWER))
        assert told == {"killed": 4, "left": []}
        assert runner.wait(PATIENCE_S) == -signal.SIGKILL
        assert box.read_job_state(str(tmp_path))["state"] == "killed"
        assert not box.start_time(lost)
        assert theirs.poll() is None
        again = box.take({"folder": str(tmp_path), "home": home})
        assert again == {"killed": 0, "left": []}
    finally:
        for process in (theirs, runner):
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(lost, signal.SIGKILL)
