"""A rank that writes the script's own checkpoint when another rank dies may finish it."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.failpoints import FOLDER, SWITCH
from tests.e2e.harness import Job

pytestmark = pytest.mark.slow

SAVES = """
import os, time
rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
size = os.path.getsize("model.pt") if os.path.exists("model.pt") else 0
print(f"life {life} of {rank} finds {size} bytes", flush=True)
if rank == "0" and life == "0":
    with open("model.pt", "wb") as file:
        while not os.path.exists("go"):
            file.write(b"some"); file.flush(); time.sleep(0.05)
        file.write(b"last" * 100_000)
    print("saved", flush=True)
time.sleep(86_400)
"""


def begin(start: Callable[..., Job], folder: Path) -> Job:
    (folder / "train.py").write_text(SAVES)
    job = start("writes", "-n", "2", "--cold", "train.py")
    job.wait_until(lambda: (folder / "model.pt").exists(), "half a file")
    job.wait_until(lambda: "life 0 of 1" in job.text(), "the other rank")
    job.kill(" g0 r1")
    job.wait_until(lambda: "perdure waits for rank 0" in job.text(), "the name of the rank")
    return job


def test_a_restart_waits_for_a_rank_that_writes(start: Callable[..., Job], tmp_path: Path) -> None:
    job = begin(start, tmp_path)
    (tmp_path / "go").touch()
    job.wait_until(lambda: "life 1 of 0 finds" in job.text(), "the next life")
    size = (tmp_path / "model.pt").stat().st_size
    assert size > 400_000
    assert f"life 1 of 0 finds {size} bytes" in job.text()
    job.cli("stop", "writes", "--now")
    job.wait()


def test_a_rank_that_writes_for_too_long_is_killed_and_named(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = begin(start, tmp_path)
    job.wait_until(lambda: "killed rank 0, which still wrote" in job.text(), "the end of the wait")
    job.wait_until(lambda: "life 1 of 0 finds" in job.text(), "the next life")
    words = f"rank 0 was killed while it wrote {tmp_path}/model.pt"
    assert words in job.cli("report", "writes").stdout
    job.cli("stop", "writes", "--now")
    job.wait()


OVERWRITES = """
import os, time
rank, life = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == "0" and life == "0":
    with open("model.pt", "wb") as file:
        file.write(b"whole" * 1000)
open(f"begun-{life}-{rank}", "w").close()
while rank == "0" and life == "0":
    if os.path.exists("points/fired"):
        with open("model.pt", "wb", buffering=0) as file:
            while not os.path.exists("go"):
                file.write(b"half"); time.sleep(0.05)
            file.truncate(0); file.seek(0)
            file.write(b"whole" * 1000)
        break
    time.sleep(0.01)
time.sleep(86_400)
"""


@pytest.mark.parametrize("end", ["death", "stop"])
def test_a_save_that_begins_just_before_the_end_is_not_cut(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The script truncates its only checkpoint after the keeper's look and before its kill."""
    (tmp_path / "points").mkdir()
    monkeypatch.setenv(SWITCH, f"keeper/looked=delay(5),nth=1,file={tmp_path}/end")
    monkeypatch.setenv(FOLDER, str(tmp_path / "points"))
    (tmp_path / "train.py").write_text(OVERWRITES)
    job = start("over", "-n", "2", "--cold", "train.py")
    job.wait_until(lambda: len(list(tmp_path.glob("begun-0-*"))) == 2, "both ranks")
    (tmp_path / "end").touch()
    if end == "stop":
        job.process.send_signal(signal.SIGTERM)
    else:
        job.kill(" g0 r1")
    job.wait_until(lambda: "perdure waits for rank 0" in job.text(), "the name of the rank")
    (tmp_path / "go").touch()
    if end == "death":
        job.wait_until(lambda: (tmp_path / "begun-1-0").exists(), "the next life")
        job.cli("stop", "over", "--now")
    job.wait()
    assert (tmp_path / "model.pt").read_bytes() == b"whole" * 1000


WRITER_S = 30.0
"""Time for a writer after a crash."""
IN_GRACE = """
import os, signal, time
def write(name, until):
    with open(name, "wb", buffering=0) as file:
        while not os.path.exists(until):
            file.write(b"some"); time.sleep(0.05)
def save(*_):
    write("model-0.pt", "go")
    os._exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
    open("handles", "w").close()
    time.sleep(86_400)
write("model-1.pt", "go")
time.sleep(86_400)
"""


def test_a_rank_within_its_grace_is_not_said_to_be_killed(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    """Both ranks write for longer than a writer has after a crash, and neither file is torn."""
    (tmp_path / "train.py").write_text(IN_GRACE)
    grace_s = 4 * WRITER_S
    job = start("grace", "-n", "2", "--shutdown-timeout", str(int(grace_s)), "--cold", "train.py")
    job.wait_until((tmp_path / "handles").exists, "the handler")
    job.wait_until((tmp_path / "model-1.pt").exists, "half a file")
    job.process.send_signal(signal.SIGTERM)
    job.wait_until((tmp_path / "model-0.pt").exists, "the save of the rank that handles SIGTERM")
    began_s = time.monotonic()
    job.wait_until(lambda: time.monotonic() > began_s + 1.5 * WRITER_S, "a long save")
    (tmp_path / "go").touch()
    job.wait()
    assert "killed rank" not in job.text()
    assert "torn" not in job.text()
