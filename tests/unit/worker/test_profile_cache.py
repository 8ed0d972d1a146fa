"""What was measured before is taken only where it can be read."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

pytest.importorskip("torch")

from perdure.model.codec import encode
from perdure.model.planning.costs import ProfileRequest
from perdure.worker.profiling import read_kept
from perdure.worker.profiling.links import LinkFigures


def test_what_cannot_be_read_is_measured_again(tmp_path: Path) -> None:
    request = ProfileRequest(folder=str(tmp_path), report="", model="m")
    kept = tmp_path / "links.json"
    assert read_kept(kept, LinkFigures, request) is None
    figures = LinkFigures((), (), 0.5, "a message")
    kept.write_bytes(encode(figures))
    assert read_kept(kept, LinkFigures, request) == figures
    kept.write_bytes(encode(figures)[:-9])
    assert read_kept(kept, LinkFigures, request) is None


@pytest.mark.long
def test_the_processes_that_measure_links_are_silent() -> None:
    """Python warned on the user's terminal, once for each rank, that the module was there twice."""
    command = [sys.executable, "-m", "perdure.worker.profiling.links", "0", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "Warning" not in done.stderr
    assert "expected at least 4, got 2" in done.stderr
