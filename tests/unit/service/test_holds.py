"""What a killed `perdure serve` has left in its journal about whom it held."""

from pathlib import Path

import pytest

from perdure.model.chain import FIRST, seal
from perdure.model.codec import encode
from perdure.model.events import (
    AnyEvent,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    NodeCordoned,
    NodeRestored,
    QuorumFormed,
    ReplicaSeen,
)
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.paths import JobPaths
from perdure.service.holds import read_holds

SPEC = JobSpec(script="", torchft=TorchftConfig(replicas=1, elsewhere=True))
NAMES = ("a_0:x", "b_1:y", "c_2:z", "uuid", "a_0:w", "d_5:v")


def find(journal: Path) -> JobPaths:
    root = str(journal.parent)
    return JobPaths(root, root, root)


def write_journal(path: Path, *more: AnyEvent, spec: JobSpec = SPEC) -> JobPaths:
    """Write the journal of groups 0 to 5, of which 4 has the name of 0, and then `more`."""
    seen = [
        ReplicaSeen(replica=name, group=number, at_s=2.0, life=number)
        for number, name in enumerate(NAMES)
    ]
    formed = QuorumFormed(quorum_id=1, step=3, members=(NAMES[0], NAMES[2]), at_s=3.0)
    events = [JobSubmitted(spec=spec, at_s=1.0), *seen, formed, *more]
    before, lines = FIRST, []
    for number, event in enumerate(events, 1):
        line, before = seal(encode(JournalEntry(number, float(number), event)), before)
        lines.append(line)
    path.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
    return find(path)


def cordon(number: int) -> NodeCordoned:
    return NodeCordoned(node=number, at_s=5.0, who="me", reason="drain asked for by me")


def test_those_with_a_name_of_their_own_are_held_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    back = NodeRestored(node=5, at_s=6.0, who="me", reason="")
    holds = read_holds(write_journal(path, *map(cordon, (1, 2, 3, 4, 5)), back))
    assert [(held.number, held.name, held.trains) for held in holds.groups] == [
        (1, "b_1", ""),
        (2, "c_2", "c_2:z"),
    ], "who trained was only cordoned"
    assert holds.groups[0].reason == "drain asked for by me"
    assert holds.lost == ["group 3 (uuid)", "group 4 (a_0:w)"]
    assert holds.damage == ""


def test_what_came_to_its_own_end_holds_nobody_and_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert read_holds(find(path)).groups == ()
    ended = JobEnded(status="stopped", exit_code=0, at_s=9.0, reason="stopped by me")
    assert read_holds(write_journal(path, cordon(1), ended)).groups == ()
    other = JobSpec(script="x.py", torchft=TorchftConfig(replicas=3))
    assert read_holds(write_journal(path, cordon(1), spec=other)).groups == ()
    write_journal(path, cordon(1), cordon(2))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"{ torn\n", *lines[6:]]))
    assert read_holds(find(path)).damage != ""
    path.write_bytes(b"\x00\xff\n" * 5000)
    assert read_holds(find(path)).damage != ""


def test_of_one_that_has_ended_only_the_end_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = JobEnded(status="stopped", exit_code=0, at_s=9.0, reason="stopped by me")
    paths = write_journal(tmp_path / "journal.jsonl", cordon(1), ended)
    monkeypatch.setattr("perdure.service.holds.read_lines", lambda path: 1 / 0)
    assert read_holds(paths).groups == ()
    paths = write_journal(tmp_path / "journal.jsonl", cordon(1))
    with pytest.raises(ZeroDivisionError):
        read_holds(paths)
