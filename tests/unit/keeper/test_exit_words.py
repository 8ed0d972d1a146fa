"""What a script says as it leaves by `sys.exit`, started from the image."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.keeper.test_keeper_exits import make_evidence, make_record
from tests.waiting import PATIENCE_S

from perdure.model.failures import ExitRecord, explain_exit

LOST = """
import atexit
from perdure.model.errors import DeviceLostError
atexit.register(print, "cleared up", file=sys.stderr)
raise DeviceLostError("an illegal memory access was encountered")
"""
PROGRAM = """
import sys
from perdure.keeper.bootstrap import run_main
run_main(sys.argv[1], (), module=False, traceback_file=sys.argv[2])
"""


COLD = """
import os, sys
from perdure.worker.start.failure import install_hook
install_hook(sys.argv[2], os.getpid())
exec(open(sys.argv[1]).read())
"""


def run_rank(program: str, script: str, folder: Path) -> tuple[ExitRecord, str]:
    """Return the record of a rank that runs `script`, and what it has said on standard error."""
    path = folder / "leaves.py"
    path.write_text(f"import sys\n{script}\n")
    evidence = make_evidence(folder)
    command = [sys.executable, "-c", program, str(path), evidence.traceback_file]
    with open(evidence.stderr, "wb") as stderr:
        done = subprocess.run(command, stderr=stderr, timeout=PATIENCE_S, check=False)
    return make_record(evidence, done.returncode << 8), Path(evidence.stderr).read_text()


@pytest.mark.parametrize("program", [PROGRAM, COLD])
def test_who_has_lost_its_device_leaves_at_once_and_says_so(program: str, tmp_path: Path) -> None:
    """A destructor might wait for the device for ever."""
    record, said = run_rank(program, LOST, tmp_path)
    words = "an illegal memory access was encountered"
    assert record.cause == f"device lost (exit code 5): {words}"
    reason = explain_exit(record, 0.0, 7, None).reason
    assert reason.startswith(f"the device of rank {record.rank} was lost")
    assert reason.endswith(words)
    assert words in said
    assert "cleared up" not in said


def test_a_script_that_leaves_with_that_code_has_lost_nothing() -> None:
    for error in ("", "SystemExit: 5", "ValueError: DeviceLostError: no"):
        record = ExitRecord(0, 0, 1, 0.0, code=5, error=error)
        assert record.cause == f"exit code 5{': ' if error else ''}{error}"
    other = ExitRecord(0, 0, 1, 0.0, code=1, error="perdure.model.errors.DeviceLostError: gone")
    assert not other.lost_device


@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        ("sys.exit('no data in /data\\nsee above')", 1, "SystemExit: no data in /data"),
        ("sys.exit('x' * 10_000_000)", 1, "SystemExit: xxx"),
        ("def f():\n    raise SystemExit(('no', 'data'))\nf()", 1, "SystemExit: ('no', 'data')"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
    ],
)
def test_a_reason_given_to_exit_is_the_ranks(
    script: str, code: int, error: str, tmp_path: Path
) -> None:
    record, _ = run_rank(PROGRAM, script, tmp_path)
    assert record.code == code
    assert record.error.startswith(error)
    assert len(record.error) <= 4096
    assert bool(record.error) == bool(error)
    assert "perdure" not in record.traceback
    if error:
        assert record.cause.startswith(f"exit code 1: {error}")
        assert 'leaves.py", line ' in record.traceback


def test_a_cold_rank_that_is_interrupted_ends_by_sigint(tmp_path: Path) -> None:
    """As plain Python does, also if the exception is saved."""
    path = tmp_path / "leaves.py"
    path.write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-c", COLD, str(path), str(tmp_path / "saved")]
    done = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in (tmp_path / "saved").read_text()
