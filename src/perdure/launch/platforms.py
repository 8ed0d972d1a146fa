"""What every platform's launcher is to the commands, five functions in one module, and does alike.

`render` is pure: the same job and profile give the same plan, and nothing is touched. `check` looks
at the place itself and changes nothing. Only `submit` acts. What a launched job is asked later goes
through `run`, which carries one perdure command line to where the job is.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import BoxState, Finding, LaunchRecord, Plan
from perdure.model.platforms.profile import Kind, Profile

MODULES: dict[Kind, str] = {
    "local": "perdure.launch.here",
    "ssh": "perdure.launch.ssh",
    "slurm": "perdure.launch.slurm",
    "notebook": "perdure.launch.notebook",
    "kubernetes": "perdure.launch.kubernetes",
}
"""Kind of a profile -> module that is a `Platform`."""


@dataclass(frozen=True, slots=True)
class Here:
    """This machine, as a launcher meets it."""

    home: str
    """PERDURE_HOME of this machine, absolute."""
    environ: Mapping[str, str]
    """Where the values of secrets are."""
    tell: Callable[[str], None]
    """Says one line of progress to the person who waits."""


class Platform(Protocol):
    """The module of one kind of platform."""

    def render(self, spec: JobSpec, profile: Profile) -> Plan:
        """Return what would be submitted. `spec.launch.project` is an absolute path.

        Raises:
            ConfigError: this job cannot be rendered for this platform at all.
        """

    def check(self, plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
        """Return values of the profile measured at the place, by dotted key, and what is amiss.

        Raises:
            PlatformError: the place cannot be reached.
        """

    def submit(self, plan: Plan, here: Here) -> LaunchRecord:
        """Start the job, detached; return what is to be remembered.

        Raises:
            ConfigError: a job of this name runs there.
            PlatformError: a step failed; the message says which.
        """

    def query_state(self, record: LaunchRecord, here: Here) -> BoxState:
        """Return how the job is, by what the place itself says.

        Raises:
            PlatformError: nobody answered, which says nothing about the job.
        """

    def run(self, record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
        """Run one perdure command line where the job is; return its exit code.

        Raises:
            PlatformError: nobody answered, which says nothing about the job.
        """


class Teardown:
    """What a platform does before a job's place is given back; what it has no need of is nothing.

    A platform's module has its own as `TEARDOWN`. The stop verb itself is the profile's.
    """

    def list_users(self, box: LaunchRecord) -> list[str]:
        """Return who else would lose something with a box, in words.

        Raises:
            UnreachedError: nobody answered.
        """
        return []

    def hold(self, box: LaunchRecord) -> AbstractContextManager[str]:
        """Let nothing start on a box while the body runs; give why that cannot be, empty: it is."""
        return nullcontext("")

    def clean(self, box: LaunchRecord) -> str:
        """Take secrets off a box, and what starts the job again; return what was in the way."""
        return ""

    def render_deletion(self, record: LaunchRecord, *, with_volume: bool) -> tuple[str, ...]:
        """Return the command that deletes what the job has at the platform; empty: none does."""
        return ()


def load_teardown(kind: Kind) -> Teardown:
    """Return what a kind of platform does before a job's place is given back."""
    return cast(Teardown, getattr(import_module(MODULES[kind]), "TEARDOWN", Teardown()))


def load_platform(kind: Kind) -> Platform:
    """Return the launcher of a kind of platform.

    Raises:
        ConfigError: perdure renders nothing for it.
    """
    if kind not in MODULES:
        raise ConfigError(
            f"no launcher for platforms of kind {kind}",
            hint=f"there is {', '.join(sorted(MODULES))}",
        )
    return cast(Platform, import_module(MODULES[kind]))


def locate_in_project(spec: JobSpec, path: str, what: str) -> str:
    """Return `path` relative to the project.

    Raises:
        ConfigError: it lies outside, so that it would not be there on the other machine.
    """
    project = os.path.abspath(spec.launch.project)
    inside = os.path.relpath(os.path.join(project, os.path.expanduser(path)), project)
    if inside == ".." or inside.startswith("../"):
        raise ConfigError(
            f"{what} {path} is outside the project {project}",
            hint="launch.project names the folder that is sent along",
        )
    return inside


def render_job(spec: JobSpec) -> str:
    """Return the job's document for a person: only what differs from the defaults."""
    document = msgspec.to_builtins(spec)
    plain = msgspec.to_builtins(JobSpec(script=""))
    shown: dict[str, Any] = {"name": spec.name}
    for key, value in document.items():
        if isinstance(value, dict):
            value = {k: v for k, v in value.items() if k not in plain[key] or v != plain[key][k]}
        if value not in ({}, plain[key]):
            shown[key] = value
    return msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n"


def place_job(spec: JobSpec, boxes: int = 1) -> JobSpec:
    """Return the job as it is on another machine: paths in the project, relative to it.

    Of several boxes each is a node; all but the first join.

    Raises:
        ConfigError: one lies outside the project.
    """
    cwd = locate_in_project(spec, spec.cwd, "cwd")
    script = spec.script
    if not spec.module and not spec.no_python:
        inside = locate_in_project(spec, os.path.join(spec.cwd, script), "script")
        script = os.path.relpath(inside, cwd)
    launch = msgspec.structs.replace(spec.launch, project=".")
    remote = boxes - 1 if boxes > 1 else spec.remote
    return msgspec.structs.replace(spec, cwd=cwd, script=script, launch=launch, remote=remote)


def expand_tilde(place: str) -> str:
    """Return a place for double quotes, where the shell expands no tilde."""
    return "$HOME" + place[1:] if place == "~" or place.startswith("~/") else place


def read_secrets(names: Iterable[str], here: Here) -> dict[str, str]:
    """Return the values of secrets, as this shell has them.

    Raises:
        ConfigError: one is missing.
    """
    secrets = {name: here.environ.get(name, "") for name in names}
    for name, value in secrets.items():
        if not value:
            raise ConfigError(f"the secret {name} is not set", hint=f"export {name}=...")
    return secrets


def write_files(
    files: Mapping[str, str], folder: Path, *, mode: int = 0o777, hint: str = ""
) -> None:
    """Write a plan's files below `folder`, made with `mode`; scripts can be executed.

    Raises:
        PlatformError: they cannot be written.
    """
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            if content.startswith("#!"):
                path.chmod(0o755)
    except OSError as error:
        raise PlatformError(
            f"cannot write {error.filename}: {error.strerror}", hint=hint
        ) from error
