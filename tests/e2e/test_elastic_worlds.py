"""Ranks of elastic worlds, really killed: survivors go on, replicas stay equal, data is whole."""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.plan.microbatches import plan_batches
from tests.e2e.elastic_world import KILLED_AT

EVERY = 3
STEPS, BATCH, MICRO = 8, 16, 2
PLACES = KILLED_AT[:6]
"""Where a rank of an undisturbed world comes by."""

FOLLOWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "exact": {"exact": True},
    "donor-dies": {"kill": {"0": "backward 3"}},
    "follower-dies": {"kill": {"3": "applied 1"}},
}
"""A rank takes the members' state while they train, and keeps up until it is called."""


def scenario(name: str, ranks: int, **more: Any) -> dict[str, Any]:
    base = {"name": name, "ranks": ranks, "steps": STEPS, "batch": BATCH, "micro_batch": MICRO}
    return base | {"timeout_s": 60} | more


def fixed() -> list[dict[str, Any]]:
    kills = [(place, {str(i % 3): f"{place} 4"}) for i, place in enumerate(PLACES)]
    # The second to die serves the store at which the others meet after the first one's death.
    nested = [(p, {"0": "reduced 3", "1": f"{p} 1"}) for p in KILLED_AT[6:]]
    return [
        scenario("whole", 2),
        *(scenario(f"kill-{place}", 3, kill=kill) for place, kill in kills),
        *(scenario(f"again-{place}", 4, kill=kill) for place, kill in nested),
        scenario("join", 2, joins=1),
        scenario("replace", 3, joins=1, join_epoch=1, kill={"1": "backward 9"}),
        *(scenario(f"exact-{size}", size, exact=True) for size in (1, 2, 4)),
        *(
            scenario(f"follow-{name}", 3, joins=1, follow=True, pace_s=0.05, **more)
            for name, more in FOLLOWS.items()
        ),
        scenario(
            "exact-killed", 4, exact=True, joins=1, join_epoch=1,
            kill={"0": "reduced 3", "2": "optimizer 5"},
        ),
        *(
            scenario(f"shard-{n}", 4, shard=2, joins=1, join_epoch=1, kill={str(n): place})
            for n, place in enumerate(("forward 5", "backward 9", "reduced 41", "applied 3"))
        ),
        *(
            scenario(f"sole-{n}", 3, shard=0, every=EVERY, joins=n, join_epoch=1,
                     kill={str(n): place, "2": "bring 2"} if n == 1 else {str(n): place})
            for n, place in enumerate(("applied 4", "backward 17"))
        ),
        scenario("sole-node", 3, shard=0, every=EVERY, nodes=3, kill={"1": "backward 17"}),
    ]  # fmt: skip


def seeded(seed: int) -> dict[str, Any]:
    """Return a world of 3 or 4 ranks of which all but one die, anywhere."""
    chance = random.Random(seed)
    ranks = chance.choice([3, 4])
    victims = chance.sample(range(ranks), ranks - 1)
    kill = {str(v): f"{chance.choice(KILLED_AT)} {chance.randrange(10)}" for v in victims}
    return scenario(f"seed-{seed}", ranks, kill=kill, exact=chance.random() < 0.3)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run every scenario in one process: importing torch is what takes long."""
    folder = tmp_path_factory.mktemp("elastic")
    scenarios = [*fixed(), *(seeded(seed) for seed in range(12))]
    for one in scenarios:
        one["out"] = str(folder / f"{one['name']}-{{}}.jsonl")
        one["memory"] = str(folder / "memory" / one["name"])
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.elastic_world"],
        input="".join(json.dumps(one) + "\n" for one in scenarios),
        capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    found = {}
    for one, answer in zip(scenarios, answers, strict=True):
        rows = {
            path.stem.rsplit("-", 1)[1]: [
                json.loads(line) for line in path.read_text().splitlines()
            ]
            for path in folder.glob(f"{one['name']}-*.jsonl")
        }
        found[one["name"]] = {"scenario": one, "answer": answer, "rows": rows, "log": done.stderr}
    return found


NAMES = [one["name"] for one in fixed()] + [f"seed-{seed}" for seed in range(12)]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", [name for name in NAMES if "sole" not in name])
def test_survivors_commit_every_step_and_agree(outcomes: dict[str, Any], name: str) -> None:
    outcome = outcomes[name]
    answer, rows, ranks = outcome["answer"], outcome["rows"], outcome["scenario"]["ranks"]
    assert not answer.get("hung"), (answer, outcome["log"][-2000:])
    victims = outcome["scenario"].get("kill", {})
    ends = {rank: code for rank, code in answer["ends"].items() if rank not in victims}
    assert set(ends.values()) == {0}, outcome["log"][-2000:]
    survivors = [rank for rank in ends if int(rank) < ranks]
    assert all([row["step"] for row in rows[r]] == list(range(STEPS)) for r in survivors)
    hashes: dict[tuple[int, str], set[str]] = {}
    losses: dict[int, set[tuple[str, ...]]] = {}
    for row in (row for of_rank in rows.values() for row in of_rank):
        hashes.setdefault((row["hash_of"], row["shard"]), set()).add(row["hash"])
        losses.setdefault(row["step"], set()).add(tuple(row["losses"]))
    assert [len(found) for found in hashes.values()] == [1] * len(hashes)
    assert [len(found) for found in losses.values()] == [1] * STEPS


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1000)
def test_what_a_micro_batch_has_does_not_depend_on_the_world(outcomes: dict[str, Any]) -> None:
    """And where nobody died, each was computed once, by one rank."""
    plan = plan_batches(BATCH, MICRO)
    samples: dict[tuple[int, int], list[int]] = {}
    for name, outcome in outcomes.items():
        computed = [u for rows in outcome["rows"].values() for row in rows for u in row["used"]]
        for step, number, *indices in computed:
            assert samples.setdefault((step, number), indices) == indices
        if name == "whole":
            once = sorted((step, number) for step, number, *_ in computed)
            assert once == [(s, m) for s in range(STEPS) for m in range(plan.count)]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1000)
def test_exact_losses_and_parameters_are_bitwise_equal(outcomes: dict[str, Any]) -> None:
    curves, ends = set(), set()
    for name in ("exact-1", "exact-2", "exact-4", "exact-killed", "follow-exact"):
        for rows in outcomes[name]["rows"].values():
            if rows and rows[0]["step"] == 0 and len(rows) == STEPS:
                curves.add(tuple(tuple(row["losses"]) for row in rows))
                ends.add(rows[-1]["hash"])
    assert len(curves) == len(ends) == 1


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1000)
def test_sharded_losses_are_the_replicated_ones(outcomes: dict[str, Any]) -> None:
    """But for the order in which gradients of another number of ranks are added."""

    def curve(name: str) -> list[float]:
        rows = next(rows for rows in outcomes[name]["rows"].values() if len(rows) == STEPS)
        return [float.fromhex(loss) for row in rows for loss in row["losses"]]

    for name in (n for n in NAMES if "shard" in n):
        assert curve(name) == pytest.approx(curve("whole"), rel=1e-4), name


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", [name for name in NAMES if "sole" in name])
def test_a_lost_sole_shard_costs_at_most_an_interval(outcomes: dict[str, Any], name: str) -> None:
    """All go back to one snapshot, take the same steps again, and leave no snapshot behind."""
    outcome = outcomes[name]
    assert not outcome["answer"].get("hung"), outcome["log"][-2000:]
    victims = outcome["scenario"]["kill"]
    rows = {r: rows for r, rows in outcome["rows"].items() if r not in victims and int(r) < 3}
    assert rows
    whole = {r["step"]: r["losses"] for r in outcomes["whole"]["rows"]["0"]}
    for mine in rows.values():
        steps = [row["step"] for row in mine]
        assert set(steps) == set(range(STEPS))
        back = [a - b + 1 for a, b in itertools.pairwise(steps) if b != a + 1]
        assert all(0 < steps_back <= EVERY for steps_back in back)
        for row in mine:
            got, wanted = (
                [float.fromhex(x) for x in losses] for losses in (row["losses"], whole[row["step"]])
            )
            assert got == pytest.approx(wanted, rel=1e-4)
    left = list(Path(outcome["scenario"]["memory"]).glob("*/m*.head"))
    assert {path.name.split("-")[0] for path in left} <= {f"m{victim}" for victim in victims}


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", ["whole", "exact"])
def test_who_has_followed_the_world_joins_without_a_transfer_of_state(
    outcomes: dict[str, Any], name: str
) -> None:
    outcome = outcomes[f"follow-{name}"]
    assert [step >= 0 for step in outcome["answer"]["ready"]] == [True]
    assert not [why for why in outcome["answer"]["reasons"] if "receive the state" in why]
    assert outcome["rows"]["3"][0]["step"] > 0
    assert outcome["rows"]["3"][-1]["world"] == [0, 1, 2, 3]
