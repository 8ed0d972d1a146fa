"""The agent makes and fetches copies under `checkpoint.url`, and names what it fetched."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from perdure.files.own import find_newest, open_room
from perdure.model.events import AnyEvent, OwnChecked
from perdure.model.job import CheckpointConfig, JobSpec
from perdure.model.orders import CheckOwn
from perdure.service.agent.outbox import Outbox
from perdure.service.agent.own import OwnCheckpoints


class Kept(Outbox):
    """Keeps each event."""

    def __init__(self) -> None:
        super().__init__(None, "s", node=0, source="a")
        self.events: list[AnyEvent] = []

    def put(self, event: AnyEvent, *known: Any) -> None:  # type: ignore[override]
        self.events.append(event)
        for act in known:
            act()


def save(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", b"x")
    return path


def make(
    cwd: Path, url: Path, *patterns: str, observe: bool = False
) -> tuple[OwnCheckpoints, Kept]:
    cwd.mkdir(exist_ok=True)
    spec = JobSpec(
        name="j", script="t.py", cwd=str(cwd), observe=observe,
        checkpoint=CheckpointConfig(own=patterns, url=str(url)),
    )  # fmt: skip
    kept = Kept()
    return OwnCheckpoints(spec, 0, kept, now=lambda: 1.0), kept


def check(own: OwnCheckpoints, kept: Kept, *, move: bool = True) -> OwnChecked:
    asyncio.run(own.check(CheckOwn(generation=0, nodes=(0,), move=move, reason="r")))
    *_, event = kept.events
    assert isinstance(event, OwnChecked)
    return event


@pytest.mark.parametrize("name", ["last.ckpt", "last-v1.ckpt"])
def test_a_torn_last_one_becomes_a_copy_of_the_newest_whole_one(tmp_path: Path, name: str) -> None:
    """Lightning's `ckpt_path="last"` begins from step 0 if no such file is there."""
    out = tmp_path / "out"
    whole, torn = save(out / "epoch=0-step=40.ckpt"), save(out / name)
    os.utime(whole, (1.0, 1.0))
    torn.write_bytes(torn.read_bytes()[:10])
    own, kept = make(tmp_path, tmp_path / "url", "out/*.ckpt")
    (told,) = check(own, kept).moved
    assert "moved to out.torn/last" in told
    assert "; a copy of out/epoch=0-step=40.ckpt, " in told
    assert told.endswith(" old, takes its place")
    assert torn.read_bytes() == whole.read_bytes()
    assert len((tmp_path / "out.torn" / name).read_bytes()) == 10


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04"])
def test_a_last_one_is_looked_at_if_it_is_as_old_as_the_newest(tmp_path: Path, data: bytes) -> None:
    """Lightning writes both at once, and times of files are coarse."""
    out = tmp_path / "out"
    whole, torn = save(out / "step=40.ckpt"), out / "last.ckpt"
    torn.write_bytes(data)
    for path in (whole, torn):
        os.utime(path, (1000.0, 1000.0))
    own, kept = make(tmp_path, tmp_path / "url", "out/*.ckpt")
    (told,) = check(own, kept).moved
    assert "a copy of out/step=40.ckpt, " in told
    assert torn.read_bytes() == whole.read_bytes()


def test_another_torn_file_without_a_number_is_moved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    os.utime(save(out / "epoch=0-step=40.ckpt"), (1.0, 1.0))
    for name in ("best.ckpt", "blast.ckpt", "last.pt"):
        (out / name).write_bytes(b"PK\x03\x04")
        own, kept = make(tmp_path, tmp_path / "url", "out/*")
        (told,) = check(own, kept).moved
        assert "the newest whole one is out/epoch=0-step=40.ckpt" in told
        assert not (out / name).exists()


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (b"9" * 5000, b"90"),  # More digits than Python makes a number of
        (b"\n120\n", b"90"),
        (b"nan", b"nan"),
        (b"\xff\xed\xa0\x80", b"\xff\xed\xa0\x80"),
        (b"0" * (10 << 20), b"0" * (10 << 20)),
    ],
    ids=["long", "lines", "nan", "bytes", "10 MB"],
)
def test_no_text_of_a_pointer_keeps_perdure_from_an_answer(
    tmp_path: Path, text: bytes, after: bytes
) -> None:
    out, pointer = tmp_path / "out", tmp_path / "out" / "latest_checkpointed_iteration.txt"
    whole, torn = (save(out / f"iter_0000{n:03}" / "mp_rank_00" / "x.pt") for n in (90, 120))
    torn.write_bytes(torn.read_bytes()[:10])
    pointer.write_bytes(text)
    own, kept = make(tmp_path, tmp_path / "url", "out/iter_*")
    told = check(own, kept).moved
    assert "out/iter_0000120 " in told[0]
    assert "moved to out.torn/iter_0000120" in told[0]
    assert pointer.read_bytes() == after
    assert whole.exists()


def test_a_name_may_have_any_bytes(tmp_path: Path) -> None:
    """Without an answer, no rank would ever start."""
    out = os.fsencode(tmp_path / "out")
    for number in (90, 120):
        file = b"%s/run\xff-%d/mp_rank_00_model_states.pt" % (out, number)
        save(Path(os.fsdecode(file)))
    with open(file, "r+b") as torn:
        torn.truncate(10)
    with open(out + b"/latest", "wb") as pointer:
        pointer.write(b"run\xff-120")
    own, kept = make(tmp_path, tmp_path / "url", "out/run*")
    (told,) = check(own, kept).moved
    assert "takes its place" not in told
    (tmp_path / "out" / "latest").write_text("")
    assert len(check(own, kept).moved) == 1
    with open(out + b"/latest", "rb") as named:
        assert named.read() == b"run\xff-90"
    assert sorted(os.listdir(out + b".torn")) == [b"latest", b"run\xff-120"]


def test_a_move_that_fails_in_any_way_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a surprise")

    monkeypatch.setattr("perdure.service.agent.own.set_aside", fail)
    out = tmp_path / "out"
    save(out / "step-1.pt")
    (out / "step-2.pt").write_bytes(b"PK\x03\x04")
    own, kept = make(tmp_path, tmp_path / "url", "out/step-*")
    (told,) = check(own, kept).moved
    assert told.endswith("it cannot be moved: a surprise")


def test_a_pattern_that_cannot_be_copied_keeps_no_other_one_from_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    bad = save(here / "a" / "step-1" / "x.pt").parent
    save(bad / ("d" * 200) / ("e" * 200) / "x.pt")  # No name of a copy is as long.
    save(here / "b" / "ckpt-1.pt")
    own, _ = make(here, tmp_path / "url", "a/step-*", "b/*.pt")
    assert not asyncio.run(own._copy_away())
    there = tmp_path / "there"
    other, kept = make(there, tmp_path / "url", "a/step-*", "b/*.pt")
    (told,) = check(other, kept).fetched
    assert told.startswith("b/ckpt-1.pt, "), told


def test_a_checkpoint_that_was_copied_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def look(pattern: str, cwd: str) -> Any:
        looks.append(pattern)
        return find_newest(pattern, cwd)

    monkeypatch.setattr("perdure.service.agent.own.find_newest", look)
    path = save(tmp_path / "b" / "step-1" / "x.pt")
    own, _ = make(tmp_path, tmp_path / "url", "b/step-*")

    async def copy() -> int:
        looks.clear()
        assert await own._copy_away()
        return len(looks)

    async def act() -> None:
        assert await copy() == 1
        assert await copy() == 0
        os.utime(path, (1.0, 1.0))  # It is overwritten in its folder.
        assert (await copy(), await copy()) == (1, 0)
        save(path.parent.with_name("step-2") / "x.pt").write_bytes(b"")
        assert (await copy(), await copy()) == (1, 1), "the newest is not whole yet"

    asyncio.run(act())


def test_a_job_that_is_only_observed_makes_no_copies(tmp_path: Path) -> None:
    save(tmp_path / "b" / "ckpt-1.pt")
    own, _ = make(tmp_path, tmp_path / "url", "b/*.pt", observe=True)
    assert asyncio.run(own._copy_away())
    assert not (tmp_path / "url").exists(), "it fetches none, and would replace newer ones"


def test_while_a_lost_node_may_write_a_copy_is_fetched_and_nothing_is_moved(
    tmp_path: Path,
) -> None:
    save(tmp_path / "here" / "b" / "ckpt-1.pt")
    own, _ = make(tmp_path / "here", tmp_path / "url", "b/*.pt")
    assert asyncio.run(own._copy_away())
    other, kept = make(tmp_path / "there", tmp_path / "url", "a/*.pt", "b/*.pt")
    torn = save(tmp_path / "there" / "a" / "ckpt-1.pt")
    torn.write_bytes(torn.read_bytes()[:10])
    told = check(other, kept, move=False)
    assert (told.moved, told.newest) == ((), "b/ckpt-1.pt")
    assert torn.exists()


@pytest.mark.parametrize("why", ["none", "damaged"])
def test_what_cannot_be_fetched_is_said_and_what_is_not_there_is_not(
    tmp_path: Path, why: str
) -> None:
    save(tmp_path / "here" / "b" / "ckpt-1.pt")
    own, _ = make(tmp_path / "here", tmp_path / "url", "b/*.pt")
    if why == "damaged":
        assert asyncio.run(own._copy_away())
        (file,) = (tmp_path / "url").rglob("=")
        file.write_bytes(b"x")
    other, kept = make(tmp_path / "there", tmp_path / "url", "b/*.pt")
    told = check(other, kept).fetched
    if why == "none":
        assert told == ()
    else:
        assert "does not match its hash; the script begins without one" in told[0]


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(errno.ENOSPC, "the disk is full"), "the disk is full"),
     (TimeoutError(), "the disk takes too long")],
)  # fmt: skip
def test_a_torn_file_stays_if_its_copy_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, why: str
) -> None:
    """Without the file, the script begins from step 0, and its first save overwrites the copy."""
    path, copy = save(tmp_path / "out" / "ckpt.pt"), save(tmp_path / "out.copy" / "ckpt.pt")
    path.write_bytes(b"PK\x03\x04")

    def fail(*args: object) -> None:
        raise error

    checkpoint = CheckpointConfig(own=("out/ckpt.pt",), own_copy=True)
    spec, kept = JobSpec(name="j", script="t.py", cwd=str(tmp_path), checkpoint=checkpoint), Kept()
    own, before = OwnCheckpoints(spec, 0, kept, now=lambda: 1.0), copy.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("perdure.files.own._copy_bytes", fail)
        (told,) = check(own, kept).moved
    assert told.endswith(f"out.copy/ckpt.pt cannot take its place: {why}")
    assert path.read_bytes() == b"PK\x03\x04"
    (told,) = check(own, kept).moved
    assert "its copy, " in told
    assert path.read_bytes() == copy.read_bytes() == before


KILLED = """
import os, sys
from perdure.files import own
own._refuse_late = lambda until_s: os.kill(os.getpid(), 9)
getattr(own, sys.argv[1])(*sys.argv[2:])
"""


@pytest.mark.parametrize("act", ["copy", "put back", "fetch"])
def test_what_a_killed_agent_has_left_of_a_copy_is_removed(tmp_path: Path, act: str) -> None:
    path, copy = save(tmp_path / "out" / "ckpt.pt"), tmp_path / "out.copy" / "ckpt.pt"
    words = ["copy_whole", path, copy]
    if act == "put back":
        save(copy)
        words = ["put_back", copy, path, tmp_path / "out.torn" / "ckpt.pt"]
    if act == "fetch":
        words = ["copy_whole", path, tmp_path / "out" / "x.pt"]
    done = subprocess.run([sys.executable, "-c", KILLED, *map(str, words)], check=False)
    assert done.returncode == -signal.SIGKILL
    if act == "fetch":
        (tmp_path / "out" / ".partial").rename(tmp_path / "out.partial")
    left = [one for one in tmp_path.rglob("*") if ".partial" in str(one) and one.is_file()]
    assert any(one.name == "ckpt.pt" for one in left), left
    with open_room(str(tmp_path / "out.partial")) as room:
        own, kept = make(tmp_path, tmp_path / "url", "out/ckpt.pt")
        check(own, kept)
        assert [one for one in left if one.exists()] == []
        assert os.listdir(room) == [".lock"], "another process copies there"
    assert not [one for one in tmp_path.rglob("*") if ".partial" in str(one)]
    assert sorted(os.listdir(tmp_path / "out")) == ["ckpt.pt"]
