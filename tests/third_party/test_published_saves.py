"""Published libraries save and resume by themselves: killed during a save, cut, and preempted.

The losses of all lives equal those of a run that nothing disturbed. `make third-party` installs the
libraries.
"""

import importlib.util
import json
import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import start  # noqa: F401  (a fixture)
from tests.e2e.exact import Start, find_ranks, jobs_in, kill_all
from tests.e2e.own_kills import read_lives

SCRIPT = Path(__file__).resolve().parent / "scripts" / "own_saves.py"
RANKS, EVERY = 2, 3
PATTERNS = {
    "deepspeed": "out/global_step*",
    "lightning": "out/*.ckpt",
    "accelerate": "out/checkpoint-*",
    "transformers": "out/checkpoint-*",
    "torchtitan": "out/step-*",
    "timm": "out/*.pth.tar",
}
LAST = ("last.ckpt", "last.pth.tar")
"""Names of a file that a library begins at, whatever else is there."""
STATES = {".pt", ".bin", ".safetensors", ".ckpt", ".distcp", ".tar"}
"""Ends of the names of files with tensors."""
pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long]


class Published:
    """A job whose script saves by a library at every third step."""

    def __init__(self, start: Start, home: Path, form: str, name: str = "own") -> None:  # noqa: F811
        """Start it, or start it again."""
        self.home, self.pattern = home, PATTERNS[form]
        (home / "job.toml").write_text(
            f"script = {json.dumps(str(SCRIPT))}\nargs = {json.dumps([form, str(EVERY)])}\n"
            f"nproc = {RANKS}\nenv = {{ DS_ACCELERATOR = 'cpu' }}\n"
            f"[checkpoint]\nown = {json.dumps([self.pattern])}\n[restart]\nmax_restarts = 50\n"
        )
        self.job = start(name, "-c", "job.toml")

    def wait_saves(self, life: int, count: int = 2) -> None:
        self.job.wait_until(
            lambda: (
                len(lives := read_lives(self.home)) > life
                and sum(word == "saved" for word, _ in lives[life]) >= count
            ),
            f"{count} saves of life {life}",
        )

    def stop_ranks(self, life: int, instant: str) -> dict[int, psutil.Process]:
        """Stop all ranks when rank 0 has noted `instant` last."""
        while True:
            assert self.job.process.poll() is None, self.job.text()[-4000:]
            ranks = {number: process for number, process in find_ranks(self.job).items()
                     if f" g{life} " in process.cmdline()[0]}  # fmt: skip
            for process in ranks.values():
                process.suspend()
            if len(ranks) == RANKS and read_lives(self.home)[life][-1][0] == instant:
                return ranks
            for process in ranks.values():
                process.resume()
            time.sleep(random.uniform(0.0, 0.05))

    def kill_one(self, ranks: dict[int, psutil.Process], victim: int) -> None:
        kill_all([ranks.pop(victim)])
        for process in ranks.values():
            process.resume()

    def finish(self) -> None:
        (self.home / "enough").touch()
        assert self.job.wait() == 0, self.job.text()[-4000:]
        (self.home / "enough").unlink()

    def locate_newest(self, step: int) -> Path:
        """Return the checkpoint that the library loads, which is that of `step`."""
        for last in (self.home / "out" / name for name in LAST):
            if last.exists():
                return last
        paths = self.home.glob(self.pattern)
        return next(p for p in paths if re.findall(r"\d+", p.name)[-1] == str(step))


def read_losses(home: Path) -> dict[int, set[str]]:
    """Return each step's losses of all lives."""
    losses: dict[int, set[str]] = {}
    for line in (home / "losses").read_text().splitlines():
        step, loss = line.split()
        losses.setdefault(int(step), set()).add(loss)
    return losses


def assert_equal_to_an_undisturbed_run(home: Path, form: str) -> None:
    found = read_losses(home)
    (home / "reference").mkdir()
    with jobs_in(home / "reference") as begin:
        reference = Published(begin, home / "reference", form)
        path = home / "reference" / "losses"
        reference.job.wait_until(
            lambda: path.exists() and max(read_losses(path.parent), default=0) > max(found),
            "as many steps",
        )
        reference.finish()
    wanted = read_losses(path.parent)
    unequal = {step: (losses, wanted[step]) for step, losses in found.items()
               if losses != wanted[step]}  # fmt: skip
    assert not unequal, unequal


def list_saved(home: Path, life: int) -> list[int]:
    """Return the steps at which a life began or has saved."""
    return [step for word, step in read_lives(home)[life] if word in ("began", "saved")]


@pytest.mark.parametrize("form", PATTERNS)
def test_kills_a_cut_and_a_preemption_cost_no_whole_checkpoint(
    start: Start,  # noqa: F811
    tmp_path: Path,
    form: str,
) -> None:
    if importlib.util.find_spec(form) is None:  # An import of timm would want torchvision.
        pytest.skip(f"no {form}: make third-party")
    own, chance = Published(start, tmp_path, form), random.Random(form)
    for life, victim in enumerate((1, 0)):
        own.wait_saves(life)
        ranks = own.stop_ranks(life, "saving")
        begun = read_lives(tmp_path)[life][-1][1]
        whole = max(list_saved(tmp_path, life))
        own.kill_one(ranks, victim)
        own.wait_saves(life + 1)
        began = list_saved(tmp_path, life + 1)[0]
        assert whole <= began <= begun, own.job.text()[-4000:]

    ranks = own.stop_ranks(2, "saved")
    *_, before, newest = list_saved(tmp_path, 2)
    cut = own.locate_newest(newest)
    files = [path for path in (cut.rglob("*") if cut.is_dir() else [cut]) if path.is_file()]
    file = chance.choice([path for path in files if path.suffix in STATES])
    with file.open("rb+") as opened:
        opened.truncate(file.stat().st_size // 2)
    own.kill_one(ranks, 0)
    own.wait_saves(3)
    wanted = newest if cut.name == "last.ckpt" else before  # The same step has another file.
    assert list_saved(tmp_path, 3)[0] == wanted, own.job.text()[-4000:]
    assert (tmp_path / "out.torn" / cut.name).exists()

    own.job.process.send_signal(signal.SIGTERM)
    assert own.job.wait() == 0, own.job.text()[-4000:]
    whole, latest = max(list_saved(tmp_path, 3)), max(read_losses(tmp_path))
    if form == "transformers":  # `enable_jit_checkpoint` saves 3 s after SIGTERM, at any step.
        whole = latest - 1
    own = Published(start, tmp_path, form)
    own.wait_saves(4)
    assert whole <= list_saved(tmp_path, 4)[0] <= latest, own.job.text()[-4000:]
    own.finish()
    assert_equal_to_an_undisturbed_run(tmp_path, form)
