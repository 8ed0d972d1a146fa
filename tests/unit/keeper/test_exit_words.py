"""What a script says as it leaves by `sys.exit`, started from the image."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.keeper.test_keeper_exits import make_evidence, make_record

PROGRAM = """
import sys
from perdure.keeper.bootstrap import run_main
run_main(sys.argv[1], (), module=False, traceback_file=sys.argv[2])
"""


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
    (tmp_path / "leaves.py").write_text(f"import sys\n{script}\n")
    evidence = make_evidence(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "leaves.py"), evidence.traceback_file]
    with open(evidence.stderr, "wb") as stderr:
        done = subprocess.run(command, stderr=stderr, timeout=60, check=False)
    record = make_record(evidence, done.returncode << 8)
    assert record.code == code
    assert record.error.startswith(error)
    assert len(record.error) <= 4096
    assert bool(record.error) == bool(error)
    assert "perdure" not in record.traceback
    if error:
        assert record.cause.startswith(f"exit code 1: {error}")
        assert 'leaves.py", line ' in record.traceback
