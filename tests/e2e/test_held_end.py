"""A rank whose script has ended, and that does not exit: what holds it is named."""

from pathlib import Path

import pytest

from tests.e2e.exact import Start

HEAD = """
import atexit, multiprocessing, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def hold(way):
    if way == "atexit":
        atexit.register(time.sleep, 1e5)
    if way == "thread":
        threading.Thread(target=time.sleep, args=(1e5,), name="uploader").start()
    if way == "child":
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(1e5,)).start()
"""
RAISES = """
if rank == 1:
    hold(sys.argv[1])
    raise ValueError("bad batch")
while True:
    dist.all_reduce(torch.ones(1))
"""
ENDS_WELL = """
dist.all_reduce(torch.ones(1))
hold("thread")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "cold"),
    [
        pytest.param("atexit", (), marks=pytest.mark.long),
        ("thread", ("--cold",)),
        pytest.param("child", (), marks=pytest.mark.long),
        pytest.param("atexit", ("--cold",), marks=pytest.mark.long),
        pytest.param("thread", (), marks=pytest.mark.long),
        pytest.param("child", ("--cold",), marks=pytest.mark.long),
    ],
)
def test_a_rank_that_raised_and_does_not_exit_has_crashed(
    start: Start, tmp_path: Path, way: str, cold: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(HEAD + RAISES)
    job = start("raised", "-n", "2", "--max-restarts", "0", *cold, str(tmp_path / "train.py"), way)
    assert job.wait() == 1
    told = job.cli("status", "raised").stdout
    assert "rank 1" in told
    assert "ValueError: bad batch; the process did not exit within 5 s" in told


@pytest.mark.slow
def test_a_thread_that_holds_a_rank_after_a_good_end_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + ENDS_WELL)
    job = start("held", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(
        lambda: (
            "rank 1 has ended and waits for threads that are no daemons: uploader" in job.text()
        ),
        "the name of the thread",
    )
    job.wait_until(
        lambda: "end, waits for thread uploader" in job.cli("status", "held").stdout, "its state"
    )
    job.cli("stop", "held", "--now")
    job.wait()
