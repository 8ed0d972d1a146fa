"""A plain script that takes its time after the last collective: to save, or to be torn down."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.exact import Start
from tests.e2e.test_listeners import count_listeners, list_open

pytestmark = pytest.mark.slow

SCRIPT = """
import os, time
import torch, torch.distributed as dist

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(4.0)

dist.init_process_group("gloo")
last = Slow()  # Ends with the interpreter, after all that `atexit` calls.
value = torch.ones(1000)
end = time.monotonic() + 8.0
while float(value[0]) > 0.0:
    time.sleep(0.02)
    value.fill_(float(time.monotonic() < end or not os.path.exists("end")))
    dist.broadcast(value, 0)
rank = dist.get_rank()
if rank == 0:
    print("trained until", time.time(), flush=True)
dist.destroy_process_group()
if rank == 0:
    until = time.monotonic() + 8.0
    while time.monotonic() < until:  # It exports the model.
        sum(range(10_000))
"""


def test_a_plain_job_listens_on_loopback_alone_and_its_last_work_is_no_hang(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = start("last", "-n", "2", str(tmp_path / "train.py"))
    job.wait_until(lambda: count_listeners(job) >= 2, "gloo on both ranks")
    assert list_open(job) == []
    (tmp_path / "end").touch()
    assert job.wait() == 0
    verdicts = json.loads(job.cli("diagnose", "last", "--json").stdout)["verdicts"]
    # On a busy machine a rank may stand still while it trains, which is right to be told.
    (trained_s,) = re.findall(r"trained until ([\d.]+)", job.text())
    late = [v for v in verdicts if v["confirmed_s"] > float(trained_s) and v["kind"] != "HostBusy"]
    assert late == []
