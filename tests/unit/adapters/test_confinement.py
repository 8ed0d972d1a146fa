"""A process that is held to a folder writes nowhere else, and neither does what it starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.adapters.confinement import Confinement, can_confine

pytestmark = pytest.mark.skipif(not can_confine(), reason="this kernel has no Landlock")

PROGRAM = """\
import os, subprocess, sys
inside, outside = sys.argv[1:]
open(f"{inside}/made", "w").write("x")
os.mkdir(f"{inside}/folder")
os.rename(f"{inside}/made", f"{inside}/folder/made")
print(open(f"{outside}/theirs").read())
for act in (
    lambda: open(f"{outside}/theirs", "w"),
    lambda: open(f"{outside}/new", "w"),
    lambda: os.truncate(f"{outside}/theirs", 0),
    lambda: os.unlink(f"{outside}/theirs"),
    lambda: os.rename(f"{outside}/theirs", f"{inside}/taken"),
    lambda: os.symlink("x", f"{outside}/link"),
):
    try:
        act()
    except PermissionError:
        print("refused")
link = f"{inside}/link"
os.symlink(f"{outside}/theirs", link)
print(subprocess.run(["sh", "-c", f"echo theirs > {link}"], capture_output=True).returncode)
"""


def test_what_is_outside_is_read_and_never_written(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "theirs").write_text("kept")
    confinement = Confinement([str(inside), "/dev", str(tmp_path / "missing")])
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(inside), str(outside)],
            capture_output=True, text=True, timeout=PATIENCE_S, preexec_fn=confinement.enter,
        )  # fmt: skip
    finally:
        confinement.close()
    assert done.stderr == ""
    first, *refused, code = done.stdout.split()
    assert first == "kept"
    assert refused == ["refused"] * 6
    assert code != "0"
    assert (outside / "theirs").read_text() == "kept"
    assert [path.name for path in outside.iterdir()] == ["theirs"]
    assert (inside / "folder" / "made").exists()
    (outside / "new").write_text("this process is free")
