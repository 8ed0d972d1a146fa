"""A rank of a job starts a job of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import Job

OUTER = """
import subprocess
import sys
words = [sys.executable, "-m", "perdure", "run", "--name", "inner", "--cold", "-n", "2", "inner.py"]
sys.exit(subprocess.run(words).returncode)
"""


@pytest.mark.slow
def test_a_rank_runs_a_job_of_its_own(start: Callable[..., Job], tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(OUTER)
    (tmp_path / "inner.py").write_text("import os\nprint('hello from', os.environ['RANK'])\n")
    job = start("outer", "-n", "1", "--cold", str(tmp_path / "outer.py"))
    assert job.wait() == 0, job.text()
    assert "hello from 0" in job.text()
    assert "hello from 1" in job.text()
    assert "died" not in job.text()
