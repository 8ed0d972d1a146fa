"""A script is edited while its job runs: perdure names it at the restart, and at the next run."""

from collections.abc import Callable
from pathlib import Path

from tests.e2e.harness import Job

SCRIPT = """
import os, time
print("life", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
time.sleep(86_400)
"""


def test_an_edited_script_is_named(start: Callable[..., Job], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = start("edit", "-n", "1", "--cold", str(script))
    job.wait_until(lambda: "life 0" in job.text(), "a first life")
    script.write_text(f"{SCRIPT}# edited\n")
    job.kill("perdure rank")
    job.wait_until(lambda: f"other code: {script} was edited at" in job.text(), "its name")
    job.wait_until(lambda: "life 1" in job.text(), "a second life")
    job.cli("stop", "edit", "--now")
    job.wait()
    assert job.text().count("was edited") == 1

    script.write_text(f"{SCRIPT}# edited again\n")
    again = start("edit", "-n", "1", "--cold", str(script), "more")
    again.wait_until(lambda: "differs from its last one" in again.text(), "the difference")
    (line,) = [line for line in again.text().splitlines() if "differs from its last one" in line]
    assert "the arguments changed from `` to `more`" in line
    assert f"{script} was edited at" in line
    again.cli("stop", "edit", "--now")
    again.wait()
