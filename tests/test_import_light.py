"""Controller, command line and simulator run on a machine without torch."""

import resource
import subprocess
import sys

import pytest

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
        "import perdure.sim",
        "import perdure.service.controller.process, perdure.service.agent.shell",
        "import perdure.service.supervisor",
        "import perdure.keeper.keeper",
        "from perdure.cli.app import run_command; assert run_command(['--help']) == 0",
    ],
)
def test_without_torch(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCK + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_parts_do_not_import_the_terminal() -> None:
    code = (
        "import sys, perdure.cli.main, perdure.service.agent.shell, perdure.keeper.keeper; "
        "heavy = ('typer', 'rich', 'torch', 'numpy', 'matplotlib', 'aiohttp'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "unused"),
    [
        (
            "status nosuch",
            ("nats", "perdure.launch.slurm", "perdure.plan", "perdure.cli.running.run"),
        ),
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_help_is_quick() -> None:
    """The bound is wide: measured are 0.6 s of CPU, on a slow machine that others use."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-m", "perdure", "--help"], capture_output=True)
    assert done.returncode == 0
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 3.0
