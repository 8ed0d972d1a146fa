"""A cold start's `sitecustomize`: armed once, gone for everybody else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

from perdure.keeper.execution import INJECT

SHOW = """
import json, os, subprocess, sys
found = {
    "env": {k: v for k, v in os.environ.items() if k.startswith("PERDURE") or k == "PYTHONPATH"},
    "path": sys.path, "user": getattr(sys.modules.get("sitecustomize"), "MARK", ""),
    "armed": any(type(f).__name__ == "_After" and f._name == "torch" for f in sys.meta_path),
}
if len(sys.argv) > 1:
    found["child"] = json.loads(subprocess.check_output([sys.executable, sys.argv[0]]))
print(json.dumps(found))
"""


def show(folder: Path, *options: str) -> Any:
    script = folder / "show.py"
    script.write_text(SHOW)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PERDURE", "PYTHON"))}
    env |= {"PYTHONPATH": f"{INJECT}{os.pathsep}{folder}", "PERDURE_ATTACH": "1"}
    env["PERDURE_TRACEBACK"] = str(folder / "traceback")
    command = [sys.executable, *options, str(script), "child"]
    return json.loads(subprocess.check_output(command, env=env, timeout=PATIENCE_S))


def test_chains_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("MARK = 'mine'\n")
    found = show(tmp_path)
    assert found["armed"]
    assert found["user"] == found["child"]["user"] == "mine"
    assert INJECT not in found["path"]
    assert found["env"] == found["child"]["env"] == {"PYTHONPATH": str(tmp_path)}
    assert not found["child"]["armed"]


def test_isolated_python_is_left_alone(tmp_path: Path) -> None:
    found = show(tmp_path, "-I")
    assert not found["armed"]


def test_traceback_is_kept_and_shown_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("raise ValueError('bad lr')\n")
    env = os.environ | {"PYTHONPATH": INJECT, "PERDURE_ATTACH": "1"}
    env["PERDURE_TRACEBACK"] = str(tmp_path / "traceback")
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    plain = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (1, plain.stderr)
    kept = json.loads((tmp_path / "traceback").read_text())
    assert kept == {"error": "ValueError: bad lr", "traceback": plain.stderr}
