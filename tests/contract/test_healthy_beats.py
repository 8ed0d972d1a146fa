"""The simulated heartbeats of the benchmark of harm have what real ones have, and nothing else.

What a real job's agents send is recorded from its bus, and compared field by field.
"""

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench.healthy.agents import BEAT_S, NodeView
from bench.healthy.noise import Lognormal
from bench.healthy.record import list_fields, list_step_times, record_beats
from bench.healthy.training import Shape, World
from bench.healthy.workloads import Ddp

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PLAIN = """
    host host.busy host.cores host.host host.own host.pressure host.waited incarnation
    node ranks ranks.account ranks.account.group_s ranks.account.script_s ranks.account.spawned_s
    ranks.comms ranks.comms.bytes ranks.comms.dtype ranks.comms.ended_seq ranks.comms.name
    ranks.comms.op ranks.comms.ranks ranks.comms.since_s ranks.comms.size ranks.comms.started_seq
    ranks.comms.timeout_s ranks.heartbeat_s ranks.phase ranks.phase_since_s ranks.pid ranks.proc
    ranks.proc.cpu_s ranks.proc.io_bytes ranks.proc.num_threads ranks.proc.rss_bytes
    ranks.proc.run_delay_s ranks.proc.state ranks.rank ranks.recorder ranks.spans ranks.spans.bytes
    ranks.spans.end_s ranks.spans.op ranks.spans.seq ranks.spans.start_s
    ranks.spans.wait_s ranks.stages ranks.stages.backward_s ranks.stages.begin_s
    ranks.stages.data_s ranks.stages.end_s ranks.stages.forward_s ranks.stages.optimizer_s
    ranks.stages.step ranks.stages.wait_s sent_s seq sweep sweep.at_s sweep.links
    sweep.links.busy_s sweep.links.bytes_acked sweep.links.comm sweep.links.dst
    sweep.links.last_ack_s sweep.links.rtt_s sweep.links.src sweep.window_s
"""
"""What a real agent says of a plain script, as it was recorded; `test_a_real_job` looks again."""
STEPS = "init_s first_step_s last_step_s step step_s"
"""What `run.steps()` adds to the account."""
LEFT_OUT = {
    "generation": "below 0 until ranks run",
    "sweep.cost_s": "of the agent itself",
    "sweep.sockets": "a count for people",
    "sweep.omitted": "a count for people",
    "sweep.endpoints": "the controller has joined the links by then",
    "sweep.links.local": "likewise",
    "sweep.links.remote": "likewise",
    "sweep.links.min_rtt_s": "for people",
    "sweep.links.retrans": "no segment is lost in health",
    "sweep.links.backoff": "likewise",
    "sweep.links.unsent_bytes": "nothing waits in a socket at the moment of a look",
    "sweep.links.unread_bytes": "likewise",
    "ranks.stages.other_s": "less than a millisecond, but where a workload does something else",
    "ranks.proc.blocked": "of workloads that wait for a disk",
    "ranks.account.restored_s": "start-up is over",
    "ranks.num_steps": "for people",
    "ranks.busy_phase": "the first optimizer's step imports what compiles, of a busy machine seen",
    "ranks.account.marks": "no checkpoints here",
    "ranks.account.boundary_s": "sub-millisecond accounts of perdure's own",
    "ranks.account.checkpoint_s": "likewise",
    "ranks.account.overhead_s": "likewise",
}
"""Field -> why no simulated heartbeat has it."""


def simulate(seconds: float, *, declared: bool):
    shape = Shape(2, 1, 0.1, declared=declared)
    chance = random.Random(1)
    world = World(shape, chance, 1000.0)
    steps = Ddp(world, chance, Lognormal(chance, 2, 0.05))
    views = [NodeView(world, node, node, chance) for node in range(2)]
    beats = []
    for tick in range(1, int(seconds / BEAT_S)):
        now = 1000.0 + tick * BEAT_S
        world.advance(now, steps.run)
        beats += [view.beat(now, 0) for view in views]
    return beats


def real_fields(*, declared: bool) -> set[str]:
    return set(PLAIN.split()) | {f"ranks.account.{x}" for x in STEPS.split() if declared}


@pytest.mark.parametrize("declared", [False, True])
def test_simulated_heartbeats_have_the_fields_of_real_ones(declared):
    assert list_fields(simulate(20.0, declared=declared)) == real_fields(declared=declared)


def test_simulated_steps_and_collectives_obey_what_real_ones_obey():
    check_rules(simulate(30.0, declared=True))


@pytest.mark.parametrize(("kind", "field"), [("evaluate", "busy_phase"), ("pause", "phase")])
def test_a_declared_phase_and_a_pause_begin_and_end_with_a_beat(kind, field):
    """As the ring's writer does it (`RingWriter.set_busy`, and each change of the phase)."""
    chance = random.Random(1)
    world = World(Shape(2, 1, 1.0, declared=True), chance, 1000.0)
    if kind == "evaluate":
        world.be_alone(30.0, 0, "S", declared="evaluate")
    else:
        world.pause_all(30.0, steered=True)
    steps = Ddp(world, chance, Lognormal(chance, 2, 0.05))
    view = NodeView(world, 0, 0, chance)
    seen = []
    for tick in range(1, 200):
        now = 1000.0 + tick * BEAT_S
        world.advance(now, steps.run)
        seen.append(view.beat(now, 0).ranks[0])
    inside, after = seen[50], seen[151]
    assert getattr(inside, field) not in (None, "step")
    assert getattr(after, field) in (None, "step")
    assert inside.heartbeat_s == pytest.approx(1000.0)
    assert after.heartbeat_s == pytest.approx(1030.0, abs=0.3)


def find_ends(beats):
    """Return for each heartbeat when its rings were read at the latest.

    It is stamped before they are read, and its node's next one after that.
    """
    ends, next_s = [], {}
    for beat in reversed(beats):
        ends.append(next_s.get(beat.node, math.inf))
        next_s[beat.node] = beat.sent_s
    return ends[::-1]


def check_rules(beats, *, exactly=True):
    """Check what holds of every heartbeat of a real job in training."""
    last: dict[tuple[int, str], int] = {}
    for beat, read_s in zip(beats, find_ends(beats), strict=True):
        for progress in beat.ranks:
            assert progress.heartbeat_s <= read_s
            for comm in progress.comms:
                key = progress.rank, comm.name
                assert last.get(key, 0) <= comm.started_seq
                assert comm.ended_seq <= comm.started_seq
                last[key] = comm.started_seq
            for span in progress.spans:
                assert span.comm < len(progress.comms)
                assert 0.0 < span.start_s <= read_s
                assert span.end_s <= read_s
                # A wait may begin before its collective does, by a hair, and end after it.
                until_s = span.end_s if exactly else read_s
                assert span.wait_s <= max(until_s - span.start_s, 0.0) + 0.02
            for s in progress.stages:
                parts = s.data_s + s.forward_s + s.backward_s + s.optimizer_s
                whole = s.end_s - s.begin_s
                assert parts + s.wait_s + s.other_s == pytest.approx(whole, abs=1e-6)
    assert last


def is_enough(beats, *, declared):
    """Return whether all fields were seen, and more than 20 steps of each rank."""
    times = list_step_times(beats)
    steps = len(times) == 2 and all(len(each) > 20 for each in times.values())
    return steps and not real_fields(declared=declared) - list_fields(beats)


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize("declared", [False, True])
def test_a_real_job_sends_what_the_simulated_ones_do(tmp_path, declared):
    words = ["--step-s", "0.1", *(["--declare"] if declared else [])]
    command = [sys.executable, "-m", "perdure", "run", "--name", "job", "-n", "1", "--nodes", "2"]
    env = dict(os.environ, PERDURE_HOME=str(tmp_path), OMP_NUM_THREADS="1")
    with open(tmp_path / "out", "wb") as out:
        job = subprocess.Popen(
            [*command, str(ROOT / "tests" / "lab" / "train.py"), *words],
            env=env, stdout=out, stderr=out, cwd=ROOT,
        )  # fmt: skip
        try:
            beats = []
            while not is_enough(beats, declared=declared):
                beats += asyncio.run(record_beats(str(tmp_path), "job", 15.0))
        finally:
            job.send_signal(signal.SIGINT)
            job.wait(PATIENCE_S)
    real = list_fields(beats)
    more = real - real_fields(declared=declared)
    assert not [name for name in more if not any(name.startswith(each) for each in LEFT_OUT)]
    trained = [b for b in beats if b.ranks and all(p.stages for p in b.ranks)]
    check_rules(trained, exactly=False)
