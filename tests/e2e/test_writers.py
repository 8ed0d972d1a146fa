"""A rank that writes the script's own checkpoint when another rank dies may finish it."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
