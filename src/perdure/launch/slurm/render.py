"""A job for Slurm as files that a person can read: the sbatch script and what its program reads."""

import os

import msgspec

from perdure.launch import lint
from perdure.launch.slurm.batch import Chain
from perdure.launch.slurm.checks import check_array, check_nodes, check_walltime
from perdure.launch.slurm.script import find_cpus, find_gres, find_place, render_script
from perdure.launch.ssh.render import place_job
from perdure.launch.ssh.render import render as render_ssh
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Plan, Step
from perdure.model.platforms.profile import Profile
from perdure.model.platforms.slurm import list_tasks


def render(spec: JobSpec, profile: Profile) -> Plan:
    """Return the script of `spec`, the job's document, and what sbatch is told."""
    if not profile.shared_fs and spec.num_nodes > 1:
        raise ConfigError("several nodes need a shared file system", hint="shared_fs = true")
    host, place = profile.launch.host, find_place(spec, profile)
    chain = Chain(
        requeue_max=profile.slurm.requeue_max,
        cpus=find_cpus(spec, profile.slurm),
        gres=find_gres(spec, profile.slurm),
    )
    files = {
        "job.sbatch": render_script(spec, profile),
        "job.json": lint.render_job(_place_job(spec, there=bool(host))),
        "chain.json": msgspec.json.format(msgspec.json.encode(chain)).decode() + "\n",
    }
    steps: tuple[Step, ...] = (Step("submit it", ("sbatch", "--parsable", f"{place}/job.sbatch")),)
    tasks = list_tasks(profile.slurm.array)
    settings = {"jobs": {f"tasks/{t}": f"{spec.name}-{t}" for t in tasks} or {"job": spec.name}}
    if host:
        sent = render_ssh(spec, profile)
        files |= {name: sent.files[name] for name in ("env.sh", "setup.sh", "results.py")}
        command = ("ssh", host, f"cd {place} && sbatch --parsable job.sbatch")
        steps = (*sent.steps[:-1], Step("submit it", command))
        settings |= sent.settings
    return Plan(
        job=spec.name,
        kind="slurm",
        profile=profile,
        files=files,
        steps=steps,
        findings=(
            *lint.check_plan(spec, profile),
            *check_walltime(profile),
            *check_nodes(spec, profile),
            *check_array(spec, profile),
        ),
        attach=(f"perdure attach {spec.name}", f"perdure watch {spec.name}"),
        place=os.path.dirname(place) if host else place,
        settings=settings,
    )


def _place_job(spec: JobSpec, *, there: bool) -> JobSpec:
    """Return the job as its nodes see it: in the project sent there, or where it is."""
    if there:
        return msgspec.structs.replace(place_job(spec), tee="all")
    lint.locate_in_project(spec, spec.cwd, "cwd")
    cwd = os.path.normpath(os.path.join(spec.launch.project, spec.cwd))
    return msgspec.structs.replace(spec, cwd=cwd, tee="all")
