"""What the detector costs the controller: 10,000 ranks, one heartbeat of each node a second."""

from bench.gates.gate import Gate, measure_cpu, time_spin

from perdure.detect.detector import Detector
from perdure.model.job import JobSpec
from perdure.model.signals.progress import NodeBeat, ProcSample, RankAccount, RankProgress

NODES, NPROC, SECONDS = 1250, 8, 4


def make_beats(spec: JobSpec) -> list[NodeBeat]:
    """Return the heartbeats of a few seconds in which every rank makes a step a second."""

    def rank_at(rank: int, now: float, step: int) -> RankProgress:
        account = RankAccount(step=step, init_s=1.0, first_step_s=1.0, last_step_s=now)
        return RankProgress(rank, rank, "step", 1.0, now, account, (), ProcSample("R", now, 0))

    return [
        NodeBeat(n, "a", s, 10.0 + s, 0, tuple(rank_at(r, 10.0 + s, s) for r in spec.ranks_of(n)))
        for s in range(SECONDS)
        for n in range(NODES)
    ]


def measure_beats() -> float:
    """Return the CPU seconds of four seconds' heartbeats."""
    spec = JobSpec(script="x.py", nproc=NPROC, nodes=NODES)
    detector, beats = Detector(spec), make_beats(spec)

    def take() -> None:
        for beat in beats:
            detector.take_beat(beat.sent_s, beat)

    return measure_cpu(take)


GATES = (
    # Four seconds of a core on a machine that spins in 0.1 s.
    Gate("detector-heartbeats", "spins for 4 s of 10,000 ranks", 40, measure_beats, time_spin),
)
