"""Results at home: what is missing, cut off, too many or newer on the box keeps the gate shut."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.cli.platforms import teardown
from perdure.cli.platforms.teardown import Waived
from perdure.launch.catalog import load_profile
from perdure.launch.channel import Channel
from perdure.launch.kubernetes.client import PodChannel
from perdure.launch.kubernetes.fetching import fetch
from perdure.launch.platforms import Here
from perdure.launch.records import write_record
from perdure.launch.results.gate import find_obstacles, list_neighbours
from perdure.launch.results.pulling import (
    compare_files,
    group_files,
    list_loadable,
    pull_files,
    read_manifest,
    read_verified,
    write_verified,
)
from perdure.launch.ssh.results import hash_file
from perdure.launch.transfer import PARTIAL, salvage
from perdure.launch.transfer import pull as pull_names
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.launching import (
    PULL_MANIFEST,
    BoxState,
    Finding,
    LaunchRecord,
    PulledFile,
    PullManifest,
)
from perdure.model.platforms.profile import LaunchSection

NAMES = ("job/checkpoints/step-00000010/rank-0.pt", "job/journal.jsonl", "outputs/runs/a/best.pth")
ENDED = BoxState(state="ended", reason="exit code 0")


def make(folder: Path) -> PullManifest:
    files = []
    for name in NAMES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}")
        files.append(PulledFile(name, *hash_file(str(path))))
    manifest = PullManifest(
        job="gpt",
        host="box",
        roots={"job": "/b/state/jobs/gpt", "outputs/runs": "/b/gpt/project/runs"},
        pulled_s=1.0,
        files=tuple(files),
    )
    (folder / PULL_MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return manifest


def test_what_differs_from_the_roster_is_named(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    assert read_manifest(tmp_path) == manifest
    assert compare_files(tmp_path, manifest) == []
    (tmp_path / NAMES[0]).unlink()
    (tmp_path / NAMES[1]).write_text("Content of job/journal.jsonl")
    (tmp_path / NAMES[2]).write_text("cut")
    (tmp_path / "job" / "stray.pt").write_text("?")
    assert compare_files(tmp_path, manifest) == [
        f"{NAMES[0]} is missing",
        f"{NAMES[1]} does not match its SHA-256",
        f"{NAMES[2]} has 3 bytes instead of {manifest.files[2].bytes}",
        "job/stray.pt is not in the roster",
    ]


def test_an_empty_directory_is_not_whole(tmp_path: Path) -> None:
    nothing = PullManifest(job="gpt", host="box", roots={}, pulled_s=1.0, files=())
    assert compare_files(tmp_path, nothing) == ["the roster is empty: nothing was pulled"]


def test_files_are_pulled_by_label_and_first_folder(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    groups = {key: [file.path for file in files] for key, files in group_files(manifest).items()}
    assert groups == {
        ("job", "checkpoints"): ["checkpoints/step-00000010/rank-0.pt"],
        ("job", ""): ["journal.jsonl"],
        ("outputs/runs", "a"): ["a/best.pth"],
    }
    found = list_loadable(tmp_path, manifest)
    assert found == [str(tmp_path / NAMES[0]), str(tmp_path / NAMES[2])]


def test_a_proof_is_of_one_manifest(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    assert read_verified(tmp_path) is None
    proof = write_verified(tmp_path, manifest, 2, 5.0, tensors=3)
    assert read_verified(tmp_path) == proof
    later = msgspec.structs.replace(manifest, pulled_s=9.0)
    (tmp_path / PULL_MANIFEST).write_bytes(msgspec.json.encode(later))
    assert read_verified(tmp_path) is None


def test_what_a_killed_rsync_left_is_gone_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".big.pt.Ab3xYz").write_text("half of it")
    (folder / ".hidden.config").write_text("the user's own")
    salvage(tmp_path, {"checkpoints/big.pt"})
    assert (folder / PARTIAL / "big.pt").read_text() == "half of it"
    assert (folder / ".hidden.config").exists()


@pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync")
def test_a_broken_transfer_goes_on_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "box", tmp_path / "here"
    source.mkdir()
    (source / "big.pt").write_bytes(os.urandom(8 << 20))
    # The first one is ended once a part of the file is here.
    (tmp_path / "rsync").write_text(f"""#!/bin/sh
[ -e {tmp_path}/broke ] && exec {shutil.which("rsync")} "$@"
touch {tmp_path}/broke
exec 3<&0
{shutil.which("rsync")} --bwlimit=500 "$@" <&3 &
pid=$!
until [ -n "$(find {target} -name '.big.pt.*' -size +0)" ]; do
  kill -0 $pid || exit 99
  sleep 0.05
done
kill $pid
wait $pid
""")
    (tmp_path / "rsync").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    told: list[str] = []

    def tell(text: str) -> None:
        if "going on" in text:
            told.append(text)
            assert not (target / "big.pt").exists()
            assert (target / PARTIAL / "big.pt").stat().st_size

    pull_names(Channel(LaunchSection()), str(source), target, ["big.pt"], tell=tell)
    assert len(told) == 1
    assert (target / "big.pt").read_bytes() == (source / "big.pt").read_bytes()


def gate(tmp_path: Path, **changes: object) -> list[str]:
    manifest = make(tmp_path)
    proof = write_verified(tmp_path, manifest, 2, 5.0, tensors=3)
    known: dict[str, object] = {
        "states": [ENDED], "on_box": manifest, "pulled": manifest, "verified": proof,
        "differences": [], "box_is_gone": False,
    }  # fmt: skip
    record = LaunchRecord(
        job="gpt",
        profile=load_profile("vastai", "/nonexistent").profile,
        place="/b/gpt",
        home="/b/state",
        python="/usr/bin/python3",
        pulled_to=str(tmp_path),
    )
    return [f.text for f in find_obstacles(record, **(known | changes))]  # type: ignore[arg-type]


def test_the_gate_is_open_when_all_is_here_whole_and_the_newest(tmp_path: Path) -> None:
    assert gate(tmp_path) == []
    assert gate(tmp_path, states=[None], on_box=None, box_is_gone=True) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"states": [BoxState(state="running")]}, "the job is running"),
        ({"states": [BoxState(state="orphaned")]}, "the job is orphaned"),
        ({"states": [None], "on_box": None}, "does not answer"),
        ({"pulled": None}, "holds no pulled job"),
        ({"verified": None}, "was not verified"),
        ({"differences": ["a is missing"]}, "a is missing"),
    ],
)
def test_the_gate_is_shut_by_each_lack(
    tmp_path: Path, changes: dict[str, object], word: str
) -> None:
    assert [text for text in gate(tmp_path, **changes) if word in text]


def test_the_gate_is_shut_by_what_is_newer_on_the_box(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    newer = (*manifest.files, PulledFile("job/checkpoints/step-20/rank-0.pt", 1, "0"))
    found = gate(tmp_path, on_box=msgspec.structs.replace(manifest, files=newer))
    assert found == ["job/checkpoints/step-20/rank-0.pt on the box is not what was pulled"]


def test_the_gate_is_shut_by_other_jobs_of_the_same_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_profile("vastai", "/nonexistent").profile

    def launched(job: str, host: str, **fields: Any) -> LaunchRecord:
        at = msgspec.structs.replace(profile.launch, host=host)
        return LaunchRecord(
            job=job,
            profile=msgspec.structs.replace(profile, launch=at),
            place=f"/b/{job}",
            home="/b/state",
            python="python3",
            **fields,
        )

    mine = launched("gpt", "box")
    others = [launched("bert", "box"), launched("far", "elsewhere")]
    others.append(launched("old", "box", torn_down_s=1.0))
    assert [r.job for r in list_neighbours(mine, [mine, *others])] == ["bert"]
    wide = launched("wide", "first", others=(launched("wide", "box"),))
    assert [r.job for r in list_neighbours(mine, [mine, wide])] == ["wide"]
    assert [r.job for r in list_neighbours(wide, [mine, wide, others[1]])] == ["gpt"]
    for record in (mine, *others):
        write_record(str(tmp_path), record)
    said = {"gpt": [], "bert": [Finding("error", "nothing was pulled", "perdure pull bert DIR")]}
    monkeypatch.setattr(teardown, "_look", lambda record, *rest: [*said[record.job]])
    monkeypatch.setattr(teardown, "_look_for_others", lambda record: [])
    place = Here(str(tmp_path), {}, lambda text: None)
    (found,) = teardown.check_gate(mine, place, Waived()).obstacles
    assert found.text == "job `bert` is on the same box: nothing was pulled"
    assert found.hint == "perdure pull bert DIR"
    assert teardown.check_gate(mine, place, Waived(box_is_gone=True)).obstacles == []


def test_a_directory_of_another_job_is_not_pulled_into(tmp_path: Path) -> None:
    manifest = make(tmp_path)
    other = msgspec.structs.replace(manifest, job="bert")
    record = LaunchRecord(
        job="bert",
        profile=load_profile("vastai", "/nonexistent").profile,
        place="/b/bert",
        home="/b/state",
        python="python3",
    )
    with pytest.raises(ConfigError, match="holds job `gpt`"):
        pull_files(record, other, tmp_path, {}, lambda text: None)
    assert compare_files(tmp_path, manifest) == []


def test_a_pull_that_broke_off_is_gone_on_from_after_the_box_has_changed(tmp_path: Path) -> None:
    """Checkpoints rotate under a job that runs, and the first pull has left no manifest."""
    box, here = tmp_path / "box", tmp_path / "here"
    manifest = make(box)
    left = {"job/checkpoints/step-00000005/rank-0.pt": "rotated away",
            f"job/checkpoints/step-00000005/{PARTIAL}/rank-1.pt": "half of what is gone",
            f"job/checkpoints/step-00000010/{PARTIAL}/rank-0.pt": "half of what comes",
            "job/checkpoints/step-00000010/.rank-0.pt.Ab3xYz": "less of it"}  # fmt: skip
    for name, text in left.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    found: list[str] = []

    def bring(source: str, target: Path, files: Any, *, tell: Any) -> None:
        found.extend(str(p.relative_to(here)) for p in target.rglob("*") if p.is_file())
        for file in files:
            (target / file.path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(box / target.relative_to(here) / file.path, target / file.path)
        for part in (*target.rglob(f"{PARTIAL}/*"), *target.rglob(".rank*")):
            part.unlink()

    record = LaunchRecord(
        job="gpt",
        profile=load_profile("vastai", "/nonexistent").profile,
        place="/b/gpt",
        home="/b/state",
        python="python3",
        roots=dict(manifest.roots),
    )
    there: Any = Channel(LaunchSection())
    there.bring = bring
    pull_files(record, manifest, here, {record.box: there}, lambda text: None)
    assert compare_files(here, manifest) == []
    assert set(list(left)[2:]) <= set(found)  # What has arrived of a file is not sent again.
    aside = tmp_path / "here.superseded"
    assert [(aside / name).exists() for name in left] == [True, True, False, False]


class _Pod(PodChannel):
    """A pod whose volume is a folder of this machine."""

    def __init__(self) -> None:
        self.host, self.python, self._pod = "", sys.executable, "gpt-0"

    def enter(self, *words: str, stdin: bool = True) -> list[str]:
        return list(words)


def change(folder: Path) -> None:
    """Do to files of a job what its own rotation does; what comes after them is as it was."""
    (folder / "0-gone.log").unlink()
    (folder / "1-shorter.log").write_text("new")
    (folder / "2-longer.log").write_text("2-longer.log and more")
    (folder / "3-other.log").write_text("3-OTHER.log")
    (folder / "4-folder.log").unlink()
    (folder / "4-folder.log").mkdir()
    shutil.rmtree(folder / "5-step")
    (folder / "5-step").write_text("a file where a folder was")


NAMED = ("0-gone.log", "1-shorter.log", "2-longer.log", "3-other.log", "4-folder.log", "5-step/w")


@pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync")
@pytest.mark.parametrize("way", ["rsync", "pod"])
def test_files_that_are_rotated_away_while_they_are_pulled_stop_nothing(
    tmp_path: Path, way: str
) -> None:
    """Live it goes on, says which and counts; of a job that has ended it is refused, once all
    else is here."""
    there, here = tmp_path / "there", tmp_path / "here"
    files = []
    for name in (*NAMED, "6-last.log", "a/last.log"):
        path = there / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Path(name).name)
        files.append(PulledFile(f"job/{name}", *hash_file(str(path))))
    change(there)
    record = LaunchRecord(
        job="gpt", profile=load_profile("vastai", "/nonexistent").profile, place=str(tmp_path),
        home=str(tmp_path), python="python3", roots={"job": str(there)},
    )  # fmt: skip
    channel = Channel(LaunchSection()) if way == "rsync" else _Pod()
    sources = {record.box: channel}
    manifest = PullManifest(
        job="gpt", host="box", roots={"job": str(there)}, pulled_s=1.0, files=tuple(files)
    )
    with pytest.raises(PlatformError, match=r"^[45] files have changed or gone \(job/0-gone.log"):
        pull_files(record, manifest, here, sources, lambda text: None)
    assert read_manifest(here) is None
    assert (here / "job" / "a" / "last.log").read_text() == "last.log"

    told = pull_files(record, manifest, here, sources, lambda text: None, live=True)
    grown = () if way == "rsync" else ("2-longer.log",)  # Read as far as the roster says.
    assert told.changed == tuple(f"job/{name}" for name in NAMED if name not in grown)
    assert read_manifest(here) == told
    assert compare_files(here, told) == []
    assert {"job/0-gone.log", "job/4-folder.log", "job/5-step/w"}.isdisjoint(
        file.path for file in told.files
    )
    assert (here / "job" / "1-shorter.log").read_text() == "new"


@pytest.mark.parametrize("left", ["nothing of it", "all of it"])
def test_a_file_that_went_from_a_pod_does_not_cost_the_one_behind_it(
    tmp_path: Path, left: str
) -> None:
    """The first needs no bytes, so that the sender's word on it comes in the second's place."""
    there, here = tmp_path / "there", tmp_path / "here"
    texts = {"a-gön.log": "" if left == "nothing of it" else "gone", "b.pt": "b" * 1000}
    files = []
    for name, text in texts.items():
        there.mkdir(exist_ok=True)
        (there / name).write_text(text)
        files.append(PulledFile(name, *hash_file(str(there / name))))
        (here / PARTIAL).mkdir(parents=True, exist_ok=True)
        (here / PARTIAL / name).write_text(text[:500])
    (there / "a-gön.log").unlink()
    told: list[str] = []
    fetch(_Pod(), str(there), here, files, tell=told.append)
    assert {path.name: path.read_text() for path in here.glob("[ab]*")} == texts
    assert told == []


def test_a_pod_that_names_a_file_that_nobody_asked_for_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Liar(_Pod):
        def enter(self, *words: str, stdin: bool = True) -> list[str]:
            word = 'changed: "/there/c.pt": it is no file any more'
            return ["sh", "-c", f"cat >/dev/null; echo '{word}' >&2"]

    monkeypatch.setattr("time.sleep", lambda s: None)
    with pytest.raises(PlatformError, match="nothing more arrives"):
        fetch(Liar(), "/there", tmp_path, [PulledFile("b.pt", 3, "0")], tell=lambda text: None)
