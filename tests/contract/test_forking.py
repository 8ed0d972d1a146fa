"""A rank forks while perdure's threads hold its locks, and no child waits for one of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import is_readable

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_no_child_of_a_rank_inherits_a_held_lock(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with (
        errors.open("w") as said,
        subprocess.Popen(
            [sys.executable, "-m", "tests.contract.forking_rank", str(tmp_path)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,  # The rank ends at the end of it.
            stdout=subprocess.PIPE,
            stderr=said,
        ) as rank,
    ):
        try:
            assert rank.stdout is not None
            ready = is_readable(rank.stdout)
            assert ready, "a child still waits"
            assert rank.stdout.readline() == b"every child has ended\n", errors.read_text()[-3000:]
        finally:
            rank.kill()
