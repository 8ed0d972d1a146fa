"""What must not matter to the detector: the names of ranks, the clocks of nodes, healthy noise."""

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.simulator.collectives import Layout, Noise
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Run

from perdure.model.signals.progress import CollectiveSpan, NodeBeat, StepStages

KINDS = (
    "stop", "spin", "drop-link", "slow-link", "slow-forward", "slow-backward", "slow-data",
    "other-bytes",
)  # fmt: skip
SLOW = dict(max_examples=12, deadline=None)
SIZE = 4


def make_run(kind, victim, seed):
    fault = Fault(kind, FAULT_S, victim, (victim + 1) % SIZE, 3.0)
    return Run(Layout(SIZE), fault, seed=seed)


def rename(beat: NodeBeat, new: dict[int, int]) -> NodeBeat:
    """Each rank, and its node, under another number."""
    replace = msgspec.structs.replace
    (p,) = beat.ranks
    comms = tuple(replace(c, ranks=tuple(range(SIZE))) for c in p.comms)
    sweep = beat.sweep
    if sweep is not None:
        links = tuple(replace(x, src=new[x.src], dst=new[x.dst]) for x in sweep.links)
        sweep = replace(sweep, links=links)
    rank = replace(p, rank=new[p.rank], comms=comms)
    return replace(beat, node=new[beat.node], ranks=(rank,), sweep=sweep)


@settings(**SLOW)
@given(
    kind=st.sampled_from(KINDS),
    victim=st.integers(0, SIZE - 1),
    order=st.permutations(range(SIZE)),
    seed=st.integers(0, 1000),
)
def test_relabelling_ranks_relabels_the_verdict(kind, victim, order, seed):
    new = dict(enumerate(order))
    seconds = FAULT_S - BEGIN_S + 5
    plain = make_run(kind, victim, seed).run(seconds)
    run = make_run(kind, victim, seed)
    # The nodes to be swept more often come back under their new numbers.
    old = {b: a for a, b in new.items()}
    suspects = run.detector.suspects
    run.detector.suspects = lambda: frozenset(old[n] for n in suspects())
    renamed = run.run(seconds, lambda beat: rename(beat, new))
    culprit = plain.standing.culprit
    expected = msgspec.structs.replace(
        culprit,
        rank=None if culprit.rank is None else new[culprit.rank],
        link=None if culprit.link is None else tuple(new[r] for r in culprit.link),
    )
    assert (renamed.standing.kind, renamed.standing.culprit) == (plain.standing.kind, expected)


def shift(beat: NodeBeat, by_s: float) -> NodeBeat:
    """The same heartbeat from a node whose clock differs."""
    replace = msgspec.structs.replace
    ranks = []
    for p in beat.ranks:
        a = p.account
        account = replace(
            a,
            spawned_s=a.spawned_s + by_s,
            init_s=a.init_s + by_s,
            first_step_s=a.first_step_s + by_s,
            last_step_s=a.last_step_s + by_s if a.last_step_s else 0.0,
        )
        comms = tuple(replace(c, since_s=c.since_s + by_s) for c in p.comms)
        spans = tuple(
            CollectiveSpan(
                s.comm, s.seq, s.op, s.bytes, s.start_s + by_s, s.end_s + by_s, s.wait_s, s.peer
            )
            for s in p.spans
        )
        stages = tuple(
            StepStages(
                s.step, s.begin_s + by_s, s.end_s + by_s, s.data_s, s.forward_s, s.backward_s,
                s.optimizer_s, s.wait_s, s.other_s,
            )
            for s in p.stages
        )  # fmt: skip
        ranks.append(
            replace(
                p, phase_since_s=p.phase_since_s + by_s, heartbeat_s=p.heartbeat_s + by_s,
                account=account, comms=comms, spans=spans, stages=stages,
            )
        )  # fmt: skip
    sweep = beat.sweep
    if sweep is not None:
        sweep = replace(sweep, at_s=sweep.at_s + by_s)
    return replace(beat, sent_s=beat.sent_s + by_s, ranks=tuple(ranks), sweep=sweep)


@settings(**SLOW)
@given(
    kind=st.sampled_from(KINDS),
    victim=st.integers(0, SIZE - 1),
    node=st.integers(0, SIZE - 1),
    by_s=st.sampled_from((3600.0, -900.0)),
    restarted=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_one_clock_shifted_by_an_hour_changes_nothing(kind, victim, node, by_s, restarted, seed):
    """T4: from the start on; or since its agent was restarted, on that machine or another."""
    seconds = FAULT_S - BEGIN_S + 5
    plain = make_run(kind, victim, seed).run(seconds)

    def change(beat: NodeBeat) -> NodeBeat:
        if beat.node != node or (restarted and beat.sent_s < BEGIN_S + 9):
            return beat
        return msgspec.structs.replace(shift(beat, by_s), incarnation=str(restarted))

    shifted = make_run(kind, victim, seed).run(seconds, change)
    assert shifted.summary == plain.summary
    assert plain.summary


@settings(**SLOW)
@given(kind=st.sampled_from(KINDS), victim=st.integers(0, SIZE - 1), seed=st.integers(0, 1000))
def test_healthy_noise_beside_a_fault_changes_no_verdict(kind, victim, seed):
    seconds = FAULT_S - BEGIN_S + 6
    plain = make_run(kind, victim, seed).run(seconds).standing
    noisy = make_run(kind, victim, seed)
    noisy.training.noise = Noise(jitter=0.05)
    noisy = noisy.run(seconds).standing
    assert (noisy.kind, noisy.culprit) == (plain.kind, plain.culprit)


@settings(**SLOW)
@given(
    size=st.sampled_from((2, 4)),
    seed=st.integers(0, 10_000),
    step_s=st.floats(0.05, 1.0),
    jitter=st.floats(0.0, 0.06),
)
@example(size=4, seed=567, step_s=0.40625, jitter=0.0546875)
def test_healthy_noise_alone_is_no_verdict(size, seed, step_s, jitter):
    noise = Noise(
        jitter=jitter, hog_every_s=20, gc_every_s=10, checkpoint_every_s=20, resize_every_s=25
    )
    run = Run(Layout(size), seed=seed, noise=noise, step_s=step_s).run(90)
    assert run.said == []
