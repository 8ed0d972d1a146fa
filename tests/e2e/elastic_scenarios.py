"""Scenarios of `elastic_world`: how they are made, run, and judged."""

import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.elastic_world import KILLED_AT

STEPS, BATCH, MICRO = 8, 16, 2
PIECE = 32
"""Scenarios that one process of the test run runs; another runs others meanwhile."""
Outcome = dict[str, Any]


def scenario(name: str, ranks: int, **more: Any) -> dict[str, Any]:
    base = {"name": name, "ranks": ranks, "steps": STEPS, "batch": BATCH, "micro_batch": MICRO}
    return base | {"timeout_s": 120} | more


def seeded(
    seed: int,
    sizes: tuple[int, ...] = (3, 4),
    places: tuple[str, ...] = KILLED_AT,
    **more: Any,
) -> dict[str, Any]:
    """Return a world of which all ranks but one die, anywhere."""
    chance = random.Random(seed)
    ranks = chance.choice(sizes)
    victims = chance.sample(range(ranks), ranks - 1)
    kill = {str(v): f"{chance.choice(places)} {chance.randrange(10)}" for v in victims}
    exact = chance.random() < 0.3
    return scenario(f"seed-{seed}", ranks, kill=kill, exact=exact, **more)


def run_scenarios(
    scenarios: Sequence[dict[str, Any]], folder: Path, at_once: int = 1
) -> dict[str, Outcome]:
    """Run every scenario below one process: importing torch is what takes long."""
    for one in scenarios:
        one["out"] = str(folder / f"{one['name']}-{{}}.jsonl")
        one["memory"] = str(folder / "memory" / one["name"])
        one["log"], one["answer"] = (str(folder / f"{one['name']}.{x}") for x in ("log", "json"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.elastic_world", str(at_once)],
        input="".join(json.dumps(one) + "\n" for one in scenarios),
        capture_output=True, text=True, timeout=sum(one["timeout_s"] for one in scenarios),
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    logs = {one["name"]: read_text(one["log"]) for one in scenarios}
    last = [f"{name}: {log[-1000:]}" for name, log in logs.items() if log]
    assert done.returncode == 0, "\n".join([done.stderr[-1000:], *last[-3:]])
    found = {}
    for one in scenarios:
        rows = {
            path.stem.rsplit("-", 1)[1]: [
                json.loads(line) for line in path.read_text().splitlines()
            ]
            for path in folder.glob(f"{one['name']}-*.jsonl")
        }
        answer = json.loads(Path(one["answer"]).read_text())
        found[one["name"]] = {
            "scenario": one, "answer": answer, "rows": rows, "log": logs[one["name"]],
        }  # fmt: skip
    return found


def read_text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


class Outcomes(dict[str, Outcome]):
    """The outcome of each scenario. If one of a batch is asked for, the batch is run.

    Processes that test at the same time share `folder`, so that one of them runs a batch.
    """

    def __init__(self, batches: Sequence[Sequence[dict[str, Any]]], folder: Path) -> None:
        """Run nothing yet."""
        super().__init__()
        self._batches, self._folder = batches, folder

    def __missing__(self, name: str) -> Outcome:
        """Read the batch of which `name` is one, and run it if nobody has run it before."""
        names = [[one["name"] for one in batch] for batch in self._batches]
        number = next(i for i, batch in enumerate(names) if name in batch)
        done = self._folder / f"{number}.json"
        with open(self._folder / f"{number}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                found = self._run(self._batches[number], self._folder / str(number))
                done.write_text(json.dumps(found))
        self.update(json.loads(done.read_text()))
        return self[name]

    @staticmethod
    def _run(batch: Sequence[dict[str, Any]], folder: Path) -> dict[str, Outcome]:
        """Run two of a batch at once: each mostly waits."""
        shutil.rmtree(folder, ignore_errors=True)  # An earlier run of the batch may have failed.
        folder.mkdir()
        return run_scenarios(batch, folder, at_once=2)


def make_outcomes(
    factory: pytest.TempPathFactory, name: str, batches: Sequence[Sequence[dict[str, Any]]]
) -> Outcomes:
    """Return outcomes that the processes of one run of pytest share, in pieces of a batch each."""
    batches = [batch[at : at + PIECE] for batch in batches for at in range(0, len(batch), PIECE)]
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return Outcomes(batches, factory.mktemp(name))
    folder = factory.getbasetemp().parent / name
    folder.mkdir(exist_ok=True)
    return Outcomes(batches, folder)


def judge(outcome: Outcome) -> None:
    """Survivors have committed every step, and replicas agree at each of them.

    Who is left out while it lives may have been the only one to end the step's last reduction: the
    others make that step again without it, so that its last state differs by rounding, and only
    its losses are compared.

    Raises:
        AssertionError: they have not.
    """
    answer, rows, ranks = outcome["answer"], outcome["rows"], outcome["scenario"]["ranks"]
    assert not answer.get("hung"), (answer, outcome["log"][-2000:])
    harmed = (outcome["scenario"].get(harm, {}) for harm in ("kill", "lose", "hang", "capture"))
    victims = {*(rank for ranks in harmed for rank in ranks), *map(str, answer["dismissed"])}
    ends = {rank: code for rank, code in answer["ends"].items() if rank not in victims}
    assert set(ends.values()) == {0}, outcome["log"][-2000:]
    survivors = [rank for rank in ends if int(rank) < ranks]
    assert all([row["step"] for row in rows[r]] == list(range(STEPS)) for r in survivors)
    hashes: dict[tuple[int, str], set[str]] = {}
    losses: dict[int, set[tuple[str, ...]]] = {}
    left_out = str(outcome["scenario"].get("cut", ""))
    last = rows[left_out][-1] if left_out else None
    for row in (row for of_rank in rows.values() for row in of_rank):
        losses.setdefault(row["step"], set()).add(tuple(row["losses"]))
        if row is last:
            continue
        hashes.setdefault((row["hash_of"], row["shard"]), set()).add(row["hash"])
    assert [len(found) for found in hashes.values()] == [1] * len(hashes)
    assert [len(found) for found in losses.values()] == [1] * STEPS


def find_samples(outcome: Outcome) -> dict[tuple[int, int], list[int]]:
    """Return the samples of each (step, micro-batch) that somebody computed.

    Raises:
        AssertionError: a micro-batch had other samples when it was redone.
    """
    samples: dict[tuple[int, int], list[int]] = {}
    for rows in outcome["rows"].values():
        for step, number, *indices in (used for row in rows for used in row["used"]):
            assert samples.setdefault((step, number), indices) == indices
    return samples
