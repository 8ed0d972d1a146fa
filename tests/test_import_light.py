"""Controller, command line and simulator run on a machine without torch."""

import subprocess
import sys
import time

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
        "import perdure.service.controller, perdure.service.supervisor, perdure.service.agent",
        "import perdure.worker.keeper",
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
        "import sys, perdure.cli.main, perdure.service.agent, perdure.worker.keeper; "
        "heavy = ('typer', 'rich', 'torch', 'numpy', 'matplotlib', 'aiohttp'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_help_is_quick() -> None:
    """Measured 0.2 s of CPU; the bound is wide, since other tests share the machine."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "perdure", "--help"], capture_output=True)
    assert done.returncode == 0
    assert time.monotonic() - began < 5.0
