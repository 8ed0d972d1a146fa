"""The notebook as a document: nbformat 4.5, which is JSON with four keys.

Written here and not by the nbformat library, which would bring a JSON schema validator and its
dependencies to every machine that launches; the tests hold the document to that format's rules.
"""

import json
from pathlib import Path
from pprint import pformat
from typing import Any

import msgspec

from perdure.launch.notebook.payload import pack
from perdure.launch.placing import locate_in_project, place_job, render_job
from perdure.launch.wheel import name_wheel
from perdure.model.job import JobSpec
from perdure.model.platforms.profile import Profile

MOUNT = "/content/drive"
INPUT = "/kaggle/input"
_TITLE = """\
# {job}

Made by `perdure render`. Run all cells: the job begins, or goes on from its newest checkpoint.

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
        every = profile.notebook.every_steps
        checkpoint = msgspec.structs.replace(checkpoint, every_steps=every)
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
