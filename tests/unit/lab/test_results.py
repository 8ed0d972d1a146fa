"""Results that are kept: whole or not at all, not too many; a stranger's files stay."""

import errno
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.results import CARD, REPLAY
from tests.waiting import PATIENCE_S

from perdure.cli.app import run_command
from perdure.cli.page.results import OTHERS_MAX, PAGE_MAX, Results
from perdure.drill.card import Card, KeptDrill
from perdure.failpoints import SWITCH, switch
from perdure.model.codec import encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.service.results import (
    FILES_MAX,
    KEPT_MAX,
    SIZE_MAX,
    TOTAL_MAX,
    keep_result,
    list_results,
    locate_results,
    read_result,
)
from perdure_lab.results import KeptReplay

ANY = KeptDrill | KeptReplay
PROFILE = Path(__file__).resolve().parents[3] / "examples" / "cost_profile.json"
PLAN = ["plan", str(PROFILE), "--devices", "2", "--global-batch", "8", "--memory", "16GB"]


@pytest.fixture(autouse=True)
def nothing_is_switched_afterwards() -> Iterator[None]:
    yield
    switch({})


def test_what_was_kept_is_what_is_read(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(CARD, job="\ud800", drilled_s=math.nan)
    for result in (KeptDrill(card=odd), KeptReplay(result=REPLAY)):
        path = keep_result(str(tmp_path), result)
        found = read_result(path.parent, path.stem, ANY)
        assert type(found) is type(result)
        assert found.at_s > 1.7e9
        assert found.version
    assert read_result(path.parent, path.stem, ANY).result == REPLAY  # type: ignore[attr-defined]
    (name,) = [n for n in list_results(path.parent).names if n.startswith("drill")]
    card = read_result(path.parent, name, ANY).card  # type: ignore[attr-defined]
    assert math.isnan(card.drilled_s)
    assert card.job == r"\ud800"


def test_the_newest_of_each_kind_stay_and_strangers_files_do(tmp_path: Path) -> None:
    folder = locate_results(str(tmp_path))
    folder.mkdir()
    for number in range(KEPT_MAX + 5):
        (folder / f"drill-20250101T{number:06}Z-00000000.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    (folder / "drill-20250101T000000Z-0.json").write_text("mine")
    left = folder / ".drill-20250101T000000Z-00000000.json-0123456789abcdef"
    left.write_text("cut sho")
    fresh = folder / ".plan-20250101T000000Z-00000000.json-0123456789abcdef"
    fresh.write_text("being writ")
    os.utime(left, (0, 0))
    foreign = folder / "drill-20240101T000000Z-00000000.json"
    foreign.symlink_to(folder / "notes.txt")
    assert len(list_results(folder).surplus) == 5
    replay = keep_result(str(tmp_path), KeptReplay(result=REPLAY))
    path = keep_result(str(tmp_path), KeptDrill(card=CARD))
    names, surplus, unlike, others = list_results(folder)
    assert names[0] in (path.stem, replay.stem)
    assert len(names) == KEPT_MAX + 1
    assert "drill-20250101T000005Z-00000000" not in names
    assert len(list(folder.glob("drill*Z-00000000.json"))) == KEPT_MAX - 1 + 1
    assert surplus == []
    assert unlike == [foreign.stem]
    assert others == ["drill-20250101T000000Z-0.json", "notes.txt"]
    assert not left.exists()
    assert fresh.exists()


def test_all_kinds_together_are_bounded_and_the_newest_stays(tmp_path: Path) -> None:
    folder = locate_results(str(tmp_path))
    folder.mkdir()
    kinds = ("trace", "simulation", "replay", "drive", "plan", "drill")
    for number in range(2 * TOTAL_MAX // SIZE_MAX):
        kind = kinds[number % len(kinds)]
        with open(folder / f"{kind}-20990101T{number:06}Z-00000000.json", "wb") as file:
            file.truncate(SIZE_MAX)
    with open(folder / "plan-20990101T999999Z-00000000.json", "wb") as file:
        file.truncate(1 << 40)  # It is nobody's result, and no reason to remove one.
    path = keep_result(str(tmp_path), KeptDrill(card=CARD))
    names, surplus, unlike, _ = list_results(folder)
    assert path.exists(), "a clock that was set back must not make it the oldest"
    assert len(names) == TOTAL_MAX // SIZE_MAX
    assert sum((folder / f"{name}.json").stat().st_size for name in names) <= TOTAL_MAX
    numbers = [int(name[-15:-10]) for name in names if name != path.stem]
    assert numbers == list(range(2 * TOTAL_MAX // SIZE_MAX))[: -TOTAL_MAX // SIZE_MAX : -1]
    assert (surplus, unlike) == ([], ["plan-20990101T999999Z-00000000"])


def test_a_folder_full_of_strange_files_is_said_and_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    folder = locate_results(str(tmp_path))
    folder.mkdir()
    for number in range(FILES_MAX + 1):
        (folder / f"{number}.txt").touch()
    with pytest.raises(PlatformError, match="more than 10,000 files"):
        Results(str(tmp_path)).look()
    assert run_command(PLAN) == 0
    assert capsys.readouterr().err.count("not kept for `perdure dash`") == 1
    assert len(os.listdir(folder)) == FILES_MAX + 1


@pytest.mark.parametrize("home", ["", "file", "file/below", "read-only/below"])
def test_a_home_that_is_none_fails_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], home: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "read-only").mkdir(0o500)
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / home) if home else "")
    switch({SWITCH: "file/write=error(EACCES),about=plan-*"})  # Root writes anywhere.
    assert run_command([*PLAN, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["options"]
    assert err.count("not kept for `perdure dash`") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_what_cannot_be_a_page_is_said_in_a_line(tmp_path: Path) -> None:
    system = REPLAY.systems[0]
    replace = msgspec.structs.replace
    strange = {
        "characters": replace(REPLAY, systems=(replace(system, system="s"),) * 1500),
        "its page would": replace(REPLAY, unit="x" * (SIZE_MAX - 10_000)),
        "KeyError": replace(REPLAY, systems=(replace(system, ledger={"useful": 1.0}),)),
    }
    results = Results(str(tmp_path))
    for words, result in strange.items():
        path = keep_result(str(tmp_path), KeptReplay(result=result))
        with pytest.raises(ProtocolError, match=words) as raised:
            results.open(path.stem)
        assert len(str(raised.value)) < 400
    listing = results.look()
    assert len(listing.rows["replay"]) == len(strange)
    assert all(len(row.said) < 400 for row in listing.rows["replay"])


def test_what_weighs_more_than_a_page_may_is_refused_by_its_size_alone(tmp_path: Path) -> None:
    system = msgspec.structs.replace(REPLAY.systems[0], system="s")
    heavy = KeptReplay(result=msgspec.structs.replace(REPLAY, systems=(system,) * 2500))
    data = encode(heavy)
    assert PAGE_MAX < len(data) < 2 * PAGE_MAX
    with pytest.raises(PlatformError, match="too large to be kept"):
        keep_result(str(tmp_path), heavy)
    path = keep_result(str(tmp_path), KeptReplay(result=REPLAY))
    path.write_bytes(data)
    results = Results(str(tmp_path))
    with pytest.raises(ProtocolError, match="larger than 1 MiB"):
        results.open(path.stem)
    (why,) = [why for _, why in results.look().faults]
    assert "larger than 1 MiB" in why


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5.0, 0.0, 1e300])
def test_figures_that_cannot_be_are_shown_as_they_are_and_nothing_is_drawn_askew(
    tmp_path: Path, value: float
) -> None:
    counts = ((0.0, 2), (value, -3), (30.0, 1))
    system = msgspec.structs.replace(REPLAY.systems[0], rates=((0.0, value), (1.0, 2.0)))
    result = msgspec.structs.replace(
        REPLAY, u1=value, duration_s=value, counts=counts, systems=(system,)
    )
    path = keep_result(str(tmp_path), KeptReplay(result=result))
    _, document = Results(str(tmp_path)).open(path.stem)
    for _, html in document.sections:
        for drawn in re.findall(r'(?:points|x|y|[xy][12]|width)="([^"]*)"', html):
            assert not re.search("nan|inf", drawn), drawn


def test_what_is_damaged_or_foreign_is_named_and_the_others_are_there(tmp_path: Path) -> None:
    good = keep_result(str(tmp_path), KeptDrill(card=CARD))
    folder, stamp = good.parent, "20260101T000000Z-0000000"
    whole = good.read_bytes()
    (folder / f"drill-{stamp}1.json").write_bytes(whole[: len(whole) // 2])
    (folder / f"drill-{stamp}2.json").write_bytes(b"\xff\x00" * 99)
    (folder / f"drill-{stamp}3.json").symlink_to(good)
    os.mkfifo(folder / f"drill-{stamp}4.json")
    (folder / f"drill-{stamp}5.json").mkdir()
    (folder / f"plan-{stamp}6.json").write_bytes(whole)
    with open(folder / f"drill-{stamp}7.json", "wb") as file:
        file.truncate(1 << 40)
    replay = json.loads(keep_result(str(tmp_path), KeptReplay(result=REPLAY)).read_bytes())
    replay["result"]["throughput"] = replay["result"]["systems"][0]["ledger"] = {}
    (folder / f"replay-{stamp}8.json").write_text(json.dumps(replay))
    (folder / os.fsdecode(b"\xff<b>")).write_text("")
    results = Results(str(tmp_path))
    listing = results.look()
    assert [row.title for row in listing.rows["drill"]] == [CARD.job]
    told = dict(listing.faults)
    words = (
        "truncated",
        "malformed",
        "a symbolic link",
        "a FIFO",
        "a directory",
        "a drill, and not",
        "larger than 1 MiB",
    )
    for number, word in enumerate(words, 1):
        (name,) = [name for name in told if name.endswith(f"{number}.json")]
        assert word in told[name], (name, told[name])
    assert told[r"\udcff<b>"] == "not one of perdure's"
    with pytest.raises(ProtocolError, match="KeyError"):
        results.open(f"replay-{stamp}8")
    assert results.look() == listing
    good.unlink()
    assert "drill" not in results.look().rows


def test_of_very_many_strange_files_some_are_named(tmp_path: Path) -> None:
    locate_results(str(tmp_path)).mkdir()
    for number in range(OTHERS_MAX + 7):
        (locate_results(str(tmp_path)) / f"{number}.txt").touch()
    listing = Results(str(tmp_path)).look()
    assert (len(listing.faults), listing.more, listing.rows) == (OTHERS_MAX, 7, {})
    assert listing.surplus == 0


def test_a_full_disk_is_said_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    switch({SWITCH: "file/write=error(ENOSPC),about=plan-*"})
    assert run_command([*PLAN, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["options"]
    assert "not kept for `perdure dash`" in err
    assert os.strerror(errno.ENOSPC) in err
    assert list(locate_results(str(tmp_path)).iterdir()) == []


def test_what_is_too_large_is_not_kept(tmp_path: Path) -> None:
    card = msgspec.structs.replace(CARD, notes=("x" * (17 << 20),))
    with pytest.raises(PlatformError, match="too large"):
        keep_result(str(tmp_path), KeptDrill(card=card))
    assert not locate_results(str(tmp_path)).exists()


@pytest.mark.parametrize("point", ["file/rename", "file/renamed"])
def test_who_dies_while_it_is_kept_leaves_it_whole_or_not_at_all(
    tmp_path: Path, point: str
) -> None:
    environ: dict[str, Any] = os.environ | {
        "PERDURE_HOME": str(tmp_path), SWITCH: f"{point}=crash,about=plan-*",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "perdure", *PLAN],
        env=environ,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == -9
    listing = Results(str(tmp_path)).look()
    assert listing.faults == []
    assert [len(rows) for rows in listing.rows.values()] == ([1] if point == "file/renamed" else [])


def test_a_card_of_another_version_with_more_in_it_is_read(tmp_path: Path) -> None:
    path = keep_result(str(tmp_path), KeptDrill(card=CARD))
    document = json.loads(path.read_bytes())
    document["new"] = document["card"]["new"] = 1
    path.write_text(json.dumps(document))
    found = read_result(path.parent, path.stem, ANY)
    assert isinstance(found, KeptDrill)
    assert isinstance(found.card, Card)
