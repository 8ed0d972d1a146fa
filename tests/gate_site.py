"""A person's machine and a box that is folders of this one: what the gate is tried on."""

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.cli.app import run_command
from perdure.launch.catalog import load_profile
from perdure.launch.records import read_record, write_record
from perdure.launch.ssh import box as box_program
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.platforms.profile import Profile


def write_tensors(path: Path, fill: bytes = b"\0") -> None:
    """Write a safetensors file of one tensor of four floats."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + fill * 16)


class Site:
    """A person's machine and a box, on which the job `gpt` has ended."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.home, self.project, self.box = folder / "home", folder / "project", folder / "box"
        self.pulled, self.stopped = folder / "pulled", folder / "stopped"
        self.job = self.box / "gpt"
        for path in (self.home, self.project, self.job / "launch", self.job / "project"):
            path.mkdir(parents=True)
        for folder_ in (self.project, self.job / "project"):
            (folder_ / "train.py").write_text("print('trained')\n")
        state = self.box / "state" / "jobs" / "gpt"
        state.mkdir(parents=True)
        (state / "job.json").write_text("{}")
        (state / "journal.jsonl").write_text("{}\n")
        shutil.copy(box_program.__file__, self.job / "launch" / "box.py")
        self.end()
        shipped = load_profile("generic-ssh", str(self.home)).profile
        stop = msgspec.structs.replace(
            shipped.teardown,
            stop_command=("touch", str(self.stopped)),
            gone_command=("test", "-e", str(self.stopped)),
        )  # fmt: skip
        self.record = LaunchRecord(
            job="gpt",
            profile=msgspec.structs.replace(shipped, teardown=stop),
            place=str(self.job),
            home=str(self.box / "state"),
            python=sys.executable,
            launched_s=1.0,
            roots={"job": str(state), "launch": str(self.job / "launch")},
            project=str(self.project),
        )
        write_record(str(self.home), self.record)

    def end(self, attempt: int = 1) -> None:
        """Write down that the job's newest attempt has ended."""
        told = {"attempt": attempt, "boot_id": box_program.boot_id(), "at": 1.0, "pid": 0,
                "pid_start": -1, "memory": "", "oom_kills": 0, "code": 0}  # fmt: skip
        for name in ("start.json", "exit.json"):
            (self.job / "launch" / name).write_text(json.dumps(told))

    def run(self, *args: str, code: int = 0) -> str:
        """Run a perdure command line; return what it printed."""
        self._capsys.readouterr()
        left = run_command(args)
        said = self._capsys.readouterr()
        assert left == code, said.out + said.err
        return said.out + said.err

    def pull(self, *args: str) -> str:
        return self.run("pull", "gpt", str(self.pulled), *args)

    def verify(self, *args: str, code: int = 0) -> str:
        return self.run("verify", str(self.pulled), *args, code=code)

    def teardown(self, *args: str, code: int = 0) -> str:
        return self.run("teardown", "gpt", "--confirm", "gpt", *args, code=code)

    def read_record(self) -> LaunchRecord:
        record = read_record(str(self.home), "gpt")
        assert record is not None
        return record

    def set_profile(self, **sections: Any) -> None:
        profile: Profile = msgspec.structs.replace(self.record.profile, **sections)
        self.record = msgspec.structs.replace(self.read_record(), profile=profile)
        write_record(str(self.home), self.record)


def make_site(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Site:
    """Return a site below `folder`, in whose environment commands run."""
    monkeypatch.setenv("PERDURE_HOME", str(folder / "home"))
    monkeypatch.setenv("HOME", str(folder / "box-home"))
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")  # Not a slow shim of it.
    return Site(folder, capsys)
