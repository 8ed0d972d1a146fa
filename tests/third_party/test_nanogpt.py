"""nanoGPT's own train.py: it overwrites `ckpt.pt`, is killed during the save, and preempted.

`PERDURE_NANOGPT` names a checkout of karpathy/nanoGPT (tried with commit 3adf61e). Three lines are
patched, because it wants a GPU for each of several ranks. All its batches are the same, since it
does not save its random state.
"""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from perdure.files.own import examine
from tests.e2e.conftest import start  # noqa: F401  (a fixture)
from tests.e2e.exact import Start, find_ranks, jobs_in, kill_all
from tests.e2e.harness import Job
from tests.third_party.test_published import PATCHES

np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
CHECKOUT = os.environ.get("PERDURE_NANOGPT", "")
BLOCK, EVERY, RANKS = 8, 5, 2
OPTIONS = {
    "dataset": "tiny", "backend": "gloo", "device": "cpu", "compile": False, "dtype": "float32",
    "eval_iters": 1, "eval_interval": EVERY, "block_size": BLOCK, "batch_size": 2,
    "gradient_accumulation_steps": RANKS, "n_layer": 2, "n_head": 2, "n_embd": 384,
    "warmup_iters": 10, "lr_decay_iters": 500, "max_iters": 10**6,
}  # fmt: skip
pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long,
    pytest.mark.skipif(not CHECKOUT, reason="PERDURE_NANOGPT names no checkout of nanoGPT"),
]  # fmt: skip


def prepare(home: Path) -> None:
    """Copy and patch the script, and make a data set with one batch."""
    for name in ("train.py", "model.py", "configurator.py"):
        shutil.copy(Path(CHECKOUT) / name, home)
    subprocess.run(["sed", "-i", "-f", PATCHES / "nanoGPT.sed", home / "train.py"], check=True)
    data = home / "data" / "tiny"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        np.arange(BLOCK + 1, dtype=np.uint16).tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 32}))


def launch(start: Start, home: Path, begin: str) -> Job:  # noqa: F811
    args = [f"--{key}={value}" for key, value in ({"init_from": begin} | OPTIONS).items()]
    (home / "job.toml").write_text(
        f'script = "train.py"\nargs = {json.dumps(args)}\nnproc = {RANKS}\n'
        '[checkpoint]\nown = ["out/ckpt.pt"]\nown_copy = true\n'
    )
    return start("own", "-c", "job.toml")


def read_losses(text: str) -> dict[int, set[str]]:
    losses: dict[int, set[str]] = {}
    for step, loss in re.findall(r"iter (\d+): loss ([\d.]+)", text):
        losses.setdefault(int(step), set()).add(loss)
    return losses


def list_begun(text: str) -> list[int]:
    """Return the iteration at which each life that resumed began."""
    lives = re.split(r"Resuming training from out.*\n(?:.*Resuming training from out.*\n)?", text)
    return [int(found[1]) for one in lives[1:] if (found := re.search(r"step (\d+):", one))]


def wait_copy(job: Job, home: Path) -> int:
    """Wait for a copy that is newer than the job's newest life; return its iteration."""
    copy, began = home / "out.copy" / "ckpt.pt", max([*list_begun(job.text()), 0])
    job.wait_until(lambda: copy.exists() and read_step(copy) > began, "a copy")
    return read_step(copy)


def read_step(path: Path) -> int:
    return int(torch.load(path, weights_only=False)["iter_num"])


def kill_amid_a_save(job: Job, home: Path) -> int:
    """Kill rank 0 when `ckpt.pt` is cut; return the iteration of the copy."""
    while True:
        assert job.process.poll() is None, job.text()[-4000:]
        ranks = find_ranks(job)
        for process in ranks.values():
            process.suspend()
        if len(ranks) == RANKS and examine(str(home / "out" / "ckpt.pt")).state == "torn":
            break
        for process in ranks.values():
            process.resume()
        time.sleep(random.uniform(0.0, 0.05))
    step = read_step(home / "out.copy" / "ckpt.pt")
    kill_all([ranks.pop(0)])
    for process in ranks.values():
        process.resume()
    return step


def test_an_overwritten_file_is_torn_and_its_copy_takes_its_place(
    start: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    job = launch(start, tmp_path, "scratch")
    wait_copy(job, tmp_path)
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.text()[-4000:]

    job = launch(start, tmp_path, "resume")
    wanted = []
    for life in range(2):
        job.wait_until(lambda life=life: len(list_begun(job.text())) > life, f"life {life}")
        wait_copy(job, tmp_path)
        wanted.append(kill_amid_a_save(job, tmp_path))
    job.wait_until(lambda: len(list_begun(job.text())) > 2, "the last life")
    assert list_begun(job.text())[1:] == wanted, job.text()[-4000:]
    assert (tmp_path / "out.torn" / "ckpt.pt").exists()
    wait_copy(job, tmp_path)
    job.process.send_signal(signal.SIGTERM)  # Its only handler is Python's own.
    assert job.wait() == 0, job.text()[-4000:]
    again = launch(start, tmp_path, "resume")
    again.wait_until(lambda: len(list_begun(again.text())) > 3, "the next run")
    assert list_begun(again.text())[3] > max(wanted)
    again.process.send_signal(signal.SIGTERM)
    again.wait()
    losses = read_losses(again.text())  # Its output follows that of the runs before.
    reference = tmp_path / "reference"
    reference.mkdir()
    prepare(reference)
    with jobs_in(reference) as begin:
        job = launch(begin, reference, "scratch")
        job.wait_until(
            lambda: max([*read_losses(job.text()), 0]) >= max(losses), "as many iterations"
        )
        job.process.send_signal(signal.SIGTERM)
        job.wait()
    expected = read_losses(job.text())
    unequal = {step: (found, expected[step]) for step, found in losses.items()
               if found != expected[step]}  # fmt: skip
    assert not unequal, unequal
