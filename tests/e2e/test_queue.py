"""`perdure queue` with real processes: a runner that is killed, files that prove, devices."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.model.codec import encode
from perdure.model.queue import Attempt, Item, Put
from perdure.service.jobfiles import read_document
from perdure.service.queue.runner import Runner
from perdure.service.queue.store import QueueStore
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[QueueStore]:
    made = QueueStore(str(tmp_path / "home"), "q")
    yield made
    left = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("PERDURE_QUEUE") == str(made.root)
            mine |= any(str(made.root) in word for word in process.cmdline())
        except psutil.Error:
            continue
        if mine and process.status() != psutil.STATUS_ZOMBIE:
            left.append(process.cmdline())
            process.kill()
    assert left == []


def put(store: QueueStore, *items: Item) -> None:
    with store.writing() as writer:
        writer.append(*(Put(time.time(), item) for item in items))


def item(name: str, script: str, folder: Path, **fields: Any) -> Item:
    return Item(name=name, command=("sh", "-c", script), cwd=str(folder), **fields)


def run_here(store: QueueStore, slots: tuple[str, ...] = ("cpu-0",)) -> dict[str, str]:
    book = Runner(store, slots, lambda text: None).run()
    return {name: line.state for name, line in book.lines.items()}


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def command(store: QueueStore, *args: str) -> list[str]:
    return [sys.executable, "-m", "perdure", "queue", *args, "--queue", store.name]


def test_a_runner_killed_at_any_instant_loses_nothing_and_starts_nothing_twice(
    store: QueueStore, tmp_path: Path
) -> None:
    names = [f"i{number}" for number in range(8)]
    scripts = [f"echo {name} >> starts; sleep 0.2" for name in names]
    scripts[-1] += "; until [ -e go ]; do sleep 0.05; done"  # Five kills come before the end.
    put(store, *(item(*pair, tmp_path, retries=0) for pair in zip(names, scripts, strict=True)))
    env = dict(os.environ, PERDURE_HOME=store.home)
    code, kills, chance = -9, 0, random.Random(7)
    while code != 0:
        runner = subprocess.Popen(
            command(store, "run", "--slots", "2"), env=env, stderr=subprocess.DEVNULL
        )
        try:
            code = runner.wait(chance.uniform(0.3, 1.2) if kills < 5 else PATIENCE_S)
            assert (code, kills) == (0, 5)
        except subprocess.TimeoutExpired:
            runner.kill()
            runner.wait()
            kills += 1
            assert kills <= 5, "the queue does not end"
        if kills == 5:
            (tmp_path / "go").touch()
    assert Counter((tmp_path / "starts").read_text().split()) == dict.fromkeys(names, 1)


def test_of_two_holders_of_one_attempt_one_leaves(store: QueueStore, tmp_path: Path) -> None:
    folder = store.attempt("a", 1)
    folder.mkdir(parents=True)
    given = Attempt(
        item=item("a", "echo x >> starts", tmp_path), attempt=1, slots=(), home=store.home
    )
    (folder / "attempt.json").write_bytes(encode(given))
    words = [sys.executable, "-m", "perdure.service.queue.holder", str(folder)]
    holders = [subprocess.Popen(words) for _ in range(2)]
    assert [holder.wait(PATIENCE_S) for holder in holders] == [0, 0]
    assert (tmp_path / "starts").read_text() == "x\n"


def test_a_holder_that_was_killed_leaves_its_command_which_is_waited_for(
    store: QueueStore, tmp_path: Path
) -> None:
    script = "touch begun; until [ -e go ]; do sleep 0.05; done; echo x > best"
    put(store, item("a", script, tmp_path, done=("best",), retries=0))
    runner = Runner(store, ("cpu-0",), lambda text: None)
    runner.step()
    claim = store.attempt("a", 1) / "claim.json"
    wait_until((tmp_path / "begun").exists, "the command")
    holder = psutil.Process(json.loads(claim.read_text())["holder"])
    holder.kill()
    wait_until(lambda: is_gone(holder), "end of the holder")
    runner.step()
    assert store.read().lines["a"].state == "running"
    (tmp_path / "go").touch()
    assert runner.run().lines["a"].state == "done"
    assert len(list(claim.parent.parent.iterdir())) == 1


def test_files_decide_failures_are_tried_again_and_time_runs_out(
    store: QueueStore, tmp_path: Path
) -> None:
    (tmp_path / "there").write_text("x")
    put(
        store,
        item("skipped", "echo x > wrong", tmp_path, done=("there",)),
        item("liar", "true", tmp_path, done=("nowhere/*.pt",), retries=0),
        item("second", "test -e mark || { touch mark; exit 1; }", tmp_path, backoff_s=0.05),
        item("blocked", "true", tmp_path, after=("liar",)),
        item("slow", "sleep 86400", tmp_path, timeout_s=0.2, retries=0),
        Item(name="none", command=("no-such-program",), cwd=str(tmp_path), retries=0),
    )
    states = run_here(store, ("cpu-0", "cpu-1"))
    assert states == {
        "skipped": "done", "liar": "failed", "second": "done", "blocked": "waiting",
        "slow": "failed", "none": "failed",
    }  # fmt: skip
    assert not (tmp_path / "wrong").exists()
    lines = store.book.lines
    assert "ran out of time" in lines["slow"].reason
    assert "not there: nowhere/*.pt" in lines["liar"].reason
    assert "exit code 127" in lines["none"].reason


def test_a_torn_record_is_cut_off_and_the_rest_counts(store: QueueStore, tmp_path: Path) -> None:
    put(store, item("a", "true", tmp_path))
    journal = store.root / "journal.jsonl"
    journal.write_bytes(journal.read_bytes() + b'{"type":"Remo')
    again = QueueStore(store.home, store.name)
    put(again, item("b", "true", tmp_path))
    assert list(QueueStore(store.home, store.name).read().lines) == ["a", "b"]
    assert read_document(str(journal), dict) is None
