import random

from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.detect.detector import Detector
from perdure.model.events import VerdictReached
from perdure.model.job import JobSpec
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)


def make_beat(seq, now, step, last_s, started, ended, state):
    account = RankAccount(step=step, init_s=1.0, first_step_s=1.0, last_step_s=last_s)
    ranks = tuple(
        RankProgress(
            r,
            r + 1,
            "step",
            1.0,
            last_s,
            account,
            (CommProgress("pg", 2, started[r], ended, "allreduce", last_s),),
            ProcSample(state[r], now, 0),
        )
        for r in range(2)
    )
    return NodeBeat(0, "a", seq, now, 0, ranks)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    step_s=st.floats(0.01, 10.0),
    noise=st.floats(0.0, 0.12),
    loss=st.floats(0.0, 0.3),
    victim=st.integers(0, 1),
)
def test_healthy_is_left_alone_and_stopped_is_found(seed, step_s, noise, loss, victim):
    """Whatever the step time, the noise and the heartbeats lost on the way."""
    rng = random.Random(seed)
    detector = Detector(JobSpec(script="x.py", nproc=2))
    now = last_s = 10.0
    step = seq = 0
    next_s = now + step_s
    found = []
    for _ in range(max(400, int(40 * step_s / 0.2))):
        now += 0.2
        while next_s <= now:
            last_s, step = next_s, step + 1
            next_s += step_s * max(0.3, rng.gauss(1.0, noise))
        seq += 1
        if rng.random() >= loss:
            beat = make_beat(seq, now, step, last_s, (step, step), step, "RR")
            found += detector.take_beat(now, beat)
    assert [e for e in found if isinstance(e, VerdictReached)] == []
    state = ["S", "S"]
    state[victim] = "T"
    started = [step + 1, step + 1]
    started[victim] = step
    stopped_s, verdicts = now, []
    while now < stopped_s + 1.0 + 1.5 * step_s + 3.0:
        now += 0.2
        seq += 1
        beat = make_beat(seq, now, step, last_s, started, step, state)
        found = [e for e in detector.take_beat(now, beat) if isinstance(e, VerdictReached)]
        verdicts += [e.verdict for e in found]
    assert {v.culprit.rank for v in verdicts} == {victim}
    assert verdicts[0].confirmed_s - stopped_s <= 1.0 + 1.3 * step_s + 0.4
    assert verdicts[-1].actionable
