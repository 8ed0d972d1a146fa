"""The detector over a simulated training: what it said, and when."""

from tests.simulator.collectives import Fault, Layout, Noise, Training

from perdure.detect.detector import Detector
from perdure.model.events import AnyEvent, NodeLost, RanksStarted, VerdictReached, VerdictWithdrawn
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.verdicts import Verdict

BEGIN_S, FAULT_S = 1000.0, 1018.0
ACTED_S = 40.0
"""`slow_action_s` of these jobs, so that they need not be long."""


class Run:
    """One training with one detector; `said` holds every event about verdicts."""

    def __init__(
        self,
        lay: Layout,
        fault: Fault | None = None,
        *,
        seed: int = 1,
        detect: DetectConfig | None = None,
        remote: int = 0,
        **options,
    ) -> None:
        self.training = Training(lay, seed, fault=fault, **options)
        self.spec = JobSpec(
            script="x.py",
            nproc=lay.nproc,
            nodes=lay.nodes,
            remote=remote,
            detect=detect or DetectConfig(slow_action_s=ACTED_S),
        )
        self.detector = Detector(self.spec)
        self.said: list[tuple[float, AnyEvent]] = []
        self.suspected_s: float | None = None
        self.fault_s = fault.at_s if fault is not None else 0.0
        for node in range(lay.nodes):
            started = RanksStarted(
                node=node, generation=0, pids={}, at_s=self.training.now, warm=True
            )
            self.detector.note(self.training.now, started)

    def run(self, seconds: float, change=lambda beat: beat) -> "Run":
        """Advance; what `change` makes of a heartbeat arrives, or nothing where that is None."""
        last_s = 0.0
        for now, beat in self.training.run(seconds):
            heard = change(beat)
            events = [] if heard is None else self.detector.take_beat(now, heard)
            if now != last_s:
                events = [*events, *self.detector.tick(now)]
                last_s = now
            self.training.close = self.detector.suspects()
            if self.training.close and self.suspected_s is None and now > self.fault_s:
                self.suspected_s = now
            for event in events:
                self.take(now, event)
        return self

    def take(self, now: float, event: AnyEvent) -> None:
        for more in self.detector.note(now, event):
            self.said.append((now, more))
        if isinstance(event, VerdictReached | VerdictWithdrawn | NodeLost):
            self.said.append((now, event))

    @property
    def verdicts(self) -> list[Verdict]:
        return [e.verdict for _, e in self.said if isinstance(e, VerdictReached)]

    @property
    def acted(self) -> list[AnyEvent]:
        """What somebody would have acted upon: actionable verdicts, and lost nodes."""
        return [
            e
            for _, e in self.said
            if isinstance(e, NodeLost) or (isinstance(e, VerdictReached) and e.verdict.actionable)
        ]

    @property
    def standing(self) -> Verdict | None:
        """The last verdict that was not withdrawn."""
        standing: dict[tuple[str, str], Verdict] = {}
        for _, e in self.said:
            if isinstance(e, VerdictReached):
                standing[e.verdict.kind, str(e.verdict.culprit)] = e.verdict
            elif isinstance(e, VerdictWithdrawn):
                standing.pop((e.verdict.kind, str(e.verdict.culprit)), None)
        return list(standing.values())[-1] if standing else None

    @property
    def summary(self) -> list[tuple[float, str, str, str]]:
        return [
            (round(now, 3), type(e).__name__, e.verdict.kind, str(e.verdict.culprit))
            for now, e in self.said
            if isinstance(e, VerdictReached | VerdictWithdrawn)
        ]


def inject(lay: Layout, kind: str, rank: int, seconds: float, *, peer=0, factor=1.0, **options):
    """Return the run with this fault at `FAULT_S`, `seconds` after it."""
    fault = Fault(kind, FAULT_S, rank, peer, factor, options.pop("until_s", float("inf")))
    return Run(lay, fault, **options).run(FAULT_S - BEGIN_S + seconds)


__all__ = ["BEGIN_S", "FAULT_S", "Fault", "Layout", "Noise", "Run", "inject"]
