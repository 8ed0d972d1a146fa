"""A job rendered to data, then submitted."""

import os
import sys
from pathlib import Path

import msgspec
import pytest
from tests.waiting import wait_until

from perdure.launch.local import render, submit
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec


def test_render_touches_nothing_and_reads_back(tmp_path: Path) -> None:
    spec = JobSpec(script="train.py", name="a", nproc=2, cwd=str(tmp_path))
    plan = render(spec, str(tmp_path / "home"), nats_url="nats://h:1")
    assert not (tmp_path / "home").exists()
    ((path, text),) = plan.files.items()
    assert msgspec.json.decode(text, type=JobSpec) == spec
    assert plan.command == (
        sys.executable, "-P", "-m", "perdure", "run", "--config", path, "--nats", "nats://h:1",
    )  # fmt: skip
    assert plan.env == {"PERDURE_HOME": str(tmp_path / "home")}


def test_submit_starts_it_in_a_session_of_its_own(tmp_path: Path) -> None:
    spec = JobSpec(script="train.py", name="a", cwd=str(tmp_path))
    plan = msgspec.structs.replace(
        render(spec, str(tmp_path)), command=("/bin/sh", "-c", "cat /proc/self/stat; exec sleep 0")
    )
    pid = submit(plan)
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "end")
    fields = Path(plan.log).read_text().split()
    assert int(fields[5]) == pid  # session


def test_submit_says_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file")
    spec = JobSpec(script="train.py", name="a", cwd=str(tmp_path))
    with pytest.raises(PlatformError, match="cannot start job a"):
        submit(render(spec, str(tmp_path / "home")))
