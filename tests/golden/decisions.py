"""What the controller decided, in words that outlive the names of its types.

A line is the time since the job's beginning, what is done, to what, and why. Whoever renames an
action adds its new name to `DONE`, with the old word: then the lines stay what they were.
"""

import gzip
import sys
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from perdure.control.memory import Memory
from perdure.model.events import Decision, JobSubmitted, JournalEntry
from perdure.model.job import JobSpec
from perdure.service.jobfiles import parse_journal
from perdure.telemetry.accounting.ledger import LedgerFold
from tests.simulator import Scenario, Simulation, Weather
from tests.simulator.elastic import ElasticSimulation

JOURNALS = Path(__file__).with_name("journals")
"""Recorded from real jobs; names of people, machines and folders are made up."""
SUFFIX = ".jsonl.gz"

DONE = {
    "AnswerCommand": "answer",
    "AssignNodes": "assign",
    "CordonNode": "cordon",
    "EndJob": "end",
    "EvictReplica": "evict",
    "FenceAbort": "fence",
    "FollowWorld": "follow",
    "HoldReplicas": "hold",
    "InjectFault": "inject",
    "InterruptCollectives": "interrupt",
    "NoteDraining": "drain",
    "NoteFinding": "find",
    "RecordEvent": "record",
    "ReformWorld": "reform",
    "RestoreNode": "restore",
    "ResumeRanks": "resume",
    "RunProbe": "probe",
    "SendBoundary": "agree",
    "TakeStacks": "stacks",
    "WatchClosely": "watch",
}
"""Type of an action -> what is done."""

STORM = Weather(delay_s=0.02, loss=0.2, duplicate=0.2)
DEATHS = ("controller", "halfway", "agent")
SMALL = {"nodes": 2, "nproc": 2}
ELASTIC = {
    "nodes": 4, "nproc": 1, "steps": 100, "step_s": 0.05, "faults": 4,
    "kinds": ("crash", "crash", "crash", "agent", "keeper", "controller", "halfway", "outage"),
}  # fmt: skip
CHECKPOINTS = ("checkpoint",) * 4

FAMILIES: dict[str, tuple[type[Simulation], range, dict[str, object]]] = {
    "faults": (Simulation, range(150), {}),
    "storm": (Simulation, range(1000, 1060), dict(nodes=4, nproc=4, faults=14, weather=STORM)),
    "halfway": (
        Simulation,
        range(2000, 2050),
        SMALL | dict(faults=12, kinds=("crash", "halfway", "halfway", "leave")),
    ),
    "spares": (
        Simulation,
        range(5000, 5040),
        SMALL | dict(spares=2, faults=8, kinds=("crash", "crash", "stop", *DEATHS, "keeper")),
    ),
    "agreements": (Simulation, range(40), SMALL | dict(faults=6, commands=CHECKPOINTS)),
    "agreements in a storm": (
        Simulation,
        range(1000, 1040),
        dict(nodes=4, nproc=2, faults=14, weather=STORM, commands=CHECKPOINTS),
    ),
    "deaths between": (
        Simulation,
        range(40),
        SMALL | dict(faults=10, kinds=DEATHS, save_s=2.0, weather=STORM),
    ),
    "stops": (Simulation, range(40), SMALL | dict(faults=5, commands=("checkpoint", "stop"))),
    "kills": (Simulation, range(40), SMALL | dict(faults=4, commands=("checkpoint", "kill"))),
    "elastic": (ElasticSimulation, range(60), ELASTIC),
    "elastic in a storm": (
        ElasticSimulation,
        range(500, 515),
        ELASTIC | dict(nproc=2, faults=10, weather=STORM),
    ),
    "elastic with spares": (ElasticSimulation, range(700, 730), ELASTIC | dict(spares=1, faults=6)),
}
"""Worlds under virtual time: every seed of each is a run of its own."""


def play(family: str, seed: int) -> list[str]:
    """Return what the controllers of one simulated job decided."""
    kind, _, changes = FAMILIES[family]
    simulation = kind(Scenario(seed=seed, **changes))  # type: ignore[arg-type]
    simulation.run()
    journal = simulation.journal
    bodies = ((entry.at_s, entry.body) for entry in journal)
    return project(
        journal[0].at_s,
        ((at_s, b.action, b.summary, b.reason) for at_s, b in bodies if isinstance(b, Decision)),
    )


def find_recorded() -> list[str]:
    """Return the names of the recorded journals."""
    return sorted(path.name.removesuffix(SUFFIX) for path in JOURNALS.glob(f"*{SUFFIX}"))


def read_recorded(name: str) -> list[JournalEntry]:
    """Return every entry of a recorded journal."""
    data = gzip.decompress((JOURNALS / f"{name}{SUFFIX}").read_bytes())
    return parse_journal(data.splitlines(keepends=True))


def find_spec(entries: list[JournalEntry]) -> JobSpec:
    """Return the job of a journal."""
    first = entries[0].body
    assert isinstance(first, JobSubmitted)
    return first.spec


def decide_again(entries: list[JournalEntry]) -> list[str]:
    """Return what a controller of today decides that meets the events of a recorded journal."""
    machine = Memory(find_spec(entries)).machine

    def decide() -> Iterator[tuple[float, str, str, str]]:
        for entry in entries:
            if not isinstance(entry.body, Decision):
                for action in machine.handle(entry.at_s, entry.body):
                    yield entry.at_s, type(action).__name__, action.describe(), action.reason

    return project(entries[0].at_s, decide())


def report_again(entries: list[JournalEntry]) -> dict[str, Any]:
    """Return the report of a recorded journal, its seconds to the microsecond."""
    fold = LedgerFold()
    for entry in entries:
        fold.add(entry)
    report: dict[str, Any] = _round(msgspec.to_builtins(fold.report(entries[-1].at_s)))
    return report


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _round(one) for key, one in value.items()}
    return [_round(one) for one in value] if isinstance(value, list | tuple) else value


def project(began_s: float, decisions: Iterable[tuple[float, str, str, str]]) -> list[str]:
    """Return a line for each of (time, type of the action, target, reason).

    Raises:
        KeyError: an action has no word in `DONE`.
    """
    return [
        f"{at_s - began_s:10.3f}  {DONE[action]}  {target}  because {reason}"
        for at_s, action, target, reason in decisions
    ]


def summarize(lines: list[str]) -> str:
    """Return how many lines there are, and their hash."""
    return f"{len(lines)} {sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


if __name__ == "__main__":
    family, seed = sys.argv[1:]
    print("\n".join(play(family, int(seed))))
