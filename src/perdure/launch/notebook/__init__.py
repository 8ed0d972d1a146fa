"""Colab and Kaggle as platforms: a generated notebook that resumes whenever its cells are run.

Kaggle has a command line that runs a notebook (`kaggle`), whose one door is here: a notebook is
pushed, asked about, its output fetched. Its exit code is 0 also where a push was refused, so that
its words are read. A pushed version has the output of the one before below /kaggle/input: that is
how a session goes on. A person starts a session of Colab: mounting Drive asks for their consent.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from perdure.launch.exchange import FOLLOWS, last_line, print_output, run_bounded, show_lines
from perdure.launch.lint import check_plan
from perdure.launch.notebook.cells import check_notebook, render_notebook
from perdure.launch.platforms import Here, write_files
from perdure.launch.records import write_record
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import BoxState, Finding, LaunchRecord, Plan, Step
from perdure.model.platforms.profile import Profile


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the notebook of `spec`, and for Kaggle what its command line reads beside it."""
    on_kaggle = profile.notebook.service == "kaggle"
    files = {f"{spec.name}.ipynb": render_notebook(spec, profile)}
    steps = (Step("open it in Colab, and run all cells", ("upload", f"{spec.name}.ipynb")),)
    if on_kaggle:
        files["kernel-metadata.json"] = render_metadata(spec, profile)
        steps = (Step("run it on Kaggle", ("kaggle", "kernels", "push", "-p", "DIR")),)
    return Plan(
        job=spec.name,
        kind="notebook",
        profile=profile,
        files=files,
        steps=steps,
        findings=(*check_plan(spec, profile), *check_notebook(spec, profile, files)),
        attach=(f"perdure status {spec.name}",) if on_kaggle else (),
        place=f"{profile.overrides.DURABLE_DIR}/{spec.name}",
        settings={"by_hand": not on_kaggle},
    )


def check(plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return nothing measured: the notebook's own cells look at the session."""
    return {}, ()


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Write the files and, on Kaggle, push them; return what is to be remembered."""
    folder = Path(here.home, "notebooks", plan.job)
    write_files(plan.files, folder)
    record = LaunchRecord(
        job=plan.job,
        profile=plan.profile,
        place=plan.place,
        home=str(folder / "output"),
        python="python3",
        launched_s=time.time(),
        roots={"job": str(folder / "output" / plan.job)},
    )
    if plan.profile.notebook.service == "kaggle":
        record = msgspec.structs.replace(record, id=prepare(plan, folder, here))
        write_record(here.home, record)  # Before it costs: whatever breaks now, it is known.
        push(plan, record.id, folder, here)
    else:
        for line in describe_hand(plan, folder):
            here.tell(line)
    return record


def describe_hand(plan: Plan, folder: Path) -> list[str]:
    """Return what a person does to start a session of Colab, step by step."""
    runtime = plan.profile.notebook.accelerator or "CPU"
    return [
        f"1. colab.research.google.com: File > Upload notebook: {folder / f'{plan.job}.ipynb'}",
        f"2. Runtime > Change runtime type: {runtime}, which the notebook asks for itself",
        "3. Runtime > Run all; say yes to Drive",
        f"4. when the session has ended, Run all again; {plan.place}/status.json says how it is",
    ]


METADATA = "kernel-metadata.json"
_CALL_S = 120.0
_FETCH_S = 3600.0
_STATUS = re.compile(r'has status "(?:\w+\.)?(\w+)"')
_MESSAGE = re.compile(r'Failure message: "(.*)"', re.S)
_LIVING: dict[str, Literal["waiting", "running"]] = {
    "queued": "waiting",
    "new_script": "waiting",
    "running": "running",
    "cancel_requested": "running",
}
"""Kaggle's word for a session that is not over -> perdure's."""
_NOTHING_SAID = "this says nothing about the job"


def make_slug(job: str) -> str:
    """Return the notebook's name on Kaggle, which is its title as well.

    >>> make_slug("GPT_small.2")
    'perdure-gpt-small-2'
    """
    return "perdure-" + re.sub(r"[^a-z0-9]+", "-", job.lower()).strip("-")


def render_metadata(spec: JobSpec, profile: Profile) -> str:
    """Return `kernel-metadata.json`; the notebook itself is among its sources.

    Raises:
        ConfigError: the name is too long for a title.
    """
    section, slug = profile.notebook, make_slug(spec.name)
    if len(slug) > 50:
        raise ConfigError(
            f"{slug} has {len(slug)} characters, a title on Kaggle at most 50",
            hint="a shorter `name`",
        )
    identity = f"{section.owner or 'OWNER'}/{slug}"
    document: dict[str, Any] = {
        "id": identity,
        "title": slug,
        "code_file": f"{spec.name}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": bool(section.accelerator),
        "enable_tpu": False,
        "enable_internet": True,
        "dataset_sources": list(section.dataset_sources),
        "competition_sources": [],
        "kernel_sources": [identity],
        "model_sources": [],
        **({"machine_shape": section.accelerator} if section.accelerator else {}),
    }
    return json.dumps(document, indent=2) + "\n"


def prepare(plan: Plan, folder: Path, here: Here) -> str:
    """Return the id of the notebook of `plan`, written to `folder`, as it can be pushed.

    Raises:
        ConfigError: a session of it runs.
        PlatformError: nobody answered.
    """
    document = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    identity = str(document["id"])
    status, _ = _ask(identity, here)
    if status in _LIVING:
        raise ConfigError(f"a session of {identity} is {status}", hint=f"perdure status {plan.job}")
    if not status:  # The first session has nothing to go on from.
        document["kernel_sources"] = []
        (folder / METADATA).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return identity


def push(plan: Plan, identity: str, folder: Path, here: Here) -> None:
    """Push the notebook in `folder`, which starts a session.

    Raises:
        PlatformError: Kaggle refuses it, or takes it without what earlier sessions left.
    """
    ceiling = str(int(plan.profile.interruption.session_max_s))
    code, out = call(here, "push", "-p", str(folder), "-t", ceiling)
    if code or "successfully pushed" not in out:
        raise PlatformError(
            f"kaggle kernels push: {last_line(out, 'it said nothing')}", hint=f"look at {folder}"
        )
    if "not valid kernel sources" in out:
        raise PlatformError(
            f"{identity} runs without the output of its earlier version",
            hint="stop it on kaggle.com; add that output under Input, and save a version there",
        )
    here.tell(last_line(out, "it said nothing"))


def identify(record: LaunchRecord) -> str:
    """Return what Kaggle calls a job's notebook.

    Raises:
        PlatformError: its sessions are Colab's.
    """
    if not record.id:
        raise PlatformError(
            "nobody can be asked about a session of Colab",
            hint=f"{record.place}/status.json in Drive, once a session has ended",
        )
    return record.id


def query_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return how the newest session is; how it ended is said by the status that it left.

    Kaggle calls a version complete whose job has failed, since the notebook's cells never do.
    """
    word, message = _ask(identify(record), here)
    if word in _LIVING:
        return BoxState(state=_LIVING[word], reason=f"Kaggle: {word}")
    if not word:
        return BoxState(state="not-started", reason=f"Kaggle knows no {record.id}")
    pattern = f"^{re.escape(record.job)}/status\\.json$"
    # Apart from what was fetched: that a state was asked for changes nothing that was pulled.
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        code, out = call(here, "output", record.id, "-p", folder, "-o", "--file-pattern", pattern)
        if code and "404" not in out:  # Else the session might be taken for one that left nothing.
            raise PlatformError(
                f"kaggle kernels output: {last_line(out, 'it said nothing')}", hint=_NOTHING_SAID
            )
        try:
            left = json.loads(Path(folder, record.job, "status.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            reason = f"Kaggle: {word}: {message or 'it left no status'}"
            return BoxState(state="killed", reason=reason)
    reason = f"session {left.get('session', 0)}: {left.get('state')}: {left.get('reason')}"
    if left.get("next") == "requeue":
        reason += "; the same `perdure launch` goes on"
    return BoxState(
        state="ended",
        code=int(left.get("state") not in ("done", "stopped")),
        reason=reason,
        attempt=int(left.get("session", 0)),
    )


def fetch(record: LaunchRecord, here: Here) -> None:
    """Bring all output of the newest version to the record's own folder here.

    Raises:
        PlatformError: Kaggle gives nothing, or it is in Drive.
    """
    code, out = call(here, "output", identify(record), "-p", record.home, "-o", timeout_s=_FETCH_S)
    if code or not os.path.isdir(os.path.join(record.home, record.job)):
        raise PlatformError(
            f"kaggle kernels output: {last_line(out, 'it said nothing')}", hint="ask again later"
        )


def run(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Answer `status` and `logs` with what Kaggle shows; nothing else reaches a session.

    Raises:
        ConfigError: another command.
    """
    identity = identify(record)
    if argv[0] == "status":
        if "--json" in argv:
            print(msgspec.json.encode(query_state(record, here)).decode())
        return 0  # The caller says in words how the job is.
    if argv[0] == "logs" and FOLLOWS & set(argv):  # For as long as the session lasts.
        return show_lines(("kaggle", "kernels", "logs", identity, "--follow"), None, here.environ)
    if argv[0] == "logs":
        code, out = call(here, "logs", identity)
        for line in out.splitlines():
            print_output(line)
        return code
    raise ConfigError(
        f"`{argv[0]}` does not reach a session of Kaggle",
        hint=f"perdure status {record.job}, perdure logs {record.job}, kaggle.com",
    )


def call(here: Here, *words: str, timeout_s: float = _CALL_S) -> tuple[int, str]:
    """Run `kaggle kernels`; return its exit code, and its output with its errors.

    Raises:
        PlatformError: it is not installed, or nobody answered in time.
    """
    try:
        done = run_bounded(
            ["kaggle", "kernels", *words], name="kaggle", env=here.environ, timeout_s=timeout_s
        )
    except FileNotFoundError as error:
        raise PlatformError(
            "no `kaggle` here",
            hint="pip install kaggle six, and an API token from kaggle.com/settings",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PlatformError(f"kaggle: no answer in {timeout_s:g} s", hint="ask again") from error
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace").strip()


def _ask(identity: str, here: Here) -> tuple[str, str]:
    """Return Kaggle's word for the newest session, small letters, and its message of a failure.

    Both are empty where there is no such notebook.

    Raises:
        PlatformError: nobody answered.
    """
    code, out = call(here, "status", identity)
    match, message = _STATUS.search(out), _MESSAGE.search(out)
    if match:
        return match[1].lower(), message[1] if message else ""
    # Kaggle does not tell a notebook that is not there from one that is not yours.
    if "404" in out or "Cannot access kernel" in out:
        return "", ""
    raise PlatformError(
        f"kaggle kernels status: {last_line(out, 'it said nothing') or code}", hint=_NOTHING_SAID
    )
