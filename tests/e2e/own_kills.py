"""A script with declared checkpoints is killed again and again, beside an exact account.

At each kill, the test stops all ranks first and loads the checkpoints on the disk one by one. The
next life has to begin at the newest one that loads. A survivor may finish its save.
"""

import contextlib
import json
import random
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from torch.distributed.checkpoint import CheckpointException

from tests.e2e.exact import Start, find_ranks
from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.scripts import own_saver

DECLARED = {
    "torch": "out/ckpt-*.pt",
    "lightning": "out/*.ckpt",
    "safetensors": "out/*.safetensors",
    "trainer": "out/checkpoint-*",
    "deepspeed": "out/global_step*",
    "megatron": "out/iter_*",
    "dcp": "out/step-*",
    "overwritten": "out/ckpt.pt",
}
SHARED = own_saver.SHARED
"""Formats of which each rank writes a part: no survivor can finish a save alone."""
WITHIN_S = 1.0
"""Seconds between the first save of a life and the latest instant of a kill."""
_LOADED_MAX = 8
"""Newest checkpoints that are loaded at a kill."""


@dataclass
class Account:
    """What kills in one format have shown."""

    kills: int = 0
    writers: int = 0
    """Kills of the rank that writes."""
    amid: int = 0
    """Kills of another rank during a save of the writer."""
    finished: int = 0
    """Such saves that the writer finished."""
    behind: int = 0
    """Kills during a save that overwrites the one before, whose copy was not complete."""
    moved: int = 0
    faults: list[str] = field(default_factory=list)


def run_saver(
    start: Start, folder: Path, form: str, own: tuple[str, ...], *keys: str, ranks: int = 1
) -> Job:
    """Start the script that saves in `form` at every step."""
    rows = "\n".join((f"own = {json.dumps(own)}", *keys))
    script = SCRIPTS / "own_saver.py"
    (folder / "job.toml").write_text(
        f'script = "{script}"\nargs = ["{form}", "out"]\nnproc = {ranks}\n[checkpoint]\n{rows}\n'
        "[restart]\nmax_restarts = 1000\nwindow_max = 1000\n"
    )
    return start("own", "-c", "job.toml")


def read_lives(folder: Path) -> list[list[tuple[str, int]]]:
    """Return what each life did, oldest first."""
    lives: list[list[tuple[str, int]]] = []
    path = folder / "trail"
    for line in path.read_text().splitlines() if path.exists() else ():
        word, step = line.split()
        if word == "began":
            lives.append([])
        lives[-1].append((word, int(step)))
    return lives


def wait_saves(job: Job, folder: Path, life: int, count: int) -> None:
    """Wait until life number `life` has saved `count` times."""

    def has_saved() -> bool:
        lives = read_lives(folder)
        return len(lives) > life and sum(word == "saved" for word, _ in lives[life]) >= count

    job.wait_until(has_saved, f"{count} saves of life {life}")


def list_loadable(form: str, folder: Path, ranks: int) -> list[int]:
    """Return the steps of the newest checkpoints that load, the newest first.

    A script of DeepSpeed or Megatron-LM takes the one that its pointer names, if it loads.
    """
    paths = own_saver.list_saved(form, str(folder / "out"))
    if form in own_saver.POINTERS:
        found = (folder / "out").glob(DECLARED[form].removeprefix("out/"))
        paths += sorted(map(str, found), key=lambda p: int(re.findall(r"\d+", p)[-1]), reverse=True)
    if form == "overwritten":
        paths.append(str(folder / "out.copy" / "ckpt.pt"))
    steps = [load(form, path, ranks) for path in paths[:_LOADED_MAX]]
    return [step for step in steps if step is not None]


def load(form: str, path: str, ranks: int) -> int | None:
    """Return the step of a checkpoint; None if it does not load."""
    with contextlib.suppress(Exception, CheckpointException), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # That no process group is there.
        return own_saver.load(form, path, ranks)
    return None


def kill_again_and_again(
    start: Start,
    folder: Path,
    form: str,
    kills: int,
    chance: random.Random,
    *,
    ranks: int = 2,
    kill_last: Callable[[Job], None] | None = None,
) -> Account:
    """Kill any rank of a job `kills` times, and at last by `kill_last`; return what was found."""
    keys = ("own_copy = true",) if form == "overwritten" else ()
    job = run_saver(start, folder, form, (DECLARED[form],), *keys, ranks=ranks)
    account = Account()
    for life in range(kills):
        wait_life(job, folder, life)
        time.sleep(chance.uniform(0.0, WITHIN_S))
        victim = chance.randrange(ranks)
        before, begun = kill_one(job, folder, form, life, victim, ranks)
        wait_life(job, folder, life + 1)
        lives, whole = read_lives(folder), max(before[:1], default=0)
        after, survives = lives[life + 1][0][1], victim > 0 and form not in SHARED
        account.kills += 1
        account.writers += victim == 0
        if begun > whole and survives:
            account.amid += 1
            account.finished += after >= begun
        ended = [step for word, step in lives[life] if word == "saved"]
        account.behind += after < max(ended, default=0)
        latest = lives[life][-1][1] if victim > 0 or form in SHARED else whole
        if not whole <= after <= latest:
            text = f"kill {life} of rank {victim}: {before} load, {begun} begun, life at {after}"
            account.faults.append(text)
    if kill_last is not None:
        kill_last(job)
    (folder / "enough").touch()
    code = job.wait()
    if code or job.state()["restarts"] != kills + (kill_last is not None):
        account.faults.append(
            f"code {code}, {job.state()['restarts']} restarts: {job.text()[-2000:]}"
        )
    account.faults += check_disk(form, folder, ranks, account)
    return account


def wait_life(job: Job, folder: Path, life: int) -> None:
    """Wait until a life has loaded and begun a save."""
    job.wait_until(
        lambda: len(lives := read_lives(folder)) > life and len(lives[life]) > 1, f"life {life}"
    )


def kill_one(
    job: Job, folder: Path, form: str, life: int, victim: int, ranks: int
) -> tuple[list[int], int]:
    """Stop all ranks, look at the disk, and kill one.

    Return the steps that load, and the newest step whose save had begun.
    """
    found: dict[int, psutil.Process] = {}

    def has_all() -> bool:
        found.clear()
        with contextlib.suppress(psutil.Error, IndexError):  # One has just ended.
            found.update(find_ranks(job))
            title = f" g{life} "
            return len(found) == ranks and all(title in p.cmdline()[0] for p in found.values())
        return False

    job.wait_until(has_all, f"the ranks of life {life}")
    for process in found.values():
        process.suspend()
    try:
        seen = list_loadable(form, folder, ranks), read_lives(folder)[life][-1][1]
        found[victim].kill()
    finally:
        for process in found.values():
            with contextlib.suppress(psutil.Error):
                process.resume()
    return seen


def check_disk(form: str, folder: Path, ranks: int, account: Account) -> list[str]:
    """Return whole checkpoints that were moved, and those that are gone though they were saved."""
    moved = [path for path in (folder / "out.torn").glob("*") if "latest" not in path.name]
    account.moved = len(moved)
    steps = [(path.name, load(form, str(path), ranks)) for path in moved]
    faults = [f"{name} was moved, and loads" for name, step in steps if step is not None]
    if form == "overwritten":
        return faults
    saved = {step for life in read_lives(folder) for word, step in life if word == "saved"}
    left = {load(form, str(path), ranks) for path in (folder / "out").glob("*")}
    return faults + [f"step {step} was saved, and is gone" for step in sorted(saved - left)]
