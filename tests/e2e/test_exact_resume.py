"""Exact resume, whole: kills at random instants, and bitwise the uninterrupted run.

Dropout, shuffled data, loader workers with augmentation, AdamW with a schedule, gradient
accumulation and several buckets are all on. FSDP2 with 3 ranks is killed three times; the longer
forms have 200 steps and five kills, 2, 3 and 4 ranks, DDP and FSDP2. A longer form of the property
test, which has DDP with 2 ranks: `PERDURE_EXACT_EXAMPLES=100`.
"""

import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.exact import (
    Start,
    check_equal,
    check_samples,
    find_temporaries,
    jobs_in,
    kill_after,
    kill_at_random,
    kill_rank_0_inside_a_write,
    launch,
)

ACCUMULATE = 2
EXAMPLES = int(os.environ.get("PERDURE_EXACT_EXAMPLES", "1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "steps", "kills"),
    [
        (2, "fsdp", 60, 2),
        *(
            pytest.param(*more, 200, 5, marks=pytest.mark.long)
            for more in ((2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp"), (4, "fsdp"), (4, "ddp"))
        ),
    ],
)
def test_kills_change_no_bit(
    start: Start, tmp_path: Path, ranks: int, kind: str, steps: int, kills: int
) -> None:
    options = ["--steps", str(steps), "--accumulate", str(ACCUMULATE), "--workers", "1"]
    options += ["--fsdp"] if kind == "fsdp" else []
    reference = launch(start, tmp_path, "reference", ranks, *options, every=steps)
    words = [*options, "--pace-s", "0.005", "--slow-disk-s", "0.02"]
    job = launch(start, tmp_path, "killed", ranks, *words, until=steps // (kills + 1))
    chance = random.Random(f"{ranks} {kind}")
    kill_at_random(job, steps, kills, chance, inside=chance.randrange(kills))
    assert job.wait() == 0, job.text()
    assert reference.wait() == 0, reference.text()
    check_equal(tmp_path, steps, ranks)
    check_samples(tmp_path, steps, ranks, ACCUMULATE, "killed")
    assert find_temporaries(job) == []
    report = job.report()
    assert report["steps_committed"] == steps
    assert len(report["recoveries"]) >= kills - 1, report["recoveries"]
    assert abs(report["ledger"]["unattributed"]["fraction"]) <= 0.005, report


@pytest.mark.slow
@pytest.mark.long
def test_rank_0_killed_while_it_writes_a_large_checkpoint(start: Start, tmp_path: Path) -> None:
    steps = 40
    options = ["--steps", str(steps), "--width", "768"]
    reference = launch(start, tmp_path, "reference", 2, *options, every=steps)
    job = launch(start, tmp_path, "killed", 2, *options, "--pace-s", "0.05")
    for step in (12, 22):
        kill_rank_0_inside_a_write(job, step)
    assert job.wait() == 0, job.text()
    assert reference.wait() == 0, reference.text()
    check_equal(tmp_path, steps, 2)
    assert find_temporaries(job) == []
    causes = [row["cause"] for row in job.report()["recoveries"]]
    assert len(causes) >= 2
    assert not [cause for cause in causes if "Hang" in cause], causes


PROPERTY_STEPS = 60


@pytest.fixture(scope="module")
def reference_trail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the uninterrupted run that every example is compared with."""
    home = tmp_path_factory.mktemp("reference")
    with jobs_in(home) as start:
        job = launch(start, home, "reference", 2, "--steps", str(PROPERTY_STEPS), every=60)
        assert job.wait() == 0, job.text()
    return home / "reference"


Instants = st.lists(
    st.tuples(
        st.floats(0.0, 2.5, allow_nan=False),
        st.sampled_from([(0,), (1,), (0, 1)]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900 * EXAMPLES)
@settings(
    max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(instants=Instants)
def test_any_kills_at_any_instants_change_no_bit(
    reference_trail: Path, instants: list[tuple[float, tuple[int, ...]]]
) -> None:
    """Seconds after the world steps (again), and whom: one rank, the other, or both at once."""
    with tempfile.TemporaryDirectory() as folder, jobs_in(Path(folder)) as start:
        home = Path(folder)
        (home / "reference").symlink_to(reference_trail)
        words = ["--steps", str(PROPERTY_STEPS), "--pace-s", "0.02", "--slow-disk-s", "0.02"]
        job = launch(start, home, "killed", 2, *words)
        for delay_s, ranks in instants:
            kill_after(job, delay_s, ranks)
        assert job.wait() == 0, job.text()
        check_equal(home, PROPERTY_STEPS, 2)
        assert find_temporaries(job) == []
        assert job.report()["steps_committed"] == PROPERTY_STEPS
