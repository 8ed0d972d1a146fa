"""The image that a cluster's pods run: a Dockerfile with its build context, as text.

Any builder makes the image; none is started here. Everything is pinned to what runs on this
machine, so that a pod is what the job was tried with, and the image holds no secret: what a
private registry asks for comes to the builder by a mount that leaves nothing behind.
"""

import re
import zipfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import msgspec

from perdure.launch.wheel import name_wheel, write_wheel
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.box import TESTED_TORCHES, TORCH_END, TORCH_MIN, read_version
from perdure.model.platforms.kubernetes import IMAGE_BASE, NO_TORCH, KubernetesSection
from perdure.model.platforms.launching import Finding
from perdure.traps.findings import note, warning

DOCKERFILE, IGNORED, PINS, WHEELS = "Dockerfile", ".dockerignore", "constraints.txt", "wheels"
LABEL = "dev.perdure.version"
_HOME = "/opt/perdure"
_RECORDER = "native/prebuilt/recorder-torch"
_WITH_TORCH = "numpy"
"""What torch itself does not ask for, and everybody who trains does."""
_CONFIG = "--mount=type=secret,id=pip.conf,target=/etc/pip.conf"
_TORCH_INDEX = "https://download.pytorch.org/whl/"
_REFERENCE = re.compile(
    r"(?=[A-Za-z0-9].{0,254}$)"
    r"((localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:))(:[0-9]+)?/)?"
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}))?"
    r"(@sha256:(?P<digest>[0-9a-f]{64}))?"
)
_TORCH = re.compile(
    r"\d+\.\d+(\.\d+)?((a|b|rc)\d+|\.dev\d+)?(\+(?P<build>cpu|cu\d+|rocm[\d.]+|xpu))?"
)
_WHEEL = re.compile(r"perdure-(?P<version>[^-]+)-py3-none-[A-Za-z0-9_.]+\.whl")


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A build context, but for the wheel, which is no text."""

    tag: str
    base: str
    torch: str
    """Of pip, such as `2.13.0+cpu`; `none`: as the base has it."""
    version: str
    """Of perdure."""
    wheel: str
    """Below the context."""
    files: dict[str, str]
    """Path in the context -> content."""
    build: tuple[str, ...]
    """A command that builds it; `podman` and `buildah` take the same words."""
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wheel:
    name: str
    version: str
    recorders: tuple[str, ...] = ()
    """The compiled recorders that it carries, each for one torch."""


def make_image(
    *,
    base: str,
    torch: str | None,
    tag: str | None,
    wheel: Path | None,
    compiles: bool,
    folder: str,
) -> Image:
    """Return the context of an image; `folder` is where it will be, as a person would type it.

    With `compiles` the recorder is compiled for the image's torch in a stage of its own, unless
    the wheel brings it.

    Raises:
        ConfigError: a name is none, the wheel is none of perdure's, or torch is too old.
        PlatformError: perdure is on the path here, and not installed.
    """
    check_reference(base, "--base")
    torch = choose_torch(torch)
    check_installed()
    found = look_at_wheel(wheel)
    brought = any(torch == NO_TORCH or f"{_RECORDER}{torch}-" in name for name in found.recorders)
    compiles = compiles and not brought and (torch, base) != (NO_TORCH, IMAGE_BASE)
    tag = f"perdure:{found.version.replace('+', '-')}" if tag is None else tag
    if check_reference(tag, "--tag")["digest"]:
        raise ConfigError(f"--tag {tag}: a digest is what an image gets once it is built")
    pins = pin_packages(torch)
    build = ("docker", "build", "--tag", tag, folder)
    path = f"{WHEELS}/{found.name}"
    return Image(
        tag=tag, base=base, torch=torch, version=found.version, wheel=path, build=build,
        files={
            DOCKERFILE: render_dockerfile(base, torch, found, tag, compiles=compiles),
            IGNORED: _IGNORE,
            PINS: "".join(f"{name}=={pinned}\n" for name, pinned in pins.items()),
        },
        findings=tuple(explain_image(base, torch, found, recorded=brought or compiles)),
    )  # fmt: skip


def check_folder(folder: Path) -> None:
    """Refuse a folder that others' files are in, which nothing may be written over.

    Raises:
        ConfigError: it is no folder, or holds something else than a build context.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is no folder")
    strange = [
        path.name
        for path in (folder.iterdir() if folder.exists() else ())
        if path.name not in (DOCKERFILE, IGNORED, PINS, WHEELS)
    ]
    if strange:
        text = f"--out {folder} holds {sorted(strange)[0]}, which is no part of a build context"
        raise ConfigError(text, hint="a folder of its own")


def write_context(image: Image, folder: Path, wheel: Path | None) -> None:
    """Write the wheel of an image into its context: this installation's, or the one given.

    Raises:
        PlatformError: it cannot be made.
        OSError: it cannot be written.
    """
    target = folder / image.wheel
    target.parent.mkdir(parents=True, exist_ok=True)
    if wheel is None:
        write_wheel(target.parent)
    elif wheel.resolve() != target.resolve():
        target.write_bytes(wheel.read_bytes())


def check_reference(text: str, option: str) -> "re.Match[str]":
    """Return the parts of an image's name.

    Raises:
        ConfigError: it is none.

    >>> check_reference("registry.example:5000/train/gpt:2", "--tag")["tag"]
    '2'
    """
    match = _REFERENCE.fullmatch(text)
    if match is None:
        hint = "such as registry.example/train:1, in lower-case letters"
        raise ConfigError(f"{option} {text!r} is no name of an image", hint=hint)
    return match


def choose_torch(asked: str | None) -> str:
    """Return the version of torch: as asked for, else the one that is installed here.

    Raises:
        ConfigError: it is no version, too old, or there is none here.
    """
    if asked == NO_TORCH:
        return NO_TORCH
    try:
        chosen = version("torch") if asked is None else asked
    except PackageNotFoundError:
        text = "--torch is not given, and no torch is installed here whose version could be meant"
        hint = "--torch 2.13.0+cpu, or --torch none where the base has it"
        raise ConfigError(text, hint=hint) from None
    if not _TORCH.fullmatch(chosen):
        hint = f"such as 2.13.0, 2.13.0+cpu or 2.13.0+cu130; {NO_TORCH}: the base has it"
        raise ConfigError(f"--torch {chosen!r} is no version", hint=hint)
    if read_version(chosen) < TORCH_MIN:
        raise ConfigError(
            f"--torch {chosen} is older than perdure runs with", hint=f"it is {TESTED_TORCHES}"
        )
    return chosen


def check_installed() -> None:
    """Refuse where nothing says what perdure needs.

    Raises:
        PlatformError: perdure is on the path here, and not installed.
    """
    try:
        version("perdure")
    except PackageNotFoundError:
        text = "perdure is on the path here, and not installed: nothing says what it needs"
        raise PlatformError(text, hint="pip install -e DIR") from None


def look_at_wheel(path: Path | None) -> _Wheel:
    """Return what a wheel says of itself; without a path, of the one that would be made here.

    Raises:
        ConfigError: it is no wheel of perdure.
    """
    if path is None:
        return _Wheel(name_wheel(), version("perdure"))
    match = _WHEEL.fullmatch(path.name)
    hint = "scripts/build_wheel.sh makes one; without --wheel it is made of this installation"
    if match is None:
        raise ConfigError(
            f"--wheel {path}: {path.name} is no name of a wheel of perdure", hint=hint
        )
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"--wheel {path}: {why}", hint=hint) from error
    if f"perdure-{match['version']}.dist-info/METADATA" not in names:
        raise ConfigError(f"--wheel {path} holds no perdure {match['version']}", hint=hint)
    recorders = tuple(name for name in names if _RECORDER in name)
    return _Wheel(path.name, match["version"], recorders)


def pin_packages(torch: str) -> dict[str, str]:
    """Return package -> version of all that perdure needs, and torch, as they are installed here.

    What torch needs is pinned where it is the torch of this machine: another one may need others.
    """
    try:
        same = version("torch") == torch
    except PackageNotFoundError:
        same = False
    roots = ["perdure", *([_WITH_TORCH] if torch != NO_TORCH else []), *(["torch"] if same else [])]
    pins: dict[str, str] = {}
    while roots:
        name = re.sub(r"[-_.]+", "-", roots.pop()).lower()
        if name in pins:
            continue
        try:
            pins[name] = version(name)
        except PackageNotFoundError:
            continue  # It is for another system or another Python.
        for line in requires(name) or ():
            wanted, _, marker = line.partition(";")
            if "extra" not in marker and (match := re.match(r"[A-Za-z0-9._-]+", wanted)):
                roots.append(match[0])
    return {name: pins[name] for name in sorted(pins) if name not in ("perdure", "torch")}


def explain_image(base: str, torch: str, wheel: _Wheel, *, recorded: bool) -> list[Finding]:
    """Return what a person should know before it is built."""
    here = version("perdure")
    return [
        *warning(
            "@sha256:" not in base,
            f"base {base} by tag: another may come by that name",
            "--base NAME@sha256:...",
            "U30",
        ),
        *warning(
            torch != NO_TORCH and read_version(torch) >= TORCH_END,
            f"torch {torch}: perdure is tested with {TESTED_TORCHES}",
        ),
        *warning(
            wheel.version != here,
            f"the wheel is perdure {wheel.version}, and a launch from here sends pods what {here} "
            "means",
        ),
        *note(
            torch == NO_TORCH and base == IMAGE_BASE,
            "no torch is in it: jobs that import torch fail",
            "--torch VERSION, or a base that has it",
        ),
        *warning(
            not recorded and (torch, base) != (NO_TORCH, IMAGE_BASE),
            "no compiled recorder: no durations, stages or waits; no slow rank by its collectives",
            "without --no-compile, or --wheel of scripts/build_wheel.sh for this torch",
        ),
    ]


_IGNORE = f"""\
# Nothing is sent to the builder but what the Dockerfile takes.
*
!{PINS}
!{WHEELS}
"""

_HEAD = """\
# The image of perdure {version} for a cluster's pods, by `perdure launch --write-image`.
#
#   docker build --tag {tag} .
#
# podman and buildah take the same words, and need no root. The image holds no secret: a mirror of
# packages and its password come by a file that the build sees and the image does not,
#
#   --secret id=pip.conf,src=$HOME/.config/pip/pip.conf
#
# and wheels that lie in {wheels}/ are taken before any from outside.
FROM {base}{stage}

USER root
# Python 3.11 or newer, and openssl, which encrypts the bus of several nodes. The user has a number.
RUN python3 -c 'import sys; assert sys.version_info >= (3, 11), sys.version' && openssl version \\
 && {{ getent group {user} || groupadd --gid {user} perdure; }} \\
 && {{ getent passwd {user} || useradd --uid {user} --gid {user} --create-home perdure; }}

# An environment of perdure's own, first on the PATH. It sees what the base has, such as its torch.
RUN python3 -m venv --system-site-packages {home}
ENV PATH={home}/bin:$PATH
COPY {pins} {home}/
"""

_TORCH_LAYER = """\

# torch before perdure: it is the largest layer, and changes least.
RUN {config} \\
    --mount=type=bind,source={wheels},target=/tmp/wheels \\
    python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \\
    --constraint {home}/{pins} --find-links /tmp/wheels{index} \\
    torch=={torch} {beside}
"""

_PERDURE_LAYER = """\

# perdure with all that it needs, nats-server among it.
RUN {config} \\
    --mount=type=bind,source={wheels},target=/tmp/wheels \\
    python3 -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \\
    --constraint {home}/{pins} --find-links /tmp/wheels \\
    /tmp/wheels/{wheel}
"""

_COMPILED = """\

# The recorder of collectives for this torch, compiled in a stage whose compiler stays behind.
FROM perdure AS compiled
RUN apt-get update -qq && apt-get install -qq --yes --no-install-recommends g++ >/dev/null \\
 && python3 -P -m perdure.worker.native --into /compiled

FROM perdure
RUN --mount=type=bind,from=compiled,source=/compiled,target=/tmp/compiled \\
    at=$(python3 -P -c 'import perdure.worker.native as native; print(native.__path__[0])') \\
 && cp -r /tmp/compiled "$at/prebuilt"
"""

_TAIL = """\

LABEL org.opencontainers.image.title=perdure \\
      {label}={version} \\
      dev.perdure.torch={torch}

# By number: a cluster that refuses root looks no name up. A pod may be any other user.
USER {user}:{user}
WORKDIR /tmp
RUN perdure --version && nats-server --version && python3 -P -c 'import {modules}'

# A job's manifest says `python3 -P -m perdure...` itself, in place of this.
ENTRYPOINT ["perdure"]
CMD ["--help"]
"""


def render_dockerfile(base: str, torch: str, wheel: _Wheel, tag: str, *, compiles: bool) -> str:
    """Return the Dockerfile."""
    user = KubernetesSection().run_as_user
    build_of_torch = match["build"] if (match := _TORCH.fullmatch(torch)) else None
    index = f" \\\n    --extra-index-url {_TORCH_INDEX}{build_of_torch}" if build_of_torch else ""
    modules = "perdure.launch.kubernetes.pod" + (", torch" if torch != NO_TORCH else "")
    words = {
        "base": base, "torch": torch, "version": wheel.version, "wheel": wheel.name,
        "tag": tag, "user": user, "home": _HOME, "pins": PINS, "wheels": WHEELS,
        "config": _CONFIG, "index": index, "beside": _WITH_TORCH, "label": LABEL,
        "modules": modules, "stage": " AS perdure" if compiles else "",
    }  # fmt: skip
    layers = {
        _HEAD: True, _TORCH_LAYER: torch != NO_TORCH, _PERDURE_LAYER: True, _COMPILED: compiles,
        _TAIL: True,
    }  # fmt: skip
    return "".join(layer.format(**words) for layer, wanted in layers.items() if wanted)
