"""This machine as a platform: the job is started in a session of its own, in the project itself."""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.files.private import locate_job
from perdure.launch import local
from perdure.launch.lint import check_plan
from perdure.launch.platforms import Here, locate_in_project, read_secrets, render_job
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import BoxState, Finding, LaunchRecord, Plan, Step
from perdure.model.platforms.profile import Profile


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the plan of `spec` on this machine."""
    locate_in_project(spec, spec.cwd, "cwd")
    project = os.path.abspath(spec.launch.project)
    placed = msgspec.structs.replace(
        spec,
        cwd=os.path.normpath(os.path.join(project, spec.cwd)),
        launch=msgspec.structs.replace(spec.launch, project=project),
    )
    return Plan(
        job=spec.name,
        kind="local",
        profile=profile,
        files={"job.json": render_job(placed)},
        steps=(
            Step(
                "start the job in a session of its own",
                ("perdure", "run", "--config", "job.json", "--detach"),
            ),
        ),
        findings=check_plan(spec, profile),
        attach=(f"perdure attach {spec.name}", f"perdure watch {spec.name}"),
        place=project,
    )


def check(plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Return nothing measured: `perdure run` checks this machine itself."""
    return {}, ()


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Start the job; return what is to be remembered."""
    spec = msgspec.json.decode(plan.files["job.json"], type=JobSpec)
    read_secrets(spec.launch.secrets, here)
    pid = local.submit(local.render(spec, here.home))
    here.tell(f"started (pid {pid})")
    return LaunchRecord(
        job=plan.job,
        profile=plan.profile,
        place=plan.place,
        home=here.home,
        python=sys.executable,
        id=str(pid),
        launched_s=time.time(),
        roots={
            "job": locate_job(here.home, plan.job).root,
            **{f"outputs/{o}": f"{plan.place}/{o}" for o in spec.launch.outputs},
        },
    )


def query_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return nothing by itself: a job of this machine is looked at by its own files."""
    return BoxState(state="running", reason="see `perdure status`")


def run(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Refuse to run a command: commands find a job of this machine by themselves."""
    raise ConfigError(f"job `{record.job}` is not on another machine")
