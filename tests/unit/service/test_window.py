"""What a platform says of the time between its SIGTERM and its SIGKILL."""

import time
from pathlib import Path

import pytest

from perdure.service.window import read_left_s, read_window_s


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `scontrol` that prints the file that is returned."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\nexec /bin/cat "{tmp_path}/config"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "config"


def test_elsewhere_nothing_tells() -> None:
    assert read_window_s({}) is None


def test_a_pod_knows_its_grace() -> None:
    assert read_window_s({"PERDURE_POD_GRACE_S": "120"}) == 120.0


@pytest.mark.parametrize(
    ("text", "window_s"),
    [
        ("KillOnBadExit           = 0\nKillWait                = 45 sec\n", 45.0),
        ("KillOnBadExit           = 0\n", None),
        ("KillWait                = never\n", None),
    ],
)
def test_slurm_tells_its_killwait(cluster: Path, text: str, window_s: float | None) -> None:
    cluster.write_text(text)
    assert read_window_s({"SLURM_JOB_ID": "12"}) == window_s


def test_a_controller_of_slurm_that_is_away(cluster: Path) -> None:
    assert read_window_s({"SLURM_JOB_ID": "12"}) is None


@pytest.mark.parametrize("grace", ["soon", "nan", "-3", "inf"])
def test_what_is_no_time(grace: str) -> None:
    assert read_window_s({"PERDURE_POD_GRACE_S": grace}) is None


@pytest.mark.parametrize(
    ("state", "in_s", "left_s"),
    [
        ("RUNNING", 100, 100),  # A warning, or a GraceTime
        ("RUNNING", 90_000, None),  # A person has sent SIGTERM.
        ("RUNNING", -1, None),  # The walltime is over: KillWait.
        ("COMPLETING", 100, None),  # scancel
    ],
)
def test_slurm_tells_when_it_ends_a_job_that_runs(
    cluster: Path, monkeypatch: pytest.MonkeyPatch, state: str, in_s: float, left_s: float | None
) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + in_s))
    cluster.write_text(f"JobId=12 JobState={state} TimeLimit=00:02:00 EndTime={end}")
    (cluster.parent / "scontrol").write_text(
        f'#!/bin/sh\n[ "$*|$TZ" = "-o show job 12|UTC" ] && exec /bin/cat "{cluster}"\n'
    )
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    found = read_left_s({"SLURM_JOB_ID": "12"})
    assert found == (None if left_s is None else pytest.approx(left_s, abs=60))


@pytest.mark.parametrize("text", ["", "JobState=RUNNING EndTime=Unknown", "slurm_load_jobs error"])
def test_an_end_that_is_not_known(cluster: Path, text: str) -> None:
    cluster.write_text(text)
    assert read_left_s({"SLURM_JOB_ID": "12"}) is None
    assert read_left_s({}) is None
