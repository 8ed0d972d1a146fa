"""What is wrong with a job and a profile by themselves, before any machine is asked.

These are the checks that hold for every platform; each launcher adds its own.
"""

import re

from perdure.model.job import JobSpec
from perdure.model.platforms.launching import Finding
from perdure.model.platforms.profile import Profile, Tier
from perdure.traps.checks import FLEETING, is_below
from perdure.traps.findings import error, warning

_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|CREDENTIAL)", re.I)
_FLEETING = (*FLEETING, "$TMPDIR", "${TMPDIR}", "$SLURM_TMPDIR")


def check_plan(spec: JobSpec, profile: Profile) -> tuple[Finding, ...]:
    """Return what a person should know of `spec` under `profile`."""
    return (
        *_check_secrets(spec),
        *_check_durable(spec, profile),
        *_check_meter(profile),
        *error(
            spec.growth and profile.kind not in ("kubernetes", "local", "slurm"),
            f"nodes_max: nothing brings nodes to a job on {profile.kind} while it runs",
            "nodes alone, or spares",
        ),
        *_check_groups(spec, profile),
    )


def _check_secrets(spec: JobSpec) -> list[Finding]:
    return [
        one
        for name, value in sorted(spec.env.items())
        for one in error(
            _SECRET.search(name) and value,
            f"env.{name} looks like a secret, and a job file is no place for one",
            f'launch.secrets = ["{name}"] takes its value from this shell, over standard input',
            "U34",
        )
    ]


def _check_durable(spec: JobSpec, profile: Profile) -> list[Finding]:
    url = "" if "://" in spec.checkpoint.url else spec.checkpoint.url
    places = {"overrides.DURABLE_DIR": profile.overrides.DURABLE_DIR, "checkpoint.url": url}
    return [
        one for key, place in places.items() if place for one in _check_place(profile, key, place)
    ]


def _check_place(profile: Profile, key: str, place: str) -> list[Finding]:
    tier, wiped = find_tier(profile, place), is_below(place, _FLEETING)
    stops = not wiped and tier is not None and tier.survives_stop == "no"
    return [
        *error(
            wiped,
            f"{key} = {place} is wiped at the end of a job or a boot",
            "name a place that survives: see the matrix",
            "SLURM5",
        ),
        *warning(
            stops,
            f"{key} = {place} is on the {tier and tier.name}, which does not survive a stop",
            "name a place that does",
        ),
    ]


def find_tier(profile: Profile, place: str) -> Tier | None:
    """Return the tier that `place` is on: the one with the longest path above it."""
    above = [tier for tier in profile.storage.tiers if is_below(place, [tier.path])]
    return max(above, key=lambda tier: len(tier.path.rstrip("/")), default=None)


def _check_groups(spec: JobSpec, profile: Profile) -> list[Finding]:
    """Return what torchft's groups need: one machine, and devices for each of them."""
    if not spec.groups:
        return []
    machines = {"slurm": spec.nodes, "kubernetes": spec.num_nodes}.get(profile.kind, 1)
    gpus, wanted = spec.launch.gpus, spec.machine_ranks
    return [
        *error(
            machines > 1,
            f"torchft on {machines} machines: all replica groups are on one, where their "
            "lighthouse is; no other machine reaches it yet",
            "nodes = 1, and on Kubernetes no spares; or an elastic job over several machines",
        ),
        *error(
            0 < gpus < wanted,
            f"launch.gpus = {gpus}, and the groups have {wanted} ranks on one machine",
            f"launch.gpus = {wanted}: nproc x (replicas + spares)",
        ),
    ]


def _check_meter(profile: Profile) -> list[Finding]:
    teardown = profile.teardown
    unnamed = not (teardown.id or teardown.ids) and any("{id}" in w for w in teardown.stop_command)
    hint = f"by hand: {teardown.how}" if not teardown.stop_command else "perdure teardown JOB"
    if unnamed:
        hint = f"teardown.id, for perdure teardown JOB; or by hand: {teardown.how}"
    return warning(
        not profile.ends_by_itself,
        f"nothing stops the meter but a person ({profile.meter_stop_verb})",
        hint,
        "GEN1",
    )
