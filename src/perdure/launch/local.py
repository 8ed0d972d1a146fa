"""This machine: a job is rendered to data first (files, command, environment), then submitted.

Every launcher has these two functions. `render` touches nothing, so that what it returns can be
shown, compared with a golden file, or carried to another machine; `submit` carries it out.
"""

import os
import subprocess
import sys

import msgspec

from perdure.model.errors import PlatformError
from perdure.model.input.raw import restore_text
from perdure.model.job import JobSpec


class LocalPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What starts one job on this machine."""

    job: str
    files: dict[str, str]
    """Path -> content, to be written first."""
    command: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment."""
    cwd: str
    log: str
    """Where the command's own output goes when it is detached."""
    attach: str
    """The command line that shows the job."""


def render(spec: JobSpec, home: str, *, nats_url: str = "", placement: str = "") -> LocalPlan:
    """Return the plan of `spec` under the absolute state directory `home`."""
    folder = os.path.join(home, "launch")
    document = os.path.join(folder, f"{spec.name}.json")
    options = {"--config": document, "--nats": nats_url, "--placement": placement}
    words = [word for name, value in options.items() if value for word in (name, value)]
    start = ["serve", spec.name, "--unprotected"] if spec.served else ["run"]
    return LocalPlan(
        job=spec.name,
        files={document: msgspec.json.format(msgspec.json.encode(spec)).decode() + "\n"},
        command=(sys.executable, "-P", "-m", "perdure", *start, *words),
        env={"PERDURE_HOME": home},
        cwd=restore_text(spec.cwd),
        log=os.path.join(folder, f"{spec.name}.out"),
        attach=f"perdure {'watch' if spec.served else 'logs -f'} {spec.name}",
    )


def submit(plan: LocalPlan) -> int:
    """Start the job in a session of its own; return the pid of its `perdure run`.

    Raises:
        PlatformError: a file cannot be written, or the command not started.
    """
    write_files(plan)
    try:
        with open(plan.log, "wb") as output:
            process = subprocess.Popen(
                plan.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **plan.env},
                cwd=plan.cwd,
                start_new_session=True,
            )
    except OSError as error:
        raise _explain(plan, error) from error
    process.returncode = 0  # it outlives us: nobody waits for it here
    return process.pid


def write_files(plan: LocalPlan) -> None:
    """Write what `plan` has to be on the disk.

    Raises:
        PlatformError: a file cannot be written.
    """
    try:
        for path, content in plan.files.items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(content)
    except OSError as error:
        raise _explain(plan, error) from error


def _explain(plan: LocalPlan, error: OSError) -> PlatformError:
    return PlatformError(
        f"cannot start job {plan.job}: {error.strerror}: {error.filename}",
        hint="choose another state directory with PERDURE_HOME",
    )
