"""What a rank left behind becomes its exit record."""

import contextlib
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.disks import small_disk

from perdure.keeper import exits
from perdure.model.bus.wire import RankLaunch
from perdure.model.codec import decode, encode
from perdure.model.failures import ExitRecord
from perdure.service.part import LINE_MAX
from perdure.worker.start.failure import RESERVED_BYTES, save_failure

USAGE = resource.getrusage(resource.RUSAGE_SELF)


def make_evidence(folder: Path, **offsets: int) -> exits.Evidence:
    names = ("stdout", "stderr", "error_file", "traceback_file")
    return exits.Evidence(**{n: str(folder / n) for n in names}, **offsets)


def make_record(evidence: exits.Evidence, status: int, **options: Any) -> ExitRecord:
    defaults: dict[str, Any] = {"asked": False, "oom_kills": 0}
    return exits.make_record(
        rank=1, generation=2, pid=3, at_s=4.0, status=status, usage=USAGE, evidence=evidence,
        **(defaults | options),
    )  # fmt: skip


def test_torch_error_file_comes_first(tmp_path: Path) -> None:
    (tmp_path / "error_file").write_text(
        json.dumps({"message": {"message": "ValueError: a", "extraInfo": {"py_callstack": "T"}}})
    )
    (tmp_path / "traceback_file").write_text('{"error": "other", "traceback": "U"}')
    record = make_record(make_evidence(tmp_path), 1 << 8)
    assert (record.code, record.error, record.traceback) == (1, "ValueError: a", "T")


def test_own_traceback_file(tmp_path: Path) -> None:
    try:
        raise ValueError("bad lr\nsecond line")
    except ValueError as error:
        save_failure(str(tmp_path / "traceback_file"), error, error.__traceback__)
    record = make_record(make_evidence(tmp_path), 1 << 8)
    assert record.error == "ValueError: bad lr"
    assert record.traceback.startswith("Traceback (most recent call last):")


def test_a_rank_that_was_killed_because_it_did_not_exit_ended_by_its_exception(
    tmp_path: Path,
) -> None:
    own = str(tmp_path / "errors" / "g2-r1.json")
    evidence = exits.prepare_evidence(RankLaunch(1, {}, "", "", ""), own)
    assert not exits.has_raised(evidence)
    try:
        raise ValueError("bad batch")
    except ValueError as error:
        save_failure(evidence.traceback_file, error, error.__traceback__)
    assert exits.has_raised(evidence)
    record = make_record(evidence, signal.SIGKILL, ended_for="it did not exit")
    assert (record.code, record.signal) == (1, 0)
    assert record.error == "ValueError: bad batch; it did not exit"


def test_traceback_read_off_the_stream(tmp_path: Path) -> None:
    (tmp_path / "stderr").write_text(
        "old\nTraceback (most recent call last):\n  File\nKeyError: 'a'\n"
        "Traceback (most recent call last):\n  File x\n    y\nOSError: no\nafter\n"
    )
    record = make_record(make_evidence(tmp_path), 1 << 8)
    assert record.error == "OSError: no"
    assert record.traceback.endswith("    y\nOSError: no")
    assert record.last_output[-1] == "after"
    fresh = make_record(
        make_evidence(tmp_path, stderr_from=(tmp_path / "stderr").stat().st_size), 9
    )
    assert (fresh.error, fresh.last_output) == ("", ())


def test_output_where_stderr_is_empty(tmp_path: Path) -> None:
    (tmp_path / "stdout").write_text("".join(f"line {n}\n" for n in range(50)))
    record = make_record(make_evidence(tmp_path), 0)
    assert record.last_output == tuple(f"line {n}" for n in range(30, 50))
    assert not record.failed


@pytest.mark.parametrize(
    ("number", "asked", "kills", "oom"),
    [
        (signal.SIGKILL, False, 1, True),
        (signal.SIGKILL, False, 0, False),
        (signal.SIGKILL, True, 1, False),
        (signal.SIGSEGV, False, 1, False),
    ],
)
def test_out_of_memory(tmp_path: Path, number: int, asked: bool, kills: int, oom: bool) -> None:
    record = make_record(make_evidence(tmp_path), number, asked=asked, oom_kills=kills)
    assert (record.signal, record.oom) == (number, oom)


def test_record_is_replaced_whole(tmp_path: Path) -> None:
    record = make_record(make_evidence(tmp_path), signal.SIGKILL)
    path = tmp_path / "exits" / "g2-r1.json"
    exits.write_record(str(path), record)
    exits.write_record(str(path), record)
    assert decode(path.read_bytes(), ExitRecord) == record
    assert os.listdir(path.parent) == ["g2-r1.json"]


class Unspeakable(Exception):
    """Its text has half of a surrogate pair, as a file name that is not UTF-8 has."""

    def __str__(self) -> str:
        return "cannot open \udcff: " + "x" * 10_000_000


def test_an_exception_that_cannot_be_encoded(tmp_path: Path) -> None:
    """T2: it killed the keeper, and so every rank of the node."""
    try:
        raise Unspeakable
    except Unspeakable as error:
        save_failure(str(tmp_path / "traceback_file"), error, error.__traceback__)
    assert (tmp_path / "traceback_file").stat().st_size < 200_000
    record = make_record(make_evidence(tmp_path), 1 << 8)
    assert "Unspeakable: cannot open \\udcff: xxx" in record.error
    assert record.traceback.startswith("Traceback (most recent call last):")
    assert decode(encode(record), ExitRecord) == record


@pytest.mark.parametrize(
    "content",
    [
        b'{"message": {"message": "E: \\udcff", "extraInfo": {"py_callstack": "\\ud800"}}}',
        b'{"message": "' + b"x" * 10_000_000 + b'"}',
        b'{"message": [NaN, Infinity, {"a": "\\udcff"}]}',
        b"[" * 1_000_000, b'{"message":' * 1_000_000, b"\xff\xfe\x00" * 1000, b"\x00" * 100_000,
        b'{"message": ' + b"9" * 10_000 + b"}",
    ],
)  # fmt: skip
def test_no_evidence_can_keep_a_record_from_being_made(tmp_path: Path, content: bytes) -> None:
    """T2: that a rank ended, and how, is known whatever it left behind."""
    evidence = make_evidence(tmp_path)
    for name in ("error_file", "traceback_file", "stderr", "stdout"):
        (tmp_path / name).write_bytes(content)
    record = make_record(evidence, 7)
    assert (record.signal, record.code) == (7, 0)
    data = encode(record)
    assert decode(data, ExitRecord) == record
    assert len(data) < 1_000_000


def test_a_pipe_in_the_place_of_evidence_holds_nobody_up(tmp_path: Path) -> None:
    """T2: whoever opens a pipe to read waits for somebody who writes."""
    for name in ("error_file", "traceback_file", "stderr", "stdout"):
        os.mkfifo(tmp_path / name)
    assert make_record(make_evidence(tmp_path), 1 << 8).code == 1


def test_a_link_in_the_place_of_evidence_leads_nowhere(tmp_path: Path) -> None:
    """T2: a record tells what the rank said, not what lies elsewhere."""
    (tmp_path / "elsewhere").write_text("a secret")
    for name in ("error_file", "traceback_file", "stderr", "stdout"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    record = make_record(make_evidence(tmp_path), 1 << 8)
    assert (record.code, record.last_output, record.error) == (1, (), "")


def test_a_fault_of_our_own_costs_the_reason_and_not_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T2: the keeper holds all ranks of the node."""

    def fail(*_: object) -> tuple[str, str]:
        raise LookupError("a bug")

    monkeypatch.setattr(exits, "choose_error", fail)
    record = make_record(make_evidence(tmp_path), 3 << 8)
    assert record.code == 3
    assert "a bug" in record.error


def test_the_ends_of_many_ranks_are_one_message(tmp_path: Path) -> None:
    """T3: a keeper says them together; a line that no agent takes would keep its node away."""
    evidence = make_evidence(tmp_path)
    (tmp_path / "stderr").write_bytes(b"\x00" * 4096 * 20)
    (tmp_path / "traceback_file").write_text(
        json.dumps({"error": "E" * 4096, "traceback": "\x00" * 65_536})
    )
    one = make_record(evidence, 1 << 8)
    fitting = exits.fit_records([one] * 128)
    assert len(fitting) == 128
    assert len(encode(fitting)) < LINE_MAX < len(encode([one] * 128))
    assert {(each.rank, each.code, each.error[:50]) for each in fitting} == {(1, 1, "E" * 50)}
    assert exits.fit_records([one]) == (one,)


def launch_on(disk: Path, rank: int = 1) -> RankLaunch:
    return RankLaunch(rank, {}, *(str(disk / name) for name in ("stdout", "stderr", "ring")))


@pytest.mark.parametrize("text", ["later", "\udcff\x00" * 100_000])
def test_the_cause_is_known_although_the_disk_is_full(tmp_path: Path, text: str) -> None:
    """T2: standard error and the copy of the exception are on the same disk as the job."""
    with small_disk(tmp_path / "disk", "256k") as disk:
        evidence = exits.prepare_evidence(launch_on(disk), str(disk / "own.json"))
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        try:
            raise ValueError(text)
        except ValueError as error:
            save_failure(evidence.traceback_file, error, error.__traceback__)
        record = make_record(evidence, 1 << 8)
    assert record.error.startswith("ValueError: " + text[:1].replace("\udcff", "\\udcff"))
    assert "in test_the_cause_is_known" in record.traceback


def test_what_was_reserved_for_an_exception_is_given_back(tmp_path: Path) -> None:
    evidence = exits.prepare_evidence(launch_on(tmp_path), str(tmp_path / "own.json"))
    assert os.stat(evidence.traceback_file).st_blocks * 512 >= RESERVED_BYTES
    assert make_record(evidence, 0).error == ""
    assert not os.path.exists(evidence.traceback_file)
    exits.prepare_evidence(launch_on(tmp_path), str(tmp_path / "own.json"))
    assert make_record(evidence, 1 << 8).error == ""
    assert not os.path.exists(evidence.traceback_file)


def test_what_a_killed_keeper_had_reserved_is_given_back_by_the_next(tmp_path: Path) -> None:
    """What says something stays, and so does what another rank needs."""
    for name in ("g1-r0", "g2-r0", "g1-r7"):
        exits.prepare_evidence(launch_on(tmp_path, int(name[-1])), str(tmp_path / f"{name}.json"))
    told = tmp_path / "g1-r0.traceback.json"
    assert not told.exists()
    save_failure(str(told), ValueError("bad"), None)
    exits.prepare_evidence(launch_on(tmp_path, 0), str(tmp_path / "g3-r0.json"))
    left = {path.name.partition(".")[0] for path in tmp_path.glob("*.traceback.json")}
    assert left == {"g1-r0", "g1-r7", "g3-r0"}
