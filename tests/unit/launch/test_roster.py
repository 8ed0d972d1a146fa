"""D2: whatever a box names, nothing is written outside the directory that was pulled into."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.cli.main import main
from perdure.launch.catalog import load_profile
from perdure.launch.records import write_record
from perdure.launch.roster import Roster, check_roster
from perdure.launch.ssh.results import make_manifest
from perdure.model.errors import SafetyError
from perdure.model.platforms.launching import PULL_MANIFEST, LaunchRecord, PulledFile, PullManifest

FAKE = Path(__file__).with_name("fake_kubectl.py")
CONTENT = "ssh-ed25519 AAAA\n"
HOSTILE = (
    "job/../../.ssh/authorized_keys", "job//abs/path", "/abs/path", "../escape", "job/..", "job/",
    "job/./x", "", ".", "..", "job/a\0b", "other/x", "job/a/../../../escape",
)  # fmt: skip
Pull = Callable[..., tuple[int, str]]


def make_roster(*names: str) -> dict[str, Any]:
    digest = hashlib.sha256(CONTENT.encode()).hexdigest()
    files = [{"path": name, "bytes": len(CONTENT), "sha256": digest} for name in names]
    return {"files": files, "links": [], "roots": {"job": "/checkpoints/state/jobs/gpt"}}


@pytest.fixture(params=["kubernetes", "vastai"])
def pull(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Pull:
    """Return what runs `perdure pull` against a place that answers with a given roster."""
    home, bin_ = tmp_path / "home" / "perdure", tmp_path / "bin"
    bin_.mkdir(parents=True)
    monkeypatch.setenv("PERDURE_HOME", str(home))
    monkeypatch.setenv("PATH", str(bin_), prepend=":")
    monkeypatch.setenv("FAKE_CLUSTER", str(tmp_path / "cluster.json"))
    profile = load_profile(request.param, "/nonexistent").profile
    write_record(str(home), LaunchRecord(
        job="gpt", profile=profile, place="/checkpoints/gpt", home="/checkpoints/state", id="gpt",
        python="python3", roots={"job": "/checkpoints/state/jobs/gpt"}))  # fmt: skip

    def run(roster: dict[str, Any], *, target: Path = tmp_path / "home" / "results" / "gpt",
            content: str = CONTENT) -> tuple[int, str]:  # fmt: skip
        """The box is this machine (no host), with a `python3` of the box's own choice."""
        if request.param == "kubernetes":
            shutil.copy(FAKE, bin_ / "kubectl")
            running = {"metadata": {"name": "gpt-0", "labels": {"job-name": "gpt"}, "annotations": {
                "batch.kubernetes.io/job-completion-index": "0"}},
                "status": {"phase": "Running"}}  # fmt: skip
            (tmp_path / "cluster.json").write_text(json.dumps({
                "version": "v1.31.2", "job": {"metadata": {"name": "gpt"}, "spec": {},
                "status": {}}, "pods": [running],
                "roster": roster, "content": content}))  # fmt: skip
        else:
            (bin_ / "answer").write_text("@@perdure-json " + json.dumps(roster) + "\n")
            (bin_ / "python3").write_text(
                f'#!/bin/sh\ncase "$2" in manifest) cat >/dev/null; cat {bin_}/answer;;\n'
                '*) echo \'@@perdure-json {"state":"ended","reason":"exit code 0"}\';; esac\n'
            )
        for program in bin_.iterdir():
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        with pytest.raises(SystemExit) as ended:
            main(["pull", "gpt", str(target), "--live"])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return run


def list_files(tmp_path: Path) -> set[str]:
    return {str(path.relative_to(tmp_path)) for path in (tmp_path / "home").rglob("*")}


@pytest.mark.parametrize("name", HOSTILE)
def test_d2_every_form_of_such_a_name_is_refused(name: str) -> None:
    roster = msgspec.convert(make_roster("job/good.txt", name), Roster)
    with pytest.raises(SafetyError):
        check_roster(roster, {"job": "/checkpoints/state/jobs/gpt"}, "box")


@pytest.mark.parametrize("name", HOSTILE[:2])
def test_d2_a_name_that_leads_elsewhere_is_refused_with_nothing_written(
    pull: Pull, name: str, tmp_path: Path
) -> None:
    before = list_files(tmp_path)
    code, said = pull(make_roster("job/good.txt", name))
    assert code == 4, said
    lines = [line for line in said.splitlines() if "error" in line]
    assert len(lines) == 1
    assert "\0" not in said
    assert list_files(tmp_path) == before


@pytest.mark.parametrize("link", ["results/gpt/job", "results/gpt/job/sub/x"])
def test_d2_nothing_is_written_through_a_link_that_lies_here(
    pull: Pull, link: str, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "home" / "elsewhere"
    elsewhere.mkdir(parents=True)
    path = tmp_path / "home" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(elsewhere)
    before = list_files(tmp_path)
    code, said = pull(make_roster("job/sub/x"))
    assert code == 4, said
    assert "is a link" in said
    assert list_files(tmp_path) == before


def test_a_good_roster_is_pulled(pull: Pull, tmp_path: Path) -> None:
    """The other side of D2: what is refused above is not refused for another reason."""
    code, said = pull(make_roster("job/a/x..y", "job/...z"))
    if "rsync" not in said:  # A box of this test has nothing that rsync could bring.
        assert code == 0, said
        assert (tmp_path / "home" / "results" / "gpt" / "job" / "a" / "x..y").read_text() == CONTENT


def test_d2_a_roster_of_another_shape_is_one_clear_line(pull: Pull) -> None:
    for wrong in ({"files": 7}, {**make_roster(), "roots": {"job": "/etc", "more": "/"}}):
        code, said = pull(wrong)
        assert code in (3, 4)
        assert "Traceback" not in said


def test_d2_a_manifest_that_names_files_elsewhere_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = PullManifest(job="j", host="h", roots={"job": "/j"}, pulled_s=1.0,
                            files=(PulledFile("job/../../secret.pt", 1, ""),))  # fmt: skip
    (tmp_path / PULL_MANIFEST).write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 4
    assert ".." in capsys.readouterr().err


@pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync")
def test_d2_a_link_that_takes_a_files_place_does_not_arrive(tmp_path: Path) -> None:
    from perdure.launch import transfer
    from perdure.launch.channel import Channel
    from perdure.model.platforms.profile import LaunchSection

    box, here = tmp_path / "box", tmp_path / "here"
    (box / "sub").mkdir(parents=True)
    (box / "link").symlink_to("/etc/passwd")
    os.mkfifo(box / "pipe")
    (box / "sub" / "file").write_text("x")
    transfer.pull(Channel(LaunchSection()), str(box), here, ["link", "pipe", "sub/file"],
                  tell=lambda text: None)  # fmt: skip
    assert {path.name for path in here.rglob("*")} == {"sub", "file"}


@pytest.mark.parametrize("age_s", [7200.0, -86_400.0], ids=["kept", "set back by a day"])
def test_weights_elsewhere_are_found_whatever_the_clocks_were_set_to(
    age_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's clock says how old a launch is, and may be set back meanwhile."""
    home = tmp_path / "home"
    launch, weights = home / "job" / "launch", home / "best.pth"
    launch.mkdir(parents=True)
    (launch / "settings.json").write_text("{}")
    weights.write_bytes(b"weights")
    monkeypatch.setenv("HOME", str(home))
    wanted = {
        "roots": {"launch": str(launch)}, "skip": {}, "exclude": (), "elsewhere": "elsewhere",
        "age_s": age_s,
    }  # fmt: skip
    told = make_manifest(wanted)
    assert [row["path"] for row in told["files"] if row["path"].endswith(".pth")] == [
        f"elsewhere/{weights.relative_to('/')}"
    ]
