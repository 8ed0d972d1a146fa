"""The ledger of a run with failures, beside what the script itself measured.

The steps are paced by deadlines, so that the comparison is of the accounts and not of how busy
the machine happens to be.
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, Job

Start = Callable[..., Job]
SCRIPT = str(SCRIPTS / "train_paced.py")
RANKS = 2
STEPS = 60


def launch(start: Start, home: Path, name: str) -> Job:
    (home / name).mkdir()
    spec = home / f"{name}.toml"
    args = f'["--trail", "{home / name}", "--steps", "{STEPS}"]'
    spec.write_text(f'script = "{SCRIPT}"\nargs = {args}\n[checkpoint]\nevery_steps = 10\n')
    return start(name, "-n", str(RANKS), "-c", str(spec))


def read_steps(folder: Path) -> list[tuple[int, float]]:
    """Return (step, seconds) of every step that any rank has run."""
    rows = (row.split() for path in folder.glob("*.txt") for row in path.read_text().splitlines())
    return [(int(row[0]), float(row[1])) for row in rows if len(row) == 2]


@pytest.mark.slow
def test_useful_is_what_the_committed_steps_took(start: Start, tmp_path: Path) -> None:
    reference, job = launch(start, tmp_path, "reference"), launch(start, tmp_path, "killed")
    trail = tmp_path / "killed"
    for generation, (at_step, rank) in enumerate(((24, 1), (47, 0))):
        # By the script's own trail: pictures of a busy machine come late.
        job.wait_until(
            lambda s=at_step: max(read_steps(trail), default=(0, 0))[0] >= s, f"step {at_step}"
        )
        job.kill(f"perdure rank killed g{generation} r{rank}")
        job.wait_until(lambda g=generation: job.find(f"rank killed g{g + 1}"), "restart")
    assert job.wait() == 0, job.text()
    assert reference.wait() == 0, reference.text()
    step_s = statistics.median(seconds for _, seconds in read_steps(tmp_path / "reference"))

    report = job.report()
    ledger = {name: row["s"] for name, row in report["ledger"].items()}
    slot_s = report["slot_s"]
    assert report["steps_committed"] == STEPS
    assert ledger["unattributed"] <= 0.005 * slot_s, ledger
    assert sum(ledger.values()) == pytest.approx(slot_s, rel=1e-6)
    assert ledger["useful"] == pytest.approx(STEPS * step_s * RANKS, rel=0.02), ledger
    again_s = sum(s for _, s in read_steps(tmp_path / "killed")) - STEPS * step_s * RANKS
    assert again_s > 0
    assert ledger["lost_work"] == pytest.approx(again_s, abs=RANKS * 3 * step_s), ledger
