"""How long a job still takes is said while it trains steadily, and not while it stands."""

from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job

pytestmark = [pytest.mark.slow, pytest.mark.torch]
STEPS = 100_000


@pytest.mark.long
def test_a_steady_job_tells_how_long_it_takes_and_a_paused_one_does_not(tmp_path: Path) -> None:
    script = str(SCRIPTS / "train_settings.py")
    job = Job(
        tmp_path, "left", "-n", "1", script, "--steps", str(STEPS), "--pace-s", "0.1",
        "--trail", str(tmp_path),
    )  # fmt: skip
    try:
        job.wait_step(5)
        assert job.state()["num_steps"] == STEPS
        assert job.state()["left_s"] is None
        job.wait_until(lambda: job.state().get("left_s"), "time left")
        seen = job.state()
        least_s, most_s = seen["left_s"]
        assert most_s > least_s > 0.05 * (STEPS - seen["step"])  # It is paced.
        assert " left, by the pace of the last minutes" in job.cli("status", "left").stdout
        job.cli("pause", "left")
        job.wait_state("paused")
        job.wait_until(lambda: job.state()["left_s"] is None, "end of it")
        assert "by the pace" not in job.cli("status", "left").stdout
    finally:
        job.end()
