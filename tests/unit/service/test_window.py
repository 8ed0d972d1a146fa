"""What a platform says of the time between its SIGTERM and its SIGKILL."""

from pathlib import Path

import pytest

from perdure.service.window import read_window_s


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
    assert read_window_s({"PERDURE_POD_GRACE_S": "120"}) == 108.0


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
