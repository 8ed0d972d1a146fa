"""The file that `perdure run` writes to, where whoever began it has named it."""

from pathlib import Path

import pytest

from perdure.files.rotation import HEAD_BYTES, list_parts
from tests.e2e.exact import Start

pytestmark = pytest.mark.slow

SCRIPT = """
import pathlib, time
while not pathlib.Path("finish").exists():
    print("x" * 9_999, flush=True)
    time.sleep(0.01)  # Of what comes faster, not all is shown.
"""


def test_a_named_output_is_kept_to_a_bounded_size(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    output = tmp_path / "talks.out"
    monkeypatch.setenv("PERDURE_OUTPUT", str(output))
    job = start("talks", "-n", "1", "--cold", str(tmp_path / "train.py"))
    assert job.output == output
    job.wait_until(lambda: len(list_parts(str(output))) == 2, "a cut")
    (tmp_path / "finish").touch()
    assert job.wait() == 0
    _first, newest = list_parts(str(output))
    assert newest.begin > HEAD_BYTES - 65_536, "its head was cut off once it was full"


def test_the_last_lines_of_a_failing_start_say_its_cause(start: Start, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('raise ValueError("no tokens in data/")\n')
    job = start("fails", "-n", "2", "--cold", "--max-restarts", "0", str(tmp_path / "train.py"))
    assert job.wait() == 1
    failed, where, more = job.text().splitlines()[-3:]
    assert "fails failed: rank " in failed
    assert "ValueError: no tokens in data/" in failed
    assert "ValueError: no tokens in data/" in Path(where.rpartition(": ")[2]).read_text()
    assert more.endswith("perdure diagnose fails")
    assert "Ledger" not in job.text(), "of nothing"
    assert "counts as useful" not in job.text()
    assert "Ledger" in job.cli("report", "fails").stdout


BAR = """
import pathlib, sys, time
print("begun", flush=True)
for percent in range(10_000):
    sys.stderr.write(f"\\r{percent} of 10000")
    sys.stderr.flush()
    time.sleep(0.05)
    if pathlib.Path("finish").exists():
        break
"""


def test_an_unfinished_line_comes_before_the_word_that_the_job_has_ended(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(BAR)
    job = start("bars", "-n", "1", "--cold", str(tmp_path / "train.py"))
    job.wait_until(lambda: "[rank 0] begun" in job.text(), "its first line")
    job.kill("perdure rank bars g0 r0")
    job.wait_until(lambda: job.text().count("[rank 0] begun") == 2, "it again")
    job.wait_until(lambda: job.text().count(" of 10000") == 1, "what the first has left")
    (tmp_path / "finish").touch()
    assert job.wait() == 0
    lines = job.text().splitlines()
    bars = [i for i, line in enumerate(lines) if line.endswith(" of 10000")]
    (done,) = [i for i, line in enumerate(lines) if line.startswith("[perdure] bars done")]
    assert len(bars) == 2
    assert all(lines[i].startswith("[rank 0] ") for i in bars)
    assert bars[-1] < done
