"""A year of recorded faults through the controller's policy: what would have been cordoned, when.

Reads a trace of labelled faults (`[{"node_id", "event_time" in days, "event_type": "fault_start" |
"fault_end", "fault_type": {"Level", "Class", "Desc"}}]`, as stepfun-ai/InfiniteHBD-Trace has it)
and plays it to the real `Controller`: each fault as what perdure would have been told of it, each
end as the node's return. Slow and hanging nodes are verdicts that the product makes itself: the
same fault in a simulated training, its heartbeats through the real detector, and the verdict that
came of them moved to the node and hour of the trace. One job on all servers but the spare ones.
Nothing of the policy is modelled here; the costs of a restart are arguments, and what the
controller learns of them is what it weighs. Prints one JSON document a configuration.
"""

import argparse
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from perdure.control.machine import Controller
from perdure.detect.detector import Detector
from perdure.model.events import (
    ActionWithheld,
    AnyEvent,
    CheckpointSaved,
    ControllerStarted,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    NodeCordoned,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    RankExited,
    RanksStarted,
    StoreReady,
    TimerFired,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, PolicyConfig, RestartConfig
from perdure.model.orders import AnyAction, AssignNodes, CordonNode, RecordEvent
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.simulator.collectives import Fault, Layout, Noise, Training

DAY_S = 86_400.0
_FOREVER = RestartConfig(
    max_restarts=10**6, same_fault_max=10**6, window_max=10**6, node_wait_s=10**9
)
SLOW = ("Speed low", "Width low", "width low", "Bandwidth Low", "Temperature High")
HANG = ("Link Down", "NIC Lost", "Gid Error", "Optical Module")
DEVICE = ("ECC", "xid", "GPU Lost", "GPU device", "nvidia-smi")


def classify(fault: dict[str, str]) -> str:
    """Return as what perdure would meet a fault: slow, hang, device, or a lost node."""
    text = f"{fault['Class']}: {fault['Desc']}"
    for name, words in (("slow", SLOW), ("hang", HANG), ("device", DEVICE)):
        if any(word in text for word in words):
            return name
    return "lost"


@cache
def find_verdict(kind: str, factor: float) -> Verdict:
    """Return what the detector says of node 1 of four, struck by `kind`, once it may be acted upon.

    Raises:
        LookupError: it says nothing, or nothing to act upon.
    """
    fault = Fault(kind, 1018.0, 1, 2, factor)
    training = Training(Layout(4), 1, fault=fault, noise=Noise(jitter=0.05))
    detector = Detector(JobSpec(script="x.py", nodes=4))
    for node in range(4):
        began = RanksStarted(node=node, generation=0, pids={}, at_s=1000.0, warm=True)
        detector.note(1000.0, began)
    last = None
    for now, beat in training.run(80.0):
        for event in detector.take_beat(now, beat):
            detector.note(now, event)
            if isinstance(event, VerdictReached) and event.verdict.actionable:
                last = event.verdict
        training.close = detector.suspects()
    if last is None:
        raise LookupError(f"{kind} x{factor:g}: nothing to act upon")
    return last


class Replay:
    """One configuration's year."""

    def __init__(self, servers: list[str], spares: int, policy: PolicyConfig, factor: float):
        self.number = {name: node for node, name in enumerate(servers)}
        self.spec = JobSpec(
            name="trace", script="train.py", nodes=len(servers) - spares, spares=spares,
            restart=_FOREVER, policy=policy,
        )  # fmt: skip
        self.factor = factor
        self.controller = Controller()
        self.state = self.controller.state
        self.faulty: set[int] = set()
        self.cordoned: list[tuple[float, int]] = []
        self.restarts = self.swaps = 0
        self.withheld = Counter[str]()
        self.avoided = 0
        self.slow_days = self.waiting_days = self.last_day = 0.0
        self.slow: set[int] = set()
        self.broken: dict[int, str] = {}
        self.do(0.0, JobSubmitted(spec=self.spec, at_s=0.0))
        self.do(0.0, ControllerStarted(incarnation="c"))
        for node in range(self.spec.num_nodes):
            self.register(0.0, node)
        self.settle(0.0)
        self.restarts = self.swaps = 0

    def do(self, now: float, event: AnyEvent) -> list[AnyAction]:
        actions = self.controller.handle(now, event)
        for action in actions:
            if isinstance(action, CordonNode):
                self.cordoned.append((now / DAY_S, action.node))
                self.do(now, NodeCordoned(node=action.node, at_s=now, reason=action.reason))
            if isinstance(action, AssignNodes) and action.assignment.phase == "store":
                self.restarts += 1
                self.swaps += "stands in" in action.reason
        return actions

    def register(self, now: float, node: int) -> None:
        self.do(
            now,
            NodeRegistered(node=node, incarnation=f"a{node}", host="h", boot_id="b", slots=1),
        )

    def settle(self, now: float) -> None:
        """Answer for every living node until the world trains, or waits for a lost one."""
        state = self.state
        while state.world.phase in ("forming", "starting"):
            generation = state.generation
            for node in range(self.spec.num_nodes):
                if node not in state.lost:
                    stopped = GenerationStopped(node=node, generation=generation - 1, at_s=now)
                    self.do(now, stopped)
            self.do(now, StoreReady(generation=generation, host="h", port=1, agent_store=True))
            if state.phase != "starting":
                return
            for group, node in enumerate(state.world.placement):
                started = RanksStarted(
                    node=node, generation=generation, pids={group: 1}, at_s=now, warm=True
                )
                self.do(now, started)
            self.do(now, GenerationStepping(generation=generation, at_s=now + 5.0, step=1))

    def tell(self, now: float, kind: str, node: int) -> None:
        """Tell of a fault as the detector would: its own verdict, of this node, at this hour."""
        found = find_verdict(kind, self.factor)
        place = self.state.world.placement.index(node)
        culprit = Culprit(node=node)
        if found.culprit.rank is not None:
            culprit = Culprit(rank=place)
        elif found.culprit.link is not None:
            culprit = Culprit(link=(place, (place + 1) % len(self.state.world.placement)))
        verdict = msgspec.structs.replace(
            found, culprit=culprit, generation=self.state.generation, confirmed_s=now,
            first_seen_s=now - (found.confirmed_s - found.first_seen_s),
        )  # fmt: skip
        saved = CheckpointSaved(
            generation=self.state.generation, step=1, path="", bytes=0, stall_s=0.0, save_s=0.0,
            at_s=now,
        )  # fmt: skip
        self.do(now, saved)  # What a restart costs is an argument, lost work included.
        for action in self.do(now, VerdictReached(verdict=verdict)):
            if isinstance(action, RecordEvent) and isinstance(action.event, ActionWithheld):
                self.withheld[action.event.reason.partition("(")[0]] += 1
        if self.state.world.stacks is not None and self.state.world.stacks.held is not None:
            self.do(self.state.world.stacks.due_s, TimerFired())

    def begin(self, now: float, node: int, fault: dict[str, str]) -> None:
        """A fault strikes `node`."""
        self.faulty.add(node)
        if node not in self.state.world.placement:
            self.avoided += node in self.state.cordoned
            if classify(fault) == "lost":
                self.do(now, NodeLost(node=node, at_s=now, reason="trace"))
            return
        match classify(fault):
            case "slow":
                heat = "Temperature" in fault["Desc"] + fault["Class"]
                self.tell(now, "slow-host" if heat else "slow-nic", node)
                if node in self.state.world.placement:
                    self.slow.add(node)
            case "hang":
                self.broken[node] = "hang"
                self.break_again(now)
            case "device":
                self.broken[node] = "device"
                self.break_again(now)
            case _:
                self.do(now, NodeLost(node=node, at_s=now, reason="trace"))
        self.settle(now)

    def break_again(self, now: float) -> None:
        """What is broken fails again wherever it is placed, a few times at the most."""
        for _ in range(5):
            self.settle(now)
            struck = [n for n in self.state.world.placement if n in self.broken]
            if not struck or self.state.phase != "running":
                return
            if self.broken[struck[0]] == "hang":
                self.tell(now, "drop-nic", struck[0])
            else:
                self.crash(now, struck[0])

    def crash(self, now: float, node: int) -> None:
        """A rank of `node` dies of its device."""
        record = ExitRecord(
            rank=self.state.world.placement.index(node),
            generation=self.state.generation,
            pid=1,
            at_s=now,
            code=1,
            error="RuntimeError: CUDA error: uncorrectable ECC error encountered",
        )
        account = RankAccount(step=1)
        self.do(now, RankExited(node=node, record=record, account=account, detected_s=now))

    def end(self, now: float, node: int, *, restore: bool) -> None:
        """`node` was mended."""
        self.faulty.discard(node)
        self.slow.discard(node)
        self.broken.pop(node, None)
        if restore and node in self.state.cordoned:
            self.do(now, NodeRestored(node=node, at_s=now, reason="mended", who="operator"))
        if node in self.state.lost:
            self.register(now, node)
        self.settle(now)

    def pass_time(self, day: float) -> None:
        """Account for the time since the last event."""
        days = day - self.last_day
        self.last_day = day
        placed = set(self.state.world.placement)
        stands = self.state.phase != "running" or bool(placed & set(self.broken))
        self.waiting_days += days * stands
        self.slow_days += days * bool(self.slow & set(self.state.world.placement))


def replay(trace: list[dict[str, Any]], args: argparse.Namespace, **how: Any) -> dict[str, Any]:
    """Return what one configuration would have made of the trace."""
    named = sorted({event["node_id"] for event in trace})
    servers = named + [f"quiet-{n}" for n in range(args.servers - len(named))]
    policy = PolicyConfig(cordon_after=how["cordon_after"], evict_factor=how["evict_factor"])
    run = Replay(servers, how["spares"], policy, args.factor)
    idle_days, seen = 0.0, Counter[str]()
    for event in sorted(trace, key=lambda e: (e["event_time"], e["event_type"])):
        day, node = event["event_time"], run.number[event["node_id"]]
        healthy = sum(n not in run.faulty for n in run.state.cordoned)
        idle_days += healthy * (day - run.last_day)
        run.pass_time(day)
        if event["event_type"] == "fault_start":
            seen[classify(event["fault_type"])] += 1
            run.begin(day * DAY_S, node, event["fault_type"])
        else:
            run.end(day * DAY_S, node, restore=how["restore"])
    days = run.last_day
    lost_h = run.restarts * args.restart_s / 3600
    return {
        **how,
        "faults": dict(seen),
        "nothing done": dict(run.withheld),
        "restarts": run.restarts,
        "spare stood in": run.swaps,
        "cordoned": len(run.cordoned),
        "cordoned nodes": len({node for _, node in run.cordoned}),
        "first cordon, day": round(run.cordoned[0][0], 1) if run.cordoned else None,
        "median cordon, day": (
            round(run.cordoned[len(run.cordoned) // 2][0], 1) if run.cordoned else None
        ),
        "later faults on cordoned nodes": run.avoided,
        "healthy node-days idle by cordon": round(idle_days, 1),
        "restart cost, h": round(lost_h, 2),
        "waiting for nodes, share": round(run.waiting_days / days, 4),
        "with a slow node, share": round(run.slow_days / days, 4),
    }


def main() -> int:
    """Replay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="fault_trace.json")
    parser.add_argument("--servers", type=int, default=400)
    parser.add_argument("--restart-s", type=float, default=120.0, help="a restart, lost work in")
    parser.add_argument("--factor", type=float, default=2.0, help="slowness of a slow fault")
    args = parser.parse_args()
    trace = json.loads(args.trace.read_text())
    for spares in (8, 16, 32):
        for cordon_after in (0, 2, 3):
            for restore in (True, False) if cordon_after else (True,):
                row = replay(
                    trace, args, spares=spares, cordon_after=cordon_after, evict_factor=1.5,
                    restore=restore,
                )  # fmt: skip
                print(json.dumps(row), flush=True)
    print(json.dumps(replay(
        trace, args, spares=16, cordon_after=2, evict_factor=99.0, restore=True
    )))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
