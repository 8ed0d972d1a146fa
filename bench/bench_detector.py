"""The real detector on simulated collectives: cost at scale, localisation, healthy hours.

`scale`: 12,000 ranks in four dimensions with data-parallel communicators of 1,000 ranks, 1 Hz.
`faults`: seeded faults of every kind and severity in layouts of 2 to 64 ranks; a confusion matrix.
`healthy`: an hour of noisy training for each of three layouts: every verdict is a false one.
Prints one JSON document a part.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from perdure.detect.detector import Detector
from perdure.model.events import AnyEvent, NodeLost, RanksStarted, VerdictReached, VerdictWithdrawn
from perdure.model.job import JobSpec
from perdure.model.verdicts import Culprit, Verdict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.simulator.collectives import Fault, Layout, Noise, Training

KINDS = {
    "stop": "ComputeHang",
    "spin": "ComputeHang",
    "sleep": "ComputeHang",
    "drop-link": "CommHang",
    "drop-nic": "CommHang",
    "slow-link": "CommSlow",
    "slow-nic": "CommSlow",
    "loss": "CommSlow",
    "slow-data": "Straggler",
    "slow-forward": "Straggler",
    "slow-backward": "Straggler",
    "slow-optimizer": "Straggler",
    "slow-host": "Straggler",
    "other-bytes": "Desync",
    "other-op": "Desync",
    "node": "NodeLost",
}
LAYOUTS = (
    Layout(2),
    Layout(2),
    Layout(4),
    Layout(4, nproc=2),
    Layout(8),
    Layout(8, nproc=2),
    Layout(data=2, tensor=2, pipeline=2, nproc=2),
    Layout(data=4, tensor=2, pipeline=2, nproc=4),
    Layout(data=2, tensor=2, pipeline=2, context=2, nproc=4),
    Layout(data=8, tensor=2, pipeline=2, context=2, nproc=8),
)
LEARNING_S = 20.0
"""Of `scale`: with steps of a second, so long it takes to see enough of them."""
HEALTHY = (
    Layout(2),
    Layout(4, nproc=2),
    Layout(data=2, tensor=2, pipeline=2, context=2, nproc=4),
)


@dataclass
class Watched:
    """A training and the detector that watches it."""

    training: Training
    detector: Detector
    open: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    reached: list[tuple[float, Verdict]] = field(default_factory=list)
    lost: list[tuple[float, int]] = field(default_factory=list)
    last_s: float = 0.0

    def run(self, seconds: float) -> None:
        """Pass heartbeats on for so long."""
        for now, beat in self.training.run(seconds):
            events = self.detector.take_beat(now, beat)
            if now != self.last_s:
                events = [*events, *self.detector.tick(now)]
                self.last_s = now
                self.training.close = self.detector.suspects()
            for event in events:
                self.detector.note(now, event)
                self.take(now, event)

    def take(self, now: float, event: AnyEvent) -> None:
        """Keep what was said."""
        match event:
            case VerdictReached(verdict=v):
                if not v.actionable:
                    self.reached.append((now, v))
                self.open[v.kind, str(v.culprit)] = v
            case VerdictWithdrawn(verdict=v):
                self.open.pop((v.kind, str(v.culprit)), None)
            case NodeLost(node=node):
                self.lost.append((now, node))
            case _:
                pass


def watch(training: Training) -> Watched:
    """Return a training with a detector of its own."""
    lay = training.layout
    detector = Detector(JobSpec(script="x.py", nproc=lay.nproc, nodes=lay.nodes))
    for node in range(lay.nodes):
        started = RanksStarted(node=node, generation=0, pids={}, at_s=training.now, warm=True)
        detector.note(training.now, started)
    return Watched(training, detector)


def draw_fault(rng: random.Random, kind: str, lay: Layout, at_s: float) -> Fault:
    """Return a fault of this kind somewhere in the layout."""
    rank = rng.randrange(lay.size)
    factor = rng.choice((1.5, 2.0, 4.0))
    peer = 0
    if kind in ("drop-link", "slow-link", "loss"):
        stride = lay.context * lay.tensor
        # In the last stages a slow link hides in the pipeline's bubble and costs nothing.
        rank %= lay.width
        base = 0
        at = (rank - base) // stride
        peer = base + (at + 1) % lay.data * stride + rank % stride
        factor = rng.choice((4.0, 10.0, 29.0)) if kind == "slow-link" else 1.5
    if kind == "slow-nic":
        factor = rng.choice((4.0, 10.0))
    return Fault(kind, at_s, rank, peer, factor)  # type: ignore[arg-type]


def is_right(fault: Fault, lay: Layout, culprit: Culprit) -> bool:
    """Return whether the culprit is the injected one."""
    node = lay.node_of(fault.rank)
    if fault.kind in ("drop-link", "slow-link", "loss"):
        return culprit.link == (fault.rank, fault.peer)
    if fault.kind in ("drop-nic", "slow-nic"):
        return culprit.node == node
    return culprit.rank == fault.rank


def is_asked(fault: Fault, lay: Layout, verdict: Verdict) -> bool:
    """Return whether the verdict leaves it to a probe of the right node, or of the link's."""
    node = lay.node_of(fault.rank)
    return node in verdict.evidence.get("probe", ())


def measure_faults(num: int, seed: int) -> dict[str, object]:
    """Inject `num` faults, one a run."""
    rng = random.Random(seed)
    confusion: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    total: Counter[str] = Counter()
    delays: dict[str, list[float]] = {kind: [] for kind in KINDS}
    stages: Counter[str] = Counter()
    early, wrong = 0, []
    for number in range(num):
        kind = sorted(KINDS)[number % len(KINDS)]
        lay = rng.choice(LAYOUTS)
        if kind in ("drop-nic", "slow-nic", "node") and lay.nodes < 2:
            lay = LAYOUTS[0]
        at_s = 1000.0 + 15.0 + 5.0 * rng.random()
        fault = draw_fault(rng, kind, lay, at_s)
        noise = Noise(jitter=0.03, gc_every_s=15.0, hog_every_s=30.0)
        watched = watch(Training(lay, rng.randrange(1 << 30), fault=fault, noise=noise))
        watched.run(at_s - 1000.0)
        early += len(watched.reached)
        watched.run(18.0 if kind == "node" else 5.0)
        total[kind] += 1
        if kind == "node":
            found = [node for _, node in watched.lost] == [lay.node_of(fault.rank)]
            confusion[kind]["NodeLost" if found else "none"] += 1
            right[kind] += found
            delays[kind] += [now - at_s for now, _ in watched.lost[:1]]
            if not found:
                wrong.append(f"{lay} {fault}: lost {watched.lost}")
            continue
        after = [(now, v) for now, v in watched.reached if now > at_s]
        last = max(watched.open.values(), key=lambda v: v.confidence, default=None)
        confusion[kind][last.kind if last is not None else "none"] += 1
        good = last is not None and last.kind == KINDS[kind]
        if good and last is not None and is_right(fault, lay, last.culprit):
            right[kind] += 1
            delays[kind].append(next(now for now, v in after if v.culprit == last.culprit) - at_s)
            if last.kind == "Straggler":
                said = str(last.evidence["stage"])
                stages[f"{kind.removeprefix('slow-').replace('host', 'compute')} as {said}"] += 1
        elif good and last is not None and is_asked(fault, lay, last):
            asked[kind] += 1
        else:
            said = f"{last.kind} {last.culprit}" if last is not None else "none"
            wrong.append(f"{lay} {fault}: {said}")
    return {
        "faults": num,
        "right": sum(right.values()) / num,
        "right or left to the right probe": (sum(right.values()) + sum(asked.values())) / num,
        "verdicts before the fault": early,
        "confusion": {kind: dict(row) for kind, row in confusion.items()},
        "culprit right": {k: f"{right[k]}+{asked[k]} probe/{n}" for k, n in total.items()},
        "seconds, median and p95": {k: show_delays(v) for k, v in delays.items() if v},
        "stages": dict(sorted(stages.items())),
        "wrong": wrong[:20],
    }


def show_delays(values: list[float]) -> list[float]:
    """Return median and 95th percentile."""
    ordered = sorted(values)
    return [round(statistics.median(ordered), 2), round(ordered[int(0.95 * (len(ordered) - 1))], 2)]


def measure_healthy(seconds: float) -> dict[str, object]:
    """Train healthily beside noisy neighbours."""
    noise = Noise(
        jitter=0.05, hog_every_s=20, gc_every_s=10, checkpoint_every_s=60, evaluate_steps=400,
        resize_every_s=120, rebuild_step=2,
    )  # fmt: skip
    result: dict[str, object] = {"virtual s each": seconds}
    for seed, lay in enumerate(HEALTHY):
        for name, options in (
            ("all signals", {}),
            ("no stages", {"stages": False}),
            ("no links", {"links": False}),
            ("status only", {"stages": False, "links": False, "spans": False}),
        ):
            if name == "status only":
                options["recorder"] = "status"  # type: ignore[assignment]
            watched = watch(Training(lay, seed, noise=noise, **options))  # type: ignore[arg-type]
            watched.run(seconds)
            said = [f"{now:.0f}: {v.reason}" for now, v in watched.reached]
            result[f"{lay.size} ranks on {lay.nodes} nodes, {name}"] = said
    return result


def measure_scale(seconds: int) -> dict[str, object]:
    """Time one second of heartbeats, and the analysis of what they brought."""
    lay = Layout(data=1000, tensor=2, context=2, pipeline=3, nproc=8)
    fault = Fault("slow-forward", 1000.0 + seconds - 20.0, rank=4321, factor=2.0)
    training = Training(lay, 1, step_s=1.0, beat_every_s=1.0, fault=fault)
    detector = watch(training).detector
    windows: list[tuple[float, float]] = []
    weigh = detector._weigh

    def timed(now: float) -> list[AnyEvent]:
        begun = time.process_time()
        out = weigh(now)
        windows.append((now, time.process_time() - begun))
        return out

    detector._weigh = timed  # type: ignore[method-assign]
    taken: dict[float, float] = {}
    reached: list[str] = []
    spans = links = 0
    for now, beat in training.run(seconds):
        spans += sum(len(p.spans) for p in beat.ranks)
        links += len(beat.sweep.links) if beat.sweep else 0
        gc.disable()
        begun = time.process_time()
        events = detector.take_beat(now, beat)
        taken[now] = taken.get(now, 0.0) + time.process_time() - begun
        gc.enable()
        for event in events:
            detector.note(now, event)
            if isinstance(event, VerdictReached):
                reached.append(f"{now - fault.at_s:.1f} s: {event.verdict.reason}")
    busy = sorted(taken.values())
    learned_s = 1000.0 + LEARNING_S
    learning = sorted(spent for now, spent in windows if now < learned_s)
    window = sorted(spent for now, spent in windows if now >= learned_s)
    return {
        "ranks": lay.size,
        "communicators": 4,
        "largest communicator": lay.data,
        "spans a s": round(spans / seconds),
        "links a s": round(links / seconds),
        "analysis window, median ms": round(1e3 * statistics.median(window), 1),
        "analysis window, max ms": round(1e3 * window[-1], 1),
        "while learning what is usual, median ms": round(1e3 * statistics.median(learning), 1),
        "while learning what is usual, max ms": round(1e3 * learning[-1], 1),
        "all of a second, window included, median ms": round(1e3 * statistics.median(busy), 1),
        "all of a second, window included, max ms": round(1e3 * busy[-1], 1),
        "verdicts": reached,
    }


def main() -> None:
    """Measure the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["scale", "faults", "healthy"])
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seconds", type=int, default=60, help="virtual seconds of `scale`")
    args = parser.parse_args()
    for part in args.parts:
        begun = time.process_time()
        match part:
            case "scale":
                result = measure_scale(args.seconds)
            case "faults":
                result = measure_faults(args.faults, args.seed)
            case "healthy":
                result = measure_healthy(3600.0 * args.hours)
            case _:
                parser.error(f"unknown part {part!r}")
        result["cpu_s"] = round(time.process_time() - begun, 1)
        print(json.dumps({part: result}, indent=1), flush=True)


if __name__ == "__main__":
    main()
