"""What torch has compiled goes from one cache to another, and nothing else is ever written.

Both ends are real: two folders, and a connection between two threads.
"""

import contextlib
import errno
import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.transfer import Wire
from perdure.model.errors import PerdureError, PlatformError, ProtocolError
from perdure.model.signals.compiled import CompiledFile, explain_difference
from perdure.service import compiled
from perdure.service.compiled import Taken, list_compiled, receive_compiled, send_compiled

KEY = b"k" * 32
KERNEL = "inductor/ab/cabc.main.so"
Folders = dict[str, Path]


def make_folders(root: Path) -> Folders:
    folders = {name: root / name for name in ("inductor", "triton")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    return folders


def put(folders: Folders, name: str, data: bytes, *, age_s: float = 60.0) -> Path:
    folder, _, path = name.partition("/")
    place = folders[folder] / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    os.utime(place, (time.time() - age_s,) * 2)
    return place


def list_files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def theirs(tmp_path: Path) -> Folders:
    return make_folders(tmp_path / "theirs")


@pytest.fixture
def mine(tmp_path: Path) -> Folders:
    return make_folders(tmp_path / "mine")


def take(
    mine: Folders,
    send: Callable[[Wire], object],
    *,
    deadline_s: float = PATIENCE_S,
    over: threading.Event | None = None,
) -> tuple[Taken, Exception | None]:
    """Take what `send` sends at the other end; return what has arrived, and the error if any.

    `over` is set when the receiver has left.
    """
    here, there = socket.socketpair()
    end_s, taken = time.monotonic() + deadline_s, Taken()

    def run() -> None:
        with there, contextlib.suppress(OSError, ProtocolError):  # The receiver may have left.
            send(Wire(there, end_s))

    thread = threading.Thread(target=run)
    thread.start()
    problem: Exception | None = None
    with here:
        try:
            receive_compiled(Wire(here, end_s), mine, KEY, taken)
        except (OSError, PerdureError) as error:
            problem = error
    if over is not None:
        over.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    return taken, problem


def send_all(
    theirs: Folders, sent: tuple[str, ...] = ("inductor", "triton")
) -> Callable[[Wire], None]:
    return lambda wire: send_compiled(wire, theirs, KEY, sent=sent)


def block(what: bytes, data: bytes, key: bytes = KEY) -> bytes:
    return len(data).to_bytes(4, "big") + data + hmac.digest(key, what + b":" + data, "sha256")


def lie(
    roster: list[CompiledFile] | bytes, content: bytes = b"", key: bytes = KEY
) -> Callable[[Wire], None]:
    """Offer `roster`, whatever there is, and send `content` for what is asked."""

    def send(wire: Wire) -> None:
        told = roster if isinstance(roster, bytes) else msgspec.json.encode(roster)
        wire.send(block(b"roster", told, key))
        size = int.from_bytes(wire.receive(4), "big")
        wire.receive(size + 32)
        wire.send(content)

    return send


def test_what_is_not_there_is_taken_closed_to_others_and_what_is_there_stays(
    mine: Folders, theirs: Folders
) -> None:
    large = os.urandom(3_000_001)
    put(theirs, KERNEL, large)
    put(theirs, "inductor/fxgraph/x/fx/entry", b"graph")
    put(theirs, "inductor/fxgraph/y/fy/empty", b"")
    put(theirs, "triton/KEY/kernel.cubin", b"cubin")
    kept = put(mine, "inductor/cd/own.py", b"mine")
    put(theirs, "inductor/cd/own.py", b"theirs")
    os.chmod(theirs["inductor"] / "ab" / "cabc.main.so", 0o777)
    taken, problem = take(mine, send_all(theirs))
    assert problem is None
    assert (taken.offered, taken.files, taken.bytes) == (5, 4, len(large) + 10)
    assert list_files(mine["inductor"]) == list_files(theirs["inductor"]) | {"cd/own.py": b"mine"}
    assert (mine["inductor"] / "ab" / "cabc.main.so").stat().st_mode & 0o777 == 0o600
    assert (mine["inductor"] / "ab").stat().st_mode & 0o777 == 0o700
    assert (mine["triton"] / "KEY" / "kernel.cubin").read_bytes() == b"cubin"
    before = kept.stat().st_ino
    assert take(mine, send_all(theirs)) == (Taken(offered=5), None)
    assert kept.stat().st_ino == before


def test_locks_links_and_what_is_just_being_made_are_left_behind(
    mine: Folders, theirs: Folders, tmp_path: Path
) -> None:
    put(theirs, KERNEL, b"whole")
    put(theirs, "inductor/ab/cnew.main.so", b"half", age_s=0.0)
    put(theirs, "inductor/ab/.12.34.tmp", b"half")
    put(theirs, "inductor/locks/cabc.lock", b"")
    put(theirs, "inductor/dynamo/state", b"changes in place")
    put(theirs, "inductor/ab/odd name", b"")
    put(theirs, "triton/KEY/__grp__kernel.json", b"paths")
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    (theirs["inductor"] / "ab" / "link.so").symlink_to(secret)
    (theirs["inductor"] / "zz").symlink_to(tmp_path)
    os.mkfifo(theirs["inductor"] / "ab" / "pipe.so")
    assert [each.name for each in list_compiled(theirs, sent=("inductor",))] == [KERNEL]
    assert take(mine, send_all(theirs, ("inductor",)))[0].files == 1
    assert list_files(mine["inductor"]) == {"ab/cabc.main.so": b"whole"}


def test_what_is_locked_changes_or_vanishes_meanwhile_is_not_taken(
    mine: Folders, theirs: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = put(theirs, "inductor/ab/gone.py", b"gone")
    changed = put(theirs, "inductor/ab/changed.so", b"x" * 3_000_000)
    put(theirs, "inductor/ab/locked.so", b"half")
    put(theirs, "inductor/ab/whole.py", b"whole")
    listed = list_compiled(theirs, sent=("inductor",))
    gone.unlink()

    def look(path: Path) -> bool:
        if path.name == "changed.lock":  # It is open by now, and changed while it is read.
            os.utime(changed)
        return path.name == "locked.lock"

    monkeypatch.setattr(compiled, "is_locked", look)
    monkeypatch.setattr(compiled, "list_compiled", lambda *_, **__: listed)

    def touch_later(*args: object) -> SimpleNamespace:
        about = fstat(*args)  # type: ignore[arg-type]
        if about.st_size == 3_000_000:
            os.utime(changed)
        return about  # type: ignore[return-value]

    fstat = os.fstat
    monkeypatch.setattr(compiled.os, "fstat", touch_later)
    taken, problem = take(mine, send_all(theirs))
    assert problem is None
    assert (taken.offered, taken.files) == (4, 1)
    assert list_files(mine["inductor"]) == {"ab/whole.py": b"whole"}


def test_the_newest_are_sent_where_there_is_too_much(
    theirs: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age_s, name in ((300.0, "old"), (30.0, "new"), (100.0, "middle")):
        put(theirs, f"inductor/ab/{name}.so", b"x" * 100, age_s=age_s)
    monkeypatch.setattr(compiled, "SENT_BYTES_MAX", 250)
    names = [each.name for each in list_compiled(theirs, sent=("inductor",))]
    assert names == ["inductor/ab/new.so", "inductor/ab/middle.so"]
    monkeypatch.setattr(compiled, "SENT_FILES_MAX", 1)
    assert len(list_compiled(theirs, sent=("inductor",))) == 1


def test_many_small_files_are_sent_up_to_a_bound(mine: Folders, theirs: Folders) -> None:
    for number in range(4_010):
        put(theirs, f"triton/K/{number}", b"", age_s=10.0 + number)
    taken, problem = take(mine, send_all(theirs))
    assert (taken.files, problem) == (4_000, None)
    assert (mine["triton"] / "K" / "0").exists()
    assert not (mine["triton"] / "K" / "4009").exists()


@pytest.mark.parametrize(
    ("roster", "why"),
    [
        ([CompiledFile("inductor/../../evil", 1)], "segment `..`"),
        ([CompiledFile("/etc/evil", 1)], "is absolute"),
        ([CompiledFile("inductor/ab//evil", 1)], "empty segment"),
        ([CompiledFile("inductor/ab/evil\0.so", 1)], "NUL"),
        ([CompiledFile("cuda/ab/evil", 1)], "is not what is sent"),
        ([CompiledFile("inductor/locks/evil.lock", 1)], "is not what is sent"),
        ([CompiledFile("inductor/ab/.evil.tmp", 1)], "is not what is sent"),
        ([CompiledFile("inductor/ab/\x1b]0;evil", 1)], "is not what is sent"),
        ([CompiledFile("inductor/ab", 1)], "is not what is sent"),
        ([CompiledFile("inductor/ab/" + "e" * 400, 1)], "is too long"),
        ([CompiledFile(KERNEL, -1)], "-1 bytes"),
        ([CompiledFile(KERNEL, 1 << 40)], "too much"),
        ([CompiledFile("triton/a/b/c/d/e/f/evil", 1)], "is not what is sent"),
        ([CompiledFile(f"inductor/ab/{n}.so", 0) for n in range(4_001)], "too much"),
        ([CompiledFile(KERNEL, 1), CompiledFile(KERNEL, 1)], "one name"),
        (b"[[1, 2]]", "not a roster"),
        (b"\xff", "not a roster"),
    ],
)  # fmt: skip
def test_of_a_roster_that_lies_nothing_is_taken(
    mine: Folders, roster: list[CompiledFile] | bytes, why: str, tmp_path: Path
) -> None:
    good = [CompiledFile("inductor/ab/good.so", 4)]
    both = good + roster if isinstance(roster, list) else roster
    taken, problem = take(mine, lie(both, b"+good"))
    assert isinstance(problem, ProtocolError)
    assert why in problem.message
    assert taken == Taken()
    assert list_files(tmp_path) == {}


def test_who_has_not_the_key_is_not_believed(mine: Folders, tmp_path: Path) -> None:
    """Whoever is in the way of a connection that is not encrypted."""
    _, problem = take(mine, lie([CompiledFile(KERNEL, 4)], key=b"another"))
    assert isinstance(problem, ProtocolError)
    assert "hash of the roster" in problem.message
    evil = b"+evil" + hmac.digest(b"another", b"0:evil", "sha256")
    taken, problem = take(mine, lie([CompiledFile(KERNEL, 4)], evil))
    assert isinstance(problem, ProtocolError)
    assert problem.message == f"the hash of {KERNEL} is wrong"
    assert taken.files == 0
    assert list_files(tmp_path) == {}


def test_a_file_in_the_place_of_another_is_refused_and_what_came_before_stays(
    mine: Folders, tmp_path: Path
) -> None:
    def seal(index: int, data: bytes) -> bytes:
        return b"+" + data + hmac.digest(KEY, b"%d:" % index + data, "sha256")

    roster = [CompiledFile(f"inductor/ab/{n}.so", 4) for n in range(3)]
    content = seal(0, b"zero") + seal(1, b"one!") + seal(1, b"one!")
    taken, problem = take(mine, lie(roster, content))
    assert isinstance(problem, ProtocolError)
    assert taken.files == 2
    assert list_files(tmp_path / "mine" / "inductor") == {"ab/0.so": b"zero", "ab/1.so": b"one!"}


def test_a_sender_that_dies_half_way_leaves_what_was_whole(mine: Folders, tmp_path: Path) -> None:
    whole = b"+good" + hmac.digest(KEY, b"0:good", "sha256")
    roster = [CompiledFile("inductor/ab/good.so", 4), CompiledFile(KERNEL, 1 << 20)]
    taken, problem = take(mine, lie(roster, whole + b"+" + b"x" * 1000))
    assert isinstance(problem, ConnectionError)
    assert (taken.files, taken.bytes) == (1, 4)
    assert list_files(tmp_path) == {"mine/inductor/ab/good.so": b"good"}


def test_a_sender_that_falls_silent_is_waited_for_a_bounded_time(mine: Folders) -> None:
    over = threading.Event()

    def stall(wire: Wire) -> None:
        lie([CompiledFile(KERNEL, 1 << 20)], b"+" + b"x" * 1000)(wire)
        over.wait(PATIENCE_S)

    _, problem = take(mine, stall, deadline_s=0.3, over=over)
    assert isinstance(problem, TimeoutError)
    assert list_files(mine["inductor"]) == {}


def test_nothing_is_written_through_a_link_that_was_in_the_cache(
    mine: Folders, theirs: Folders, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (mine["inductor"] / "ab").symlink_to(elsewhere)
    put(theirs, KERNEL, b"kernel")
    put(theirs, "inductor/cd/another.so", b"another")
    taken, problem = take(mine, send_all(theirs))
    assert problem is None
    assert (taken.files, taken.skipped) == (1, 1)
    assert list(elsewhere.iterdir()) == []
    assert (mine["inductor"] / "cd" / "another.so").read_bytes() == b"another"


@pytest.mark.parametrize("at", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize(
    ("name", "own"),
    [("triton/" + "e" * 300, ""), ("triton/" + "e" * 300 + "/f", ""), ("triton/own/f", "own")],
    ids=["too long", "a folder too long", "a file in the way"],
)
def test_a_name_that_cannot_be_written_here_is_passed_over_and_the_rest_is_taken(
    mine: Folders, name: str, own: str, at: int
) -> None:
    if own:
        put(mine, f"triton/{own}", b"the user's")
    roster = [CompiledFile("triton/K/kernel", 4)]
    roster.insert(at, CompiledFile(name, 2_000_001))
    content = b""
    for index, each in enumerate(roster):
        data = b"z" * each.size
        content += b"+" + data + hmac.digest(KEY, b"%d:" % index + data, "sha256")
    taken, problem = take(mine, lie(roster, content))
    assert problem is None
    assert taken == Taken(offered=2, files=1, bytes=4, skipped=1)
    there = {"K/kernel": b"zzzz"} | ({own: b"the user's"} if own else {})
    assert list_files(mine["triton"]) == there


def test_a_disk_that_is_full_meanwhile_ends_it(
    mine: Folders, theirs: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is about no one name: what follows has no room either."""
    put(theirs, KERNEL, b"kernel")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiled.os, "link", refuse)
    taken, problem = take(mine, send_all(theirs))
    assert isinstance(problem, OSError)
    assert (problem.errno, taken.files, taken.skipped) == (errno.ENOSPC, 0, 0)
    assert list_files(mine["inductor"]) == {}


def test_a_disk_that_would_be_full_takes_nothing(
    mine: Folders, theirs: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(theirs, KERNEL, b"kernel")
    monkeypatch.setattr(compiled, "FREE_MIN_BYTES", 1 << 60)
    _, problem = take(mine, send_all(theirs))
    assert isinstance(problem, PlatformError)
    assert "too little room" in problem.message
    assert list_files(mine["inductor"]) == {}


@pytest.mark.parametrize("wanted", [b"[7]", b'["x"]', b"{}", b"[0, 1e99]", b"[0, 0]"])
def test_who_asks_for_what_there_is_not_gets_nothing(theirs: Folders, wanted: bytes) -> None:
    put(theirs, KERNEL, b"kernel")
    here, there = socket.socketpair()
    with here, there:
        here.sendall(block(b"wanted", wanted))
        end_s = time.monotonic() + PATIENCE_S
        with pytest.raises(ProtocolError, match="not files of the roster"):
            send_compiled(Wire(there, end_s), theirs, KEY, sent=("inductor",))


def test_a_difference_is_said_in_words() -> None:
    mine = {"torch": "2.13.0", "gpus": ""}
    assert explain_difference(mine, dict(mine)) == ""
    assert explain_difference(mine, {"torch": "2.13.0", "gpus": "H100"}) == (
        "gpus is H100 there and none here"
    )
