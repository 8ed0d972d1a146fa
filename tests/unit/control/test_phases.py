"""What can become of a job and of its worlds: two tables, which are drawn, and walked.

`UPDATE_GOLDEN=1 pytest tests/unit/control/test_phases.py` draws them anew.
"""

import ast
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.golden.decisions import FAMILIES, decide_again, find_recorded, play, read_recorded
from tests.unit.control.groups_lab import Lab

import perdure.control
from perdure.control import job, world
from perdure.control.job import JobState
from perdure.control.machine import Controller
from perdure.control.recovery.formation import FORM_TIMEOUT_S
from perdure.control.world import WorldState
from perdure.model.events import (
    CommandReceived,
    GenerationStopped,
    JobSubmitted,
    StoreReady,
    TimerFired,
)
from perdure.model.job import JobSpec

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs/phases.md"
SOURCE = Path(perdure.control.__file__).parent
HEAD = """# The phases of a job and of its worlds

Drawn from the tables in `src/perdure/control/job.py` and `world.py`; nothing else ever happens to \
either. A job that is none of torchft's has one world, of all its ranks; each replica group of a \
torchft job is a world of its own. A generation that is begun anew is a new value, which keeps its \
place and its past failures and nothing else.
"""

Steps = Mapping[tuple[str, str], str]


def draw(title: str, steps: Steps) -> str:
    """Return a diagram that GitHub shows, and the same as a table."""
    rows = [f"| {before} | {on} | {after} |" for (before, on), after in steps.items()]
    arrows = [f"    {before} --> {after}: {on}" for (before, on), after in steps.items()]
    lines = [
        f"## {title}", "", "```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(steps))[0]}",
        *arrows, "```", "", "| from | on what | to |", "|---|---|---|", *rows, "",
    ]  # fmt: skip
    return "\n".join(lines)


def test_the_diagrams_are_those_of_the_tables() -> None:
    text = "\n".join([HEAD, draw("A job", job.PHASES), draw("A world", world.PHASES)])
    if os.environ.get("UPDATE_GOLDEN"):
        DOCUMENT.write_text(text)
    assert DOCUMENT.read_text() == text, "UPDATE_GOLDEN=1 pytest tests/unit/control/test_phases.py"


def test_nothing_but_the_tables_sets_a_phase() -> None:
    setters = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            named = [each for target in targets for each in ast.walk(target)]
            if any(isinstance(each, ast.Attribute) and each.attr == "phase" for each in named):
                setters.append(str(path.relative_to(SOURCE)))
    assert setters == ["job.py", "world.py"]


def test_every_step_of_the_tables_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over simulated and recorded jobs, and replica groups at an operator's word."""
    seen: set[tuple[str, str, str]] = set()

    def watch(kind: type[JobState] | type[WorldState]) -> None:
        enter = kind.enter

        def note(self, on) -> None:  # type: ignore[no-untyped-def]
            before = self.phase
            enter(self, on)
            seen.add((kind.__name__, before, on))

        monkeypatch.setattr(kind, "enter", note)

    watch(JobState)
    watch(WorldState)
    for family, (_, seeds, _) in FAMILIES.items():
        play(family, seeds[0])
    for name in find_recorded():
        decide_again(read_recorded(name))
    stop_at_once()
    for phase in ("forming", "starting", "running"):
        leave_a_group(phase)
        give_a_group_up(phase)
        end_the_job(phase)
    finish_while_starting()
    wanted = {("JobState", *row) for row in job.PHASES}
    wanted |= {("WorldState", *row) for row in world.PHASES}
    assert wanted - seen == set()


def stop_at_once() -> None:
    """An operator stops a job before its nodes are there."""
    machine = Controller()
    machine.handle(0.0, JobSubmitted(spec=JobSpec(script="x.py", nodes=2), at_s=0.0))
    machine.handle(1.0, CommandReceived(id="c", kind="stop"))
    assert machine.state.phase == "ended"


def bring(phase: str) -> Lab:
    """Return a torchft job whose group 1 was lost, and has come to `phase` again."""
    lab = Lab(spares=1)
    if phase == "running":
        return lab
    lab.exit(1, code=1)
    if phase == "starting":
        generation = lab.generation(1)
        lab.add(GenerationStopped(node=1, generation=generation - 1, at_s=lab.now))
        lab.add(StoreReady(generation=generation, host="h", port=1, agent_store=True))
    assert lab.phases()[1] == phase
    return lab


def leave_a_group(phase: str) -> None:
    """It is evicted, and restored."""
    lab = bring(phase)
    lab.ask("evict", "replica:1")
    assert lab.phases()[1] == "parked"
    lab.stop(1)
    lab.ask("restore", "replica:1")
    assert lab.phases()[1] == "forming"


def give_a_group_up(phase: str) -> None:
    """It fails too often; an operator restores it, or leaves it for good."""
    for verb, after in (("restore", "forming"), ("evict", "parked")):
        lab = bring(phase)
        while lab.phases()[1] != "failed":
            if lab.phases()[1] == phase:
                lab.now += FORM_TIMEOUT_S
                lab.exit(1, code=1) if phase == "running" else lab.add(TimerFired())
            elif phase == "starting":
                generation = lab.generation(1)
                lab.add(GenerationStopped(node=1, generation=generation - 1, at_s=lab.now))
                lab.add(StoreReady(generation=generation, host="h", port=1, agent_store=True))
            else:
                lab.start(1)
        lab.ask(verb, "replica:1")
        assert lab.phases()[1] == after


def end_the_job(phase: str) -> None:
    """It is killed."""
    lab = bring(phase)
    lab.ask("kill")
    assert lab.phases() == ["ended"] * 4


def finish_while_starting() -> None:
    """Ranks may have ended before their agent has said that it started them."""
    lab = bring("starting")
    lab.exit(1, code=0)
    assert lab.phases()[1] == "done"
