"""Slurm as a platform: sbatch takes the place of tmux; the job is put back at its walltime.

The commands run on a login node that shares DURABLE_DIR and the project with the nodes.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from perdure.launch import lint
from perdure.launch.platforms import Here
from perdure.launch.slurm import client
from perdure.launch.slurm.chain import Chain
from perdure.launch.slurm.checks import check_array, check_cluster, check_nodes, check_walltime
from perdure.launch.slurm.script import (
    find_cpus,
    find_gres,
    find_home,
    find_place,
    find_python,
    render_script,
)
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.launching import BoxState, Finding, LaunchRecord, Plan, Step
from perdure.model.profile import Profile


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the script of `spec`, the job's document, and what sbatch is told."""
    if profile.launch.host:
        raise ConfigError(
            "launch.host: Slurm is asked on a login node", hint="log in there, and launch from it"
        )
    lint.locate_in_project(spec, spec.cwd, "cwd")
    cwd = os.path.normpath(os.path.join(spec.launch.project, spec.cwd))
    placed = msgspec.structs.replace(spec, cwd=cwd, tee="all")
    if not profile.shared_fs and spec.num_nodes > 1:
        raise ConfigError("several nodes need a shared file system", hint="shared_fs = true")
    chain = Chain(
        requeue_max=profile.slurm.requeue_max,
        cpus=find_cpus(spec, profile.slurm),
        gres=find_gres(spec, profile.slurm),
        python=find_python(profile),
    )
    place = find_place(spec, profile)
    return Plan(
        job=spec.name,
        kind="slurm",
        profile=profile,
        files={
            "job.sbatch": render_script(spec, profile),
            "job.json": lint.render_job(placed),
            "chain.json": msgspec.json.format(msgspec.json.encode(chain)).decode() + "\n",
        },
        steps=(Step("submit it", ("sbatch", "--parsable", f"{place}/job.sbatch")),),
        findings=(
            *lint.check_plan(spec, profile),
            *check_walltime(profile),
            *check_nodes(spec, profile),
            *check_array(spec, profile),
        ),
        attach=(f"perdure watch {spec.name}", f"perdure logs {spec.name} -f"),
        place=place,
    )


def check(plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Ask the cluster whether it would take the script, and how it is set up."""
    found = check_cluster(client.read_config())
    refusal = client.test_submit(plan.files["job.sbatch"])
    if refusal:
        found.append(
            Finding("error", f"sbatch --test-only: {refusal}", "sinfo; the profile's slurm")
        )
    return {}, tuple(found)


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Write the job's folder and submit its script; return what is to be remembered."""
    place = expand(plan.place, here)
    spec = msgspec.json.decode(plan.files["job.json"], type=JobSpec)
    try:
        os.makedirs(place, exist_ok=True)
        for name, content in plan.files.items():
            Path(place, name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise PlatformError(
            f"cannot write {error.filename}: {error.strerror}", hint="overrides.DURABLE_DIR"
        ) from error
    job = client.submit(os.path.join(place, "job.sbatch"))
    here.tell(f"submitted as Slurm job {job}")
    home = expand(find_home(plan.profile), here)
    outputs = {f"outputs/{o}": f"{spec.launch.project}/{o}" for o in spec.launch.outputs}
    return LaunchRecord(
        job=plan.job,
        profile=plan.profile,
        place=place,
        home=home,
        python=sys.executable,
        id=job,
        launched_s=time.time(),
        roots={"job": f"{home}/jobs/{plan.job}", **outputs},
    )


def expand(path: str, here: Here) -> str:
    """Return a path of the profile with this shell's variables in it."""
    for name, value in here.environ.items():
        path = path.replace("${" + name + "}", value)
    words = path.split("/")
    return "/".join(here.environ.get(w[1:], w) if w.startswith("$") else w for w in words)


def find_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return how the job is, by Slurm and by the records of its own runs."""
    end, row = client.look(record.id)
    restarts = row.restarts if row else 0
    if end.state in ("waiting", "running"):
        return BoxState(state=end.state, attempt=restarts + 1, reason=end.reason)
    if end.state == "unknown":
        raise PlatformError(f"Slurm says nothing of job {record.id}", hint="sacct -D -j ID")
    told = f"{end.state}: {end.reason}" if end.state not in ("done", "failed") else end.reason
    return BoxState(
        state="ended" if end.state in ("done", "failed") else "killed",
        code=end.code or (1 if end.state not in ("done",) else 0),
        signal=end.signal,
        attempt=restarts + 1,
        reason=told,
    )


def run(record: LaunchRecord, argv: Sequence[str], here: Here) -> int:
    """Run a perdure command line beside the job while it runs, else here: files are shared."""
    end, row = client.look(record.id)
    command = [record.python, "-P", "-m", "perdure", *argv]
    if end.state == "running" and row is not None and row.nodes:
        command = [
            "srun", f"--jobid={record.id}", "--overlap", "--nodes=1", "--ntasks=1",
            f"--nodelist={row.nodes}", "--quiet", *command,
        ]  # fmt: skip
    env = {**here.environ, "PERDURE_HOME": record.home}
    return subprocess.run(command, env=env, check=False).returncode
