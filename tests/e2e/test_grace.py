"""SIGTERM at a stop: ranks that handle it have the whole grace, and others 2 s."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SAVES = """
import os, signal, time
rank = os.environ["RANK"]
def save(*_):
    began = time.monotonic()
    while not os.path.exists("go"):
        time.sleep(0.05)
    open(f"saved-{rank}", "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("handler", rank, flush=True)
while True:
    time.sleep(0.05)
"""
WINDOW_S = 60
SAVE_ENDS = f"time.monotonic() < began + {0.8 * WINDOW_S}"
IGNORES = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("handler", os.environ["RANK"], flush=True)
time.sleep(86_400)
"""


def test_a_rank_that_ignores_sigterm_has_no_grace(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(IGNORES)
    longer_s = str(int(10 * PATIENCE_S))
    job = start("grace", "-n", "2", "--shutdown-timeout", longer_s, "--cold", "train.py")
    job.wait_until(lambda: "handler 0" in job.text() and "handler 1" in job.text(), "the ranks")
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0


def test_a_script_that_saves_itself_is_told_of_a_preemption_and_waited_for_at_a_stop(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """It is held until its machine is gone, or stays after all."""
    (tmp_path / "train.py").write_text(SAVES)
    (tmp_path / "job.toml").write_text(
        'script = "train.py"\nnproc = 2\n[preemption]\nfile = "gone"\nlead_s = 900.0\n'
        f"[restart]\ngrace_s = {10 * PATIENCE_S}\n"
    )
    go, saved = tmp_path / "go", [tmp_path / f"saved-{rank}" for rank in range(2)]
    go.touch()
    job = start("grace", "--cold", "-c", "job.toml")
    job.wait_until(lambda: "handler 0" in job.text() and "handler 1" in job.text(), "the ranks")
    job.wait_until(lambda: job.state().get("state") == "running", "a world that trains")
    (tmp_path / "gone").write_text("900 drill")
    job.wait_until(lambda: all(path.exists() for path in saved), "the save of both ranks")
    job.wait_until(lambda: "announced seconds" in job.cli("report", "grace").stdout, "its length")
    assert job.text().count("handler 0") == 1
    go.unlink()
    for path in saved:
        path.unlink()
    (tmp_path / "gone").unlink()
    job.wait_until(lambda: job.text().count("handler 0") == 2, "the next life of rank 0")
    job.wait_until(lambda: job.text().count("handler 1") == 2, "the next life of rank 1")
    job.wait_until(lambda: job.state().get("state") == "running", "a world that trains")
    before = job.text()
    job.process.send_signal(signal.SIGTERM)
    for rank in range(2):
        words = f"rank {rank} handles SIGTERM; perdure waits"
        job.wait_until(
            lambda words=words: job.text().count(words) > before.count(words), "the rank's name"
        )
    go.touch()
    assert job.wait() == 0
    assert all(path.exists() for path in saved)


@pytest.mark.long
@pytest.mark.parametrize("why", ["signal", "pod", "notice"])
def test_a_save_of_80_percent_of_the_window_is_complete(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A pod's grace is read from its environment; on a real Slurm: tests/platforms."""
    if why == "pod":
        monkeypatch.setenv("PERDURE_POD_GRACE_S", str(WINDOW_S))
    (tmp_path / "train.py").write_text(SAVES.replace('not os.path.exists("go")', SAVE_ENDS))
    grace = f"[restart]\ngrace_s = {WINDOW_S}.0\n" if why == "signal" else ""
    notices = '[preemption]\nfile = "gone"\nlead_s = 900.0\n' if why == "notice" else ""
    (tmp_path / "job.toml").write_text(f'script = "train.py"\nnproc = 2\n{grace}{notices}')
    job = start("grace", "-c", "job.toml")
    job.wait_until(lambda: "handler 0" in job.text() and "handler 1" in job.text(), "the ranks")
    job.wait_state("running")
    if why == "notice":
        (tmp_path / "gone").write_text(f"{WINDOW_S} drill")
        for rank in range(2):
            saved = tmp_path / f"saved-{rank}"
            job.wait_until(saved.exists, f"the save of rank {rank}")
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert [(tmp_path / f"saved-{rank}").exists() for rank in range(2)] == [True, True], job.text()
