"""A job made ready for another place: its document and paths as they are there, its files, secrets.

What every launcher does alike stands here, whatever the place is.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from perdure.launch.platforms import Here
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec


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
        if isinstance(value, dict) and isinstance(plain[key], dict):
            value = {k: v for k, v in value.items() if k not in plain[key] or v != plain[key][k]}
            if value:
                shown[key] = value
        elif value != plain[key]:
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
        text = f"cannot write {error.filename}: {error.strerror}"
        raise PlatformError(text, hint=hint) from error
