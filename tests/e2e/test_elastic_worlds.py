"""Ranks of elastic worlds, really killed: survivors go on, replicas stay equal, data is whole."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from perdure.plan.elastic.microbatches import plan_batches
from tests.e2e.elastic_scenarios import (
    BATCH,
    MICRO,
    STEPS,
    Outcomes,
    find_samples,
    judge,
    make_outcomes,
    scenario,
    seeded,
)
from tests.e2e.elastic_world import FORMED_AT, KILLED_AT

EVERY = 3
SEEDS = 9
PLACES = KILLED_AT[:6]
"""Where a rank of an undisturbed world comes by."""

FLAPS = ("backward", "reduce", "applied")
"""Where a member's connections end although it lives."""
FOLLOWS: dict[str, dict[str, Any]] = {
    "whole": {},
    "exact": {"exact": True},
    "donor-dies": {"kill": {"0": "backward 3"}},
    "follower-dies": {"kill": {"3": "applied 1"}},
}
"""A rank takes the members' state while they train, and keeps up until it is called."""

_TWICE: dict[str, Any] = {"kill": {"3": "backward 7", "2": "optimizer 4"}}
TIED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("one", 1, {}),
    ("end-lost", 3, {"every": EVERY, "nodes": 3, "kill": {"0": "backward 40"}}),
    ("head-lost", 3, {"every": EVERY, "nodes": 3, "kill": {"2": "reduced 40"}}),
    ("spread", 5, {"kill": {"2": "optimizer 3"}}),
    ("morph", 4, {"stages": 2, "joins": 1, "join_epoch": 1, **_TWICE}),
    ("follow", 4, {"stages": 2, "joins": 1, "follow": True, "pace_s": 0.1}),
    ("zero", 4, {"stages": 2, "schedule": "zero-bubble", **_TWICE}),
    ("interleaved", 4, {"stages": 2, "schedule": "interleaved", **_TWICE}),
    ("cut", 3, {"shapes": (3, 1, 3), "rest_s": 0.5, "pace_s": 0.03}),
)
"""Blocks at both ends share a matrix, and two between all that they have."""


def fixed() -> list[dict[str, Any]]:
    kills = [(place, {str(i % 3): f"{place} 4"}) for i, place in enumerate(PLACES)]
    # The second to die serves the store at which the others meet after the first one's death.
    nested = [(p, {"0": "reduced 3", "1": f"{p} 1"}) for p in FORMED_AT]
    return [
        scenario("whole", 2),
        *(scenario(f"kill-{place}", 3, kill=kill) for place, kill in kills),
        *(scenario(f"again-{place}", 4, kill=kill) for place, kill in nested),
        *(scenario(f"flap-{place}", 3, flap={"1": f"{place} 4"}) for place in FLAPS),
        scenario("cut", 3, cut=0, pace_s=0.05),
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
            for n, place in enumerate(("forward 5", "reduced 41", "applied 3"))
        ),
        scenario("shard-again", 4, shard=2, kill={"2": "reduced 41", "1": "connect 1"}),
        scenario(
            "exact-shard", 4, exact=True, shard=2, joins=1, join_epoch=1, kill={"1": "backward 9"}
        ),
        *(
            scenario(f"sole-{n}", 3, shard=0, every=EVERY, joins=n, join_epoch=1,
                     kill={str(n): place, "2": "bring 2"} if n == 1 else {str(n): place})
            for n, place in enumerate(("applied 4", "backward 17"))
        ),
        scenario("sole-node", 3, shard=0, every=EVERY, nodes=3, kill={"1": "backward 17"}),
        scenario("stages-one", 1, stages=2, exact=True),
        scenario("stages-morph", 4, stages=2, exact=True, joins=1, join_epoch=1,
                 kill={"3": "backward 7", "2": "optimizer 4"}),
        scenario("stages-follow", 4, stages=2, exact=True, joins=1, follow=True, pace_s=0.1),
        scenario("stages-zero", 4, stages=2, exact=True, schedule="zero-bubble",
                 kill={"3": "backward 7", "2": "optimizer 4"}),
        scenario("stages-interleaved", 4, stages=2, exact=True, schedule="interleaved", joins=1,
                 join_epoch=1, kill={"3": "backward 7", "2": "optimizer 4"}),
        scenario("stages-lost", 3, stages=3, exact=True, every=EVERY, nodes=3,
                 kill={"1": "backward 40"}),
        scenario("bare-stage", 3, stages=3, layers=0, exact=True),  # One has no parameters.
        scenario("tied-whole", 1, tied=True, layers=2, dropout=0.0),
        scenario("tied-apart-lost", 2, stages=2, tied=True, layers=2, dropout=0.0, recompute=True,
                 every=EVERY, nodes=2, kill={"1": "reduced 40"}),
        *(
            scenario(f"tied-{name}", ranks, exact=True, tied=True, layers=2, **{"stages": 3} | more)
            for name, ranks, more in TIED
        ),
    ]  # fmt: skip


LONG = {
    *("kill-forward", "kill-optimizer", "kill-reduced", "flap-backward", "flap-applied"),
    *("kill-reduce", "again-agreed", "again-connect"),  # Short ones in `test_elastic_devices`.
    *("exact-2", "exact-4", "stages-interleaved", "sole-node"),
    "replace",  # `exact-killed` has kills and a join.
    *("follow-exact", "follow-follower-dies", "shard-0", "shard-2", "sole-1", "stages-zero"),
    *(f"seed-{seed}" for seed in range(SEEDS)),
    *(f"tied-{name}" for name, *_ in TIED if name not in ("one", "end-lost")),
}
"""What differs from another scenario by a place or a number: for the campaign."""
SCENARIOS = {one["name"]: one for one in (*fixed(), *(seeded(seed) for seed in range(SEEDS)))}
NAMES = [tuple(n for n in SCENARIOS if (n in LONG) == long) for long in (False, True)]
pytestmark = pytest.mark.slow


def mark(names: Iterable[str]) -> list[Any]:
    """Return scenarios as parameters of a test."""
    return [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in names]


short_and_long = pytest.mark.parametrize(
    "names", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)], ids=["short", "long"]
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    batches = [[SCENARIOS[name] for name in names] for names in NAMES]
    return make_outcomes(tmp_path_factory, "elastic", batches)


@pytest.mark.parametrize(
    "name", mark(n for n in SCENARIOS if "sole" not in n and not n.endswith("-lost"))
)
def test_survivors_commit_every_step_and_agree(outcomes: Outcomes, name: str) -> None:
    """Also if a member dies while a world is formed: `again-*` would wait for it for an hour."""
    judge(outcomes[name])


@short_and_long
def test_what_a_micro_batch_has_does_not_depend_on_the_world(
    outcomes: Outcomes, names: tuple[str, ...]
) -> None:
    """And where nobody died, each was computed once, by one rank."""
    found: dict[tuple[int, int], list[int]] = {}
    for name in ("whole", *names):
        for key, indices in find_samples(outcomes[name]).items():
            assert found.setdefault(key, indices) == indices
    rows = outcomes["whole"]["rows"].values()
    once = sorted(
        (step, number) for of_rank in rows for r in of_rank for step, number, *_ in r["used"]
    )
    count = plan_batches(BATCH, MICRO).count
    assert once == [(step, number) for step in range(STEPS) for number in range(count)]


@short_and_long
def test_exact_losses_and_parameters_are_bitwise_equal(
    outcomes: Outcomes, names: tuple[str, ...]
) -> None:
    curves, ends = set(), set()
    for name in ("exact-1", *(n for n in names if "exact" in n)):
        for rows in outcomes[name]["rows"].values():
            if rows and rows[0]["step"] == 0 and len(rows) == STEPS:
                curves.add(tuple(tuple(row["losses"]) for row in rows))
                if name != "exact-shard":  # There nobody has all of it.
                    ends.add(rows[-1]["hash"])
    assert len(curves) == len(ends) == 1


@short_and_long
def test_stages_of_any_world_have_the_losses_of_one_process(
    outcomes: Outcomes, names: tuple[str, ...]
) -> None:
    """Bitwise: with a stage's copy lost and another one's last, morphed, joined, and gone back."""
    (whole,) = outcomes["stages-one"]["rows"].values()
    for name in (n for n in names if "stages" in n and n != "stages-one"):
        outcome = outcomes[name]
        assert not outcome["answer"].get("hung"), outcome["log"][-2000:]
        found = {r["step"]: r["losses"] for rows in outcome["rows"].values() for r in rows}
        assert found == {row["step"]: row["losses"] for row in whole}
        mine = outcome["rows"]["0"]
        assert len({row["shape"] for row in mine}) > 1
        steps = [row["step"] for row in mine]
        assert sum(b <= a for a, b in itertools.pairwise(steps)) == (name == "stages-lost")
        left = Path(outcome["scenario"]["memory"]).glob("*/m*.head")
        killed = outcome["scenario"].get("kill", {})
        assert {path.name.split("-")[0][1:] for path in left} <= set(killed)


@short_and_long
def test_what_blocks_share_has_one_value_and_the_losses_of_one_process(
    outcomes: Outcomes, names: tuple[str, ...]
) -> None:
    """Bitwise, whoever of its holders dies, and wherever the model is cut."""
    (whole,) = outcomes["tied-one"]["rows"].values()
    wanted = {(row["step"] + 1, blocks): h for row in whole for blocks, h in row["tied"].items()}
    for name in (n for n in names if "tied" in n and n not in ("tied-whole", "tied-apart-lost")):
        outcome = outcomes[name]
        assert not outcome["answer"].get("hung"), outcome["log"][-2000:]
        rows = [row for mine in outcome["rows"].values() for row in mine]
        assert {r["step"]: r["losses"] for r in rows} == {r["step"]: r["losses"] for r in whole}
        assert all(wanted[r["hash_of"], b] == h for r in rows for b, h in r["tied"].items())
        assert name == "tied-one" or len({r["shape"] for r in rows}) > 1


def test_tied_ends_of_a_pipeline_train_as_those_of_one_module(outcomes: Outcomes) -> None:
    """On two ranks, of which one dies, then on one; each gradient is counted and clipped once."""
    (whole,) = outcomes["tied-whole"]["rows"].values()
    found = {r["step"]: r for r in outcomes["tied-apart-lost"]["rows"]["0"]}
    assert {r["shape"] for r in found.values()} == {"1x2", "1x1"}
    for row in whole:
        got, wanted = ([float.fromhex(x) for x in r["losses"]] for r in (found[row["step"]], row))
        assert got == pytest.approx(wanted, rel=1e-4)


@short_and_long
def test_sharded_losses_are_the_replicated_ones(outcomes: Outcomes, names: tuple[str, ...]) -> None:
    """But for the order in which gradients of another number of ranks are added."""

    def curve(name: str) -> list[float]:
        rows = next(rows for rows in outcomes[name]["rows"].values() if len(rows) == STEPS)
        return [float.fromhex(loss) for row in rows for loss in row["losses"]]

    for name in (n for n in names if "shard" in n):
        assert curve(name) == pytest.approx(curve("whole"), rel=1e-4), name


@pytest.mark.parametrize("name", mark(name for name in SCENARIOS if "sole" in name))
def test_a_lost_sole_shard_costs_at_most_an_interval(outcomes: Outcomes, name: str) -> None:
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


@pytest.mark.parametrize("name", mark(("follow-whole", "follow-exact", "stages-follow")))
def test_who_has_followed_the_world_joins_without_a_transfer_of_state(
    outcomes: Outcomes, name: str
) -> None:
    outcome = outcomes[name]
    joiner = outcome["scenario"]["ranks"]
    assert [step >= 0 for step in outcome["answer"]["ready"]] == [True]
    moves = ("receive the state", "blocks move")
    assert not [why for why in outcome["answer"]["reasons"] if any(m in why for m in moves)]
    assert outcome["rows"][str(joiner)][0]["step"] > 0
    assert outcome["rows"][str(joiner)][-1]["world"] == list(range(joiner + 1))


@pytest.mark.parametrize("name", mark(f"flap-{place}" for place in FLAPS))
def test_links_that_come_back_cost_no_member(outcomes: Outcomes, name: str) -> None:
    rows = outcomes[name]["rows"]
    assert {tuple(r["world"]) for mine in rows.values() for r in mine} == {(0, 1, 2)}
    assert rows["0"][-1]["epoch"] > 0


def test_who_is_left_out_while_it_lives_commits_nothing_by_itself(outcomes: Outcomes) -> None:
    """It served the store of the world before, and would be first of a world of its own."""
    rows = outcomes["cut"]["rows"]
    assert rows["1"][-1]["world"] == [1, 2]
    assert {tuple(row["world"]) for row in rows["0"]} == {(0, 1, 2)}
    assert 0 < len(rows["0"]) < STEPS
