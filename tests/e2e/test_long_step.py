"""A step that is longer than the notice of a preemption: `status` and Ctrl-C say so."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job

pytestmark = [pytest.mark.slow, pytest.mark.torch]

LONG = """
import os, time
import perdure
run = perdure.init()
for step in run.steps(100):
    while step == 2 and not os.path.exists("go"):
        time.sleep(0.05)
"""


def test_status_and_an_interrupt_name_the_step_in_progress(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(LONG)
    (tmp_path / "job.toml").write_text(
        'script = "train.py"\nnproc = 1\n[preemption]\ngrace_s = 2.0\n'
    )
    job = start("long", "-c", "job.toml")
    told = "step 3 has been in progress for"
    job.wait_state("running")
    job.wait_until(lambda: told in job.cli("status", "long").stdout, "a long step")
    assert "longer than a notice of 2 s; a preemption loses it" in job.cli("status", "long").stdout
    job.process.send_signal(signal.SIGINT)
    words = f"SIGINT: stopping after the step in progress ({told}"
    job.wait_until(lambda: words in job.text(), "what the stop waits for")
    (tmp_path / "go").touch()
    assert job.wait() == 128 + signal.SIGINT, job.text()
