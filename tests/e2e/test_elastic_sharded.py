"""`perdure run` of a sharded elastic script: a sole shard is lost, and later the whole job."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.test_elastic_inplace import pid_of, read
from tests.e2e.test_elastic_steering import answer_of, ask


def losses_of(rows: list[dict[str, list[str]]]) -> list[list[float]]:
    return [[float.fromhex(loss) for loss in row["losses"]] for row in rows]


@pytest.mark.slow
def test_a_lost_shard_comes_from_memory_and_a_job_run_again_from_disk(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text("[checkpoint]\nevery_steps = 8\n")
    script = ("-c", str(tmp_path / "job.toml"), str(SCRIPTS / "elastic.py"), "--shard", "full")
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("--trail", str(first), "--steps", "36", "--pace-s", "0.1", "--hold-at", "28")
    job = start("el", "-n", "3", *script, *words)
    job.wait_until(lambda: len(read(first, 0)) >= 1, "a step")
    changed = answer_of(ask(job, "set", "el", "lr=0.02"))
    assert changed.get("ok"), changed
    job.wait_until(lambda: len(read(first, 0)) >= 17, "steps")
    os.kill(pid_of(job, 1), signal.SIGKILL)
    job.wait_until(lambda: read(first, 0)[-1]["epoch"] > 0, "the others' next step")
    (first / "hurry").touch()
    assert job.wait() == 0, job.text()[-3000:]
    rows = read(first, 0)
    assert len({row["pid"] for row in rows}) == 1
    at = next(i for i, row in enumerate(rows) if row["epoch"] > 0)
    back = rows[at - 1]["step"] + 1 - rows[at]["step"]
    assert 0 <= back <= 5
    assert [r["step"] for r in rows] == [*range(at), *range(at - back, 36)]
    assert rows[-1]["rate"] == 0.02
    recovery = job.report()["recoveries"][0]
    assert recovery["lost_steps"] == back
    assert (recovery["rung"] == "morph") == (back > 0)
    again = start("el", "-n", "2", *script, "--trail", str(second), "--steps", "36")
    assert again.wait() == 0, again.text()[-3000:]
    resumed = read(second, 0)
    assert resumed[0]["step"] == 32  # The newest multiple of eight.
    assert resumed[-1]["rate"] == 0.02
    assert losses_of(resumed) == [pytest.approx(one, rel=1e-3) for one in losses_of(rows[-4:])]
