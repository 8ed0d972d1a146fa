"""A person with a state directory, a profile `mine`, the GPT example, and the command line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.box import EXAMPLE


class Person:
    """Everything of theirs is below `folder`."""

    def __init__(self, folder: Path, profile: str, **environ: str) -> None:
        self.folder, self.home = folder, folder / "state"
        self.env = {**os.environ, "PERDURE_HOME": str(self.home), "COLUMNS": "120", **environ}
        (self.home / "profiles").mkdir(parents=True)
        self.profile = self.home / "profiles" / "mine.toml"
        self.profile.write_text(profile)
        shutil.copytree(EXAMPLE, folder / "gpt", ignore=shutil.ignore_patterns("__pycache__"))

    def perdure(
        self, *words: str, code: int = 0, timeout_s: float = 170.0, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a perdure command to its end, which has to be `code`."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *words],
            env=self.env, cwd=cwd or self.folder, capture_output=True, text=True, timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def launch(self, job: str = "gpt/job.toml") -> str:
        """Launch a job to the place of the profile; return what was said."""
        return self.perdure("launch", job, "--on", "mine").stderr
