"""A job that perdure 0.1 has stopped is run again by today's, and goes on where that left it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.older import SAVED, lay_down, read_losses

SCRIPT: dict[str, tuple[str, ...]] = {
    "resumable": ("-n", "2", str(SCRIPTS / "train_exact.py"), "--steps", "60", "--width", "16"),
    "elastic": ("-n", "3", str(SCRIPTS / "elastic.py"), "--steps", "48", "--exact"),
    "sharded": ("-n", "3", str(SCRIPTS / "elastic.py"), "--steps", "48", "--shard", "full"),
    "stages": ("-n", "3", str(SCRIPTS / "elastic.py"), "--steps", "48", "--pipeline", "3"),
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_floats(loss: Any) -> list[float]:
    return [float.fromhex(one) for one in (loss if isinstance(loss, list) else [loss])]


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "depth",
    [
        "resumable",
        pytest.param("elastic", marks=pytest.mark.long),
        pytest.param("sharded", marks=pytest.mark.long),
        pytest.param("stages", marks=pytest.mark.long),
    ],
)
def test_a_job_of_0_1_goes_on(start: Callable[..., Job], tmp_path: Path, depth: str) -> None:
    """Bitwise, where the machine is like the one that it was stopped on."""
    folder = lay_down(depth, tmp_path / "state")
    trail = tmp_path / "trail"
    trail.mkdir()
    job = start(depth, *SCRIPT[depth], "--trail", str(trail))
    assert job.wait() == 0, job.text()[-3000:]
    bodies = [
        json.loads(line)["body"] for line in (folder / "journal.jsonl").read_text().splitlines()
    ]
    restored = [body for body in bodies if body["type"] == "CheckpointRestored"]
    assert {body["step"] for body in restored} == {SAVED[depth]}
    here = not any(body.get("why_not_exact") for body in restored)
    for rank, wanted in read_losses(depth).items():
        rows = [
            json.loads(line) for line in (trail / f"rank-{rank}.jsonl").read_text().splitlines()
        ]
        got = {str(row["step"]): row.get("loss") or row["losses"] for row in rows}
        assert list(got) == list(wanted)
        if here and depth in ("resumable", "elastic"):
            assert got == wanted
        for step, loss in wanted.items():
            assert as_floats(got[step]) == pytest.approx(as_floats(loss), rel=1e-3), (rank, step)
