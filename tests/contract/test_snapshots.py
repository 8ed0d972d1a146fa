"""A memory written down and read again, fed with what came since, is the memory of everything."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.control.memory import Memory, decode_memory, encode_memory, prune_entries
from perdure.detect.detector import Detector
from perdure.model.codec import decode, encode
from perdure.model.events import JournalEntry, ProgressNoted, VerdictReached
from perdure.model.job import JobSpec
from perdure.model.signals.progress import RankAccount
from perdure.service.jobfiles import parse_journal
from perdure.telemetry.accounting.ledger import LedgerFold
from tests.journals import Story
from tests.properties.test_controller_machine import SPEC, ControllerMachine
from tests.simulator import Scenario, Simulation

JOURNALS = Path(__file__).resolve().parent.parent / "sim" / "journals"


def remember(entries: Sequence[JournalEntry], memory: Memory) -> Memory:
    for entry in entries:
        memory.replay(entry)
    return memory


def check(entries: Sequence[JournalEntry], spec: JobSpec, cuts: Sequence[int]) -> None:
    """Compare a replay from each cut on with the replay of everything."""
    entries = [decode(encode(entry), JournalEntry) for entry in entries]  # As the disk has them.
    whole = remember(entries, Memory(spec))
    full = encode_memory(whole)
    for cut in cuts:
        first = remember(entries[:cut], Memory(spec))
        data = encode_memory(first)
        second = decode_memory(data, spec)
        assert encode_memory(second) == data, "writing it down again gives other bytes"
        remember(entries[cut:], second)
        assert encode_memory(second) == full, f"from entry {cut} on it is another memory"
        assert second.machine.state == whole.machine.state
        assert list(second.machine.state.commands) == list(whole.machine.state.commands)
        assert second.machine.next_deadline() == whole.machine.next_deadline()
        assert second.fold.snapshot(1e9) == whole.fold.snapshot(1e9)
        assert second.taken == whole.taken
        assert second.recent() == whole.recent()
        assert second.seq == whole.seq


class Written(ControllerMachine):
    """The machine's own property test, whose every history is cut in three places."""

    def teardown(self) -> None:
        super().teardown()
        entries = [
            JournalEntry(number, at_s, event, f"a{number % 3}", number)
            for number, (at_s, event) in enumerate(self.journal, 1)
        ]
        length = len(entries)
        check(entries, SPEC, (length // 4, length // 2, length - 3))


TestWritten = Written.TestCase
TestWritten.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(6))
def test_simulated_journals(seed: int) -> None:
    simulation = Simulation(Scenario(seed=seed, nodes=2, nproc=2, faults=12))
    simulation.run()
    length = len(simulation.journal)
    check(simulation.journal, simulation.spec, range(0, length, max(1, length // 8)))


@pytest.mark.parametrize("path", sorted(JOURNALS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_recorded_journals(path: Path) -> None:
    entries = parse_journal(path.read_bytes().splitlines(keepends=True))
    spec = entries[0].body.spec  # type: ignore[union-attr]
    check(entries, spec, [0, *range(1, len(entries), 5), len(entries)])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["crash", "hang", "part", "steps", "save"]), max_size=25))
def test_told_journals(words: list[str]) -> None:
    """Everything that the folds look at."""
    story = tell(words)
    check(story.entries, story.spec, [len(story.entries) * n // 4 for n in range(5)])


def tell(words: Sequence[str]) -> Story:
    story = Story(nproc=2)
    story.start()
    for word in words:
        match word:
            case "crash":
                story.crash(0)
                story.start()
            case "hang":
                story.hang(1)
                story.start()
            case "part":
                story.lose_controller()
            case "steps":
                story.train(3)
            case _:
                story.train(story.checkpoint_every)
    return story


def test_what_is_written_down_does_not_grow_with_the_past() -> None:
    """Progress, checkpoints and verdicts of weeks leave as much as those of hours."""
    sizes = []
    for hours in (2, 20):
        story = Story(nproc=2)
        story.start()
        for second in range(0, hours * 3600, 30):
            now = 5000.0 + second
            accounts = {r: RankAccount(step=second, step_s=0.1 * second) for r in range(2)}
            story.write(
                ProgressNoted(
                    generation=story.generation, at_s=now, step=second, accounts=accounts
                ),
                now,
            )
        sizes.append(len(encode_memory(remember(story.entries, Memory(story.spec)))))
    assert abs(sizes[1] - sizes[0]) < 500, sizes


def test_a_picture_of_condensed_generations_counts_the_same_steps_and_incidents() -> None:
    story = tell(["save", "crash", "save", "crash", "steps", "crash", "save", "hang", "steps"])
    memory = remember(story.entries, Memory(story.spec))
    picture = memory.fold.snapshot(story.now)
    assert (picture.restarts, picture.incidents) == (4, 4)
    ledger = LedgerFold()
    for entry in story.entries:
        ledger.add(entry)
    assert picture.step == ledger.report(story.now).steps_committed
    assert [v.kind for v in picture.verdicts].count("Crash") == 3
    history = memory.fold.certain.history
    assert (history.dropped, len(history.generations)) == (2, 3)


def test_a_detector_hears_the_same_from_any_part_of_the_past() -> None:
    """Pruning is the same in one go and in two, and loses no open verdict."""
    simulation = Simulation(Scenario(seed=3, nodes=2, nproc=2, faults=12))
    simulation.run()
    entries = simulation.journal
    whole = prune_entries(entries)
    for cut in range(0, len(entries), 9):
        assert prune_entries([*prune_entries(entries[:cut]), *entries[cut:]]) == whole
    detector = Detector(simulation.spec)
    for entry in whole:
        detector.note(entry.at_s, entry.body)  # type: ignore[arg-type]
    reached = [e.body for e in entries if isinstance(e.body, VerdictReached)]
    newest = [e.body.verdict for e in whole if isinstance(e.body, VerdictReached)]
    assert all(v.verdict in newest for v in reached[-1:] if v.verdict.generation >= 3)


def test_the_state_has_nothing_that_json_would_lose() -> None:
    """Infinities become null, and a tuple as a key becomes nothing at all."""
    for field in dataclasses.fields(Memory(SPEC).machine.state):
        assert "inf" not in repr(field.default)
        assert "dict[tuple" not in str(field.type)
