"""What the exact-resume tests share: a job that leaves a trail, kills, and the comparison."""

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import psutil

from tests.e2e.harness import SCRIPTS, Job, read_trail
from tests.waiting import PATIENCE_S

Start = Callable[..., Job]
SCRIPT = str(SCRIPTS / "train_exact.py")
SAMPLES = 600
"""Length of the script's dataset."""
BATCH = 4
"""Its samples per rank and micro-batch."""


def launch(
    start: Start, home: Path, name: str, ranks: int, *args: str, every: int = 10, until: int = -1
) -> Job:
    """Start the exact script with checkpoints at every n-th step; it waits at step `until`."""
    (home / name).mkdir()
    hold_at(home / name, until)
    spec = home / f"{name}.toml"
    words = ["--trail", str(home / name), *args]
    spec.write_text(
        f'script = "{SCRIPT}"\nargs = {json.dumps(words)}\n[checkpoint]\nevery_steps = {every}\n'
        "[restart]\nmax_restarts = 20\n"
    )
    return start(name, "-n", str(ranks), "-c", str(spec))


def hold_at(trail: Path, step: int) -> None:
    """Let the script go on to `step`, and wait there; with -1 it never waits."""
    if step < 0:
        (trail / "until").unlink(missing_ok=True)
        return
    (trail / "until.new").write_text(str(step))
    (trail / "until.new").rename(trail / "until")


@contextlib.contextmanager
def jobs_in(home: Path) -> Iterator[Start]:
    """Yield what the `start` fixture is, for an example or a module instead of a test."""
    jobs: list[Job] = []

    def start_job(name: str, *options: str, timeout_s: float = PATIENCE_S) -> Job:
        jobs.append(Job(home, name, *options, timeout_s=timeout_s))
        return jobs[-1]

    try:
        yield start_job
    finally:
        for job in jobs:
            job.end()
    assert not [line for job in jobs for line in job.leftovers()]


def find_temporaries(job: Job) -> list[Path]:
    """Return the checkpoints that are half written now."""
    return list((job.folder / "checkpoints").glob("*.tmp"))


def find_step(job: Job) -> int:
    """Return the step that rank 0 ran last, by its own trail: newer than any report of it."""
    try:
        with open(job.home / job.name / "rank-0.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 2000))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"])
    except (OSError, ValueError, IndexError):
        return -1


def find_ranks(job: Job) -> dict[int, psutil.Process]:
    """Return the living ranks; their loader workers bear the same title, and are not meant."""
    found = {process.pid: process for process in job.find(f"perdure rank {job.name} ")}
    ranks = {}
    for process in found.values():
        with contextlib.suppress(psutil.Error):
            if process.ppid() not in found:
                ranks[int(process.cmdline()[0].split(" r")[-1].split(":")[0])] = process
    return ranks


def kill_all(victims: Iterable[psutil.Process]) -> None:
    """SIGKILL all of `victims`, and wait until they are dead."""
    victims = list(victims)
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):  # Its world has ended it.
            victim.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(victims, timeout=PATIENCE_S)
    assert not alive, alive


def kill_rank_0_inside_a_write(job: Job, step: int) -> None:
    """After `step`, SIGKILL rank 0 so that it leaves a half written checkpoint behind.

    The script's disk gets stuck once a checkpoint is begun. If that one becomes whole all the same,
    the next one does not.
    """
    stuck = job.home / job.name / "stuck"
    job.wait_until(lambda: find_step(job) >= step, f"step {step}")
    while True:
        job.wait_until(lambda: find_temporaries(job), "a checkpoint that is being written")
        stuck.touch()
        if not find_temporaries(job):
            continue
        kill_all(rank for number, rank in find_ranks(job).items() if number == 0)
        if find_temporaries(job):  # Only the next generation may remove it.
            stuck.unlink()
            return


def kill_at_random(
    job: Job, steps: int, kills: int, chance: random.Random, inside: int = -1
) -> None:
    """Kill a rank in each of `kills` equal parts of the run; the one numbered `inside` in a write.

    Which rank, after which step and how many milliseconds later is up to `chance`. The job waits at
    the end of each part until its rank is dead: launch it with `until=steps // (kills + 1)`.
    """
    part, trail = steps // (kills + 1), job.home / job.name
    for number in range(kills):
        step = number * part + chance.randrange(1, part)
        if number == inside:
            hold_at(trail, -1)  # The part may have no checkpoint any more.
            kill_rank_0_inside_a_write(job, step)
        else:
            job.wait_until(lambda step=step: find_step(job) >= step, f"step {step}")
            time.sleep(chance.random() * 0.2)
            job.wait_until(lambda: find_ranks(job), "a rank")
            ranks = find_ranks(job)
            kill_all([ranks[chance.choice(sorted(ranks))]])
        hold_at(trail, (number + 2) * part if number + 1 < kills else -1)


def kill_after(job: Job, delay_s: float, numbers: Collection[int]) -> None:
    """SIGKILL the ranks `numbers` so long after rank 0 has made its next step."""
    trail = job.home / job.name / "rank-0.jsonl"
    before = trail.stat().st_size if trail.exists() else 0
    deadline = time.monotonic() + job.timeout_s
    while job.process.poll() is None and not (trail.exists() and trail.stat().st_size > before):
        assert time.monotonic() < deadline, job.text()
        time.sleep(0.005)
    time.sleep(delay_s)
    if job.process.poll() is None:
        kill_all(rank for number, rank in find_ranks(job).items() if number in numbers)


def check_equal(home: Path, steps: int, ranks: int, name: str = "killed") -> None:
    """Every (rank, step) of the killed run, as often as it ran, equals the reference."""
    want, got = read_trail(home / "reference"), read_trail(home / name)
    assert sorted(want) == [(rank, step) for rank in range(ranks) for step in range(steps)]
    assert sorted(got) == sorted(want)
    for key, runs in got.items():
        assert all(run == want[key][0] for run in runs), (key, want[key], runs)


def check_samples(home: Path, steps: int, ranks: int, accumulate: int, name: str) -> None:
    """In the committed history each pass over the data uses every sample exactly once."""
    trail = read_trail(home / name)
    stream = [
        index
        for step in range(steps)
        for micro_batch in range(accumulate)
        for rank in range(ranks)
        for index in trail[rank, step][-1][1][micro_batch * BATCH : (micro_batch + 1) * BATCH]
    ]
    assert len(stream) == steps * accumulate * ranks * BATCH
    whole, rest = divmod(len(stream), SAMPLES)
    assert whole, "less than one pass"
    for number in range(whole):
        assert sorted(stream[number * SAMPLES : (number + 1) * SAMPLES]) == list(range(SAMPLES))
    assert len(set(stream[whole * SAMPLES :])) == rest
