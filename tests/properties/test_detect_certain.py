"""Health: ten minutes of noisy, uneven training with silent phases, in which nothing is acted upon.

Rows T4 and T5. Evaluations and saves of rank 0 without CPU or I/O, waits for storage in state S
and D, downloads, preprocessing, first compiles, gaps of heartbeats: all are reported, none is
acted upon. What is acted upon must still be, in the same noise.
"""

import random
from dataclasses import replace

import pytest
from tests.simulator.collectives import Layout, Noise
from tests.unit.detect.drive import Fault, Run

from perdure.model.events import NodeLost, VerdictReached
from perdure.model.job import DetectConfig

MINUTES_S = 600.0
SHAPES = [
    Layout(2),
    Layout(4, nproc=2),
    Layout(3, nproc=1),
    Layout(data=2, tensor=2, nproc=4),
    Layout(data=2, pipeline=2, nproc=2),
    Layout(8, nproc=8),
]
NOISE = Noise(
    jitter=0.2,
    hog_every_s=20.0,
    gc_every_s=15.0,
    checkpoint_every_s=45.0,
    evaluate_steps=150,
    resize_every_s=60.0,
    silences=("evaluate", "save", "storage", "disk", "download", "preprocess"),
    silent_every_s=25.0,
    silent_s=(2.0, 540.0),
    compile_s=90.0,
)
OLD = DetectConfig(quiet_action_s=30.0, hang_action_s=300.0, comm_action_s=10.0)


def train(seed: int, lay: Layout, fault: Fault | None = None, **options) -> Run:
    """Ten minutes, or until a minute after the fault."""
    rng = random.Random(seed)
    step_s = rng.choice((0.1, 0.3, 1.0, 3.0, 8.0))
    options = {"step_s": step_s, "links": False, "noise": replace(NOISE), **options}
    return Run(lay, fault, seed=seed, **options)


def drop_gaps(seed: int, nodes: int):
    """Lose one heartbeat in twenty, and now and then a node's for 1 to 10 s."""
    rng = random.Random(seed)
    state = {"node": -1, "until_s": 0.0, "next_s": 1020.0}

    def change(beat):
        now = beat.sent_s
        if now >= state["next_s"]:
            gap_s = rng.choice((1.0, 2.0, 3.0, 10.0))
            state.update(node=rng.randrange(nodes), until_s=now + gap_s, next_s=now + gap_s + 15.0)
        silent = beat.node == state["node"] and now < state["until_s"]
        return None if silent or rng.random() < 0.05 else beat

    return change


def check_health(seed: int, lay: Layout) -> None:
    run = train(seed, lay, remote=lay.nodes)
    run.run(MINUTES_S, drop_gaps(seed, lay.nodes))
    assert run.acted == []


@pytest.mark.parametrize("seed", range(6))
def test_ten_minutes_in_which_nothing_is_acted_upon(seed):
    check_health(seed, SHAPES[seed % len(SHAPES)])


@pytest.mark.long
@pytest.mark.parametrize("lay", SHAPES)
@pytest.mark.parametrize("seed", range(100, 120))
def test_ten_minutes_in_which_nothing_is_acted_upon_over_many_seeds(seed, lay):
    check_health(seed, lay)


def test_silences_are_said_and_numbers_in_the_job_file_keep_their_meaning():
    """The property above can fail: with the thresholds of old the same world is restarted."""
    said = train(1, SHAPES[1]).run(MINUTES_S)
    assert [v for v in said.verdicts if v.kind == "ComputeHang"]
    assert train(1, SHAPES[1], detect=OLD).run(MINUTES_S).acted


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["stop", "other-op"])
def test_a_fact_is_acted_upon_in_the_same_noise(seed, kind):
    noise = replace(NOISE, silent_every_s=0.0, compile_s=0.0, evaluate_steps=0)
    lay = SHAPES[seed % len(SHAPES)]
    fault = Fault(kind, 1090.0, lay.size - 1)
    run = train(seed, lay, fault, noise=noise, step_s=0.3).run(102.0)
    acted = [e for e in run.acted if isinstance(e, VerdictReached)]
    assert [e.verdict.certain for e in acted] == [True], run.summary
    assert not [e for e in run.acted if isinstance(e, NodeLost)]
