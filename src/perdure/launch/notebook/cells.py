"""The notebook as a document: nbformat 4.5, which is JSON with four keys.

Written here and not by the nbformat library, which would bring a JSON schema validator and its
dependencies to every machine that launches; the tests hold the document to that format's rules.
"""

import ast
import base64
import functools
import io
import json
import lzma
import tarfile
import tempfile
import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from pprint import pformat
from typing import Any

import msgspec

from perdure.launch.platforms import locate_in_project, place_job, render_job
from perdure.launch.transfer import list_files
from perdure.launch.wheel import name_wheel, write_wheel
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile
from perdure.traps.findings import error, note, warning

MOUNT = "/content/drive"
INPUT = "/kaggle/input"
_TITLE = """\
# {job}

Made by `perdure launch`. Run all cells: the job begins, or goes on from its newest checkpoint.

1. Settings. 2. What a session is. 3. Earlier checkpoints, and a place that keeps what is written.
4. A product of matrices on each GPU, and the internet. 5. The project and perdure. 6. Training,
until it is done or {minutes} minutes before the session's ceiling. 7. What follows."""


def render_notebook(spec: JobSpec, profile: Profile) -> str:
    """Return the text of the .ipynb file."""
    settings = list_settings(spec, profile)
    payload = pack(spec.launch.project, spec.launch.exclude, render_job(place(spec, profile)))
    source = Path(__file__).with_name("session.py").read_text(encoding="utf-8")
    title = _TITLE.format(job=spec.name, minutes=round(settings["stop_before_s"] / 60))
    cells = [
        _cell("about", title, "markdown"),
        _cell("settings", f"settings = {pformat(settings, sort_dicts=False)}"),
        _cell("session", source),
        _cell("durable", 'session = Session(settings)\n'
                         'session.step("durable place", session.show_durable)'),
        _cell("checks", 'session.step("accelerator", session.check_accelerator)\n'
                        'session.step("internet", session.check_internet)'),
        _cell("install", 'session.step("unpack", lambda: session.unpack(PAYLOAD))\n'
                         'session.step("install", session.install)'),
        _cell("train", 'session.step("training", session.train)'),
        _cell("after", 'session.step("after", session.tell)'),
    ]  # fmt: skip
    hidden = _cell("payload", f'PAYLOAD = """\n{payload}\n"""')
    hidden["metadata"] = {"jupyter": {"source_hidden": True}}
    cells.insert(5, hidden)
    gpu = {"accelerator": "GPU", "colab": {"gpuType": profile.notebook.accelerator}}
    on_colab = profile.notebook.service == "colab" and profile.notebook.accelerator
    document = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
            **(gpu if on_colab else {}),
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def place(spec: JobSpec, profile: Profile) -> JobSpec:
    """Return the job as it is in a session: checkpoints durable, and at every n-th step."""
    checkpoint = spec.checkpoint
    if not checkpoint.url:
        url = f"{profile.overrides.DURABLE_DIR}/{spec.name}/checkpoints"
        if profile.notebook.service == "colab":
            # fsspec's name for a plain path: made on the machine's own disk, then copied to Drive
            # beside training. Drive is slow, and a rename there is a promise of a cache.
            url = f"local://{url}"
        checkpoint = msgspec.structs.replace(checkpoint, url=url)
    if not checkpoint.every_steps and not checkpoint.every_s:
        checkpoint = msgspec.structs.replace(checkpoint, every_steps=profile.notebook.every_steps)
    return msgspec.structs.replace(place_job(spec), checkpoint=checkpoint, tee="all")


def list_settings(spec: JobSpec, profile: Profile) -> dict[str, Any]:
    """Return what the session is told."""
    section, launch = profile.notebook, spec.launch
    wanted = launch.requirements
    return {
        "job": spec.name,
        "service": section.service,
        "durable_dir": profile.overrides.DURABLE_DIR,
        "data_dir": profile.overrides.DATA_DIR,
        "mount": MOUNT,
        "input_dir": INPUT,
        "session_max_s": profile.interruption.session_max_s,
        "stop_before_s": section.stop_before_s,
        "sessions_max": section.sessions_max,
        "device": "cuda" if section.accelerator else "cpu",
        "internet_url": section.internet_url,
        "wheel": name_wheel(),
        "packages": list(profile.launch.packages),
        "requirements": locate_in_project(spec, wanted, "launch.requirements") if wanted else "",
        "secrets": list(launch.secrets),
        "outputs": [locate_in_project(spec, output, "output") for output in launch.outputs],
    }


def _cell(name: str, source: str, kind: str = "code") -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": name,
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


PROJECT_MAX = 32 << 20
"""Bytes of a project, unpacked. Data has other ways: Drive, a data set."""
_WIDTH = 4096
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_KEPT = ("perdure/cli/", "perdure/model/")
"""Rooms whose docstrings are read when the program runs."""


@functools.lru_cache(maxsize=1)
def pack(project: str, exclude: tuple[str, ...], job: str) -> str:
    """Return a project, `job.json` and the wheel as lines of base 85; the same for the same.

    Raises:
        ConfigError: the project is too large, or a link in it leads to no file.
        PlatformError: its files cannot be listed.
    """
    sources = read_project(Path(project), exclude)
    files = {
        **{f"project/{name}": data for name, data in sources.items()},
        "job.json": job.encode(),
        name_wheel(): _store_wheel(),
    }
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if content[:2] == b"#!" else 0o644
            archive.addfile(info, io.BytesIO(content))
    text = base64.b85encode(lzma.compress(raw.getvalue())).decode()
    return "\n".join(text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH))


def read_project(project: Path, exclude: Sequence[str]) -> dict[str, bytes]:
    """Return the files that go along, by their names in the project; of links what they lead to.

    Raises:
        ConfigError: together they are too large, or a link leads to a folder or nowhere.
        PlatformError: they cannot be listed.
    """
    found, size = {}, 0
    for name in list_files(project, exclude):
        path = project / name
        if not path.is_file():
            raise ConfigError(
                f"{path} is a link to a folder, or to nothing: it cannot go along",
                hint="the file itself, or launch.exclude",
            )
        size += path.stat().st_size
        if size > PROJECT_MAX:
            raise ConfigError(
                f"{project} is larger than {PROJECT_MAX >> 20} MiB, and goes into a notebook",
                hint="launch.exclude; data belongs on Drive or in a data set",
            )
        found[name] = path.read_bytes()
    return found


_AT_HOME = tuple(
    f"perdure/{part}"
    for part in (
        "cli/adopting/", "cli/drill.py", "cli/page/", "cli/watching/", "dash/static/live.",
        "dash/static/vendor/", "drill/", "launch/kubernetes/", "launch/schemas/", "launch/slurm/",
    )
)  # fmt: skip
"""Parts that a session does not use: drills, `perdure init`, the live page, the screen, clusters.

A notebook has no room for them (`KAGGLE_SOURCE_MAX`).
"""


def _store_wheel() -> bytes:
    stored = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="perdure-") as scratch:
        path = write_wheel(Path(scratch))
        with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(stored, "w") as plain:
            names = [name for name in wheel.namelist() if not name.startswith(_AT_HOME)]
            for name in names:
                content = wheel.read(name)
                if name.endswith("/RECORD"):  # The digests are of other texts, and take room.
                    content = "".join(f"{each},,\n" for each in names).encode()
                elif name.endswith(".py"):
                    source = strip_comments(content.decode())
                    if not name.startswith(_KEPT):
                        source = strip_docstrings(source)
                    content = source.encode()
                plain.writestr(zipfile.ZipInfo(name, _LONG_AGO), content)
    return stored.getvalue()


def strip_comments(source: str) -> str:
    """Return Python source without its comments; every line keeps its number."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip() + "\n"
    return "".join(lines)


def strip_docstrings(source: str) -> str:
    """Return Python source without its docstrings; every other line keeps its number.

    Of a module's own nothing stays in its place: nothing may stand before `from __future__`.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    module = ast.parse(source)
    for node in ast.walk(module):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(last)):
                first, last = node.lineno - 1, last - 1
                before = lines[first][: node.col_offset]
                after = lines[last][node.end_col_offset :]
                stand_in = b"" if node in module.body else b"..."
                lines[first : last + 1] = [b"\n"] * (last - first) + [before + stand_in + after]
    return b"".join(lines).decode()


KAGGLE_SOURCE_MAX = 1_000_000
"""Bytes of a pushed notebook, as it is commonly reported; Kaggle's own documents do not say."""


def check_notebook(spec: JobSpec, profile: Profile, files: Mapping[str, str]) -> list[Finding]:
    """Return what a person should know of this job in a session."""
    section, ceiling_s = profile.notebook, profile.interruption.session_max_s
    stop_before_s, startup_s = section.stop_before_s, section.startup_s
    url, durable = spec.checkpoint.url, profile.overrides.DURABLE_DIR
    return [
        *error(
            ceiling_s <= stop_before_s + startup_s,
            f"a session of {ceiling_s:g} s leaves no time to train",
            f"interruption.session_max_s above {stop_before_s} s (stop_before_s) + "
            f"{startup_s} s (startup_s)",
            "NB5",
        ),
        *error(
            url and "://" not in url and not url.startswith(f"{durable}/"),
            f"checkpoint.url = {url} is gone with the session",
            "leave it out: checkpoints go to DURABLE_DIR; or name an object store",
            "NB4",
        ),
        *note(spec.num_nodes > 1, f"{spec.num_nodes} nodes are emulated on the one machine"),
        *(_check_kaggle(spec, profile, files) if section.service == "kaggle" else ()),
    ]


def _check_kaggle(spec: JobSpec, profile: Profile, files: Mapping[str, str]) -> list[Finding]:
    section = profile.notebook
    size = max(len(content.encode()) for content in files.values())
    return [
        *error(
            not section.owner,
            "a notebook's id on Kaggle begins with your user name",
            'notebook.owner in a profile of your own, with base = "kaggle"',
        ),
        *error(
            section.accelerator == "NvidiaTeslaP100",
            "the default image's torch has no kernels for a P100",
            'notebook.accelerator = "NvidiaTeslaT4"',
            "NB3",
        ),
        *error(
            spec.launch.secrets,
            "a push takes the notebook's secrets away, so that cells find none",
            "leave launch.secrets out, and data sets private",
            "U34",
        ),
        *warning(
            size > KAGGLE_SOURCE_MAX,
            f"the notebook has {size / 1e6:.2f} MB, and Kaggle may take no more "
            f"than {KAGGLE_SOURCE_MAX / 1e6:g}",
            "launch.exclude; data in notebook.dataset_sources",
        ),
    ]
