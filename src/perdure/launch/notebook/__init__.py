"""Colab and Kaggle as platforms: a generated notebook that resumes whenever its cells are run.

Kaggle has a command line that runs a notebook (`kaggle`). A person starts a session of Colab:
mounting Drive asks for their consent.
"""

import time
from pathlib import Path
from typing import Any

import msgspec

from perdure.launch.lint import check_plan
from perdure.launch.notebook import kaggle
from perdure.launch.notebook.cells import check_notebook, render_notebook
from perdure.launch.notebook.kaggle import fetch, find_state, run
from perdure.launch.platforms import Here, write_files
from perdure.launch.records import write_record
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding, LaunchRecord, Plan, Step
from perdure.model.platforms.profile import Profile

__all__ = ["check", "fetch", "find_state", "render", "run", "submit"]


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the notebook of `spec`, and for Kaggle what its command line reads beside it."""
    on_kaggle = profile.notebook.service == "kaggle"
    files = {f"{spec.name}.ipynb": render_notebook(spec, profile)}
    steps = (Step("open it in Colab, and run all cells", ("upload", f"{spec.name}.ipynb")),)
    if on_kaggle:
        files["kernel-metadata.json"] = kaggle.render_metadata(spec, profile)
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
        record = msgspec.structs.replace(record, id=kaggle.prepare(plan, folder, here))
        write_record(here.home, record)  # Before it costs: whatever breaks now, it is known.
        kaggle.push(plan, record.id, folder, here)
    else:
        for line in describe_hand(plan, folder):
            here.tell(line)
    return record


def describe_hand(plan: Plan, folder: Path) -> list[str]:
    """Return what a person does to start a session of Colab, step by step."""
    section = plan.profile.notebook
    runtime = section.accelerator or "CPU"
    return [
        f"1. colab.research.google.com: File > Upload notebook: {folder / f'{plan.job}.ipynb'}",
        f"2. Runtime > Change runtime type: {runtime}, which the notebook asks for itself",
        "3. Runtime > Run all; say yes to Drive",
        f"4. when the session has ended, Run all again; {plan.place}/status.json says how it is",
    ]
