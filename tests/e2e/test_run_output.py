"""The file that `perdure run` writes to, where whoever began it has named it."""

from pathlib import Path

import pytest

from perdure.files.rotation import HEAD_BYTES, list_parts
from tests.e2e.exact import Start

pytestmark = pytest.mark.slow

SCRIPT = """
import time
for _ in range(1000):
    print("x" * 9_999, flush=True)
    time.sleep(0.01)
time.sleep(8.0)
"""


def test_a_named_output_is_kept_to_a_bounded_size(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    output = tmp_path / "talks.out"
    monkeypatch.setenv("PERDURE_OUTPUT", str(output))
    job = start("talks", "-n", "1", str(tmp_path / "train.py"))
    assert job.wait() == 0
    assert job.output == output
    _first, newest = list_parts(str(output))
    assert newest.end > 1000 * 10_000
    assert newest.begin > HEAD_BYTES - 65_536, "its head was cut off once it was full"
