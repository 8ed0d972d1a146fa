"""Controller, command line and simulator run on a machine without torch."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from perdure.cli.commands import COMMANDS, LAB, PANELS
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.service.jobfiles import write_document
from perdure.service.jobfolders import paths_of
from tests.waiting import PATIENCE_S

MODULES_MAX = 246
METADATA = 47
"""Modules of `importlib.metadata`, by which commands of perdure-lab are found."""
IMPORTED = {
    "--version": 0, "status": 0, "profiles": 0, "queue ls": 0, "doctor --schema": 0,
    "completion bash": 0, "status nosuch": 2, "logs nosuch": 2, "stop nosuch": 2,
    "set nosuch lr=1": 2, "report nosuch": 2, "plan": 2, "init nosuch.py": 2,
}  # fmt: skip
"""Commands that need no job, beside the help of each -> their exit code."""

_BLOCK = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)")

sys.meta_path.insert(0, NoTorch())
"""


@pytest.mark.parametrize(
    "code",
    [
        "import perdure",
        "import perdure.cli.main",
        "import perdure.cli.app, perdure.dash, perdure.dash.live, perdure.launch.local",
        "import perdure.control, perdure.agent, perdure.telemetry",
        "import perdure.service.controller.process, perdure.service.agent.shell",
        "import perdure.service.supervisor",
        "import perdure.keeper.keeper",
        "from perdure.cli.app import run_command; assert run_command(['--help']) == 0",
    ],
)
def test_without_torch(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCK + code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr


def test_parts_do_not_import_the_terminal() -> None:
    code = (
        "import sys, perdure.cli.main, perdure.service.agent.shell, perdure.keeper.keeper; "
        "heavy = ('typer', 'rich', 'torch', 'numpy', 'matplotlib', 'aiohttp'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (
            "status nosuch",
            (
                "nats",
                "perdure.launch.slurm",
                "perdure.plan",
                "perdure.cli.running.run",
                "perdure.model.platforms.profile",
                "perdure.model.events",
                "perdure.telemetry",
            ),
        ),
        ("logs nosuch", ("perdure.model.platforms.profile", "perdure.model.events")),
        ("stop nosuch", ("nats", "perdure.detect", "perdure.cli.looking.look")),
        ("run nosuch.py", ("perdure.detect", "perdure.plan", "perdure.cli.looking.look")),
    ],
)
def test_a_command_imports_what_it_uses(command: str, unused: tuple[str, ...]) -> None:
    """T14: a person waits for what every command imports, and most of that is another's."""
    code = (
        "import sys; from perdure.cli.app import run_command; "
        f"assert run_command({command.split()}) == 2; "
        f"print([m for m in {unused} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_job_that_has_ended_is_shown_without_what_reads_journals(tmp_path: Path) -> None:
    """T14: `status` has the picture that the controller has left, and telemetry is 30 modules."""
    paths = paths_of(str(tmp_path), "mine")
    Path(paths.root).mkdir(parents=True)
    write_document(paths.spec, JobSpec(script="train.py", name="mine"))
    picture = {"version": 1, "job": "mine", "state": "done", "at_s": 9.0, "started_s": 1.0}
    picture |= {"generation": 0, "restarts": 0, "step": 50, "steps_per_s": 0.0, "world_size": 1}
    picture |= {"depth": "resumable", "reason": "done"}
    write_document(paths.snapshot, msgspec.convert(picture, Snapshot))
    code = (
        "import sys; from perdure.cli.app import run_command; "
        "assert run_command(['status', 'mine']) == 0; "
        "print([m for m in ('perdure.telemetry', 'perdure.model.events') if m in sys.modules])"
    )
    env = os.environ | {"PERDURE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.startswith("mine: done, step 50"), done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_screen_is_drawn_before_what_reads_journals_is_imported() -> None:
    """T14: of `perdure watch` all that folds a journal is imported with a job's first story."""
    unused = (
        "perdure.cli.page.reading", "perdure.telemetry.accounting.history",
        "perdure.telemetry.series", "perdure.dash.links", "jinja2", "starlette",
    )  # fmt: skip
    code = (
        "import sys, perdure.cli.watching.app; "
        f"print([m for m in {unused} if m in sys.modules], 'textual' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[] True", done.stdout + done.stderr


_EACH = """
import os, sys
from perdure.cli.main import main
told = os.dup(1)
for command, words in {words}.items():
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, command
        continue
    said, code = os.open("said", os.O_RDWR | os.O_CREAT | os.O_TRUNC), 0
    os.dup2(said, 1), os.dup2(said, 2)
    try:
        main(words)
    except SystemExit as end:
        code = end.code or 0
    sys.stdout.flush()
    row = command, code, len(sys.modules), os.pread(said, 10_000, 0).decode()
    os.write(told, repr(row).encode() + b"\\n")
    os._exit(0)
"""


def test_a_command_that_needs_no_job_imports_little(tmp_path: Path) -> None:
    """What a person waits for is importing: 0.2 s on a quiet machine is about 260 modules.

    Python and Typer are 180 of them. Imports are counted, since a time depends on who else is
    at work. Each command runs in a fork of one process.
    """
    words = {command: [command, "--help"] for command in COMMANDS}
    words |= {command: command.split() for command in IMPORTED}
    done = subprocess.run(
        [sys.executable, "-c", _EACH.format(words=words)],
        env=os.environ | {"PERDURE_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert [row[0] for row in found] == list(words)
    for command, code, modules, said in found:
        assert code == IMPORTED.get(command, 0), said
        most = MODULES_MAX + METADATA * (command in PANELS[LAB])
        assert modules <= most, f"{command}: python -X importtime says which"
