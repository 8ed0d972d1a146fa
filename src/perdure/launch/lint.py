"""What is wrong with a job and a profile by themselves, before any machine is asked.

These are the checks that hold for every platform; each launcher adds its own.
"""

import os
import re
from typing import Any

import msgspec

from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile, Tier

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL)", re.I)
_FLEETING = ("/tmp", "/var/tmp", "/dev/shm", "/run", "$TMPDIR", "${TMPDIR}", "$SLURM_TMPDIR")


def check_plan(spec: JobSpec, profile: Profile) -> tuple[Finding, ...]:
    """Return what a person should know of `spec` under `profile`."""
    return (
        *_check_secrets(spec),
        *_check_durable(spec, profile),
        *_check_meter(profile),
        *_check_room(spec, profile),
        *_check_groups(spec, profile),
    )


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


def _check_secrets(spec: JobSpec) -> list[Finding]:
    shown = sorted(name for name, value in spec.env.items() if _SECRET.search(name) and value)
    return [
        Finding(
            "error",
            f"env.{name} looks like a secret, and a job file is no place for one",
            f'launch.secrets = ["{name}"] takes its value from this shell, over standard input',
            "U34",
        )
        for name in shown
    ]


def _check_durable(spec: JobSpec, profile: Profile) -> list[Finding]:
    found = []
    places = {"overrides.DURABLE_DIR": profile.overrides.DURABLE_DIR}
    url = spec.checkpoint.url
    if url and "://" not in url:
        places["checkpoint.url"] = url
    for key, place in places.items():
        if any(place == root or place.startswith(root + "/") for root in _FLEETING):
            found.append(
                Finding("error", f"{key} = {place} is wiped at the end of a job or a boot",
                        "name a place that survives: see the matrix", "SLURM5")
            )  # fmt: skip
        elif (tier := find_tier(profile, place)) and tier.survives_stop == "no":
            found.append(
                Finding("warning", f"{key} = {place} is on the {tier.name}, "
                        "which does not survive a stop", "name a place that does")
            )  # fmt: skip
    return found


def find_tier(profile: Profile, place: str) -> Tier | None:
    """Return the tier that `place` is on: the one with the longest path above it."""
    best, length = None, -1
    for tier in profile.storage.tiers:
        root = tier.path.rstrip("/")
        inside = place == tier.path or place.startswith(f"{root}/")
        if inside and len(root) > length:
            best, length = tier, len(root)
    return best


def _check_room(spec: JobSpec, profile: Profile) -> list[Finding]:
    if not spec.room or profile.kind in ("kubernetes", "local"):
        return []
    text = f"nodes_max: nothing brings nodes to a job on {profile.kind} while it runs"
    return [Finding("error", text, "nodes alone, or spares")]


def _check_groups(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what torchft's groups need: one machine, and devices for each of them."""
    if not spec.torchft.replicas:
        return []
    found = []
    machines = {"slurm": spec.nodes, "kubernetes": spec.num_nodes}.get(profile.kind, 1)
    if machines > 1:
        text = (f"torchft on {machines} machines: all replica groups are on one, where their "
                "lighthouse is; no other machine reaches it yet")  # fmt: skip
        hint = "nodes = 1, and on Kubernetes no spares; or an elastic job over several machines"
        found.append(Finding("error", text, hint))
    wanted = spec.machine_ranks
    if 0 < spec.launch.gpus < wanted:
        text = (
            f"launch.gpus = {spec.launch.gpus}, and the groups have {wanted} ranks on one machine"
        )
        found.append(Finding("error", text, f"launch.gpus = {wanted}: nproc x (replicas + spares)"))
    return found


def _check_meter(profile: Profile) -> list[Finding]:
    if profile.ends_by_itself:
        return []
    teardown = profile.teardown
    lacks = not (teardown.id or teardown.ids) and any("{id}" in w for w in teardown.stop_command)
    hint = f"by hand: {teardown.how}" if not teardown.stop_command else "perdure teardown JOB"
    if lacks:
        hint = f"teardown.id, for perdure teardown JOB; or by hand: {teardown.how}"
    text = f"nothing stops the meter but a person ({profile.meter_stop_verb})"
    return [Finding("warning", text, hint, "GEN1")]
