"""A plan brought to Slurm: the cluster asked whether it would take it, sent, submitted once."""

import sys
import time
from pathlib import Path
from secrets import token_hex
from string import Template
from typing import Any

import msgspec

from perdure.launch.platforms import Here, expand_tilde, write_files
from perdure.launch.records import write_record
from perdure.launch.slurm.client import Slurm
from perdure.launch.slurm.refusal import find_refusal
from perdure.launch.slurm.render import check_cluster, locate_home
from perdure.launch.ssh.check import (
    check_banner,
    check_places,
    check_secrets,
    check_tools,
    probe,
)
from perdure.launch.ssh.submit import make_launch_record, prepare
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding, LaunchRecord, Plan
from perdure.traps.findings import error


def check(plan: Plan, here: Here) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Ask the cluster whether it would take the script, and how it is set up."""
    slurm = Slurm(plan.profile)
    measured: dict[str, Any] = {}
    found: list[Finding] = []
    if plan.profile.launch.host:
        measured, found = _check_login(plan, here)
    found += check_cluster(slurm.read_config())
    spec = msgspec.json.decode(plan.files["job.json"], type=JobSpec)
    found += error(
        plan.profile.slurm.container_image and not slurm.has_pyxis(),
        "slurm.container_image: srun has no --container-image here: Pyxis is not installed",
        "slurm.container with a command, such as apptainer exec image.sif",
    )
    found += find_refusal(slurm, plan.files["job.sbatch"], spec, plan.profile.slurm)
    return measured, (*found, *_check_running(slurm, plan, here))


def submit(plan: Plan, here: Here) -> LaunchRecord:
    """Bring the job to its place and submit its script; return what is to be remembered."""
    if plan.profile.launch.host:
        prepare(plan, here)
        record = make_launch_record(plan)
        folder = f"{record.place}/launch"
        write_record(here.home, record)  # Should the answer be lost, the place knows the id.
    else:
        folder = expand(plan.place, here)
        record = _place_here(plan, folder, here)
    job = Slurm(plan.profile).submit(folder, token_hex(8))
    here.tell(f"submitted as Slurm job {job}")
    return msgspec.structs.replace(record, id=job)


def _place_here(plan: Plan, place: str, here: Here) -> LaunchRecord:
    """Write the job's folder, on a file system that the nodes see; return what is remembered."""
    spec = msgspec.json.decode(plan.files["job.json"], type=JobSpec)
    write_files(plan.files, Path(place), hint="overrides.DURABLE_DIR")
    home = expand(locate_home(plan.profile), here)
    roots = {
        **{label: f"{home}/jobs/{name}" for label, name in plan.settings["jobs"].items()},
        **{f"outputs/{o}": f"{spec.launch.project}/{o}" for o in spec.launch.outputs},
        "launch": place,
    }
    return LaunchRecord(
        job=plan.job,
        profile=plan.profile,
        place=place,
        home=home,
        python=sys.executable,
        launched_s=time.time(),
        roots=roots,
    )


def expand(path: str, here: Here) -> str:
    """Return a path of the profile with this shell's variables in it."""
    return Template(expand_tilde(path)).safe_substitute(here.environ)


def _check_login(plan: Plan, here: Here) -> tuple[dict[str, Any], list[Finding]]:
    """Return what is measured on the login node, and what is amiss there.

    Devices and local disks are those of the nodes, and are not looked at from here.
    """
    told = probe(plan)
    told["places"].pop("CRED_FILE", None)  # The nodes have to see it: it may well be shared.
    measured = {"inode_cap": told["places"]["DURABLE_DIR"]["inodes"] or "none"}
    return measured, [
        *check_banner(plan),
        *check_places(told),
        *check_tools(plan, told),
        *check_secrets(plan, told, here),
    ]


def _check_running(slurm: Slurm, plan: Plan, here: Here) -> list[Finding]:
    """Return whether a job of this name is in the queue already, by what its place remembers."""
    there = plan.profile.launch.host
    job = slurm.find_submitted(f"{plan.place}/launch" if there else expand(plan.place, here))
    end = slurm.look(job)[0] if job else None
    if end is None:
        return []
    text = f"job {plan.job} is Slurm job {job} already: {end.state} {end.reason}".rstrip()
    return error(
        end.state in ("waiting", "running"),
        text,
        f"perdure attach {plan.job}, perdure stop {plan.job}, or another name",
    )
